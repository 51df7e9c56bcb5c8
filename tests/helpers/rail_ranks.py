"""Scripts of ranks in the tests of rails: streams of messages whose contents are known."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from moe_comm import Communicator, _host
from moe_comm.ep.backends.rails import RailEngine, gloo, make_rail
from moe_comm.testing import RankContext
from tests.helpers.failing_ranks import HANG_S, wait_for

Bytes = npt.NDArray[np.uint8]
SIZES = (1, 7, 64, 4096, 70_001, 1, 3_000_000, 2, 300_000, *range(100, 140))


@dataclasses.dataclass(frozen=True)
class Shape:
    num_ranks: int
    num_local_ranks: int
    rail: str

    def __str__(self) -> str:
        return f"{self.num_ranks // self.num_local_ranks}x{self.num_local_ranks}-{self.rail}"


@contextmanager
def joined(
    context: RankContext, num_local_ranks: int, rail: str
) -> Iterator[tuple[Communicator, RailEngine]]:
    with Communicator(
        context.group, num_local_ranks=num_local_ranks, backend="host", rail=rail
    ) as comm:
        engine = make_rail(comm)
        assert engine is not None
        try:
            yield comm, engine
        finally:
            engine.close()


def message(source: int, target: int, number: int, num_bytes: int) -> Bytes:
    generator = np.random.default_rng([source, target, number])
    return generator.integers(0, 256, num_bytes, dtype=np.uint8)


def await_end(transfers: list[_host.RailTransfer]) -> list[str]:
    deadline_s = time.monotonic() + HANG_S
    while any(transfer.state == "moving" for transfer in transfers):
        assert time.monotonic() < deadline_s, [transfer.state for transfer in transfers]
        time.sleep(0.001)
    return [transfer.state for transfer in transfers]


def exchange(
    comm: Communicator, rail: _host.Rail, sizes: tuple[int, ...] = SIZES, *, is_late: bool = False
) -> None:
    """Every message of every pair of the rail; ranks start their transfers in different orders."""
    node_idx, num_local_ranks = comm.node_idx, comm.num_local_ranks
    peers = [node for node in range(comm.num_nodes) if node != node_idx]
    ranks = [node * num_local_ranks + comm.local_rank_idx for node in range(comm.num_nodes)]
    transfers: list[_host.RailTransfer] = []
    arrived: dict[tuple[int, int], Bytes] = {}
    before = (rail.sent_bytes, rail.received_bytes)

    def send() -> None:
        for number, size in enumerate(sizes):
            for node in peers:
                data = message(comm.rank_idx, ranks[node], number, size)
                transfers.append(rail.send(node, data))

    def receive() -> None:
        for node in peers:
            for number, size in enumerate(sizes):
                arrived[node, number] = np.zeros(size, dtype=np.uint8)
                transfers.append(rail.receive(node, arrived[node, number]))

    first, second = (send, receive) if node_idx % 2 == 0 else (receive, send)
    first()
    if is_late:
        time.sleep(0.3)
    second()
    assert set(await_end(transfers)) == {"moved"}, [transfer.error for transfer in transfers]
    for (node, number), data in arrived.items():
        assert np.array_equal(data, message(ranks[node], comm.rank_idx, number, sizes[number]))
    moved = len(peers) * sum(sizes)
    assert rail.sent_bytes - before[0] == moved
    assert rail.received_bytes - before[1] == moved


def run_exchange(context: RankContext, shape: Shape) -> None:
    with joined(context, shape.num_local_ranks, shape.rail) as (comm, engine):
        assert engine.rail.name == shape.rail
        for round_idx in range(3):
            exchange(comm, engine.rail, is_late=round_idx == 1)


def run_reuse(context: RankContext, num_local_ranks: int) -> list[bool]:
    """Return whether the engine of the second, third ... rail is that of the one before."""
    with Communicator(num_local_ranks=num_local_ranks, backend="host", rail="gloo") as comm:
        groups = []
        for round_idx in range(4):
            engine = make_rail(comm)
            assert isinstance(engine, gloo.GlooEngine)
            groups.append(engine._group)
            exchange(comm, engine.rail, (5, 50_000))
            if round_idx == 1 and context.rank_idx == 0:
                # A message is said to have moved a moment before the wait for it is over.
                wait_for(lambda engine=engine: not engine._waiting)  # type: ignore[misc]
                engine.rail.receive((comm.node_idx + 1) % comm.num_nodes, bytearray(8))
                wait_for(lambda engine=engine: bool(engine._waiting))  # type: ignore[misc]
            # Nobody ends its connections while a peer still exchanges.
            comm.all_gather(b"")
            engine.close()
            assert not any(thread.is_alive() for thread in engine._threads)
        return [one is other for one, other in itertools.pairwise(groups)]


def run_given_up(context: RankContext, shape: Shape) -> None:
    """A receive that nobody answers, in an engine without a limit."""
    with joined(context, shape.num_local_ranks, shape.rail) as (comm, engine):
        node = (comm.node_idx + 1) % comm.num_nodes
        assert isinstance(engine, gloo.GlooEngine)
        transfer = engine.rail.receive(node, bytearray(1 << 20))
        wait_for(lambda: bool(engine._waiting))
        comm.all_gather(b"")
        engine.rail.give_up("no longer wanted")
        assert (transfer.state, transfer.error) == ("failed", "no longer wanted")
        late = engine.rail.send(node, bytearray(8))
        assert (late.state, late.error) == ("failed", "no longer wanted")
        engine.close()
        assert not any(thread.is_alive() for thread in engine._threads)


def run_peer_dies(context: RankContext, shape: Shape) -> str:
    comm = Communicator(num_local_ranks=shape.num_local_ranks, backend="host", rail=shape.rail)
    engine = make_rail(comm)
    exchange(comm, engine.rail, (100,))
    if context.rank_idx == 0:
        os._exit(1)
    transfer = engine.rail.receive(0, bytearray(100))
    assert await_end([transfer]) == ["failed"]
    error = transfer.error
    transfer = engine.rail.send(0, bytearray(100))
    assert await_end([transfer]) == ["failed"]
    engine.close()
    assert not any(thread.is_alive() for thread in engine._threads)
    comm.destroy()
    return error


def run_late(context: RankContext, limit_s: float) -> None:
    """Gloo's own limit is shorter than a peer is late, and ends nothing."""
    gloo.CONNECT_TIMEOUT_S = limit_s
    with joined(context, 1, "gloo") as (comm, engine):
        if context.rank_idx == 0:
            time.sleep(limit_s + 0.5)
        exchange(comm, engine.rail, (10, 100_000))


