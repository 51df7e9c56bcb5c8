"""A rank whose backward ends early: the others are told what it does instead, as soon as that shows.

Every limit is longer than a test may take, so that a rank which is told by a limit fails the test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

import moe_comm
from moe_comm import Communicator, EpBuffer
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    LONG_S,
    PROGRAM_S,
    backward,
    config_for,
    error_of,
    inputs,
    meet,
    step,
)
from tests.helpers.fresh_python import FreshPython
from tests.helpers.source_tree import ROOT

TEST_S = 150.0
LOST = 2


@dataclasses.dataclass(frozen=True)
class _Calls:
    """Calls that a rank may make next."""

    own: EpBuffer
    other: EpBuffer
    child: EpBuffer
    far: EpBuffer
    copy: BatchedCopy


NEXT: dict[str, Callable[[_Calls], object]] = {
    "same buffer": lambda on: step(on.own, 2),
    "another buffer": lambda on: step(on.other, 2),
    "another buffer, async": lambda on: on.other.dispatch(
        *inputs(on.other, 2), async_op=True
    ).event.wait(),
    "a buffer of a child": lambda on: step(on.child, 2),
    "a buffer of another communicator": lambda on: step(on.far, 2),
    "a new buffer": lambda on: EpBuffer(on.own.communicator, on.own.config),
    "an all-gather": lambda on: on.own.communicator.all_gather(b""),
    "a copy": lambda on: on.copy.run(on.copy.prepare([], [])),
    "recover": lambda on: on.own.communicator.recover(),
    "destroy the buffer": lambda on: on.own.destroy(),
    "destroy": lambda on: on.own.communicator.destroy(),
}
RETURNS = ("recover", "destroy the buffer", "destroy")
"""These wait for nobody, or not for what the others are in."""


def _lose(context: RankContext, how: str, what: str) -> tuple[str, tuple[int, ...], str]:
    comm = Communicator(
        context.group, backend="host", stall_timeout_s=LONG_S, arrival_timeout_s=LONG_S
    )
    own, other = (EpBuffer(comm, config_for(context.num_ranks)) for _ in range(2))
    child = EpBuffer(Communicator(context.group, parent=comm, arrival_timeout_s=LONG_S), own.config)
    apart = Communicator(
        context.group, backend="host", stall_timeout_s=LONG_S, arrival_timeout_s=LONG_S
    )
    far = EpBuffer(apart, own.config)
    on = _Calls(own, other, child, far, BatchedCopy(comm))
    for buffer in (own, other, child, far):
        step(buffer, 0)
    meet(context)
    error: BaseException | None = None
    if context.rank_idx != LOST:
        error = error_of(lambda: backward(own, how, is_lost=False))
    else:
        if how == "skips":
            backward(own, how, is_lost=True)
        else:
            fault = error_of(lambda: backward(own, how, is_lost=True))
            assert isinstance(fault, ArithmeticError), repr(fault)
        if what in RETURNS:
            NEXT[what](on)
        else:
            error = error_of(lambda: NEXT[what](on))
    told = type(error).__name__, getattr(error, "ranks", ()), str(error)
    if what == "destroy":
        meet(context)
        return told
    if what == "recover":
        if context.rank_idx != LOST:
            comm.recover()
    elif isinstance(error, moe_comm.CommunicationError):
        for each in (comm, child.communicator, apart):
            each.recover()
    meet(context)
    for buffer in (other, child, far, *([] if what == "destroy the buffer" else [own])):
        step(buffer, 3)
    meet(context)
    for each in (apart, comm):
        each.destroy()
    return told


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["processes", "threads"])
@pytest.mark.parametrize("what", NEXT)
@pytest.mark.parametrize("how", ["raises", "skips"])
def test_others_are_told_what_the_rank_does_instead(how: str, what: str, mode: str) -> None:
    results = run_ranks(_lose, 3, how, what, mode=mode, timeout_s=TEST_S)
    for rank_idx, (name, ranks, text) in enumerate(results):
        if rank_idx == LOST:
            continue
        assert f"rank {LOST}" in text, (rank_idx, name, text)
        if what in ("same buffer", "destroy the buffer"):
            assert name == "ValueError", text
        else:
            assert ranks == (LOST,), (rank_idx, name, ranks, text)


_ENDING_RANKS = """
import sys, torch, moe_comm
from tests.helpers.failing_ranks import *
import torch.distributed as dist
rank, store, how, LOST = int(sys.argv[1]), sys.argv[2], sys.argv[3], 2
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=3)
comm = moe_comm.Communicator(backend="host", stall_timeout_s=LONG_S, arrival_timeout_s=LONG_S)
buffer = moe_comm.EpBuffer(comm, config_for(3))
step(buffer, 0)
dist.destroy_process_group()  # Gloo's threads may not outlive Python
if how == "raises out of main" or rank != LOST:
    try:
        backward(buffer, "raises", rank == LOST)
    except moe_comm.PeerFailedError as error:
        assert error.ranks == (LOST,), repr(error)
        print("told:", error)
        sys.exit(0)
elif how == "exits":
    error = error_of(lambda: backward(buffer, "raises", True))
    sys.exit(7)
else:
    error_of(lambda: backward(buffer, "raises", True))
    os._exit(7)
"""


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("exits", marks=pytest.mark.full),
        "raises out of main",
        pytest.param("dies", marks=pytest.mark.full),
    ],
)
def test_others_are_told_that_the_process_ends(how: str, tmp_path: Path) -> None:
    ranks = [
        FreshPython(
            *("-c", _ENDING_RANKS, str(rank), str(tmp_path / "store"), how),
            cwd=ROOT,
            merges_errors=True,
        )
        for rank in range(3)
    ]
    output = [rank.communicate(PROGRAM_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks[:LOST]] == [0, 0], output
    assert ranks[LOST].returncode == (1 if how == "raises out of main" else 7), output
    for text in output[:LOST]:
        assert f"told: rank {LOST} {'died' if how == 'dies' else 'left'}" in text, output
