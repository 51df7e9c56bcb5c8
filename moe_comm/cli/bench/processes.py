"""Starts the rank processes of the benchmark and speaks to all of them at once."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import tempfile
import time
import types
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moe_comm.cli.bench.barrier import SpinBarrier
from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.options import BenchOptions
from moe_comm.cli.bench.serve import serve_threads, serve_worker
from moe_comm.cli.bench.worker import Worker
from moe_comm.peers.agree import name_ranks

if TYPE_CHECKING:
    from typing_extensions import Self

JOIN_TIMEOUT_S = 20.0
# No call of a worker takes as long; what ranks wait for each other has limits of its own.
CALL_TIMEOUT_S = 3600.0


class WorkerError(RuntimeError):
    """A rank of the benchmark failed; the message holds its own, or the traceback of a fault."""


class WorkerProcesses:
    """A worker per rank in a process of its own; a context manager that leaves none behind.

    Args:
        num_ranks: Ranks.
        make_worker: Called for each with a folder for rendezvous, which has a file `barrier` for
            `SpinBarrier`, and with the rank; at the top of a module, or a partial of such. What it
            returns has a method `close`.
        mode: "processes", or "threads": all ranks are threads of one process, and `make_worker` gets
            their `Bootstrap` besides.

    Raises:
        WorkerError: A rank could not start.

    Attributes:
        call_timeout_s: Limit for the answers of all ranks to one call.
    """

    call_timeout_s = CALL_TIMEOUT_S

    def __init__(
        self, num_ranks: int, make_worker: Callable[..., Any], mode: str = "processes"
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moe-comm-bench-")
        self.folder = Path(self._folder.name)
        (self.folder / "barrier").write_bytes(bytes(SpinBarrier.file_bytes(num_ranks)))
        # A child forked from here would inherit torch's threads and locks in any state; one forked
        # from a server that has only imported torch does not pay for that again.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "moe_comm.cli.bench.worker"])
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []  # of every rank
        make_worker = functools.partial(make_worker, self.folder)
        try:
            pairs = [context.Pipe() for _ in range(num_ranks)]
            self._pipes = [ours for ours, _ in pairs]
            theirs = [end for _, end in pairs]
            if mode == "threads":
                process = context.Process(
                    target=serve_threads, args=(make_worker, theirs), name="ranks", daemon=True
                )
                process.start()
                self._processes = [process] * num_ranks
            else:
                for rank_idx, end in enumerate(theirs):
                    process = context.Process(
                        target=serve_worker,
                        args=(functools.partial(make_worker, rank_idx), end),
                        name=f"rank {rank_idx}",
                        daemon=True,
                    )
                    process.start()
                    self._processes.append(process)
            for end in theirs:
                end.close()
            self._collect("its start")
        except BaseException:
            self._kill()
            raise

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a `Worker` method on every rank; every rank's answer, in rank order.

        Raises:
            WorkerError: A rank raised, died or did not answer in `call_timeout_s`.
        """
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError):  # died since: _collect() says who
                pipe.send((method, arguments))
        return self._collect(method)

    def close(self) -> None:
        """End the processes. Idempotent."""
        if all(process.is_alive() for process in self._processes):
            try:
                self.call("close")
                for process in self._processes:
                    process.join(JOIN_TIMEOUT_S)
            except (WorkerError, OSError):
                # The ranks are leaving anyway; whoever called close has its results.
                pass
        self._kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if exc is None:
            self.close()
        else:
            self._kill()

    def _collect(self, what: str) -> list[Any]:
        answers: dict[int, Any] = {}
        pending: Mapping[Any, int] = {pipe: i for i, pipe in enumerate(self._pipes)}
        deadline_s = time.monotonic() + self.call_timeout_s
        while len(answers) < len(self._pipes):
            waiting = [pipe for pipe, i in pending.items() if i not in answers]
            left_s = max(0.0, deadline_s - time.monotonic())
            ready = multiprocessing.connection.wait(waiting, left_s)
            if not ready:
                who = name_ranks([pending[pipe] for pipe in waiting])
                raise WorkerError(f"{who} did not end {what} within {self.call_timeout_s} s")
            for pipe in ready:
                rank_idx = pending[pipe]
                try:
                    status, value = self._pipes[rank_idx].recv()
                except (EOFError, ConnectionResetError):  # the latter with our call unread
                    self._processes[rank_idx].join(JOIN_TIMEOUT_S)
                    raise self._death(rank_idx) from None
                if status == "error":
                    # The error of a rank about a peer that was killed is the echo of that death.
                    for peer_idx, process in enumerate(self._processes):
                        if (process.exitcode or 0) < 0:
                            raise self._death(peer_idx)
                    raise WorkerError(f"rank {rank_idx} failed: {value}")
                answers[rank_idx] = value
        return [answers[i] for i in range(len(self._pipes))]

    def _death(self, rank_idx: int) -> WorkerError:
        exit_code = self._processes[rank_idx].exitcode
        return WorkerError(f"rank {rank_idx} died (exit code {exit_code})")

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(JOIN_TIMEOUT_S)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


class RankProcesses(WorkerProcesses):
    """Processes for a case of dispatch and combine.

    Args:
        case: The case.
        options: Options of the ranks.
        worker: Class of the worker of every rank.

    Raises:
        WorkerError: A rank could not start.
    """

    def __init__(
        self, case: BenchCase, options: BenchOptions, worker: type[Worker] = Worker
    ) -> None:
        make_worker = functools.partial(worker, case, options)
        super().__init__(case.num_ranks, make_worker, options.mode)

    def check(self, method: str = "check", *arguments: Any) -> None:
        """Call a method that compares results with the reference's, on every rank.

        Args:
            method: Name of a method of the worker, which returns None, or what is wrong.
            arguments: Arguments of the method.

        Raises:
            WorkerError: A result is wrong, and a wrong operation has no speed.
        """
        problems = [problem for problem in self.call(method, *arguments) if problem is not None]
        if problems:
            raise WorkerError("the check against the reference failed: " + "; ".join(problems))
