"""Emulated kernels where ranks lie on several nodes: the conformance suite, refusals and failures."""

from __future__ import annotations

import functools
import os
import signal
from typing import Any

import pytest
import torch

from moe_comm import Communicator, EpBuffer, EpConfig, Layout, PeerFailedError
from moe_comm.peers.bootstrap import bootstrap_for
from moe_comm.testing import RankContext, run_ranks
from moe_comm.testing.case_list import CASES, NODE_REDUCTION_CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import CHECKS, check_case
from moe_comm.testing.target import Target
from tests.helpers.failing_ranks import config_for, step, steps_until_error
from tests.helpers.rank_threads import on_ranks

# Mode, ranks of a node, numbers of ranks.
RUNS = [
    ("threads", 2, (4,)),
    ("threads", 1, (2, 3)),
    ("threads", 3, (6,)),
    ("processes", 2, (4,)),
    ("processes", 1, (2, 3)),
    ("processes", 4, (8,)),
]


def connect(group: Any, num_local_ranks: int) -> Communicator:
    num_ranks = bootstrap_for(group).num_ranks
    fitting = num_local_ranks if num_ranks % num_local_ranks == 0 else 1
    return Communicator(group, backend="simt", num_local_ranks=fitting)


def target(num_local_ranks: int) -> Target:
    """The emulator; so many ranks share a node, or each has one of its own where they cannot."""
    return Target(name="simt", connect=functools.partial(connect, num_local_ranks=num_local_ranks))


RUNS_OF_CASES = [
    pytest.param(
        mode,
        num_local_ranks,
        case,
        id=f"{mode}-{case.num_ranks // num_local_ranks}x{num_local_ranks}-{case.name}",
        marks=pytest.mark.full if case.num_ranks > 6 else (),
    )
    for mode, num_local_ranks, numbers in RUNS
    for case in CASES
    # Memory between nodes is made with the buffer, which has to know its sizes.
    if case.num_ranks in numbers and not case.is_elastic
]


@pytest.mark.sampled(1, 2, of=("mode", "num_local_ranks", "layout", "rows", "capacity"))
@pytest.mark.parametrize(("mode", "num_local_ranks", "case"), RUNS_OF_CASES)
def test_case(mode: str, num_local_ranks: int, case: Case) -> None:
    check_case(target(num_local_ranks), case, mode=mode)


# `make test` runs one of each layout and number of nodes, and one with special values.
FEW_REDUCED = (
    "2x2-expert-major",
    "2x1-low-latency",
    "3x1-rank-major",
    "2x2-special-bfloat16",
    "2x2-mask",
)


def reduced_cases() -> list[object]:
    fitting = [case for case in NODE_REDUCTION_CASES if not case.is_elastic]
    names = {f"node-reduction-{name}" for name in FEW_REDUCED}
    assert names <= {case.name for case in fitting}
    return [
        pytest.param(case, id=case.name, marks=() if case.name in names else pytest.mark.full)
        for case in fitting
    ]


@pytest.mark.parametrize("case", reduced_cases())
def test_node_reduction(case: Case) -> None:
    check_case(Target(name="simt"), case, mode="threads")


@pytest.mark.full
@pytest.mark.parametrize("layout", Layout)
def test_node_reduction_between_processes(layout: Layout) -> None:
    (case,) = (
        case
        for case in NODE_REDUCTION_CASES
        if case.name == f"node-reduction-2x2-{layout.name.lower().replace('_', '-')}"
    )
    check_case(Target(name="simt"), case, mode="processes")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check == "bad-input" else pytest.mark.full)
        for check in CHECKS
    ],
)
@pytest.mark.parametrize(
    ("mode", "num_local_ranks"),
    [("threads", 1), pytest.param("processes", 2, marks=pytest.mark.full)],
)
def test_check(mode: str, num_local_ranks: int, check: str) -> None:
    CHECKS[check](target(num_local_ranks), mode=mode)


# ---------------------------------------------------------------------------------------------
# Memory between nodes is made with the buffer.


def make_buffer(communicator: Communicator, **changes: Any) -> EpBuffer:
    fields = {"num_experts": 4, "num_topk": 2, "hidden": 32, "num_max_tokens_per_rank": 16}
    return EpBuffer(communicator, EpConfig(**{**fields, **changes}))


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ("num_topk", "got 0 choices per token"),
        ("hidden", "rows of 0 bytes"),
        ("dtype", "rows of 0 bytes"),
        ("num_max_tokens_per_rank", "and -1 tokens"),
    ],
)
def test_a_configuration_that_leaves_sizes_open_is_refused(field: str, said: str) -> None:
    def body(communicator: Communicator) -> str:
        with pytest.raises(ValueError, match="across nodes EpConfig has to say") as caught:
            make_buffer(communicator, **{field: None})
        return str(caught.value)

    first, second = on_ranks(2, body, backend="simt", num_local_ranks=1)
    assert first == second
    assert said in first


def test_rows_too_large_for_it_are_refused_on_every_rank() -> None:
    def body(communicator: Communicator) -> str:
        buffer = make_buffer(communicator)
        x = torch.randn(16, 32).bfloat16()
        topk_idx = torch.tensor([[0, 3]]).expand(16, 2).contiguous()
        result = buffer.dispatch(x, topk_idx)
        wide = torch.randn(16, 4096, dtype=torch.float64)
        with pytest.raises(ValueError, match=r"32768 bytes take \d+ bytes") as caught:
            buffer.dispatch(wide, None, handle=result.handle)
        y = buffer.combine(result.x, result.handle)
        assert torch.equal(y, 2 * x)  # the buffer stays usable
        return str(caught.value)

    first, second = on_ranks(2, body, backend="simt", num_local_ranks=1)
    assert first == second
    assert "for 16 tokens with rows of 68 bytes" in first


@pytest.mark.parametrize("backend", ["simt", "host"])
def test_a_buffer_that_a_rank_of_another_node_destroyed_is_refused(backend: str) -> None:
    def body(communicator: Communicator) -> str:
        buffer = make_buffer(communicator)
        x = torch.randn(16, 32).bfloat16()
        topk_idx = torch.tensor([[0, 3]]).expand(16, 2).contiguous()
        buffer.dispatch(x, topk_idx)
        if communicator.rank_idx == 1:
            buffer.destroy()
            return ""
        with pytest.raises(ValueError, match="rank 1 has destroyed this buffer") as caught:
            buffer.dispatch(x, topk_idx)
        return str(caught.value)

    first, _ = on_ranks(2, body, backend=backend, num_local_ranks=1)
    assert "rank 0 calls dispatch on it" in first


# ---------------------------------------------------------------------------------------------
# Deaths.


def _lose_a_rank(context: RankContext, victim: int) -> tuple[str, tuple[int, ...]] | None:
    comm = Communicator(
        context.group,
        backend="simt",
        num_local_ranks=2,
        stall_timeout_s=20.0,
        arrival_timeout_s=40.0,
    )
    buffer = EpBuffer(comm, config_for(context.num_ranks, 32))
    if context.rank_idx == victim:
        step(buffer, 0)  # which others may not have ended when it dies
        os.kill(os.getpid(), signal.SIGKILL)
    error, _ = steps_until_error(buffer)
    assert isinstance(error, PeerFailedError), repr(error)
    comm.destroy()
    return type(error).__name__, error.ranks


def test_a_rank_that_dies_is_named_on_all_nodes() -> None:
    results = run_ranks(_lose_a_rank, 4, 3, fresh=True, expect_dead=[3])
    assert results[:3] == [("PeerFailedError", (3,))] * 3
