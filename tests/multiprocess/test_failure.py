"""Ranks that die, stop, leave or are interrupted: every other rank is told who it was, and nobody hangs."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import (
    Communicator,
    EpBuffer,
    PeerFailedError,
    PeerTimeoutError,
    _host,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    HANG_S,
    NUM_TOPK,
    PROGRAM_S,
    SHORT_S,
    Told,
    assert_all_told,
    config_for,
    die,
    die_after,
    error_of,
    gather_pids,
    has_stopped,
    inputs,
    interrupt_when_waiting,
    make_buffer,
    meet,
    own_sockets,
    step,
    steps_until_error,
    told,
    wait_for,
    when_waiting,
)
from tests.helpers.fresh_python import FreshPython
from tests.helpers.source_tree import ROOT

# ---------------------------------------------------------------------------------------------
# SIGKILL.


def _die_at_random(
    context: RankContext, backend: str, victim: int, delay_s: float, hidden: int
) -> Told:
    buffer = make_buffer(context, num_tokens=512, hidden=hidden, backend=backend)
    step(buffer, 0)
    meet(context)
    if context.rank_idx == victim:
        die_after(delay_s)
    error, _ = steps_until_error(buffer)
    later = error_of(lambda: step(buffer, 1))
    assert told(later)[:2] == told(error)[:2]
    assert buffer.communicator.recover().failed_ranks == (victim,)
    living = [rank for rank in range(context.num_ranks) if rank != victim]
    for seed in range(2, 8):  # more than the ring of the emulator has entries
        step(buffer, seed, living)
    lost = error_of(lambda: step(buffer, 9))
    assert isinstance(lost, ValueError)
    assert f"experts of rank {victim}, which has failed" in str(lost)
    step(buffer, 10, living)
    return told(error)


@pytest.mark.parametrize(
    ("backend", "num_ranks", "victim", "delay_s", "hidden"),
    [
        ("host", 2, 0, 0.002, 64),
        pytest.param("host", 3, 2, 0.05, 64, marks=pytest.mark.full),
        ("host", 4, 1, 0.1, 2048),
        pytest.param("host", 3, 0, 0.25, 4096, marks=pytest.mark.full),
        ("simt", 2, 0, 0.002, 64),
        ("simt", 3, 2, 0.05, 64),
    ],
)
def test_death_at_any_moment_and_recovery(
    backend: str, num_ranks: int, victim: int, delay_s: float, hidden: int
) -> None:
    args = (backend, victim, delay_s, hidden)
    results = run_ranks(_die_at_random, num_ranks, *args, fresh=True, expect_dead=[victim])
    assert_all_told(results, PeerFailedError, victim)


def _die_after_the_row(context: RankContext, folder: str) -> Told:
    """Rank 2 has published its row when it dies; rank 0 has not entered; rank 1 waits."""
    buffer = make_buffer(context)
    meet(context)
    died = Path(folder) / "died"
    if context.rank_idx == 2:
        x, topk_idx = inputs(buffer, 1)
        buffer.dispatch(x, topk_idx, async_op=True)
        time.sleep(0.1)
        die(died)
    if context.rank_idx == 0:
        wait_for(died.exists)
        time.sleep(0.1)
    return told(error_of(lambda: step(buffer, 1)))


def test_death_after_the_row(tmp_path: Path) -> None:
    results = run_ranks(_die_after_the_row, 3, str(tmp_path), fresh=True, expect_dead=[2])
    assert_all_told(results, PeerFailedError, 2)


def _die_while_another_idles(context: RankContext, folder: str) -> Told:
    """Rank 0 does not come for a long time: rank 1 must not wait for it to hear of rank 2."""
    buffer = make_buffer(context)
    meet(context)
    done = Path(folder) / "done"
    if context.rank_idx == 2:
        die()
    if context.rank_idx == 0:
        wait_for(done.exists)
    error = error_of(lambda: step(buffer, 1))
    done.touch()
    return told(error)


def test_death_while_another_rank_idles(tmp_path: Path) -> None:
    results = run_ranks(_die_while_another_idles, 3, str(tmp_path), fresh=True, expect_dead=[2])
    assert_all_told(results, PeerFailedError, 2)


def _die_while_a_heap_grows(context: RankContext) -> Told:
    buffer = make_buffer(context)
    meet(context)
    if context.rank_idx == 1:
        die_after(0.02)
        time.sleep(HANG_S)
    if context.rank_idx == 0:
        buffer.communicator.reserve(256 << 20)
    return told(error_of(lambda: step(buffer, 1)))


def test_death_while_a_heap_grows() -> None:
    results = run_ranks(_die_while_a_heap_grows, 3, fresh=True, expect_dead=[1])
    assert_all_told(results, PeerFailedError, 1)


def _die_instead_of_a_buffer(context: RankContext) -> Told:
    comm = Communicator(context.group, backend="host", arrival_timeout_s=HANG_S)
    meet(context)
    if context.rank_idx == 2:
        die()
    return told(error_of(lambda: EpBuffer(comm, config_for(context.num_ranks))))


def test_death_while_a_buffer_is_made() -> None:
    results = run_ranks(_die_instead_of_a_buffer, 3, fresh=True, expect_dead=[2])
    assert_all_told(results, PeerFailedError, 2)


def _die_while_connecting(context: RankContext, victim: int, folder: str) -> Told:
    connect = _host.PeerMesh.connect

    def connect_to_the_living(*arguments: Any) -> None:
        # The exchange before this one is of the process group, which reports a death in its way.
        (Path(folder) / str(context.rank_idx)).touch()
        if context.rank_idx == victim:
            wait_for(lambda: len(list(Path(folder).iterdir())) == context.num_ranks)
            die()
        connect(*arguments)

    _host.PeerMesh.connect = connect_to_the_living  # type: ignore[method-assign]
    return told(error_of(lambda: Communicator(context.group, backend="host")))


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.full), 2])
def test_death_while_a_communicator_is_made(victim: int, tmp_path: Path) -> None:
    results = run_ranks(
        _die_while_connecting, 3, victim, str(tmp_path), fresh=True, expect_dead=[victim]
    )
    assert_all_told(results, PeerFailedError, victim)


def _leave_sockets(context: RankContext, folder: str) -> None:
    buffer = make_buffer(context)
    step(buffer, 0)
    (Path(folder) / f"sockets{context.rank_idx}").write_text("\n".join(own_sockets()))
    meet(context)
    if context.rank_idx == 0:
        die()
    steps_until_error(buffer)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    shm = set(Path("/dev/shm").glob("*moe*"))
    run_ranks(_leave_sockets, 3, str(tmp_path), fresh=True, expect_dead=[0])
    names = {name for path in tmp_path.glob("sockets*") for name in path.read_text().split()}
    assert len(names) >= 2
    open_names = Path("/proc/net/unix").read_text()
    assert [name for name in names if name in open_names] == []
    assert set(Path("/dev/shm").glob("*moe*")) - shm == set()


# ---------------------------------------------------------------------------------------------
# Stopped and absent ranks.


def _stop(context: RankContext, folder: str) -> tuple[Told, Told]:
    """Rank 2 is stopped inside a dispatch; rank 1 waits for its done flag, rank 0 too."""
    buffer = make_buffer(context, num_tokens=2048, hidden=4096, stall_timeout_s=SHORT_S)
    comm = buffer.communicator
    step(buffer, 0)
    pids = gather_pids(comm)
    entered = Path(folder) / "entered"
    if context.rank_idx == 0:
        # Rank 2 enters first and waits for rank 0, so it is inside when it stops.
        wait_for(entered.exists)
        os.kill(pids[2], signal.SIGSTOP)
        wait_for(lambda: has_stopped(pids[2]))
    if context.rank_idx == 2:
        when_waiting(entered.touch)
    first = error_of(lambda: step(buffer, 1))
    if context.rank_idx != 2:
        comm_error = error_of(lambda: step(buffer, 2))
    if context.rank_idx == 0:
        os.kill(pids[2], signal.SIGCONT)
    if context.rank_idx == 2:
        comm_error = error_of(lambda: step(buffer, 2))
    recovery = comm.recover()
    assert recovery.failed_ranks == ()
    step(buffer, 3)
    comm.destroy()
    return told(first), told(comm_error)


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_stopped_rank_is_named_by_all_and_everybody_recovers(tmp_path: Path) -> None:
    results = run_ranks(_stop, 3, str(tmp_path))
    for rank_idx, (first, later) in enumerate(results):
        assert first[:2] == ("PeerTimeoutError", (2,)), (rank_idx, first)
        assert first[2] in ("data", "offers")
        assert first[3] > 0
        assert later[:2] == ("PeerTimeoutError", (2,)), (rank_idx, later)


def _stop_elsewhere(context: RankContext, folder: str) -> Told:
    """Rank 3 is stopped on node 1; rank 0 waits for rank 2, which waits for what rank 3 passes on."""
    options = {"num_local_ranks": 2, "rail": "sockets", "stall_timeout_s": SHORT_S}
    buffer = make_buffer(context, **options)
    comm = buffer.communicator
    step(buffer, 0)
    pids = gather_pids(comm)
    entered = Path(folder) / "entered"
    if context.rank_idx == 3:
        when_waiting(entered.touch)
    else:
        wait_for(entered.exists)
        if context.rank_idx == 0:
            os.kill(pids[3], signal.SIGSTOP)
        wait_for(lambda: has_stopped(pids[3]))
    error = error_of(lambda: step(buffer, 1))
    if context.rank_idx == 0:
        os.kill(pids[3], signal.SIGCONT)
    assert comm.recover().failed_ranks == ()
    step(buffer, 2)
    comm.destroy()
    return told(error)


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_a_stopped_rank_of_another_node_is_named_by_all(tmp_path: Path) -> None:
    for rank_idx, error in enumerate(run_ranks(_stop_elsewhere, 4, str(tmp_path))):
        assert error[:2] == ("PeerTimeoutError", (3,)), (rank_idx, error)


def _never_come(context: RankContext, folder: str) -> Told | None:
    buffer = make_buffer(context, arrival_timeout_s=SHORT_S)
    done = Path(folder) / "done"
    error = None
    if context.rank_idx == 1:
        wait_for(done.exists)
    else:
        error = error_of(lambda: step(buffer, 1))
        done.touch()
    buffer.communicator.recover()
    step(buffer, 2)
    buffer.communicator.destroy()
    return None if error is None else told(error)


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_absent_rank_is_named(tmp_path: Path) -> None:
    results = run_ranks(_never_come, 3, str(tmp_path))
    assert_all_told(results, PeerTimeoutError, 1)
    assert "did not enter dispatch" in results[0][4]


def _never_gather(context: RankContext, folder: str) -> str:
    comm = Communicator(context.group, backend="host", arrival_timeout_s=SHORT_S)
    done = Path(folder) / "done"
    text = ""
    if context.rank_idx == 1:
        wait_for(done.exists)
    else:
        text = str(error_of(lambda: comm.all_gather(b"")))
        done.touch()
    comm.recover()
    comm.destroy()
    return text


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_a_rank_absent_from_a_collective_call_is_named(tmp_path: Path) -> None:
    assert run_ranks(_never_gather, 2, str(tmp_path))[0] == (
        "rank 1 did not arrive at a collective call of the communicator within "
        f"{SHORT_S:g} s of rank 0"
    )


LATE_FOR = "s for rank 1"


def _come_late(context: RankContext, folder: str) -> list[str]:
    buffer = make_buffer(context)
    warnings: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warnings.append(record.getMessage())
            # On a busy machine the other rank may be late as well, for a moment.
            if sum(f"{LATE_FOR} to enter dispatch" in text for text in warnings) == 2:
                (Path(folder) / f"warned {context.rank_idx}").touch()

    handler = Keep()
    logging.getLogger("moe_comm").addHandler(handler)
    _host.set_warning_interval(0.2)
    try:
        if context.rank_idx == 1:
            wait_for(lambda: len(list(Path(folder).glob("warned *"))) == 2)
        step(buffer, 1)
    finally:
        _host.set_warning_interval(60.0)
        logging.getLogger("moe_comm").removeHandler(handler)
    buffer.communicator.destroy()
    return warnings


def test_late_rank_is_reported_until_it_comes(tmp_path: Path) -> None:
    results = run_ranks(_come_late, 3, str(tmp_path))
    for rank_idx in (0, 2):
        waits = [text for text in results[rank_idx] if f"{LATE_FOR} to enter dispatch" in text]
        assert len(waits) >= 2, results[rank_idx]


def _cross(context: RankContext, backend: str) -> Told:
    """Two ranks block on two buffers in opposite order; no limit of theirs ends within the test."""
    first = make_buffer(context, backend=backend, stall_timeout_s=1000.0, arrival_timeout_s=1000.0)
    second = EpBuffer(first.communicator, first.config)
    buffers = [first, second]
    error = error_of(lambda: step(buffers[context.rank_idx], 1))
    first.communicator.recover()
    for buffer in buffers:
        step(buffer, 2)
    first.communicator.destroy()
    return told(error)


@pytest.mark.parametrize(
    ("backend", "mode"), [("host", "processes"), ("host", "threads"), ("simt", "threads")]
)
def test_blocking_calls_in_opposite_order_name_both_buffers(backend: str, mode: str) -> None:
    results = run_ranks(_cross, 2, backend, mode=mode, timeout_s=150.0)
    for name, ranks, _, _, text in results:
        # The one of two halves without the lowest rank is blamed.
        assert (name, ranks) == ("PeerTimeoutError", (1,)), text
        waits = re.findall(
            r"rank (\d) waits for rank (\d) to enter dispatch of buffer (\d+), epoch 1", text
        )
        assert sorted(wait[:2] for wait in waits) == [("0", "1"), ("1", "0")], text
        assert waits[0][2] != waits[1][2], text


def _wait_crosswise_for_a_thread(context: RankContext) -> None:
    """Each rank's main thread waits on its own buffer for what a second thread of the other will do."""
    buffers = [make_buffer(context, stall_timeout_s=1000.0, arrival_timeout_s=1000.0)]
    buffers.append(EpBuffer(buffers[0].communicator, buffers[0].config))
    mine, other = buffers[context.rank_idx], buffers[1 - context.rank_idx]

    def come_late() -> None:
        step(other, 0, num_tokens=4)  # known as a caller before the wait
        time.sleep(1.5)
        step(other, 1)

    thread = threading.Thread(target=come_late)
    thread.start()
    step(mine, 0, num_tokens=4)
    step(mine, 1)
    thread.join()
    meet(context)
    buffers[0].communicator.destroy()


