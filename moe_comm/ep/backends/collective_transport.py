"""The torch.distributed collectives and the progress thread of one `collective` buffer."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from moe_comm.ep.backends.engine_pool import EnginePool, Lease, make_group
from moe_comm.errors import (
    CommunicationError,
    PeerFailedError,
    PeerTimeoutError,
    has_timed_out,
)
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.forks import forks
from moe_comm.peers.gather_objects import gather_objects_of_group

OutputT = TypeVar("OutputT")


_group_pools: weakref.WeakKeyDictionary[dist.ProcessGroup, EnginePool[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


class CollectiveTransport:
    """Collectives of one buffer, on a group of its own, so that buffers do not wait for each other.

    Args:
        group: Group of the ranks, whose torch.distributed backend is used; None for the default group.
        bootstrap: Bootstrap of the communicator. One rank needs no torch.distributed.
        timeout_s: Limit of every collective.

    Raises:
        ValueError: There is no torch.distributed group of as many ranks.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, bootstrap: Bootstrap, timeout_s: float
    ) -> None:
        self._num_ranks = bootstrap.num_ranks
        self._failure: CommunicationError | None = None
        self.device = torch.device("cpu")
        self._group: dist.ProcessGroup | None = None
        if self._num_ranks == 1:
            return
        if not dist.is_initialized() or dist.get_world_size(group) != self._num_ranks:
            raise ValueError(
                f"the collective backend needs a torch.distributed group of {self._num_ranks} "
                "ranks; call torch.distributed.init_process_group first"
            )
        parent = dist.group.WORLD if group is None else group
        assert parent is not None
        backend = dist.get_backend(parent)
        self._lease: Lease[dist.ProcessGroup] = _group_pools.setdefault(parent, EnginePool()).take(
            timeout_s,
            bootstrap.all_gather,
            lambda: make_group(
                dist.get_process_group_ranks(parent), backend, timeout_s, bootstrap.all_gather
            ),
        )
        self._group = self._lease.engine
        if backend == dist.Backend.NCCL:
            self.device = torch.device("cuda", torch.cuda.current_device())

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The buffer's own group; None of a single rank and after `destroy`."""
        return self._group

    def all_gather_row(self, row: torch.Tensor, operation: str) -> torch.Tensor:
        """Every rank's `row`: int64 `[n]` on the CPU to int64 `[R, n]` on the CPU."""
        if self._group is None:
            return row.unsqueeze(0)
        with self._limits(operation, "rows"):
            gathered = torch.empty(
                self._num_ranks, row.numel(), dtype=torch.int64, device=self.device
            )
            dist.all_gather(list(gathered.unbind(0)), row.to(self.device), group=self._group)
            return gathered.cpu()

    def all_gather_object(self, item: Any, operation: str) -> list[Any]:
        """Every rank's `item`, in rank order."""
        if self._group is None:
            return [item]
        with self._limits(operation, "rows"):
            return gather_objects_of_group(self._group, item)

    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        recv_splits: list[int],
        send_splits: list[int],
        operation: str,
    ) -> None:
        """Rows `[n, bytes]` of uint8 to every rank and from every rank, in rank order."""
        if self._group is None:
            received.copy_(sent)
            return
        with self._limits(operation, "data"):
            dist.all_to_all_single(received, sent, recv_splits, send_splits, group=self._group)

    def destroy(self) -> None:
        """Leave the group to a later buffer, unless it failed. Local, idempotent."""
        group, self._group = self._group, None
        if group is not None and self._failure is None:
            self._lease.give_back()

    @contextlib.contextmanager
    def _limits(self, operation: str, phase: str) -> Iterator[None]:
        """Name what torch.distributed reports; a group that failed once stays failed."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except RuntimeError as error:
            kind = PeerTimeoutError if has_timed_out(error) else PeerFailedError
            self._failure = kind(
                f"{operation} ended while {phase} were exchanged: {error}",
                operation=operation,
                phase=phase,
            )
            raise self._failure from error


class Pending(Generic[OutputT]):
    """An operation that the progress thread works on."""

    def __init__(self, work: Callable[[], OutputT]) -> None:
        self._work: Callable[[], OutputT] | None = work
        self.early: OutputT | None = None
        self._ended = threading.Event()
        self._fork_generation = forks.generation
        self._output: OutputT | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work; called once, by the progress thread."""
        assert self._work is not None
        try:
            self._output = self._work()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._error = error
        # The work holds on to the caller's input.
        self._work = None
        self._ended.set()

    def wait(self) -> OutputT:
        """The outcome, once there is one: each collective of the work has a limit.

        Raises:
            ValueError: This process was forked from the one whose thread works on it.
        """
        if not self._ended.is_set() and forks.generation != self._fork_generation:
            raise ValueError(
                f"wait: the operation belongs to the parent of this forked child {os.getpid()}"
            )
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._output  # type: ignore[return-value]  # set, unless OutputT has None

    def is_complete(self) -> bool:
        return self._ended.is_set()


class ProgressThread:
    """Runs operations one after the other; started when there is a first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue: queue.SimpleQueue[Pending[Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._latest: Pending[Any] | None = None

    def is_idle(self) -> bool:
        """Return whether everything submitted has ended."""
        return self._latest is None or self._latest.is_complete()

    def submit(self, work: Callable[[], OutputT]) -> Pending[OutputT]:
        """Run `work` after everything submitted before."""
        if self._thread is None:
            # A daemon: a peer that never answers must not keep the interpreter from exiting.
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        pending = Pending(work)
        self._latest = pending
        self._queue.put(pending)
        return pending

    def stop(self) -> None:
        """End the thread after what was submitted; does not wait for that."""
        if self._thread is not None:
            self._queue.put(None)

    def _run(self) -> None:
        with torch.no_grad():
            while (pending := self._queue.get()) is not None:
                pending.run()
