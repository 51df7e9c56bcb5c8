"""`Communicator.shrink`: the survivors go on in a communicator of their own, whoever failed and whenever."""

from __future__ import annotations

import ctypes
import logging
import os
import random
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import (
    Communicator,
    EpBuffer,
    EpConfig,
    EvictedError,
    PeerFailedError,
    PeerTimeoutError,
    Shrunk,
    _host,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    HANG_S,
    SHORT_S,
    config_for,
    die,
    die_after,
    error_of,
    gather_pids,
    has_stopped,
    interrupt_when_waiting,
    make_buffer,
    meet,
    num_open_fds,
    step,
    steps_until_error,
    wait_for,
    work,
)
from tests.helpers.unreadable import can_stop_readers, unreadable


def _heap_segments() -> dict[str, str]:
    """Shared memory mapped here: inode to address range."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split()
        if len(fields) > 5 and fields[5].startswith("/memfd:") and "w" in fields[1]:
            found[fields[4]] = fields[0]
    return found


def _lose_two(context: RankContext) -> tuple[Any, ...]:
    """Two shrinks, one after the other; tensors of the first communicator live on."""
    buffer = make_buffer(context)
    comm = buffer.communicator
    step(buffer, 0)
    kept = comm.empty(100, dtype=torch.float32).fill_(7.0)
    found = []
    living = [0, 1, 2, 3]
    for victim in (2, 0):
        meet(context, living)
        living.remove(victim)
        if context.rank_idx == victim:
            die_after(0.02)
        error, _ = steps_until_error(buffer)
        assert isinstance(error, PeerFailedError), repr(error)
        shrunk = comm.shrink(error.ranks)
        found.append((shrunk.failed_ranks, shrunk.former_ranks))
        assert shrunk.completed_epochs[0] >= 1
        for refused in (error_of(partial(comm.all_gather, b"")), error_of(comm.recover)):
            assert isinstance(refused, ValueError), repr(refused)
            assert "closed by shrink()" in str(refused)
        refused = error_of(partial(step, buffer, 1))
        assert isinstance(refused, ValueError), repr(refused)
        assert "closed by shrink()" in str(refused)
        comm = shrunk.communicator
        assert [int(old) for old in comm.all_gather(str(context.rank_idx).encode())]
        buffer = EpBuffer(comm, config_for(comm.num_ranks))
        for seed in range(5):
            step(buffer, seed)
    assert torch.equal(kept, torch.full((100,), 7.0))
    assert comm.bootstrap.all_gather(comm.rank_idx) == list(range(comm.num_ranks))
    comm.destroy()
    return tuple(found)


def test_two_shrinks() -> None:
    results = run_ranks(_lose_two, 4, fresh=True, expect_dead=[0, 2])
    want = (((2,), (0, 1, 3)), ((0,), (1, 2)))
    assert [results[1], results[3]] == [want] * 2


def _leave_no_memory(context: RankContext) -> None:
    """Memory of the old communicator goes back when its tensors die."""
    make_buffer(context).communicator.destroy()
    fds, segments = num_open_fds(), len(_heap_segments())
    buffer = make_buffer(context)
    comm = buffer.communicator
    step(buffer, 0)
    kept = comm.empty(1 << 20, dtype=torch.uint8).fill_(1)
    for _ in range(4):
        comm = comm.shrink().communicator
        work(comm)
    assert int(kept.sum()) == 1 << 20
    del kept, buffer
    comm.destroy()
    del comm
    assert num_open_fds() <= fds
    assert len(_heap_segments()) <= segments


def test_memory_goes_back() -> None:
    run_ranks(_leave_no_memory, 3)


# ---------------------------------------------------------------------------------------------
# Further deaths.


def _die_in_shrink(context: RankContext, seed: int) -> tuple[Any, ...]:
    """Rank 4 dies, then two more at some moment of the shrink."""
    buffer = make_buffer(context)
    comm = buffer.communicator
    step(buffer, 0)
    meet(context)
    draw = random.Random(seed)
    delays = {victim: draw.choice([0.0, 0.0005, 0.002, 0.004, 0.008]) for victim in (1, 2)}
    if context.rank_idx == 4:
        die()
    error, _ = steps_until_error(buffer)
    if context.rank_idx in delays:
        die_after(delays[context.rank_idx])
    failed: set[int] = set()
    former = tuple(range(5))
    reported = error.ranks if isinstance(error, PeerFailedError) else ()
    while True:
        shrunk = comm.shrink(reported)
        failed |= {former[rank] for rank in shrunk.failed_ranks}
        former = tuple(former[rank] for rank in shrunk.former_ranks)
        comm = shrunk.communicator
        try:
            work(comm, 20)
        except PeerFailedError as raised:
            reported = raised.ranks
        else:
            if failed == {1, 2, 4}:
                break
            time.sleep(0.01)  # somebody has yet to die
            reported = ()
    comm.destroy()
    return former, tuple(sorted(failed))


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))]
)
def test_deaths_during_shrink(seed: int) -> None:
    results = run_ranks(_die_in_shrink, 5, seed, fresh=True, expect_dead=[1, 2, 4])
    assert [results[0], results[3]] == [((0, 3), (1, 2, 4))] * 2


# ---------------------------------------------------------------------------------------------
# Ranks that live although they were declared failed.


def _scribble() -> None:
    """Write over all shared memory that this process can write to."""
    for addresses in _heap_segments().values():
        begin, end = (int(address, 16) for address in addresses.split("-"))
        ctypes.memset(begin, 0xA5, end - begin)


def _stop_one(context: RankContext, folder: str) -> tuple[str, tuple[int, ...]]:
    """Rank 2 is stopped in the middle of its steps and continues after the others have shrunk."""
    buffer = make_buffer(context, stall_timeout_s=SHORT_S, arrival_timeout_s=SHORT_S + 1.0)
    comm = buffer.communicator
    pids = gather_pids(comm)
    step(buffer, 0)
    entered, checked = Path(folder) / "entered", Path(folder) / "checked"
    if context.rank_idx == 2:
        entered.touch()
        error, _ = steps_until_error(buffer)
        again = error_of(lambda: step(buffer, 1))
        assert isinstance(again, EvictedError), repr(again)
        assert set(again.ranks) <= {0, 1}
        assert isinstance(error_of(comm.recover), EvictedError)
        assert isinstance(error_of(comm.shrink), EvictedError)
        assert isinstance(error_of(lambda: comm.all_gather(b"")), EvictedError)
        _scribble()
        checked.touch()
        time.sleep(60.0)
    if context.rank_idx == 0:
        wait_for(entered.exists)
        time.sleep(0.05)
        os.kill(pids[2], signal.SIGSTOP)
        wait_for(lambda: has_stopped(pids[2]))
    error, _ = steps_until_error(buffer)
    assert isinstance(error, PeerTimeoutError), repr(error)
    shrunk = comm.shrink(error.ranks)
    new = shrunk.communicator
    mine = new.empty(1 << 20, dtype=torch.uint8).fill_(context.rank_idx + 1)
    kept = EpBuffer(new, config_for(2))
    step(kept, 0)
    new.all_gather(b"")
    if context.rank_idx == 0:
        os.kill(pids[2], signal.SIGCONT)
    wait_for(checked.exists)
    assert bool((mine == context.rank_idx + 1).all())
    for seed in range(10):
        step(kept, seed)
    new.all_gather(b"")
    if context.rank_idx == 0:
        os.kill(pids[2], signal.SIGKILL)
    kept.destroy()
    new.destroy()
    return str(error), shrunk.failed_ranks


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_a_stopped_rank_is_evicted_and_cannot_write(tmp_path: Path) -> None:
    results = run_ranks(_stop_one, 3, str(tmp_path), fresh=True, expect_dead=[2])
    assert [results[0][1], results[1][1]] == [(2,)] * 2


def _views(
    context: RankContext, reports: dict[int, list[int]], delays: dict[int, float]
) -> Shrunk | BaseException:
    comm = Communicator(context.group, backend="host", stall_timeout_s=20.0, arrival_timeout_s=20.0)
    work(comm, 1)
    meet(context)
    time.sleep(delays.get(context.rank_idx, 0.0))
    try:
        shrunk = comm.shrink(reports.get(context.rank_idx, []))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        comm.destroy()
        return error
    work(shrunk.communicator)
    shrunk.communicator.destroy()
    return shrunk


def _outcomes(
    num_ranks: int, reports: dict[int, list[int]], delays: dict[int, float] | None = None
) -> tuple[list[tuple[int, ...]], list[Any]]:
    """The groups that came out of it, and what every rank got."""
    results = run_ranks(_views, num_ranks, reports, delays or {}, mode="threads")
    groups = {r.former_ranks for r in results if isinstance(r, Shrunk)}
    for group in groups:
        assert all(isinstance(results[rank], Shrunk) for rank in group), results
    return sorted(groups), results


def test_two_halves_that_declare_each_other_failed() -> None:
    groups, results = _outcomes(4, {0: [2, 3], 1: [2, 3], 2: [0, 1], 3: [0, 1]})
    assert groups == [(0, 1)]
    assert [type(results[rank]) for rank in (2, 3)] == [EvictedError] * 2


def test_the_majority_goes_on_without_the_lowest_rank() -> None:
    groups, results = _outcomes(3, {0: [1, 2], 1: [0], 2: [0]})
    assert groups == [(1, 2)]
    assert isinstance(results[0], EvictedError)
    assert set(results[0].ranks) <= {1, 2}


@pytest.mark.parametrize("seed", range(6))
def test_any_views_end_in_one_group_at_most(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks = draw.randint(2, 5)
    ranks = range(num_ranks)
    reports = {
        rank: [peer for peer in ranks if peer != rank and draw.random() < 0.25] for rank in ranks
    }
    delays = {rank: draw.choice([0.0, 0.0, 0.005]) for rank in ranks}
    groups, results = _outcomes(num_ranks, reports, delays)
    assert len(groups) <= 1, (reports, results)
    for rank, result in enumerate(results):
        if not (groups and rank in groups[0]):
            assert isinstance(result, (EvictedError, PeerFailedError)), (reports, results)


def test_the_union_of_what_survivors_report_is_left_behind() -> None:
    groups, results = _outcomes(7, {0: [5], 1: [6]})
    assert groups == [(0, 1, 2, 3, 4)]
    assert [type(results[rank]) for rank in (5, 6)] == [EvictedError] * 2
    assert {results[rank].failed_ranks for rank in range(5)} == {(5, 6)}


def _too_few(context: RankContext, folder: str) -> None:
    """Rank 1 of 2 goes on without rank 0, which is stopped: it may not, unless it insists."""
    comm = Communicator(backend="host", stall_timeout_s=5.0, arrival_timeout_s=10.0)
    pids = gather_pids(comm)
    meet(context)
    is_over = Path(folder) / "over"
    if context.rank_idx == 0:
        wait_for(is_over.exists)
        assert isinstance(error_of(lambda: comm.all_gather(b"")), EvictedError)
        return
    os.kill(pids[0], signal.SIGSTOP)
    error = error_of(lambda: comm.shrink([0]))
    assert isinstance(error, PeerFailedError), repr(error)
    assert "rank 1 may not go on without rank 0" in str(error)
    shrunk = comm.shrink([0], require_majority=False)
    assert shrunk.former_ranks == (1,)
    work(shrunk.communicator)
    is_over.touch()
    os.kill(pids[0], signal.SIGCONT)
    shrunk.communicator.destroy()


def test_too_few_may_not_go_on(tmp_path: Path) -> None:
    run_ranks(_too_few, 2, str(tmp_path), fresh=True)


def _come_late(context: RankContext, folder: str) -> None:
    """Rank 1 does not call; the others name it in their second call."""
    comm = Communicator(backend="host", stall_timeout_s=5.0, arrival_timeout_s=SHORT_S)
    is_over = Path(folder) / f"over {context.rank_idx}"
    comm.all_gather(b"")  # the others call shrink() together
    if context.rank_idx == 1:
        wait_for(lambda: all((Path(folder) / f"over {rank}").exists() for rank in (0, 2)))
        error = error_of(comm.recover)
        assert isinstance(error, EvictedError), repr(error)
        assert "declared rank 1" in str(error)
        return
    error = error_of(comm.shrink)
    assert isinstance(error, PeerTimeoutError), repr(error)
    assert error.ranks == (1,)
    assert isinstance(error_of(lambda: comm.all_gather(b"")), PeerFailedError)
    # Neither names it before the other has given it up.
    (Path(folder) / f"gave up {context.rank_idx}").touch()
    wait_for(lambda: all((Path(folder) / f"gave up {rank}").exists() for rank in (0, 2)))
    shrunk = comm.shrink([1])
    assert shrunk.failed_ranks == (1,)
    work(shrunk.communicator)
    is_over.touch()
    shrunk.communicator.destroy()


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
def test_a_rank_that_does_not_call_can_be_named_later(tmp_path: Path) -> None:
    run_ranks(_come_late, 3, str(tmp_path))


def _recover_meanwhile(context: RankContext) -> str:
    comm = Communicator(context.group, backend="host", arrival_timeout_s=20.0)
    text = ""
    if context.rank_idx == 1:
        error = error_of(comm.recover)
        assert isinstance(error, PeerFailedError), repr(error)
        text = str(error)
    work(comm.shrink().communicator)
    return text


def test_a_rank_that_recovers_hears_of_shrink() -> None:
    results = run_ranks(_recover_meanwhile, 2, mode="threads")
    assert "rank 0 called shrink() while rank 1 was in recover()" in results[1]


# ---------------------------------------------------------------------------------------------
# Mistakes.


def _mistakes(context: RankContext) -> list[str]:
    comm = Communicator(context.group, backend="host", arrival_timeout_s=20.0)
    is_first = context.rank_idx == 0
    calls: list[Callable[[], object]] = [
        lambda: comm.shrink([7] if is_first else []),
        lambda: comm.shrink([0] if is_first else []),
        lambda: comm.shrink(["x"] if is_first else []),  # type: ignore[list-item]
        lambda: comm.shrink(1 // rank for rank in ([0] if is_first else [])),
        lambda: comm.shrink(require_majority=torch.ones(2) if is_first else True),  # type: ignore[arg-type]
        lambda: comm.shrink(num_local_ranks=1 if is_first else None),
        lambda: comm.shrink(num_local_ranks=2),
        lambda: comm.shrink(require_majority=is_first),
        lambda: comm.shrink(**({"no_such_argument": 1} if is_first else {})),  # type: ignore[arg-type]
        lambda: comm.shrink(num_local_ranks="b" if is_first else None),  # type: ignore[arg-type]
    ]
    texts = []
    for call in calls:
        error = error_of(call)
        assert isinstance(error, ValueError), repr(error)
        texts.append(str(error))
        work(comm, 1)  # it stays as it is
    work(comm.shrink().communicator)
    return texts


def test_mistakes_are_raised_on_every_rank() -> None:
    results = run_ranks(_mistakes, 3, mode="threads")
    patterns = [
        r"rank 0: failed_ranks: 7 is not a rank of a communicator of 3",
        r"rank 0: failed_ranks: 0 is the rank that calls",
        r"rank 0: failed_ranks must hold integers",
        r"rank 0: failed_ranks must hold integers: ZeroDivisionError: ",
        r"rank 0: require_majority must be a bool, got a tensor of shape",
        r"differently: rank 0 shrink\(num_local_ranks=1, .* shrink\(num_local_ranks=None",
        r"num_local_ranks must divide the number of ranks, 3, got 2",
        r"differently: rank 0 shrink\(.*=True\), rank 1 shrink\(.*=False\)",
        r"rank 0: .*no_such_argument",
        r"rank 0: num_local_ranks must be an int, got 'b'",
    ]
    for texts in results:
        for text, pattern in zip(texts, patterns, strict=True):
            assert re.search(pattern, text), text


def _shrink_alone(context: RankContext, in_operation: bool) -> list[BaseException]:
    """Rank 0 shrinks although nobody failed, and the others go on; they follow when they hear of it."""
    buffer = make_buffer(context, arrival_timeout_s=60.0)
    comm = buffer.communicator
    step(buffer, 0)
    errors = []
    if context.rank_idx != 0:
        call = partial(step, buffer, 1) if in_operation else partial(comm.all_gather, b"x")
        errors.append(error_of(call))
    shrunk = comm.shrink()
    assert shrunk.failed_ranks == ()
    work(shrunk.communicator)
    return errors


@pytest.mark.parametrize("in_operation", [True, False], ids=["operation", "collective-call"])
def test_peers_of_a_rank_that_shrinks_hear_what_it_waits_for(in_operation: bool) -> None:
    for errors in run_ranks(_shrink_alone, 3, in_operation)[1:]:
        (error,) = errors
        assert isinstance(error, PeerTimeoutError), repr(error)
        assert re.search(r"different calls: .*to call shrink\(\)", str(error)), str(error)


def _warned(context: RankContext, folder: str) -> list[BaseException]:
    """A rank that hears that rank 1 is late calls the communicator, which waits for it."""
    has_heard = Path(folder) / "heard"
    buffer = make_buffer(context)
    comm = buffer.communicator
    step(buffer, 0)
    meet(context)
    if context.rank_idx == 2:
        return [steps_until_error(buffer)[0]]
    heard: list[BaseException] = []

    class Call(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(error_of(partial(comm.all_gather, b"")))
            has_heard.touch()

    handler = Call()
    logging.getLogger("moe_comm").addHandler(handler)
    _host.set_warning_interval(0.1)
    if context.rank_idx == 1:
        wait_for(has_heard.exists)
    try:
        comm.shrink([2]).communicator.destroy()
    finally:
        _host.set_warning_interval(60.0)
        logging.getLogger("moe_comm").removeHandler(handler)
    return heard


def test_who_hears_a_warning_may_call(tmp_path: Path) -> None:
    heard, _, evicted = run_ranks(_warned, 3, str(tmp_path))
    assert heard
    assert all(isinstance(error, PeerFailedError) for error in heard), heard
    assert isinstance(evicted[0], EvictedError), evicted


def _interrupted(context: RankContext, folder: str) -> None:
    """Ctrl-C while it waits; the call can be made again."""
    is_over = Path(folder) / "over"
    comm = Communicator(backend="host", arrival_timeout_s=30.0)
    if context.rank_idx == 0:
        interrupt_when_waiting()
        error = error_of(comm.shrink)
        assert isinstance(error, KeyboardInterrupt), repr(error)
        is_over.touch()
    else:
        wait_for(is_over.exists)
    work(comm.shrink().communicator)


def test_an_interrupted_shrink_can_be_repeated(tmp_path: Path) -> None:
    run_ranks(_interrupted, 2, str(tmp_path))


# Survivors that stand at different epochs.

ROW_ELEMENTS = 4096


def _stand_apart(context: RankContext, folder: str) -> tuple[int, ...]:
    """Rank 0 is an operation behind on the second buffer, rank 1 on the third; see the test."""
    comm = Communicator(context.group, backend="host", stall_timeout_s=60.0)
    config = EpConfig(num_experts=4, num_topk=1, hidden=ROW_ELEMENTS, num_max_tokens_per_rank=2)
    never_used, second, third, same = (EpBuffer(comm, config) for _ in range(4))
    pids = gather_pids(comm)
    rank_idx = context.rank_idx

    def send(buffer: EpBuffer, target: int, *, stuck: int = -1, async_op: bool = False) -> Any:
        """A dispatch of one row to expert `target`; rank `stuck` never gets to write its own."""
        x = torch.ones(1, ROW_ELEMENTS, dtype=torch.bfloat16)
        if rank_idx == stuck:
            x = unreadable(2 * ROW_ELEMENTS).view(torch.bfloat16).view(1, ROW_ELEMENTS)
        # All others send to themselves, so that nobody but `target` waits for the one that is stuck.
        expert_idx = target if rank_idx == stuck else rank_idx
        return buffer.dispatch(x, torch.tensor([[expert_idx]]), async_op=async_op)

    for buffer, num_steps in ((second, 3), (third, 1), (same, 2)):
        for _ in range(num_steps):
            send(buffer, rank_idx)
    comm.all_gather(b"")
    # Rank 0 is to get a row of rank 2, and rank 1 one of rank 3; they go on meanwhile.
    pending = [send(second, 0, stuck=2, async_op=rank_idx in (0, 2))]
    pending.append(send(third, 1, stuck=3, async_op=rank_idx in (1, 3)))
    (Path(folder) / f"done {rank_idx}").touch()
    if rank_idx == 0:
        wait_for(lambda: (Path(folder) / "done 1").exists())
        assert not pending[0].event.is_complete()
        assert pending[1].event.is_complete()
        (Path(folder) / "looked 0").touch()
        wait_for(lambda: (Path(folder) / "looked 1").exists())
        for pid in pids[2:]:
            os.kill(pid, signal.SIGKILL)
    elif rank_idx == 1:
        wait_for(lambda: (Path(folder) / "done 0").exists())
        assert pending[0].event.is_complete()
        assert not pending[1].event.is_complete()
        (Path(folder) / "looked 1").touch()
    else:
        time.sleep(HANG_S)
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids[2:]))
    shrunk = comm.shrink((2, 3))
    never_used.destroy()
    work(shrunk.communicator)
    shrunk.communicator.destroy()
    return shrunk.completed_epochs


@pytest.mark.skipif(
    not can_stop_readers(), reason="this kernel lets no process hold its own readers"
)
def test_epochs_that_every_survivor_completed(tmp_path: Path) -> None:
    """By buffer: never used; rank 0 one behind; rank 1 one behind; all at the same."""
    results = run_ranks(_stand_apart, 4, str(tmp_path), fresh=True, expect_dead=[2, 3])
    assert [results[0], results[1]] == [(-1, 3, 1, 2)] * 2