def test_ranks_that_cross_on_two_threads_wait_for_each_other() -> None:
    run_ranks(_wait_crosswise_for_a_thread, 2, timeout_s=150.0)


def _cross_in_flight(context: RankContext) -> None:
    """Orders are opposite, but nothing waits before everything is under way."""
    buffers = [make_buffer(context, stall_timeout_s=1000.0, arrival_timeout_s=1000.0)]
    buffers.append(EpBuffer(buffers[0].communicator, buffers[0].config))
    if context.rank_idx == 1:
        buffers.reverse()
    pending = [buffer.dispatch(*inputs(buffer, 1), async_op=True) for buffer in buffers]
    time.sleep(1.0 if context.rank_idx == 1 else 0.0)
    for each in pending:
        each.event.wait()
    meet(context)
    buffers[0].communicator.destroy()


def test_operations_in_flight_may_cross() -> None:
    run_ranks(_cross_in_flight, 2, timeout_s=150.0)


# ---------------------------------------------------------------------------------------------
# Interrupted and leaving ranks.


def _handle_with_rows_of(context: RankContext, backend: str) -> None:
    """A handle from before rank 2 left, which has its rows here and none of this rank there."""
    buffer = make_buffer(context, backend=backend)
    living = (0, 1)
    x, topk_idx = inputs(buffer, 1, None if context.rank_idx == 2 else living)
    result = buffer.dispatch(x, topk_idx)
    rows, handle = result.x, result.handle
    meet(context)
    if context.rank_idx == 2:
        buffer.communicator.destroy()
    meet(context)
    if context.rank_idx == 2:
        return
    assert buffer.communicator.recover().failed_ranks == (2,)
    with pytest.raises(ValueError, match=r"places for rows of rank 2, which has failed"):
        buffer.dispatch(x, None, handle=handle)
    # Nobody pulls the rows of rank 2 any more.
    assert torch.equal(buffer.combine(rows, handle), NUM_TOPK * x)
    step(buffer, 2, living)
    buffer.communicator.destroy()


