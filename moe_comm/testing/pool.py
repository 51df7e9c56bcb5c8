"""Worker processes, one per rank, that stay alive between calls.

They are forked from a server that has imported torch once, so that a call pays neither the start of an
interpreter nor the import. A worker ends when the process that started it does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

GRACE_S = 10.0
"""Seconds that other ranks may go on after one has raised."""

_STACKS_WAIT_S = 10.0
_PRELOADED = ["torch", "torch.distributed", "moe_comm.ep.backends.reference"]


@dataclasses.dataclass
class Outcome:
    """Outcome of a rank.

    Args:
        result: Value that it returned.
        error: Error that it raised, or None.
        trace: Its traceback as text, or the stacks of its threads when it was ended from outside.
        is_running: Whether it had not ended in time.
    """

    result: Any = None
    error: BaseException | None = None
    trace: str = ""
    is_running: bool = False


@dataclasses.dataclass(frozen=True)
class _Job:
    """Job that a worker is given.

    Args:
        import_path: `sys.path` of the caller, so that functions are found by name.
        num_ranks: Ranks of this job.
        store_path: Rendezvous file of the process group; another file means another group.
        call: Pickled `(fn, args)`; unpickled once the import path is set, before ranks meet.
    """

    import_path: list[str]
    num_ranks: int
    store_path: str
    call: bytes


@dataclasses.dataclass
class _Worker:
    process: multiprocessing.process.BaseProcess
    connection: Connection
    stacks_path: Path


class WorkerPool:
    """Processes of ranks 0, 1, ...; grows to the most ranks asked for. Used by one thread at a time."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOADED)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._workers: list[_Worker] = []
        self._lock = threading.Lock()
        self._num_groups = 0
        self._num_ranks = 0

    def run(
        self,
        fn: Callable[..., Any],
        num_ranks: int,
        args: tuple[Any, ...],
        timeout_s: float,
        expect_dead: Collection[int] = (),
    ) -> list[Outcome]:
        """Call `fn(rank_idx, num_ranks, *args)` on every rank, with a default gloo group of them.

        Args:
            fn: Function at the top of an importable module.
            num_ranks: Ranks.
            args: Picklable.
            timeout_s: Limit; who runs on is ended and its stacks are in its outcome.
            expect_dead: Ranks whose death is not an error.
        """
        with self._lock:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="moe-comm-ranks-")
            folder = Path(self._folder.name)
            while len(self._workers) < num_ranks:
                self._workers.append(self._start(len(self._workers), folder))
            if num_ranks != self._num_ranks:
                self._num_groups += 1
                self._num_ranks = num_ranks
            store_path = str(folder / f"store{self._num_groups}")
            job = _Job(list(sys.path), num_ranks, store_path, pickle.dumps((fn, args)))
            for worker in self._workers[:num_ranks]:
                with contextlib.suppress(BrokenPipeError):  # died since; its outcome says so
                    worker.connection.send(job)
            outcomes = self._collect(num_ranks, timeout_s, expect_dead)
            self._clean_up(outcomes)
            return outcomes

    def close(self) -> None:
        """End all workers; the pool starts new ones when it is used again."""
        with self._lock:
            self._end_workers()

    def _start(self, rank_idx: int, folder: Path) -> _Worker:
        mine, theirs = self._context.Pipe()
        stacks_path = folder / f"stacks{rank_idx}"
        process = self._context.Process(
            target=_worker_main,
            args=(rank_idx, theirs, str(stacks_path)),
            name=f"rank {rank_idx}",
            daemon=True,
        )
        process.start()
        theirs.close()
        return _Worker(process, mine, stacks_path)

    def _collect(
        self, num_ranks: int, timeout_s: float, expect_dead: Collection[int]
    ) -> list[Outcome]:
        outcomes: list[Outcome] = [Outcome(is_running=True) for _ in range(num_ranks)]
        ranks = {self._workers[rank_idx].connection: rank_idx for rank_idx in range(num_ranks)}
        deadline = time.monotonic() + timeout_s
        while ranks and (left_s := deadline - time.monotonic()) > 0:
            for ready in multiprocessing.connection.wait(list(ranks), left_s):
                assert isinstance(ready, Connection)
                rank_idx = ranks.pop(ready)
                outcome = self._receive(rank_idx, ready, is_dead_fine=rank_idx in expect_dead)
                outcomes[rank_idx] = outcome
                if outcome.error is not None:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank_idx in ranks.values():
            outcomes[rank_idx].trace = self._stacks(self._workers[rank_idx])
        return outcomes

    def _receive(self, rank_idx: int, connection: Connection, *, is_dead_fine: bool) -> Outcome:
        try:
            return pickle.loads(connection.recv_bytes())  # type: ignore[no-any-return]
        except (EOFError, ConnectionResetError):
            if is_dead_fine:
                return Outcome()
            process = self._workers[rank_idx].process
            process.join(GRACE_S)
            return Outcome(error=RuntimeError(f"the process died, exit code {process.exitcode}"))

    def _stacks(self, worker: _Worker) -> str:
        """Stacks of every thread of a worker, written by the signal handler of faulthandler."""
        if worker.process.pid is None or not worker.process.is_alive():
            return "(not alive)"
        os.kill(worker.process.pid, signal.SIGUSR1)
        deadline = time.monotonic() + _STACKS_WAIT_S
        while time.monotonic() < deadline:
            text = worker.stacks_path.read_text() if worker.stacks_path.exists() else ""
            # The main thread is written last.
            if "_worker_main" in text:
                return text
            time.sleep(0.02)
        return "(no stacks: the process does not take signals)"

    def _clean_up(self, outcomes: list[Outcome]) -> None:
        """A group in which a rank failed is not used again, nor are processes that hang or died."""
        if all(outcome.error is None and not outcome.is_running for outcome in outcomes) and all(
            worker.process.is_alive() for worker in self._workers
        ):
            return
        self._num_ranks = 0
        if any(outcome.is_running for outcome in outcomes) or not all(
            worker.process.is_alive() for worker in self._workers
        ):
            self._end_workers()

    def _end_workers(self) -> None:
        for worker in self._workers:
            worker.connection.close()
            worker.process.kill()
        for worker in self._workers:
            worker.process.join(GRACE_S)
        self._workers.clear()
        self._num_ranks = 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _worker_main(rank_idx: int, connection: Connection, stacks_path: str) -> None:
    import torch

    # Ranks share the cores; a pool of threads in each would only make them wait for each other.
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    with Path(stacks_path).open("w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        group_path = ""
        while True:
            try:
                job: _Job = connection.recv()
            except (EOFError, ConnectionResetError):
                os._exit(0)
            outcome = Outcome()
            try:
                sys.path[:] = job.import_path
                # Before ranks meet: what it imports takes seconds on a busy machine, on some later.
                fn, args = pickle.loads(job.call)
                if job.store_path != group_path:
                    _join_group(rank_idx, job)
                    group_path = job.store_path
                outcome.result = fn(rank_idx, job.num_ranks, *args)
            except BaseException as error:  # noqa: BLE001 - raised again by the caller of run_ranks
                outcome = Outcome(error=error, trace=traceback.format_exc())
            connection.send_bytes(_pickled(outcome))


def _join_group(rank_idx: int, job: _Job) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.store_path}",
        rank=rank_idx,
        world_size=job.num_ranks,
    )
    # A rank that dies at once must not take others down that are still connecting to it.
    dist.barrier()


def _pickled(outcome: Outcome) -> bytes:
    """Pickle by value: shared memory of a worker would live only as long as the worker."""
    try:
        data = pickle.dumps(outcome)
        pickle.loads(data)  # some exceptions can be written but not read
    except Exception as error:  # noqa: BLE001 - whatever a user's type raises
        cause = error if outcome.error is None else RuntimeError(repr(outcome.error))
        data = pickle.dumps(Outcome(error=RuntimeError(str(cause)), trace=outcome.trace))
    return data


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(0)
