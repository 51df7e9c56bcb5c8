"""Batched copies between processes: dead, stopped, absent and interrupted ranks, and far offsets."""

from __future__ import annotations

import functools
import mmap
import os
import signal
import threading
import time
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_comm import CommunicationError, Communicator
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy, CopyItem, PreparedCopies
from moe_comm.resharding.copy_services.changed_blocks import checksum
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    HANG_S,
    SHORT_S,
    die_after,
    error_of,
    gather_pids,
    has_stopped,
    interrupt_when_waiting,
    wait_for,
    when_waiting,
)

Told = tuple[str, tuple[int, ...], str, str, str]
NUM_ELEMENTS = 1 << 20


def told(error: BaseException) -> Told:
    assert isinstance(error, CommunicationError), repr(error)
    return type(error).__name__, error.ranks, error.operation, error.phase, str(error)


class Exchange:
    """Every rank sends a tensor to every other: to the one before it in place, to the rest through slots.

    Before one leaves or fails, `dist.barrier()` sees to it that no rank is in a run any more: there it
    would hear what others meet in the next one.
    """

    def __init__(self, context: RankContext, **options: float) -> None:
        options = {"stall_timeout_s": 20.0, "arrival_timeout_s": 40.0, **options}
        self.comm = Communicator(context.group, backend="host", **options)  # type: ignore[arg-type]
        self.engine = BatchedCopy(self.comm, slot_bytes=1 << 16)
        self.targets: dict[int, torch.Tensor] = {}

    def prepare(self, peers: Collection[int] | None = None) -> PreparedCopies:
        rank_idx = self.comm.rank_idx
        peers = range(self.comm.num_ranks) if peers is None else peers
        self.data = torch.zeros(NUM_ELEMENTS, dtype=torch.int64)
        self.targets = {
            peer: self.comm.empty(NUM_ELEMENTS, dtype=torch.int64)
            if peer == (rank_idx + 1) % self.comm.num_ranks
            else torch.zeros(NUM_ELEMENTS, dtype=torch.int64)
            for peer in peers
            if peer != rank_idx
        }
        sends: list[CopyItem] = [(rank_idx, self.data, peer) for peer in self.targets]
        recvs: list[CopyItem] = [(peer, target, peer) for peer, target in self.targets.items()]
        return self.engine.prepare(sends, recvs)

    def run(self, prepared: PreparedCopies, seed: int) -> None:
        self.data.fill_(1000 * seed + self.comm.rank_idx)
        self.engine.run(prepared)
        for peer, target in self.targets.items():
            assert bool((target == 1000 * seed + peer).all()), (seed, peer)


def run_until_error(exchange: Exchange, prepared: PreparedCopies) -> BaseException:
    deadline = time.monotonic() + HANG_S
    seed = 0
    while time.monotonic() < deadline:
        seed += 1
        try:
            exchange.run(prepared, seed)
        except CommunicationError as error:
            return error.with_traceback(None)
    raise AssertionError("no error")


def _die_and_recover(context: RankContext, delay_s: float) -> Told:
    exchange = Exchange(context)
    comm = exchange.comm
    prepared = exchange.prepare()
    exchange.run(prepared, 0)
    live_bytes = comm.heap_stats().live_bytes
    dist.barrier()
    if context.rank_idx == 2:
        die_after(delay_s)
    error = run_until_error(exchange, prepared)
    again = error_of(functools.partial(exchange.run, prepared, 1))
    assert told(again)[:2] == told(error)[:2]
    assert comm.recover().failed_ranks == (2,)
    refused = error_of(functools.partial(exchange.run, prepared, 2))
    assert isinstance(refused, ValueError), repr(refused)
    assert "has copies with rank 2, which has failed" in str(refused)
    living = exchange.prepare([0, 1, 3])
    for seed in range(5):
        exchange.run(living, seed)
    del prepared
    comm.all_gather(b"")
    stats = comm.heap_stats()
    assert stats.quarantined_bytes == 0
    assert stats.live_bytes <= live_bytes, (stats, live_bytes)
    comm.destroy()
    return told(error)


@pytest.mark.parametrize("delay_s", [pytest.param(0.003, marks=pytest.mark.full), 0.06])
def test_death_is_named_and_the_living_go_on(delay_s: float) -> None:
    results = run_ranks(_die_and_recover, 4, delay_s, fresh=True, expect_dead=[2])
    for rank_idx in (0, 1, 3):
        name, ranks, operation, _, text = results[rank_idx]
        assert (name, ranks) == ("PeerFailedError", (2,)), text
        assert operation in ("batched copy", ""), operation
        assert "rank 2 died" in text


def _stop(context: RankContext, folder: str) -> Told:
    """Rank 2 is inside a run, waiting for rank 0, when it is stopped."""
    exchange = Exchange(context, stall_timeout_s=SHORT_S)
    comm = exchange.comm
    prepared = exchange.prepare()
    exchange.run(prepared, 0)
    pids = gather_pids(comm)
    entered = Path(folder) / "entered"
    if context.rank_idx == 0:
        wait_for(entered.exists)
        os.kill(pids[2], signal.SIGSTOP)
        wait_for(lambda: has_stopped(pids[2]))
    if context.rank_idx == 2:
        when_waiting(entered.touch)
    error = error_of(lambda: exchange.run(prepared, 1))
    if context.rank_idx == 0:
        os.kill(pids[2], signal.SIGCONT)
    assert comm.recover().failed_ranks == ()
    for seed in range(3):
        exchange.run(prepared, seed)
    comm.destroy()
    return told(error)


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_a_stopped_rank_is_named_and_everybody_recovers(tmp_path: Path) -> None:
    for name, ranks, operation, phase, text in run_ranks(_stop, 3, str(tmp_path)):
        assert (name, ranks, operation) == ("PeerTimeoutError", (2,), "batched copy"), text
        assert phase == "verdicts"
        assert f"rank 2 made no progress for {SHORT_S:g} s in batched copy of buffer" in text


