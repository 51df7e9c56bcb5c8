"""Dispatch and combine with replicas of experts: over collectives, and over several nodes."""

from __future__ import annotations

import pytest
import torch

from moe_comm import (
    FP8_BLOCK128,
    Capacity,
    Communicator,
    EpBuffer,
    Layout,
    PeerFailedError,
    Placement,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import die, error_of, meet
from tests.helpers.replica_ranks import (
    HIDDEN,
    NUM_EXPERTS,
    NUM_MAX_TOKENS,
    NUM_TOPK,
    check_dense_by_rank,
    check_dispatch,
    check_loads,
    check_reduced,
    check_same_bits,
    config_of,
)


def be_rank(context: RankContext, backend: str) -> None:
    drop = Capacity(num_rows=24, num_rows_per_expert=9, on_overflow="drop")
    with Communicator(context.group, backend=backend, num_local_ranks=2) as comm:
        for seed in range(3):
            check_dispatch(comm, "balanced", Layout.EXPERT_MAJOR, seed)
            if backend != "simt":
                check_dispatch(comm, "balanced", Layout.RANK_MAJOR, seed)
                check_dense_by_rank(comm, seed)
        check_dispatch(comm, "balanced", Layout.EXPERT_MAJOR, 4, capacity=drop, expert_alignment=4)
        check_dispatch(comm, "balanced", Layout.EXPERT_MAJOR, 5, quantization=FP8_BLOCK128)
        check_dispatch(comm, "balanced", Layout.LOW_LATENCY, 6, masked=(2,))
        check_dispatch(comm, "nearest", Layout.RANK_MAJOR, 7)
        check_dispatch(comm, "given", Layout.EXPERT_MAJOR, 8)
        check_same_bits(comm, "balanced", 3)
        check_reduced(comm, 9, "node_reduction")
        check_loads(comm, "balanced")
        check_loads(comm, None)


@pytest.mark.parametrize("backend", ["collective", "host", "simt"])
def test_ranks_of_two_nodes(backend: str) -> None:
    run_ranks(be_rank, 4, backend)


def outlive(context: RankContext) -> None:
    comm = Communicator(context.group, backend="simt")
    buffer = EpBuffer(comm, config_of(Placement([[0, 2, 3], [1, 0, 4], [2, 1, 5]], NUM_EXPERTS)))
    generator = torch.Generator().manual_seed(comm.rank_idx)
    x = torch.randn(NUM_MAX_TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    topk_idx = torch.rand(NUM_MAX_TOKENS, 5, generator=generator).topk(NUM_TOPK, dim=1).indices
    buffer.dispatch(x, topk_idx)
    meet(context)
    if context.rank_idx == 2:
        die()
    assert isinstance(error_of(lambda: buffer.dispatch(x, topk_idx)), PeerFailedError)
    comm.recover()
    for layout in Layout:
        result = buffer.dispatch(x, topk_idx, layout=layout)
        rows = result.x.clone()
        if layout is Layout.RANK_MAJOR:
            rows *= (result.topk_idx >= 0).sum(1, keepdim=True)
        found = buffer.combine(rows, result.handle)
        assert torch.equal(found, (NUM_TOPK * x.float()).to(x.dtype))
    if context.rank_idx == 1:
        topk_idx[3, 1] = 5
    for layout in (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR):
        refused = error_of(lambda layout=layout: buffer.dispatch(x, topk_idx, layout=layout))
        assert isinstance(refused, ValueError), repr(refused)
        assert "rank 1: 1 tokens are routed to experts of rank 2, which has failed" in str(refused)
    result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
    found = buffer.combine(result.x, result.handle)
    num_kept = (topk_idx != 5).sum(dim=1, keepdim=True)
    assert torch.equal(found, (num_kept * x.float()).to(x.dtype))
    comm.destroy()


def test_living_replicas_take_the_rows_of_a_dead_rank() -> None:
    run_ranks(outlive, 3, fresh=True, expect_dead=[2])
