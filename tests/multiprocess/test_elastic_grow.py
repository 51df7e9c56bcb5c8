"""`Communicator.grow` and `join`: processes come to a living communicator, without a process group."""

from __future__ import annotations

import ast
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch.distributed as dist

from moe_comm import Communicator, PeerFailedError, PeerTimeoutError, _host
from moe_comm.peers.joining_ranks import JoiningRank, JoiningRanks, assign_ranks, open_store
from moe_comm.peers.plain_data import encode_plain
from moe_comm.peers.survivors import _refuse
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    PROGRAM_S,
    die,
    error_of,
    gather_pids,
    has_stopped,
    make_buffer,
    meet,
    step,
    steps_until_error,
    wait_for,
    work,
)

LIMIT_S = 100.0
"""For processes to come, each of which loads torch first."""
RANKS_S = 400.0
ROOT = Path(__file__).resolve().parents[2]


def _store(where: str) -> Any:
    return where if ":" in where else dist.FileStore(where, -1)


def _come(where: str, rank_idx: int | None) -> Any:
    """A process that joins: works with the others, and says who it is."""
    try:
        grown = Communicator.join(_store(where), rank_idx=rank_idx, timeout_s=LIMIT_S)
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return type(error).__name__, str(error)
    comm = grown.communicator
    work(comm)
    comm.destroy()
    return comm.rank_idx, grown.former_ranks, grown.new_ranks


def _stay(where: str) -> Any:
    """A process that joins and grows with the others."""
    comm = Communicator.join(_store(where), timeout_s=LIMIT_S).communicator
    work(comm)
    grown = comm.grow(_store(where), 1, timeout_s=LIMIT_S)
    work(grown.communicator)
    grown.communicator.destroy()
    return grown.communicator.rank_idx


def _die_on_the_way(where: str) -> None:
    """Joins as far as to be called, and dies."""
    JoiningRank(open_store(_store(where), False, LIMIT_S), None, LIMIT_S)
    os.kill(os.getpid(), signal.SIGKILL)


def _start(call: str) -> subprocess.Popen[str]:
    """A process of its own: workers may have no children of multiprocessing."""
    program = f"from tests.multiprocess import test_elastic_grow as t; print(repr(t.{call}))"
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )


def _outcome(process: subprocess.Popen[str]) -> Any:
    said, _ = process.communicate(timeout=PROGRAM_S)
    return ast.literal_eval(said)


def _return_to_old_place(context: RankContext, where: str) -> tuple[Any, ...]:
    """Rank 1 of 3 dies; the others go on; a new process takes its place."""
    buffer = make_buffer(context)
    comm = buffer.communicator
    step(buffer, 0)
    meet(context)
    if context.rank_idx == 1:
        die()
    error, _ = steps_until_error(buffer)
    assert isinstance(error, PeerFailedError), repr(error)
    comm = comm.shrink(error.ranks).communicator
    work(comm)
    newcomer = _start(f"_come({where!r}, 1)") if comm.rank_idx == 0 else None
    grown = comm.grow(_store(where), timeout_s=LIMIT_S)
    assert "closed by grow()" in str(error_of(lambda: comm.all_gather(b"")))
    work(grown.communicator)
    said = _outcome(newcomer) if newcomer is not None else None
    found = (grown.communicator.rank_idx, grown.former_ranks, grown.new_ranks, said)
    grown.communicator.destroy()
    return found


