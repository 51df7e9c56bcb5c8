from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moe_comm.ep.routing_trace import RoutingTrace, load_routing_trace, save_routing_trace


@pytest.mark.parametrize("num_experts", [4, 100_000])
def test_trace_comes_back(tmp_path: Path, num_experts: int) -> None:
    ids = torch.randint(-1, num_experts, (3, 10, 2))
    save_routing_trace(tmp_path / "trace", ids, num_experts=num_experts, num_ranks=5)
    trace = load_routing_trace(tmp_path / "trace")
    assert torch.equal(trace.topk_idx, ids)
    assert trace.topk_idx.dtype == torch.int64
    assert (trace.num_experts, trace.num_ranks, trace.num_topk) == (num_experts, 5, 2)


def test_ranks_take_turns_and_the_trace_starts_over() -> None:
    trace = RoutingTrace(topk_idx=torch.arange(6).view(2, 3, 1), num_experts=6, num_ranks=1)
    assert trace.rank_topk_idx(0, 4).flatten().tolist() == [0, 1, 2, 3]
    assert trace.rank_topk_idx(1, 4).flatten().tolist() == [4, 5, 0, 1]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.tensor([[0, 1]]), r"shape \(1, 2\)"),
        (torch.tensor([[[0, 4]]]), r"\[-1, 4\), got \[0, 4\]"),
        (torch.tensor([[[-2, 1]]]), r"got \[-2, 1\]"),
        (torch.empty(0, 3, 2, dtype=torch.int64), "at least one choice"),
    ],
)
def test_wrong_ids_are_refused(tmp_path: Path, ids: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_routing_trace(tmp_path / "trace", ids, num_experts=4, num_ranks=1)


def test_floats_are_refused() -> None:
    with pytest.raises(TypeError, match="float32"):
        RoutingTrace(topk_idx=torch.zeros(1, 1, 1), num_experts=4, num_ranks=1)


def test_other_files_are_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "other.npz", topk_idx=np.zeros((1, 1, 1), np.int64))
    with pytest.raises(ValueError, match="num_experts"):
        load_routing_trace(tmp_path / "other.npz")
    np.savez(
        tmp_path / "new.npz",
        topk_idx=np.zeros((1, 1, 1), np.int64),
        num_experts=1,
        num_ranks=1,
        version=2,
    )
    with pytest.raises(ValueError, match="version 2, this reads 1"):
        load_routing_trace(tmp_path / "new.npz")
    np.save(tmp_path / "array.npy", np.zeros(3))
    with pytest.raises(ValueError, match="not a routing trace"):
        load_routing_trace(tmp_path / "array.npy")