def run_leave(context: RankContext) -> None:
    """Return from the rank's function, hence leave the process, in the middle of a receive."""
    comm = Communicator(num_local_ranks=1, backend="host", rail="gloo")
    engine = make_rail(comm)
    assert isinstance(engine, gloo.GlooEngine)
    engine.rail.receive(1 - context.rank_idx, bytearray(100))
    wait_for(lambda: bool(engine._waiting))
    dist.barrier()
    # Neither is destroyed: what is left over lives until the end.
    threading.main_thread().left_over = (comm, engine)  # type: ignore[attr-defined]


def run_auto(context: RankContext, num_local_ranks: int) -> str:
    with Communicator(context.group, num_local_ranks=num_local_ranks, backend="host") as comm:
        engine = make_rail(comm)
        if engine is None:
            return "none"
        exchange(comm, engine.rail, (10,))
        engine.close()
        return engine.rail.name


def run_unusable(context: RankContext, rail: str) -> str:
    with Communicator(context.group, num_local_ranks=1, backend="host", rail=rail) as comm:
        try:
            make_rail(comm)
        except ValueError as error:
            return str(error)
        return ""


def run_setup_fails(context: RankContext) -> list[str]:
    """The rail of ranks 1 and 3 cannot be set up, once; the next engine is in order."""

    def refuse(*_: Any, **__: Any) -> dist.ProcessGroup:
        raise RuntimeError("no more sockets\nin this machine")

    with Communicator(num_local_ranks=2, backend="host", rail="gloo") as comm:
        errors = []
        new_group = dist.new_group
        dist.new_group = refuse if context.rank_idx % 2 == 1 else new_group
        try:
            make_rail(comm)
        except ValueError as error:
            errors.append(str(error))
        dist.new_group = new_group
        engine = make_rail(comm)
        exchange(comm, engine.rail, (5, 50_000))
        comm.all_gather(b"")
        engine.close()
        return errors
