"""Ranks that die, stop or leave while others replay graphs and nobody waits on the host; emulated.

Limits of waits are far away, so that a rank that is named was named by who looks after the kernels.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm import (
    Capacity,
    Communicator,
    EpBuffer,
    PeerFailedError,
    PeerTimeoutError,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    SHORT_S,
    config_for,
    die,
    die_after,
    error_of,
    inputs,
    meet,
    step,
    wait_for,
)

NUM_RANKS = 3
NUM_TOKENS = 8
VICTIM = 1
FAR_S = 600.0
TIMEOUT_S = 120.0


class Replays:
    """A buffer and a graph of a dispatch and a combine on it."""

    def __init__(self, context: RankContext, **limits: float) -> None:
        limits = {"stall_timeout_s": FAR_S, "arrival_timeout_s": FAR_S, **limits}
        self.comm = Communicator(context.group, backend="simt", **limits)
        self.buffer = EpBuffer(self.comm, config_for(context.num_ranks, NUM_TOKENS))
        self.x, self.topk_idx = inputs(self.buffer, 1)
        backend: Any = self.buffer._backend
        backend._endpoint.begin_capture()
        self.result = self.buffer.dispatch(
            self.x, self.topk_idx, capacity=Capacity(num_rows=200, on_overflow="raise")
        )
        self.y = self.buffer.combine(self.result.x, self.result.handle)
        self.graph = backend._endpoint.end_capture()

    def start(self, num_replays: int) -> None:
        for _ in range(num_replays):
            self.graph.replay()

    def status(self) -> int:
        """Status of the last replay, once all have ended: kernels alone decide when."""
        self.graph.synchronize()
        return int(self.result.status[0])

    def next_error(self) -> BaseException:
        return error_of(lambda: self.buffer.dispatch(self.x, self.topk_idx))


def _die(context: RankContext, when: str) -> None:
    replays = Replays(context)
    meet(context)
    if context.rank_idx == VICTIM:
        if when == "between replays":
            replays.start(3)
            assert replays.status() == 0
            die()
        die_after(0.2)
        replays.start(5000)
        time.sleep(FAR_S)
    replays.start(5 if when == "between replays" else 5000)
    assert replays.status() == 4
    error = replays.next_error()
    assert isinstance(error, PeerFailedError), repr(error)
    assert error.ranks == (VICTIM,)
    assert f"rank {VICTIM} died while rank " in str(error)
    assert replays.comm.recover().failed_ranks == (VICTIM,)
    living = [rank_idx for rank_idx in range(NUM_RANKS) if rank_idx != VICTIM]
    for seed in range(5):
        step(replays.buffer, seed, living)
    replays.buffer.destroy()


@pytest.mark.parametrize(
    "when", ["between replays", pytest.param("any time", marks=pytest.mark.full)]
)
def test_who_dies_is_named(when: str) -> None:
    run_ranks(_die, NUM_RANKS, when, fresh=True, expect_dead=[VICTIM], timeout_s=TIMEOUT_S)


def _never_come(context: RankContext) -> None:
    # One rank has a limit that ends: it tells those that would wait for longer.
    impatient = {"arrival_timeout_s": SHORT_S} if context.rank_idx == 0 else {}
    replays = Replays(context, **impatient)
    if context.rank_idx != VICTIM:
        replays.start(1)
        assert replays.status() == 4
    if context.rank_idx == 0:
        dist.barrier()  # the others have heard before it calls anything
    error = error_of(lambda: replays.comm.all_gather(b""))
    if context.rank_idx != 0:
        dist.barrier()
    assert isinstance(error, PeerTimeoutError), repr(error)
    assert error.ranks == (VICTIM,)
    assert f"rank {VICTIM} did not enter dispatch" in str(error)


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_limit_of_one_rank_ends_waits_of_all() -> None:
    run_ranks(_never_come, NUM_RANKS, fresh=True, timeout_s=TIMEOUT_S)


def _leave(context: RankContext, folder: Path) -> None:
    replays = Replays(context)
    replays.start(4)
    assert replays.status() == 0
    if context.rank_idx == VICTIM:
        replays.buffer.destroy()
        replays.comm.destroy()
    dist.barrier()
    if context.rank_idx == VICTIM:
        return
    time.sleep(1.0)  # longer than anybody looks at a peer that is gone before aborting
    # Nobody aborted: this rank finds out by itself that somebody is missing.
    error = replays.next_error()
    assert isinstance(error, PeerFailedError), repr(error)
    assert str(error).startswith(f"rank {VICTIM} left the communicator before this dispatch")
    assert replays.status() == 0
    assert torch.equal(replays.y, 2 * replays.x)
    (folder / str(context.rank_idx)).touch()
    wait_for(lambda: len(list(folder.iterdir())) == NUM_RANKS - 1)  # nobody aborts before
    # A replay would wait for it for ever.
    replays.start(1)
    assert replays.status() == 4
    error = replays.next_error()
    assert isinstance(error, PeerFailedError), repr(error)
    assert f"rank {VICTIM} left while rank " in str(error)


def test_who_leaves_in_good_order_aborts_nobody(tmp_path: Path) -> None:
    run_ranks(_leave, NUM_RANKS, tmp_path, fresh=True, timeout_s=TIMEOUT_S)
