"""Ranks that die or leave while experts' weights are on their way: the old placement stays whole."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_comm import CommunicationError, Communicator, Placement
from moe_comm.replicas import ReplicaCopies, plan_replicas
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    SHORT_S,
    die,
    die_after,
    error_of,
    gather_pids,
    has_stopped,
    wait_for,
    when_waiting,
)

PRESENT = Placement([[0, 1, -1], [2, 3, -1], [0, 2, 1]], 4)
WANTED = Placement([[2, 0, 1], [1, 2, 3], [3, 1, 0]], 4)
NUM_ELEMENTS = 1 << 20


def _interrupted(context: RankContext, how: str, folder: str) -> tuple[str, str]:
    """Rank 2 does as `how` says; others tell what they got, and have the old weights."""
    options = {"stall_timeout_s": SHORT_S if how == "stops" else 20.0}
    comm = Communicator(context.group, backend="host", arrival_timeout_s=40.0, **options)
    copies = ReplicaCopies(comm)
    held = PRESENT.slots[context.rank_idx]
    weights = [
        torch.tensor(held)[:, None].repeat(1, NUM_ELEMENTS),
        comm.empty(len(held), NUM_ELEMENTS, dtype=torch.int64),
    ]
    weights[1].copy_(weights[0] + 7)
    prefetch = copies.prefetch(
        plan_replicas(PRESENT, WANTED),
        weights,
        step_bytes=None if how == "dies within" else NUM_ELEMENTS,
    )
    if how != "dies within":
        prefetch.step()
    if how == "dies at the end":
        while not prefetch.step():
            pass
    pids = gather_pids(comm)
    dist.barrier()
    entered = Path(folder) / "entered"
    if context.rank_idx == 2:
        if how == "dies within":
            die_after(0.004)
        elif how == "leaves":
            comm.destroy()
            dist.barrier()
            return "", ""
        elif how == "stops":
            when_waiting(entered.touch)
        else:
            die()
    if how == "stops" and context.rank_idx == 0:
        wait_for(entered.exists)
        os.kill(pids[2], signal.SIGSTOP)
        wait_for(lambda: has_stopped(pids[2]))

    def go_on() -> None:
        while True:  # rank 2 is gone before there is an end
            if how == "dies within" and prefetch.step():
                prefetch.num_steps_done = 0
            elif how != "dies within" and prefetch.step():
                prefetch.commit()

    error = error_of(go_on)
    if how == "stops" and context.rank_idx == 0:
        os.kill(pids[2], signal.SIGCONT)
    assert isinstance(error, CommunicationError), repr(error)
    assert 2 in error.ranks
    assert not prefetch.is_committed
    for slot_idx, expert_idx in enumerate(held):
        if expert_idx >= 0:
            assert bool((weights[0][slot_idx] == expert_idx).all())
            assert bool((weights[1][slot_idx] == expert_idx + 7).all())
    failed = copies.communicator.recover().failed_ranks
    assert failed == (() if how == "stops" else (2,))
    if how == "dies at the end":  # while ranks agree: the living may come to one end still
        prefetch.commit()
        expected = torch.tensor(WANTED.slots[context.rank_idx])
        assert torch.equal(weights[0][:, 0], expected)
        assert torch.equal(weights[1][:, -1], expected + 7)
        return type(error).__name__, str(error)
    with pytest.raises(ValueError, match="commit of a prefetch that was broken off"):
        prefetch.commit()
    prefetch.abandon()
    copies.communicator.all_gather(b"")
    # Ranks 0 and 1 have what they want of each other.
    half = Placement([[2, 1, 0], [0, 3, 2], PRESENT.slots[2]], 4)
    again = copies.prefetch(plan_replicas(PRESENT, half), weights, step_bytes=NUM_ELEMENTS)
    while not again.step():
        pass
    again.commit()
    expected = torch.tensor(half.slots[context.rank_idx])
    assert torch.equal(weights[0][:, 0], expected)
    assert torch.equal(weights[1][:, -1], expected + 7)
    if how == "leaves":
        dist.barrier()
    return type(error).__name__, str(error)


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("dies between", "rank 2 died"),
        ("dies within", "rank 2 died"),
        ("dies at the end", "rank 2 died"),
        ("leaves", "rank 2"),
    ],
)
def test_the_old_placement_stays_whole_where_a_rank_is_gone(
    how: str, text: str, tmp_path: Path
) -> None:
    dead = [] if how == "leaves" else [2]
    results = run_ranks(_interrupted, 3, how, str(tmp_path), fresh=True, expect_dead=dead)
    for name, told in results[:2]:
        assert name == "PeerFailedError", told
        assert text in told


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_a_stopped_rank_is_named_and_the_old_placement_stays(tmp_path: Path) -> None:
    results = run_ranks(_interrupted, 3, "stops", str(tmp_path), fresh=True)
    for name, told in results[:2]:
        assert name == "PeerTimeoutError", told
        assert "rank 2 made no progress" in told
