"""The emulator backend beyond conformance: threads, growth, and ranks that die or stop."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from moe_comm import (
    CapacityError,
    Communicator,
    EpBuffer,
    PeerFailedError,
    PeerTimeoutError,
)
from moe_comm.ep.backends import simt
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    PROGRAM_S,
    SHORT_S,
    Told,
    assert_all_told,
    config_for,
    die,
    error_of,
    gather_pids,
    has_stopped,
    inputs,
    step,
    told,
    wait_for,
    when_waiting,
)
from tests.helpers.fresh_python import run_python

FAR_S = 600.0


def make_buffer(
    context: RankContext, backend: str = "simt", num_tokens: int = 32, **options: Any
) -> EpBuffer:
    options = {"stall_timeout_s": 20.0, "arrival_timeout_s": 40.0, **options}
    comm = Communicator(context.group, backend=backend, **options)
    return EpBuffer(comm, config_for(context.num_ranks, num_tokens))


def _steps_with_usual_threads(context: RankContext) -> None:
    """One token, a few, and enough that warps take several pieces in turn."""
    with mock.patch.object(simt, "NUM_THREADS", 0):
        buffer = make_buffer(context, num_tokens=100)
    for seed, num_tokens in enumerate((1, 5, 100)):
        step(buffer, seed, num_tokens=num_tokens)
    buffer.communicator.destroy()


def test_kernels_have_their_usual_threads_where_none_are_asked_for() -> None:
    run_ranks(_steps_with_usual_threads, 2)


def _overflow(context: RankContext, backend: str) -> list[Any]:
    buffer = make_buffer(context, backend, 40_000, max_heap_bytes=2 << 20)
    generator = torch.Generator().manual_seed(3)
    outcomes: list[Any] = []
    for num_tokens in (16, 256, 4, 40_000, 64):
        topk_idx = torch.zeros(num_tokens, 2, dtype=torch.int64)
        topk_idx[:, 1] = 1
        x = torch.randn(num_tokens, 64, generator=generator).bfloat16()
        try:
            result = buffer.dispatch(x, topk_idx)
        except CapacityError as error:
            outcomes.append((error.ranks, error.needed_bytes, error.needed_rows))
        else:
            y = buffer.combine(result.x, result.handle)
            assert torch.equal(y, 2 * x)
            outcomes.append(int(result.x.shape[0]))
    buffer.communicator.destroy()
    return outcomes


def test_windows_grow_by_second_offers_until_memory_ends() -> None:
    """Rank 0 receives everything: its window is too small again and again."""
    host = run_ranks(_overflow, 2, "host")
    emulated = run_ranks(_overflow, 2, "simt")
    assert host == emulated
    assert emulated[0][:3] == [64, 1024, 16]
    assert emulated[0][3][0] == (0,)
    assert emulated[1][:3] == [0, 0, 0]


_FIRST_ERROR = """
import torch
import moe_comm

comm = moe_comm.Communicator(moe_comm.RankThreads(1)[0], backend="simt", max_heap_bytes=1 << 20)
config = moe_comm.EpConfig(num_experts=1, num_topk=1, hidden=64, num_max_tokens_per_rank=4)
buffer = moe_comm.EpBuffer(comm, config)
rows, choices = torch.ones(4, 64).bfloat16(), torch.zeros(4, 1, dtype=torch.int64)
handle = buffer.dispatch(rows, choices).handle
try:
    buffer.empty_expert_output(handle, hidden=1 << 20)
except moe_comm.CapacityError as error:
    print(error.needed_bytes)
"""


def test_the_first_error_of_a_process_may_come_from_the_heap() -> None:
    """The heap is another module's: its exceptions cross into the emulator's, which has thrown none."""
    done = run_python("-c", _FIRST_ERROR, timeout=PROGRAM_S)
    assert (done.returncode, done.stdout.strip()) == (0, str(4 * 2 << 20)), done.stderr


# ---------------------------------------------------------------------------------------------
# Ranks that leave.


def _close(context: RankContext, folder: str, waits: bool) -> str:
    """Rank 1 destroys its buffer; the others come before it does so, or behind."""
    buffer = make_buffer(context)
    other = EpBuffer(buffer.communicator, buffer.config)
    step(buffer, 1)
    ready = Path(folder)
    error = None
    if context.rank_idx == 1:
        if waits:
            wait_for(lambda: len(list(ready.iterdir())) == context.num_ranks - 1)
            time.sleep(0.2)
        buffer.destroy()
    if not waits:
        buffer.communicator.all_gather(b"")
    if context.rank_idx != 1:
        (ready / str(context.rank_idx)).touch()
        error = error_of(lambda: step(buffer, 2))
        assert isinstance(error, ValueError), error
    step(other, 3)  # nobody was aborted
    buffer.communicator.destroy()
    return str(error)


@pytest.mark.parametrize("waits", [False, True])
def test_a_destroyed_buffer_is_named(waits: bool, tmp_path: Path) -> None:
    results = run_ranks(_close, 3, str(tmp_path), waits)
    for rank_idx in (0, 2):
        assert results[rank_idx] == (
            f"rank 1 has destroyed this buffer, rank {rank_idx} calls dispatch on it"
        )


# ---------------------------------------------------------------------------------------------
# Ranks that die or stop.


def _die_while_others_wait(context: RankContext, is_async: bool, folder: str) -> Told:
    """Nothing in the kernels of the living tells of it, nor do limits: their hosts look."""
    buffer = make_buffer(context, stall_timeout_s=FAR_S, arrival_timeout_s=FAR_S)
    waiting = Path(folder)
    if context.rank_idx == 1:
        wait_for(lambda: len(list(waiting.iterdir())) == 2)
        die()
    when_waiting((waiting / str(context.rank_idx)).touch)
    x, topk_idx = inputs(buffer, 1)
    if is_async:
        result = buffer.dispatch(x, topk_idx, async_op=True)
        error = error_of(result.event.wait)
    else:
        error = error_of(lambda: buffer.dispatch(x, topk_idx))
    return told(error)


@pytest.mark.parametrize("is_async", [False, True])
def test_death_of_a_rank_that_others_wait_for(is_async: bool, tmp_path: Path) -> None:
    results = run_ranks(
        _die_while_others_wait, 3, is_async, str(tmp_path), fresh=True, expect_dead=[1]
    )
    assert_all_told(results, PeerFailedError, 1)


def _stop(context: RankContext, folder: str) -> Told | None:
    """Rank 1 is stopped before it enters; the kernels' own limit names it."""
    buffer = make_buffer(context, arrival_timeout_s=SHORT_S, stall_timeout_s=SHORT_S)
    pids = gather_pids(buffer.communicator)
    stopped = Path(folder) / "stopped"
    has_pids = Path(folder) / "has pids"
    if context.rank_idx == 0:
        wait_for(has_pids.exists)
        os.kill(pids[1], signal.SIGSTOP)
        wait_for(lambda: has_stopped(pids[1]))
        stopped.touch()
    if context.rank_idx == 1:
        has_pids.touch()
        wait_for(stopped.exists)
    error = error_of(lambda: step(buffer, 1))
    if context.rank_idx == 0:
        os.kill(pids[1], signal.SIGCONT)
    assert buffer.communicator.recover().failed_ranks == ()
    step(buffer, 2)
    buffer.communicator.destroy()
    return told(error)


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_a_stopped_rank_is_named_and_everybody_recovers(tmp_path: Path) -> None:
    results = run_ranks(_stop, 2, str(tmp_path))
    for result in results:
        assert result[:2] == (PeerTimeoutError.__name__, (1,)), result
