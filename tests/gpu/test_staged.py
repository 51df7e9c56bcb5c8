"""The host backend for tensors of GPUs, which pass through page-locked memory of the host."""

from __future__ import annotations

import pytest
import torch

from moe_comm import Communicator
from moe_comm.peers.accelerators import has_pinned_memory
from moe_comm.testing.case_list import CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import check_case
from moe_comm.testing.launch import RankContext, run_ranks
from moe_comm.testing.target import Target
from tests.helpers.staged_calls import CALLS_AND_KINDS, compare, connect, given_to, make

pytestmark = pytest.mark.gpu(1)


def connect_to_gpu(group: object) -> Communicator:
    return connect(group, "cuda")


TARGET = Target(name="host", make=make, connect=connect_to_gpu)


@pytest.mark.parametrize("case", CASES[::5], ids=lambda case: f"ranks{case.num_ranks}-{case.name}")
def test_case(case: Case) -> None:
    check_case(TARGET, case)


@pytest.mark.parametrize(("name", "kind"), CALLS_AND_KINDS)
def test_calls_give_on_a_gpu_what_they_give_on_the_cpu(name: str, kind: str) -> None:
    run_ranks(compare, 3, name, kind, "cuda", timeout_s=200.0)


def capture_on_one_rank(context: RankContext) -> None:
    given = given_to(connect_to_gpu(context.group))
    assert has_pinned_memory(given.x.device)
    graph = torch.cuda.CUDAGraph()
    if context.rank_idx == 1:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph), pytest.raises(ValueError, match=r"rank 1: .* captured"):
            given.buffer.dispatch(given.x, given.topk_idx)
    else:
        with pytest.raises(ValueError, match=r"rank 1: .* cannot be captured"):
            given.buffer.dispatch(given.x, given.topk_idx)
    given.buffer.dispatch(given.x, given.topk_idx)


def test_a_captured_call_is_refused_on_every_rank() -> None:
    run_ranks(capture_on_one_rank, 2, timeout_s=100.0)


def wait_behind_the_stream(context: RankContext) -> None:
    """Rows that are still to be computed when they are given, in a stream that is not the default one."""
    given = given_to(connect_to_gpu(context.group))
    with torch.cuda.stream(torch.cuda.Stream()):
        x = torch.zeros_like(given.x)
        torch.cuda._sleep(200_000_000)
        x.copy_(given.x)
        found = given.buffer.dispatch(x, given.topk_idx).x
    torch.cuda.synchronize()
    assert torch.equal(found, given.buffer.dispatch(given.x, given.topk_idx).x)


def test_rows_are_taken_behind_the_callers_stream() -> None:
    run_ranks(wait_behind_the_stream, 2, timeout_s=100.0)
