"""`shrink` and `grow` where ranks lie on several nodes, and where kernels are emulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import Communicator, EpBuffer, EvictedError, GradientSum, PeerFailedError
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    config_for,
    die_after,
    error_of,
    meet,
    step,
    steps_until_error,
    wait_for,
)
from tests.multiprocess.test_elastic_grow import LIMIT_S, RANKS_S, _outcome, _start, _store

TIMEOUTS = {"stall_timeout_s": 20.0, "arrival_timeout_s": 40.0}


def _work(communicator: Communicator) -> tuple[int, int]:
    """Steps and a sum of gradients; nodes, and bytes that this rank sent to others of them."""
    with EpBuffer(communicator, config_for(communicator.num_ranks)) as buffer:
        for seed in range(5):
            step(buffer, seed)
        sent, _ = buffer._backend.internode_bytes()
    with GradientSum(communicator, 1001) as total:
        gradient = torch.full((1001,), float(communicator.rank_idx + 1))
        total.sum_([gradient])
        assert gradient.eq(sum(range(1, communicator.num_ranks + 1))).all()
    return communicator.num_nodes, sent


def _lose(context: RankContext, rail: str, victims: list[int]) -> Any:
    """Victims of 2 nodes of 2 ranks die one after the other, and who lives shrinks each time."""
    comm = Communicator(context.group, backend="host", num_local_ranks=2, rail=rail, **TIMEOUTS)
    former = tuple(range(context.num_ranks))
    for victim in victims:
        buffer = EpBuffer(comm, config_for(comm.num_ranks))
        step(buffer, 0)
        meet(context, former)
        if context.rank_idx == victim:
            die_after(0.02)
        error, _ = steps_until_error(buffer)
        assert isinstance(error, PeerFailedError), repr(error)
        shrunk = comm.shrink(error.ranks)
        former = tuple(former[rank] for rank in shrunk.former_ranks)
        comm = shrunk.communicator
    num_nodes, sent = _work(comm)
    comm.destroy()
    return former, num_nodes, sent > 0


@pytest.mark.parametrize(
    ("rail", "victims", "num_nodes"),
    [
        # Without one of its ranks a node has no equal: every rank is one, until the rest goes.
        pytest.param("sockets", [1], 3, id="a-rank"),
        pytest.param("gloo", [2, 3], 1, id="a-node"),
    ],
)
def test_survivors_on_their_nodes(rail: str, victims: list[int], num_nodes: int) -> None:
    results = run_ranks(_lose, 4, rail, victims, fresh=True, expect_dead=victims)
    living = [rank for rank in range(4) if rank not in victims]
    want = (tuple(living), num_nodes, num_nodes > 1)
    assert [results[rank] for rank in living] == [want] * len(living)


def _lose_a_rail(context: RankContext, backend: str, where: str) -> str:
    """Rank 3 of 2 nodes of 2 dies; rank 0 tries to go on without shrink(), and leaves."""
    comm = Communicator(context.group, backend=backend, num_local_ranks=2, **TIMEOUTS)
    buffer = EpBuffer(comm, config_for(4))
    step(buffer, 0)
    meet(context)
    if context.rank_idx == 3:
        die_after(0.0)
    error, _ = steps_until_error(buffer)
    assert isinstance(error, PeerFailedError), repr(error)
    assert comm.recover().failed_ranks == (3,)
    has_left = Path(where)
    if context.rank_idx != 0:
        wait_for(has_left.exists)
    refused = error_of(lambda: step(buffer, 1, [0, 1, 2]))
    if context.rank_idx == 0:
        comm.destroy()
        has_left.touch()
    assert isinstance(refused, ValueError), repr(refused)
    return str(refused)


@pytest.mark.parametrize("backend", ["host", "simt"])
def test_who_left_does_not_hide_a_lost_rail(backend: str, tmp_path: Path) -> None:
    results = run_ranks(
        _lose_a_rail, 4, backend, str(tmp_path / "left"), fresh=True, expect_dead=[3]
    )
    said = (
        "dispatch: rank 3 has failed, through which rows came to rank 2 of its node; "
        "shrink the communicator to go on"
    )
    assert results[:3] == [said] * 3


def _return(context: RankContext, where: str) -> Any:
    """Rank 1 of 3 nodes dies, and a process of a node of its own takes its place."""
    comm = Communicator(
        context.group, backend="host", num_local_ranks=1, check_messages=True, **TIMEOUTS
    )
    buffer = EpBuffer(comm, config_for(3))
    step(buffer, 0)
    meet(context)
    if context.rank_idx == 1:
        die_after(0.0)
    error, _ = steps_until_error(buffer)
    assert isinstance(error, PeerFailedError), repr(error)
    comm = comm.shrink(error.ranks).communicator
    newcomer = _start(f"_come({where!r}, 1)") if comm.rank_idx == 0 else None
    grown = comm.grow(_store(where), timeout_s=LIMIT_S)
    comm = grown.communicator
    with EpBuffer(comm, config_for(3)) as buffer:
        for seed in range(5):
            step(buffer, seed)
        comm.all_gather(b"")
    said = _outcome(newcomer) if newcomer is not None else None
    assert comm.check_messages  # which the newcomer has learned: else they would disagree
    found = (comm.num_nodes, comm.rank_idx, grown.former_ranks, said)
    comm.destroy()
    return found


def test_a_node_returns_to_its_old_place(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    results = run_ranks(_return, 3, store, fresh=True, expect_dead=[1], timeout_s=RANKS_S)
    former = (0, -1, 1)
    assert results == [(3, 0, former, (1, former, (1,))), None, (3, 2, former, None)]


def _leave_one_behind(context: RankContext, num_local_ranks: int) -> Any:
    comm = Communicator(context.group, backend="simt", num_local_ranks=num_local_ranks, **TIMEOUTS)
    buffer = EpBuffer(comm, config_for(comm.num_ranks, 16))
    step(buffer, 0)
    meet(context)
    last = context.num_ranks - 1
    if context.rank_idx == last:
        error = error_of(lambda: [comm.all_gather(b"") for _ in range(10**6)])
        comm.destroy()
        return type(error)
    shrunk = comm.shrink([last])
    new = shrunk.communicator
    with EpBuffer(new, config_for(new.num_ranks, 16)) as buffer:
        for seed in range(3):
            step(buffer, seed)
    found = (new.backend, new.num_nodes, shrunk.former_ranks)
    new.destroy()
    return found


@pytest.mark.parametrize("num_local_ranks", [3, 1])
def test_emulated_kernels_go_on_with_survivors(num_local_ranks: int) -> None:
    results = run_ranks(_leave_one_behind, 3, num_local_ranks, mode="threads")
    want = ("simt", 1 if num_local_ranks == 3 else 2, (0, 1))
    assert results == [want, want, EvictedError]