def _never_come(context: RankContext, folder: str) -> Told | None:
    exchange = Exchange(context, arrival_timeout_s=SHORT_S)
    prepared = exchange.prepare()
    done = Path(folder) / "done"
    error = None
    dist.barrier()
    if context.rank_idx == 1:
        wait_for(done.exists)
    else:
        error = told(error_of(lambda: exchange.run(prepared, 1)))
        done.touch()
    exchange.comm.recover()
    exchange.run(prepared, 2)
    exchange.comm.destroy()
    return error


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_an_absent_rank_is_named(tmp_path: Path) -> None:
    results = run_ranks(_never_come, 3, str(tmp_path))
    for rank_idx in (0, 2):
        error = results[rank_idx]
        assert error[:4] == ("PeerTimeoutError", (1,), "batched copy", "rows")
        assert "rank 1 did not enter batched copy of buffer" in error[4]


def _interrupt(context: RankContext, folder: str) -> Told:
    exchange = Exchange(context)
    comm = exchange.comm
    prepared = exchange.prepare()
    exchange.run(prepared, 0)
    done = Path(folder) / "done"
    dist.barrier()
    if context.rank_idx == 0:
        assert threading.current_thread() is threading.main_thread()
        interrupt_when_waiting()
        first = error_of(lambda: exchange.run(prepared, 1))
        assert isinstance(first, KeyboardInterrupt), repr(first)
        error = error_of(lambda: exchange.run(prepared, 1))
        done.touch()
    else:
        if context.rank_idx == 2:
            wait_for(done.exists)
        error = error_of(lambda: exchange.run(prepared, 1))
    assert comm.recover().failed_ranks == ()
    exchange.run(prepared, 2)
    comm.destroy()
    return told(error)


def test_an_interrupted_rank_gives_up_for_all(tmp_path: Path) -> None:
    for name, ranks, operation, _, text in run_ranks(_interrupt, 3, str(tmp_path)):
        assert (name, ranks, operation) == ("PeerFailedError", (0,), "batched copy"), text
        assert "rank 0 gave up batched copy" in text


def _leave(context: RankContext, folder: str) -> str:
    exchange = Exchange(context)
    prepared = exchange.prepare()
    exchange.run(prepared, 0)
    dist.barrier()
    if context.rank_idx == 1:
        exchange.comm.destroy()
        return "rank 1 left"
    error = error_of(lambda: exchange.run(prepared, 1))
    assert isinstance(error, (CommunicationError, ValueError)), repr(error)
    (Path(folder) / f"told{context.rank_idx}").touch()
    wait_for(lambda: len(list(Path(folder).iterdir())) == 2)
    exchange.comm.destroy()
    return str(error)


def test_a_rank_that_leaves_is_named(tmp_path: Path) -> None:
    for text in run_ranks(_leave, 3, str(tmp_path)):
        assert "rank 1 " in text
        assert "left" in text or "destroyed" in text


def sparse(num_bytes: int) -> torch.Tensor:
    """Zeros that take no memory until they are written."""
    return torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)


def _far_offsets(context: RankContext) -> None:
    """Offsets and strides past 2**31 on both ends, and one piece larger than that."""
    comm = Communicator(context.group, backend="host")
    far, count, step = (1 << 31) + 4096 + 3, 5000, (1 << 30) + (1 << 29) + 7
    engine = BatchedCopy(comm, slot_bytes=1 << 12)
    memory = sparse(3 * step)
    rows = memory.as_strided((2, count), (step, 1), far // 2)
    heap = comm.empty(far + count, dtype=torch.uint8)
    heap[far - 10 :] = 99
    if comm.rank_idx == 0:
        rows.copy_(torch.arange(2 * count).view(2, count) % 251)
        big = sparse(far)
        big[:: 1 << 22] = 7
        sends: list[CopyItem] = [(0, rows, 1), (1, rows[1], 1), (2, big, 1)]
        engine.run(engine.prepare(sends, []))
        comm.all_gather(checksum(big).to_bytes(8, "little"))
    else:
        recvs: list[CopyItem] = [(0, rows, 0), (1, heap[far:], 0), (2, heap[:far], 0)]
        stats = engine.run(engine.prepare([], recvs))
        assert stats.total_ns > 0
        expected = torch.arange(2 * count).view(2, count) % 251
        assert torch.equal(rows, expected.to(torch.uint8))
        assert torch.equal(heap[far:], expected[1].to(torch.uint8))
        assert heap[1 << 31] == 7
        assert heap[far - 4100 : far].sum() == 7
        sums = comm.all_gather(b"")
        assert int.from_bytes(sums[0], "little") == checksum(heap[:far])
    comm.destroy()


@pytest.mark.slow
def test_offsets_past_two_to_the_31() -> None:
    run_ranks(_far_offsets, 2, fresh=True)
