"""`Communicator.recover()`: the buffers of the living work again, whoever died and whenever."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_comm import (
    Communicator,
    EpBuffer,
    Layout,
    PeerFailedError,
    PeerTimeoutError,
    Placement,
    Recovery,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    NUM_TOPK,
    SHORT_S,
    config_for,
    die,
    die_after,
    error_of,
    gather_pids,
    has_stopped,
    inputs,
    make_buffer,
    meet,
    step,
    steps_until_error,
    wait_for,
    when_waiting,
)


def _use_replicas(comm: Communicator, living: list[int]) -> None:
    """Balanced rows go to living ranks, in every layout; experts without any are refused."""
    num_ranks = comm.num_ranks
    # Expert e lies on ranks e and e + 1, and another on each rank alone.
    slots = [[rank, (rank - 1) % num_ranks, num_ranks + rank] for rank in range(num_ranks)]
    placement = Placement(slots, 2 * num_ranks)
    config = dataclasses.replace(config_for(num_ranks), placement=placement)
    dead = next(rank for rank in range(num_ranks) if rank not in living)
    generator = torch.Generator().manual_seed(comm.rank_idx)
    x = torch.randn(40, config.hidden, generator=generator).to(config.dtype)
    topk_idx = torch.randint(len(slots), (40, NUM_TOPK), generator=generator)
    with EpBuffer(comm, config) as buffer:
        for layout in Layout:
            result = buffer.dispatch(x, topk_idx, layout=layout)
            assert torch.equal(result.num_dropped_per_expert, torch.zeros(3, dtype=torch.int64))
            rows = result.x.clone()
            if layout is Layout.RANK_MAJOR:
                rows *= (result.topk_idx >= 0).sum(1, keepdim=True)
            assert torch.equal(buffer.combine(rows, result.handle), NUM_TOPK * x)
        for layout in (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR):
            topk_idx[3, 1] = num_ranks + dead
            refused = error_of(lambda layout=layout: buffer.dispatch(x, topk_idx, layout=layout))
            assert isinstance(refused, ValueError), repr(refused)
            text = f"1 choices are of expert {num_ranks + dead}, all of whose ranks have failed"
            assert text in str(refused)


def _two_deaths(context: RankContext) -> list[tuple[int, ...]]:
    buffer = make_buffer(context)
    comm = buffer.communicator
    living = list(range(context.num_ranks))
    kept_x, kept_idx = inputs(buffer, 50)
    kept = buffer.dispatch(kept_x, kept_idx)
    rows = kept.x.clone()
    live_bytes = comm.heap_stats().live_bytes
    found = []
    for victim in (3, 1):
        meet(context, living)
        if context.rank_idx == victim:
            die_after(0.02)
        error, _ = steps_until_error(buffer, living=living)
        assert isinstance(error, PeerFailedError), repr(error)
        assert error.ranks == (victim,)
        recovery = comm.recover()
        found.append(recovery.failed_ranks)
        assert recovery.completed_epochs[0] >= 1
        living.remove(victim)
        for seed in range(10):
            step(buffer, seed, living)
        # The dead rank has no part in anything: neither its experts nor its rows.
        refused = error_of(lambda: step(buffer, 1))
        assert isinstance(refused, ValueError), repr(refused)
        assert f"rank {victim}, which has failed" in str(refused)
        refused = error_of(lambda: buffer.combine(rows, kept.handle))
        assert isinstance(refused, ValueError), repr(refused)
        assert f"rank {victim}, which has failed" in str(refused)
        comm.all_gather(b"")  # frees what is left of buffers that all ranks have destroyed
        stats = comm.heap_stats()
        assert (stats.quarantined_bytes, stats.live_bytes) == (0, live_bytes), stats
        # Tensors that were handed out before live on.
        assert torch.equal(kept.x, rows)
        with EpBuffer(comm, config_for(context.num_ranks)) as later:
            step(later, 7, living)
            comm.all_gather(b"")
        _use_replicas(comm, living)
    comm.destroy()
    return found


def test_two_deaths() -> None:
    results = run_ranks(_two_deaths, 4, fresh=True, expect_dead=[1, 3])
    assert [results[0], results[2]] == [[(3,), (1, 3)]] * 2


def _die_in_recover(context: RankContext, delay_s: float | None) -> tuple[int, ...]:
    """Rank 2 dies, then rank 1 while all recover; the others go on until they can work."""
    buffer = make_buffer(context)
    comm = buffer.communicator
    step(buffer, 0)
    meet(context)
    if context.rank_idx == 2:
        die()
    steps_until_error(buffer)
    if context.rank_idx == 1:
        if delay_s is None:
            die()
        die_after(delay_s or 0.0)
    while True:
        failed = comm.recover().failed_ranks
        living = [rank_idx for rank_idx in range(context.num_ranks) if rank_idx not in failed]
        if 1 in failed:
            break
        error, _ = steps_until_error(buffer, living=living)
        assert isinstance(error, PeerFailedError), repr(error)
        assert error.ranks == (1,)
    for seed in range(50):
        step(buffer, seed, living)
    comm.destroy()
    return failed


@pytest.mark.parametrize(
    "delay_s",
    [None, *(pytest.param(late_s, marks=pytest.mark.full) for late_s in (0.0, 0.01)), 0.001],
)
def test_death_while_recovering(delay_s: float | None) -> None:
    results = run_ranks(_die_in_recover, 4, delay_s, fresh=True, expect_dead=[1, 2])
    assert [results[0], results[3]] == [(1, 2)] * 2


def _recover_late(context: RankContext, folder: str) -> Recovery:
    """Rank 1 comes to recover() after the others have given it up once."""
    buffer = make_buffer(context, arrival_timeout_s=SHORT_S)
    comm = buffer.communicator
    step(buffer, 0)
    given_up = [Path(folder) / f"given up {rank_idx}" for rank_idx in range(context.num_ranks)]
    if context.rank_idx == 1:
        wait_for(lambda: given_up[0].exists() and given_up[2].exists())
        recovery = comm.recover()
    else:
        error = error_of(comm.recover)
        assert isinstance(error, PeerTimeoutError), repr(error)
        assert error.ranks == (1,)
        unfinished = error_of(lambda: step(buffer, 1))
        assert isinstance(unfinished, PeerFailedError), repr(unfinished)
        given_up[context.rank_idx].touch()
        recovery = comm.recover()
    for seed in range(5):
        step(buffer, seed)
    comm.destroy()
    return recovery


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_recover_can_be_repeated(tmp_path: Path) -> None:
    results = run_ranks(_recover_late, 3, str(tmp_path))
    assert [recovery.failed_ranks for recovery in results] == [()] * 3
    assert [recovery.completed_epochs for recovery in results] == [(2,)] * 3


def _recover_with_operations_in_flight(context: RankContext) -> None:
    """Rank 0 waits in the background on one buffer for a rank that has gone on to recover."""
    buffer = make_buffer(context)
    comm = buffer.communicator
    step(buffer, 0)
    pending = None
    if context.rank_idx == 0:
        x, topk_idx = inputs(buffer, 1)
        pending = [buffer.dispatch(x, topk_idx, async_op=True) for _ in range(3)]
        time.sleep(0.2)  # the first is waiting now
    assert comm.recover().failed_ranks == ()
    errors = [repr(error_of(result.event.wait)) for result in pending or []]
    assert all("PeerFailedError" in error for error in errors), errors
    for seed in range(5):
        step(buffer, seed)
    comm.destroy()


def test_recover_ends_operations_in_flight() -> None:
    run_ranks(_recover_with_operations_in_flight, 3)


def _recover_without_failure(context: RankContext) -> tuple[int, ...]:
    buffer = make_buffer(context)
    found = []
    for seed in range(20):
        step(buffer, seed)
        recovery = buffer.communicator.recover()
        assert recovery.failed_ranks == ()
        found.append(recovery.completed_epochs[0])
    buffer.communicator.destroy()
    return tuple(found)


def test_recover_without_a_failure_changes_nothing() -> None:
    results = run_ranks(_recover_without_failure, 3)
    assert results == [tuple(range(2, 42, 2))] * 3


# ---------------------------------------------------------------------------------------------
# Who waits for whom.


def _chain(context: RankContext, folder: str) -> tuple[str, tuple[int, ...]]:
    """Rank 2 is stopped, rank 1 waits for its rows, rank 0 is one operation further and waits for 1."""
    buffer = make_buffer(context, stall_timeout_s=SHORT_S)
    comm = buffer.communicator
    pids = gather_pids(comm)
    entered = Path(folder) / "entered"
    if context.rank_idx == 0:
        wait_for(entered.exists)
        os.kill(pids[2], signal.SIGSTOP)
        wait_for(lambda: has_stopped(pids[2]))
    if context.rank_idx == 2:
        when_waiting(entered.touch)
    x, _ = inputs(buffer, 1)
    own_expert = 2 * context.rank_idx if context.rank_idx < 2 else 2
    topk_idx = torch.full((len(x), 2), own_expert)
    if context.rank_idx == 0:
        buffer.dispatch(x, topk_idx)
    error: PeerTimeoutError | None = None
    try:
        buffer.dispatch(x, topk_idx)
    except PeerTimeoutError as raised:
        error = raised
    if context.rank_idx == 0:
        os.kill(pids[2], signal.SIGCONT)
    comm.recover()
    step(buffer, 2)
    comm.destroy()
    if context.rank_idx == 2 and error is None:
        return "", (2,)  # all that it waited for had come before it looked for an abort
    return str(error), error.ranks


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_the_end_of_the_chain_is_named(tmp_path: Path) -> None:
    results = run_ranks(_chain, 3, str(tmp_path))
    assert [ranks for _, ranks in results] == [(2,)] * 3, results


# ---------------------------------------------------------------------------------------------
# Communicators that share a heap.


def _children(context: RankContext) -> list[str]:
    world = Communicator(backend="host", arrival_timeout_s=40.0)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[context.rank_idx // 2]
    outer = EpBuffer(world, config_for(4))
    child = Communicator(pair, parent=world, arrival_timeout_s=40.0)
    inner = EpBuffer(child, config_for(2))
    for seed in range(3):
        step(outer, seed)
        step(inner, seed)
    assert child.heap_stats() == world.heap_stats()
    texts = []
    # An abort in one child concerns neither the parent nor the other child.
    if context.rank_idx < 2:
        refused = error_of(lambda: step(inner, 0, num_tokens=65 - context.rank_idx))
        assert isinstance(refused, ValueError), repr(refused)
        if context.rank_idx == 0:
            assert inner.communicator.native is not None
            child.recover()
        else:
            # Enter an operation that rank 0 leaves to recover.
            texts.append(repr(error_of(lambda: step(inner, 1))))
            child.recover()
    step(outer, 5)
    step(inner, 6)
    # A rank that leaves a child says so, and stays in the parent.
    if context.rank_idx == 0:
        child.destroy()
    elif context.rank_idx == 1:
        error = error_of(lambda: step(inner, 7))
        assert isinstance(error, PeerFailedError), repr(error)
        texts.append(str(error))
    else:
        step(inner, 7)
    step(outer, 8)
    world.destroy()
    refused = error_of(lambda: step(inner, 9))
    assert isinstance(refused, ValueError), repr(refused)
    return texts


def test_children_fail_alone() -> None:
    results = run_ranks(_children, 4)
    assert "PeerFailedError" in results[1][0]
    assert "rank 0 left" in results[1][1]