@pytest.mark.parametrize("backend", ["host", "simt"])
def test_a_handle_with_rows_of_a_rank_that_left(backend: str) -> None:
    run_ranks(_handle_with_rows_of, 3, backend, mode="threads")


def _interrupt(context: RankContext, folder: str) -> Told:
    """Rank 0 is interrupted while it waits for rank 2, which is elsewhere."""
    buffer = make_buffer(context)
    comm = buffer.communicator
    step(buffer, 0)
    done = Path(folder) / "done"
    if context.rank_idx == 0:
        assert threading.current_thread() is threading.main_thread()
        interrupt_when_waiting()
        first = error_of(lambda: step(buffer, 1))
        assert isinstance(first, KeyboardInterrupt), repr(first)
        error = error_of(lambda: step(buffer, 1))
        done.touch()
    else:
        if context.rank_idx == 2:
            wait_for(done.exists)
        error = error_of(lambda: step(buffer, 1))
    assert comm.recover().failed_ranks == ()
    step(buffer, 2)
    comm.destroy()
    return told(error)


def test_interrupted_rank_is_named(tmp_path: Path) -> None:
    results = run_ranks(_interrupt, 3, str(tmp_path))
    for name, ranks, phase, _, text in results:
        assert (name, ranks, phase) == ("PeerFailedError", (0,), "rows"), text
        # The error, without the place in the sources of the interrupted rank.
        assert text.endswith("it was interrupted (KeyboardInterrupt)"), text


