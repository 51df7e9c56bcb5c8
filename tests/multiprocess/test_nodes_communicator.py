"""A communicator over several nodes: messages, memory, aborts, deaths, recovery, leaving.

The nodes lie on one machine; between them the ranks have TCP and nothing else.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm import Communicator, PeerFailedError, PeerTimeoutError
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    HANG_S,
    die,
    error_of,
    gather_pids,
    has_stopped,
    wait_for,
)

LAYOUTS = [(4, 2), (3, 1), pytest.param(6, 2, marks=pytest.mark.full)]
MIB = 1 << 20
PATIENCE_S = 3.0
"""Long for ranks that start together."""


def make(context: RankContext, num_local_ranks: int, **options: Any) -> Communicator:
    options = {"stall_timeout_s": 20.0, "arrival_timeout_s": 40.0, **options}
    return Communicator(
        context.group, backend="host", num_local_ranks=num_local_ranks, num_threads=1, **options
    )


def payload(rank_idx: int, round_idx: int, num_bytes: int) -> bytes:
    return random.Random(1000 * round_idx + rank_idx).randbytes(num_bytes)


def gather_until_error(comm: Communicator) -> Exception:
    """Collective calls until one raises."""
    deadline = time.monotonic() + HANG_S
    with pytest.raises((PeerFailedError, PeerTimeoutError)) as raised:
        while time.monotonic() < deadline:
            comm.all_gather(b"")
    return raised.value.with_traceback(None)


# ------------------------------------------------------------------------------ messages, memory


def _gather(context: RankContext, num_local_ranks: int) -> None:
    with make(context, num_local_ranks) as comm:
        for round_idx, num_bytes in enumerate([0, 1, 31, 100_000, MIB, 65_536, 3]):
            gathered = comm.all_gather(payload(comm.rank_idx, round_idx, num_bytes))
            assert gathered == [payload(i, round_idx, num_bytes) for i in range(comm.num_ranks)]


@pytest.mark.parametrize(("num_ranks", "num_local_ranks"), LAYOUTS)
def test_messages_of_all_sizes_reach_all(num_ranks: int, num_local_ranks: int) -> None:
    run_ranks(_gather, num_ranks, num_local_ranks)


@pytest.mark.parametrize("num_local_ranks", [1, 2])
def test_messages_between_threads(num_local_ranks: int) -> None:
    run_ranks(_gather, 4, num_local_ranks, mode="threads")


def _map(context: RankContext, num_local_ranks: int) -> None:
    with make(context, num_local_ranks) as comm:
        tensor = comm.empty((1 + comm.rank_idx) * 3 * MIB, dtype=torch.uint8)
        tensor.fill_(comm.rank_idx)
        segment_bytes = [
            int(item) for item in comm.all_gather(str(comm.heap_stats().segment_bytes).encode())
        ]
        local = [rank for rank in range(comm.num_ranks) if rank // num_local_ranks == comm.node_idx]
        expected = sum(segment_bytes[rank] for rank in local if rank != comm.rank_idx)
        wait_for(lambda: comm.heap_stats().peer_segment_bytes >= expected)
        comm.all_gather(b"")  # whatever would come has come
        assert comm.heap_stats().peer_segment_bytes == expected
        native = comm.require_native()
        for rank in range(comm.num_ranks):
            if rank in local:
                native.resolve(rank, 0, 0, 64)
                continue
            with pytest.raises(
                ValueError,
                match=f"memory of rank {rank} on node {rank // num_local_ranks} is not seen by rank "
                f"{comm.rank_idx} on node {comm.node_idx}",
            ):
                native.resolve(rank, 0, 0, 64)
        comm.all_gather(b"")


@pytest.mark.parametrize(("num_ranks", "num_local_ranks"), [(4, 2), (3, 1)])
def test_only_memory_of_the_own_node_is_mapped(num_ranks: int, num_local_ranks: int) -> None:
    run_ranks(_map, num_ranks, num_local_ranks)


def _children(context: RankContext) -> None:
    with make(context, 2) as comm:
        shapes = {(0, 1): 2, (2, 3): 2, (0, 2): 1, (1, 3): 1, (0, 1, 2, 3): 2, (3,): 1}
        for ranks, num_local_ranks in shapes.items():
            group = dist.new_group(list(ranks))
            if comm.rank_idx not in ranks:
                continue
            with Communicator(group, parent=comm) as child:
                assert (child.backend, child.num_local_ranks) == ("host", num_local_ranks)
                assert child.all_gather(b"%d" % comm.rank_idx) == [b"%d" % rank for rank in ranks]
        group = dist.new_group([0, 1, 2])
        if comm.rank_idx < 3:
            with pytest.raises(ValueError, match="parent: 2 on node 0, 1 on node 1"):
                Communicator(group, parent=comm)
            with pytest.raises(ValueError, match="divide the number of ranks, 3, got 2"):
                Communicator(group, parent=comm, num_local_ranks=2)
        comm.all_gather(b"")


def test_children_keep_the_nodes_of_their_parent() -> None:
    run_ranks(_children, 4)


# ---------------------------------------------------------------------- aborts, deaths, recovery


def _abort(context: RankContext, num_local_ranks: int) -> list[str]:
    """Rank 0 alone loses patience with the last rank, twice; all hear of it and go on."""
    last = context.num_ranks - 1
    patience_s = PATIENCE_S if context.rank_idx == 0 else HANG_S
    comm = make(context, num_local_ranks, arrival_timeout_s=patience_s)
    messages = []
    for round_idx in range(2):
        if comm.rank_idx == last:
            wait_for(lambda: comm.require_native().is_aborted)
        error = gather_until_error(comm)
        assert isinstance(error, PeerTimeoutError), repr(error)
        assert error.ranks == (last,)
        messages.append(str(error))
        assert str(error_of(lambda: comm.all_gather(b""))) == str(error)
        dist.barrier()
        recovery = comm.recover()
        assert recovery.failed_ranks == ()
        dist.barrier()
        number = b"%d" % round_idx
        assert comm.all_gather(number) == [number] * comm.num_ranks
    dist.barrier()
    comm.destroy()
    return messages


@pytest.mark.clock(usual_s=0.2, limit_s=PATIENCE_S)
@pytest.mark.parametrize(
    ("num_ranks", "num_local_ranks"),
    [(4, 2), (3, 1), (6, 2)],
)
def test_an_abort_reaches_every_node(num_ranks: int, num_local_ranks: int) -> None:
    (messages, *others) = run_ranks(_abort, num_ranks, num_local_ranks)
    said = f"rank {num_ranks - 1} did not arrive at a collective call of the communicator within"
    assert all(message.startswith(said) for message in messages)
    assert all("of rank 0" in message for message in messages)
    assert others == [messages] * (num_ranks - 1)


def _die_remote(context: RankContext, num_local_ranks: int) -> tuple[tuple[int, ...], list[bytes]]:
    comm = make(context, num_local_ranks)
    victim = context.num_ranks - 1
    if comm.rank_idx == victim:
        comm.all_gather(b"")
        die()
    # In the call after the one that the victim ended, or still in that one.
    error = gather_until_error(comm)
    assert isinstance(error, PeerFailedError), repr(error)
    assert error.ranks == (victim,)
    assert f"rank {victim} died" in str(error)
    recovery = comm.recover()
    gathered = comm.all_gather(b"alive")
    comm.all_gather(b"")
    comm.destroy()
    return recovery.failed_ranks, gathered


@pytest.mark.parametrize(("num_ranks", "num_local_ranks"), LAYOUTS)
def test_a_killed_rank_is_named_on_every_node(num_ranks: int, num_local_ranks: int) -> None:
    victim = num_ranks - 1
    results = run_ranks(_die_remote, num_ranks, num_local_ranks, fresh=True, expect_dead=[victim])
    expected = ((victim,), [b"alive"] * victim + [b""])
    assert results == [expected] * victim + [None]


def _leave(context: RankContext, num_local_ranks: int) -> str:
    comm = make(context, num_local_ranks)
    leaver = context.num_ranks - 1
    # The last message before it leaves still counts.
    assert len(comm.all_gather(b"x")) == comm.num_ranks
    message = ""
    if comm.rank_idx == leaver:
        comm.destroy()
    # A rank that saw it gone in the next call would end the calls of those that are still in this one.
    dist.barrier()
    if comm.rank_idx != leaver:
        error = gather_until_error(comm)
        assert isinstance(error, PeerFailedError), repr(error)
        assert error.ranks == (leaver,)
        message = str(error)
    dist.barrier()
    comm.destroy()
    return message


@pytest.mark.parametrize(("num_ranks", "num_local_ranks"), LAYOUTS)
def test_who_leaves_in_good_order_is_no_failure(num_ranks: int, num_local_ranks: int) -> None:
    messages = run_ranks(_leave, num_ranks, num_local_ranks)
    assert all(f"rank {num_ranks - 1} left" in message for message in messages[:-1]), messages


def _stop(context: RankContext) -> None:
    """The last rank is stopped for three times `stall_timeout_s`, idle and with bytes for it."""
    comm = make(context, 2, stall_timeout_s=1.0)
    pids = gather_pids(comm)
    last = context.num_ranks - 1
    if comm.rank_idx == 0:
        os.kill(pids[last], signal.SIGSTOP)
        wait_for(lambda: has_stopped(pids[last]))
        threading.Timer(3.0, os.kill, (pids[last], signal.SIGCONT)).start()
    # A megabyte fills no socket, so every machine acknowledges what it is sent.
    gathered = comm.all_gather(payload(comm.rank_idx, 0, MIB))
    assert gathered == [payload(i, 0, MIB) for i in range(comm.num_ranks)]
    comm.all_gather(b"")
    comm.destroy()


@pytest.mark.full
def test_a_stopped_rank_is_not_taken_for_a_lost_link() -> None:
    run_ranks(_stop, 4, fresh=True)


# --------------------------------------------------------------------------------------- layouts


def _launched(context: RankContext, num_local_ranks: int) -> tuple[int, int]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RANK", str(context.rank_idx))
        environment.setenv("WORLD_SIZE", str(context.num_ranks))
        environment.setenv("LOCAL_WORLD_SIZE", str(num_local_ranks))
        with Communicator(context.group) as comm:
            assert comm.backend == "host"
            comm.all_gather(b"")
            return comm.num_nodes, comm.node_idx


@pytest.mark.parametrize("num_local_ranks", [1, 2, 4])
def test_agents_of_a_launcher_on_one_machine_are_nodes(num_local_ranks: int) -> None:
    num_nodes = 4 // num_local_ranks
    expected = [(num_nodes, rank_idx // num_local_ranks) for rank_idx in range(4)]
    assert run_ranks(_launched, 4, num_local_ranks) == expected


def _mismatch(context: RankContext) -> str:
    return str(error_of(lambda: make(context, 2 if context.rank_idx < 3 else 4)))


def test_layouts_that_differ_are_refused_on_every_rank() -> None:
    messages = run_ranks(_mismatch, 4)
    assert (
        messages
        == ["ranks declare different node layouts: num_local_ranks is 2 on rank 0 and 4 on rank 3"]
        * 4
    )