def _free_address() -> str:
    """Not of the ports that the system gives to whoever asks for any: nobody else takes it meanwhile."""
    given_out = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]
    for port in random.sample(range(10_000, int(given_out)), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"
    pytest.skip("every port that was tried is taken")


@pytest.mark.parametrize("kind", [pytest.param("file", marks=pytest.mark.full), "address"])
def test_a_rank_returns_to_its_old_place(tmp_path: Path, kind: str) -> None:
    where = str(tmp_path / "store") if kind == "file" else _free_address()
    results = run_ranks(
        _return_to_old_place, 3, where, fresh=True, expect_dead=[1], timeout_s=RANKS_S
    )
    assert results[0] == (0, (0, -1, 1), (1,), (1, (0, -1, 1), (1,)))
    assert results[2] == (2, (0, -1, 1), (1,), None)


def _grow_twice(context: RankContext, where: str) -> tuple[Any, ...]:
    """By two at once, who ask for nothing, then by one who wants to be first."""
    comm = Communicator(backend="host", arrival_timeout_s=LIMIT_S)
    is_first = context.rank_idx == 0
    newcomers = [_start(f"_stay({where!r})") for _ in range(2 * is_first)]
    grown = comm.grow(_store(where), 2, timeout_s=LIMIT_S)
    first = (grown.communicator.rank_idx, grown.former_ranks)
    comm = grown.communicator
    work(comm)
    newcomers += [_start(f"_come({where!r}, 0)") for _ in range(is_first)]
    grown = comm.grow(_store(where), 1, timeout_s=LIMIT_S)
    work(grown.communicator)
    second = (grown.communicator.rank_idx, grown.former_ranks)
    grown.communicator.destroy()
    assert sorted(str(_outcome(newcomer)) for newcomer in newcomers) == (
        ["(0, (-1, 0, 1, 2, 3), (0,))", "3", "4"] if is_first else []
    )
    return first, second


@pytest.mark.full
def test_growing_twice(tmp_path: Path) -> None:
    results = run_ranks(_grow_twice, 2, str(tmp_path / "store"), fresh=True, timeout_s=RANKS_S)
    for rank_idx, result in enumerate(results):
        assert result == ((rank_idx, (0, 1, -1, -1)), (rank_idx + 1, (-1, 0, 1, 2, 3)))


# ---------------------------------------------------------------------------------------------
# What goes wrong.


class _Speechless:
    """A number that fails without a word."""

    def __index__(self) -> int:
        raise AssertionError


def _nobody_comes(context: RankContext, where: str) -> list[str]:
    comm = Communicator(backend="host", arrival_timeout_s=LIMIT_S)
    texts = []
    is_first = context.rank_idx == 0
    for call in (
        lambda: comm.grow(_store(where), timeout_s=0.5),
        lambda: comm.grow(_store(where), 1 if is_first else 2, timeout_s=0.5),
        lambda: comm.grow(_store(where), 0, timeout_s=0.5),
        lambda: comm.grow(_store(where), _Speechless() if is_first else 1, timeout_s=0.5),  # type: ignore[arg-type]
        lambda: comm.grow("nowhere", timeout_s=0.5),
        lambda: comm.grow("127.0.0.1:0", timeout_s=0.5),
        lambda: comm.grow(_store(where), 1, timeout_s=0.0 if is_first else 1.0),
    ):
        error = error_of(call)
        texts.append(f"{type(error).__name__}: {error}")
        work(comm, 1)  # it goes on
    comm.destroy()
    return texts


def test_the_living_go_on_when_nobody_comes(tmp_path: Path) -> None:
    results = run_ranks(_nobody_comes, 2, str(tmp_path / "store"))
    wanted = [
        ("PeerTimeoutError", "waited 0.5 s for processes to join: 0 of 1 came"),
        ("ValueError", "ranks call differently: rank 0 grow(num_new_ranks=1, "),
        ("ValueError", "num_new_ranks must be >= 1, got 0"),
        ("ValueError", "rank 0: grow: AssertionError"),
        ("ValueError", "'nowhere'"),
        ("ValueError", "'127.0.0.1:0'"),
        ("ValueError", "timeout_s must be > 0, got 0.0"),
    ]
    for texts in results:
        for text, (kind, part) in zip(texts, wanted, strict=True):
            assert text.startswith(kind), text
            assert part in text, text


class _Gatherings:
    """The old sockets of rank 1: rank 0 found too few, then rank 2 has given up already."""

    num_ranks = 3
    rank_idx = 1

    def __init__(self) -> None:
        self.num_gathers = 0

    def shrink_gather(self, payload: bytes) -> list[bytes]:
        self.num_gathers += 1
        if self.num_gathers > 1:
            raise PeerFailedError("rank 2: grow: waited", ranks=(0,), operation="shrink")
        said = encode_plain(("late", "waited 1 s for processes to join: 0 of 1 came"))
        return [said, payload]


def test_nobody_gives_up_before_all_know_why() -> None:
    """Else a rank that hears of it before it knows why takes the others for failed, and waits."""
    sockets = _Gatherings()
    newcomers = JoiningRanks(cast("Any", sockets), None, 1.0)
    with pytest.raises(PeerTimeoutError, match="0 of 1 came"):
        newcomers.invite({})
    assert sockets.num_gathers == 2


def test_joining_where_nobody_listens() -> None:
    with socket.socket() as silent:  # bound, so that nobody else listens there either
        silent.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(PeerTimeoutError, match=f"nobody listens at {where} within 0.2 s"):
            Communicator.join(where, timeout_s=0.2)
    # Numbers that can never be are refused before anybody is looked for.
    with pytest.raises(ValueError, match="rank_idx must be >= 0, got -1"):
        Communicator.join(where, rank_idx=-1, timeout_s=0.2)
    with pytest.raises(ValueError, match="timeout_s must be > 0, got 0"):
        Communicator.join(where, timeout_s=0.0)


def _refuse_then_grow(context: RankContext, where: str) -> list[Any]:
    """Two ask for one place; one dies on the way; then one comes in good order."""
    comm = Communicator(backend="host", arrival_timeout_s=LIMIT_S, stall_timeout_s=20.0)
    is_first = context.rank_idx == 0
    newcomers = [_start(f"_come({where!r}, 1)") for _ in range(2 * is_first)]
    found: list[Any] = []
    error = error_of(lambda: comm.grow(_store(where), 2, timeout_s=LIMIT_S))
    found.append(f"{type(error).__name__}: {error}")
    if is_first:
        found.append([_outcome(newcomer) for newcomer in newcomers])
        newcomers = [_start(f"_die_on_the_way({where!r})")]
        wait_for(lambda: open_store(_store(where), False, LIMIT_S).add("tickets", 0) == 3)
    comm.all_gather(b"")
    error = error_of(lambda: comm.grow(_store(where), 1, timeout_s=1.0))
    found.append(type(error).__name__)
    work(comm)
    newcomers += [_start(f"_come({where!r}, None)") for _ in range(is_first)]
    grown = comm.grow(_store(where), 1, timeout_s=LIMIT_S)
    work(grown.communicator)
    found.append(grown.former_ranks)
    grown.communicator.destroy()
    for newcomer in newcomers:
        newcomer.wait(PROGRAM_S)
    return found


@pytest.mark.full
def test_refused_and_dead_newcomers_do_no_harm(tmp_path: Path) -> None:
    results = run_ranks(
        _refuse_then_grow, 2, str(tmp_path / "store"), fresh=True, timeout_s=RANKS_S
    )
    text = "ValueError: 2 ranks that join ask for rank_idx 1"
    assert results[0][0] == results[1][0] == text
    assert results[0][1] == [("ValueError", "2 ranks that join ask for rank_idx 1")] * 2
    assert results[0][2] in ("PeerTimeoutError", "PeerFailedError")
    assert results[0][3] == results[1][2] == (0, 1, -1)


def _no_memory(*_: object, **__: object) -> Any:
    raise OSError("no memory here")


def _come_in_vain(where: str) -> Any:
    """A process that joins, and gets no memory when it has met the others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_host.ShmHeap, "create", _no_memory)
        return _come(where, None)


def _fail_alone(context: RankContext, where: str) -> list[str]:
    """First rank 1, then the process that comes meets an error that nobody else can see."""
    comm = Communicator(backend="host", stall_timeout_s=20.0, arrival_timeout_s=LIMIT_S)
    is_first = context.rank_idx == 0
    kept: list[BaseException] = []  # and with it whatever its frames hold
    texts = []
    for call, at in (
        ("_come", "PeerMesh"),
        ("_come", "ShmHeap"),
        ("_come", "meet"),
        ("_come_in_vain", ""),
    ):
        arguments = f"({where!r}, None)" if call == "_come" else f"({where!r})"
        newcomer = _start(call + arguments) if is_first else None
        with pytest.MonkeyPatch.context() as patch:
            if context.rank_idx == 1 and at == "meet":
                patch.setattr(Communicator, "all_gather", _no_memory)
            elif context.rank_idx == 1 and at:
                patch.setattr(getattr(_host, at), "create", _no_memory)
            try:
                comm.grow(_store(where), timeout_s=LIMIT_S)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                kept.append(error)
        texts.append(f"{type(kept[-1]).__name__}: {kept[-1]}")
        if newcomer is not None:
            texts.append(str(_outcome(newcomer)))
        work(comm, 1)  # it goes on
    comm.destroy()
    return texts


@pytest.mark.full
def test_what_one_rank_alone_meets_is_told_to_all(tmp_path: Path) -> None:
    first, second, third = run_ranks(_fail_alone, 3, str(tmp_path / "store"), fresh=True)
    text = "rank 1: OSError: no memory here"
    joiners = "rank 3, which joins: OSError: no memory here"
    assert first[0] == second[0] == third[0] == "ValueError: rank 1: no memory here"
    assert (second[1], second[2]) == ("OSError: no memory here",) * 2
    for told_first, told_third, joiner in (
        (first[2], third[1], first[3]),
        (first[4], third[2], first[5]),
    ):
        assert told_first == told_third == f"PeerFailedError: {text}"
        assert joiner.startswith("('PeerFailedError'"), joiner  # it may see only who has left
    assert first[6] == second[3] == third[3]
    assert first[6] == f"PeerFailedError: grow: a rank that joins failed: {joiners}"
    assert first[7] == str(("OSError", "no memory here"))


class _Refusals:
    """The old sockets of rank 0, which is the first to end the attempt."""

    rank_idx = 0

    def shrink_refuse(self, text: str, is_mistake: bool) -> bool:
        return bool(text) and is_mistake


def test_whoever_gives_up_first_names_whose_error_it_is() -> None:
    sockets: Any = _Refusals()
    assert _refuse(sockets, ValueError("rank 1: no memory here")) == "rank 1: no memory here"
    assert _refuse(sockets, ValueError("no memory here")) == "rank 0: no memory here"


def _die_while_growing(context: RankContext, where: str) -> tuple[int, ...]:
    """Rank 1 dies while the living wait for somebody to come."""
    comm = Communicator(backend="host", arrival_timeout_s=LIMIT_S)
    meet(context)
    if context.rank_idx == 1:
        threading.Timer(0.3, die).start()
    error = error_of(lambda: comm.grow(_store(where), timeout_s=LIMIT_S))
    assert isinstance(error, PeerFailedError), repr(error)
    assert error.ranks == (1,)
    assert "call shrink() first" in str(error)
    shrunk = comm.shrink(error.ranks)
    work(shrunk.communicator)
    shrunk.communicator.destroy()
    return shrunk.former_ranks


def test_a_death_while_growing(tmp_path: Path) -> None:
    results = run_ranks(_die_while_growing, 3, str(tmp_path / "store"), fresh=True, expect_dead=[1])
    assert [results[0], results[2]] == [(0, 2)] * 2


def _hear_all_at_once(context: RankContext, where: str) -> PeerFailedError:
    """Rank 2 is stopped until rank 0 has seen that rank 1 is dead, and has refused to grow."""
    buffer = make_buffer(context)
    comm = buffer.communicator
    pids = gather_pids(comm)
    meet(context)
    if context.rank_idx == 1:
        die()
    steps_until_error(buffer)
    assert comm.recover().failed_ranks == (1,)  # both know it, however they heard of it
    if context.rank_idx == 0:
        error = error_of(comm.recover)
        assert "rank 2 called grow()" in str(error), repr(error)  # it has said what it knows
        os.kill(pids[2], signal.SIGSTOP)
        wait_for(lambda: has_stopped(pids[2]))
    error = error_of(lambda: comm.grow(_store(where), timeout_s=LIMIT_S))
    if context.rank_idx == 0:
        os.kill(pids[2], signal.SIGCONT)
    assert isinstance(error, PeerFailedError), repr(error)
    shrunk = comm.shrink(error.ranks)
    work(shrunk.communicator)
    shrunk.communicator.destroy()
    return error


def test_who_failed_is_named_however_it_is_heard(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    results = run_ranks(_hear_all_at_once, 3, store, fresh=True, expect_dead=[1])
    assert [(str(error), error.ranks) for error in (results[0], results[2])] == [
        ("grow: ranks [1] have failed; call shrink() first", (1,))
    ] * 2


def test_join_without_anybody(tmp_path: Path) -> None:
    with pytest.raises(PeerTimeoutError, match="did not call grow"):
        Communicator.join(dist.FileStore(str(tmp_path / "store"), -1), timeout_s=0.3)


def test_numbers_of_a_grown_communicator() -> None:
    assert assign_ranks(3, [1]) == ((0, 2, 3), (1,))
    assert assign_ranks(2, [None, None]) == ((0, 1), (2, 3))
    assert assign_ranks(2, [None, 0]) == ((1, 2), (3, 0))
    for wishes in ([3], [-1], [0, 0]):
        with pytest.raises(ValueError, match="rank_idx"):
            assign_ranks(1, wishes)