def _leave(context: RankContext, how: str, folder: str) -> Told | None:
    buffer = make_buffer(context)
    comm = buffer.communicator
    step(buffer, 0)
    if context.rank_idx == 1:
        if how == "destroy":
            comm.destroy()
            return None
        del buffer, comm
        return None
    wait_for(lambda: isinstance(error_of(lambda: comm.all_gather(b"")), PeerFailedError))
    result = told(error_of(lambda: step(buffer, 1)))
    # A rank that returns leaves too, and would be named by one that has not looked yet.
    (Path(folder) / f"told {context.rank_idx}").touch()
    wait_for(lambda: len(list(Path(folder).glob("told *"))) == context.num_ranks - 1)
    return result


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", ["processes", "threads"])
@pytest.mark.parametrize("how", ["destroy", "drop"])
def test_leaving_between_operations_fails_the_next_call_only(
    how: str, mode: str, tmp_path: Path
) -> None:
    results = run_ranks(_leave, 3, how, str(tmp_path), mode=mode)
    assert_all_told(results, PeerFailedError, 1)
    assert all(result is None or "left" in result[4] for result in results)


_EXITING_RANKS = """
import sys, torch, moe_comm, threading
from tests.helpers.failing_ranks import *
import torch.distributed as dist
rank, store, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
limit_s = 2.0 if how == "in flight" else 60.0  # what is in flight is given up after it
comm = moe_comm.Communicator(backend="host", stall_timeout_s=limit_s, arrival_timeout_s=60.0)
buffer = moe_comm.EpBuffer(comm, config_for(2))
step(buffer, 0)
dist.destroy_process_group()  # Gloo's threads may not outlive Python
if rank == 1:
    if how == "in flight":
        pending = buffer.dispatch(*inputs(buffer, 1), async_op=True)
    sys.exit(7)
if how == "in flight":
    import time
    time.sleep(0.5)
    wait_for(lambda: isinstance(error_of(lambda: comm.all_gather(b"")), moe_comm.PeerFailedError))
error = error_of(lambda: step(buffer, 1))
assert type(error) is moe_comm.PeerFailedError and error.ranks == (1,), repr(error)
print("told:", error)
"""


@pytest.mark.parametrize(
    "how",
    ["idle", pytest.param("in flight", marks=pytest.mark.clock(usual_s=0.2, limit_s=2.0))],
)
def test_exit_without_destroy(how: str, tmp_path: Path) -> None:
    """Python ends in good order whatever is alive, and peers hear of it."""

    ranks = [
        FreshPython(
            *("-c", _EXITING_RANKS, str(rank), str(tmp_path / "store"), how),
            cwd=ROOT,
            merges_errors=True,
        )
        for rank in range(2)
    ]
    output = [rank.communicate(PROGRAM_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 7], output
    assert "told: rank 1 " in output[0]
    assert "rror" not in output[1], output[1]
