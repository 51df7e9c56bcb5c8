"""Bootstrap of ranks that do not share memory yet: one all-gather of Python objects."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from typing import Any, Protocol

import torch.distributed as dist

from moe_comm import env
from moe_comm.errors import CommunicationError, PeerFailedError, PeerTimeoutError
from moe_comm.peers.agree import name_ranks
from moe_comm.peers.gather_objects import gather_objects_of_group
from moe_comm.peers.peer_timeouts import ARRIVAL_TIMEOUT_S

WARN_EVERY_S = 60.0
_logger = logging.getLogger("moe_comm")

# Process groups that a forked child has of its parent, whose connections end there.
_inherited: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def _remember_inherited() -> None:
    if dist.is_available() and dist.is_initialized():
        _inherited.update(dist.distributed_c10d._world.pg_map)


os.register_at_fork(after_in_child=_remember_inherited)


def check_process_of(group: dist.ProcessGroup | None, what: str) -> None:
    """Refuse a process group that a forked child has of its parent: its peers would never answer.

    Args:
        group: None for the default group.
        what: Uses it, for the message.

    Raises:
        ValueError: This process was forked from the one that made the group.
    """
    if len(_inherited) and (dist.group.WORLD if group is None else group) in _inherited:
        raise ValueError(
            f"{what}: the process group was made by process {os.getppid()} or one before it, and "
            f"this is its forked child {os.getpid()}: make a new group here, or start workers by "
            "'spawn'"
        )


class Bootstrap(Protocol):
    """Interface that a communicator needs of the launcher of its ranks."""

    @property
    def rank_idx(self) -> int:
        """This rank, in [0, num_ranks)."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order. Collective."""


class _SingleRank:
    """One rank with nobody to find."""

    rank_idx = 0
    num_ranks = 1

    def all_gather(self, item: Any) -> list[Any]:
        return [item]


class _ProcessGroup:
    """The ranks of a `torch.distributed` group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        check_process_of(group, "Communicator")
        self.group = group
        # The group's own number: a group may join worlds that were initialized apart, whose ranks
        # all count from 0.
        self.rank_idx = dist.get_rank() if group is None else group.rank()
        self.num_ranks = dist.get_world_size(group)
        if self.rank_idx < 0:
            raise ValueError(
                f"global rank {dist.get_rank()} is not a member of the group given to Communicator"
            )

    def all_gather(self, item: Any) -> list[Any]:
        check_process_of(self.group, "a collective call")
        return gather_objects_of_group(self.group, item)


class _AbortedError(PeerFailedError, threading.BrokenBarrierError):
    """A thread of these ranks has given up; nothing that is exchanged comes about any more."""


class _Round:
    """One exchange of threads: what each has said, and why nothing comes of it."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self.items: dict[int, Any] = {}
        self.failure: tuple[type[CommunicationError], str, tuple[int, ...]] | None = None

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not come."""
        return tuple(rank for rank in range(self._num_ranks) if rank not in self.items)

    def fail(self, kind: type[CommunicationError], text: str, ranks: tuple[int, ...]) -> None:
        """Keep why it failed, unless it has ended already."""
        if self.missing and self.failure is None:
            self.failure = kind, text, ranks


class RankThreads:
    """Ranks as threads of one process: make one object, give `[i]` to the thread of rank i.

    An exchange for which a rank does not come fails on every rank after the `arrival_timeout_s` of a
    communicator that has been made of them, 1800 s before there is one.

    Example:
        ```python
        ranks = RankThreads(2)
        # in thread i:
        comm = moe_comm.Communicator(ranks[i])
        ```
    """

    def __init__(self, num_ranks: int) -> None:
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be >= 1, got {num_ranks}")
        self.num_ranks = num_ranks
        self._changed = threading.Condition()
        self._is_aborted = False
        # By number, until all ranks have come: a rank that is late hears what it has missed.
        self._rounds: dict[int, _Round] = {}
        self._num_rounds = [0] * num_ranks
        # One object per rank, so that it can be told from the same rank of other threads.
        self._members = [ThreadRank(self, rank_idx) for rank_idx in range(num_ranks)]

    def __getitem__(self, rank_idx: int) -> Bootstrap:
        if not 0 <= rank_idx < self.num_ranks:
            raise IndexError(f"rank {rank_idx} is not in [0, {self.num_ranks})")
        return self._members[rank_idx]

    def exchange(
        self, rank_idx: int, item: Any, arrival_timeout_s: float = ARRIVAL_TIMEOUT_S
    ) -> list[Any]:
        """Every thread's `item`, in rank order. Called by every rank's thread.

        Args:
            rank_idx: Rank of the thread.
            item: Object of this thread; not copied.
            arrival_timeout_s: Limit for the other threads' coming; they are named in a warning of
                the logger `moe_comm` once a minute before.

        Raises:
            PeerFailedError: A thread was interrupted in it, or has called `abort`.
            PeerTimeoutError: Threads did not come, on every rank.
        """
        with self._changed:
            self._check_aborted()
            number = self._num_rounds[rank_idx]
            self._num_rounds[rank_idx] += 1
            this = self._rounds.setdefault(number, _Round(self.num_ranks))
            this.items[rank_idx] = item
            if not this.missing:
                del self._rounds[number]
                self._changed.notify_all()
            try:
                self._await(this, rank_idx, arrival_timeout_s)
            except BaseException as error:  # a handler of a signal raises
                text = f"rank {rank_idx} gave up an exchange of threads: {type(error).__name__}"
                this.fail(PeerFailedError, text, (rank_idx,))
                self._changed.notify_all()
                raise
            if this.failure is not None:
                kind, text, ranks = this.failure
                raise kind(text, ranks=ranks, operation="exchange")
            if this.missing:
                self._check_aborted()
            return [this.items[rank] for rank in range(self.num_ranks)]

    def _await(self, this: _Round, rank_idx: int, timeout_s: float) -> None:
        """Return when all have come, or nothing comes of it. Holds the lock."""
        start = time.monotonic()
        while this.missing and this.failure is None and not self._is_aborted:
            left_s = start + timeout_s - time.monotonic()
            who = name_ranks(this.missing)
            if left_s <= 0.0:
                text = f"{who} did not come to an exchange of threads within {timeout_s} s of rank {rank_idx}"
                this.fail(PeerTimeoutError, text, this.missing)
                self._changed.notify_all()
            elif not self._changed.wait(min(WARN_EVERY_S, left_s)) and left_s > WARN_EVERY_S:
                _logger.warning(
                    "rank %d has waited %.0f s for %s to come to an exchange of threads",
                    rank_idx,
                    time.monotonic() - start,
                    who,
                )

    def _check_aborted(self) -> None:
        if self._is_aborted:
            raise _AbortedError("another thread of these ranks has given up", operation="exchange")

    def abort(self) -> None:
        """Make every exchange, under way or later, raise: a thread has given up."""
        with self._changed:
            self._is_aborted = True
            self._changed.notify_all()


class ThreadRank:
    """One rank of `RankThreads`.

    Attributes:
        arrival_timeout_s: Limit of its exchanges: that of the communicator made of it last.
    """

    def __init__(self, ranks: RankThreads, rank_idx: int) -> None:
        self._ranks = ranks
        self.rank_idx = rank_idx
        self.num_ranks = ranks.num_ranks
        self.arrival_timeout_s = ARRIVAL_TIMEOUT_S

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order. Collective."""
        return self._ranks.exchange(self.rank_idx, item, self.arrival_timeout_s)


def bootstrap_for(group: dist.ProcessGroup | Bootstrap | None) -> Bootstrap:
    """The bootstrap behind the `group` argument of `Communicator`.

    None means the default process group, or a single rank when torch.distributed was never
    initialized and no launcher started several processes. A process group that is given may be one that
    torch.distributed has not made.

    Raises:
        ValueError: A launcher started several processes but there is no process group.
        TypeError: It is neither a process group nor a bootstrap. Nothing else says who the peers are,
            so only this rank raises.
    """
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if not all(hasattr(group, name) for name in ("rank_idx", "num_ranks", "all_gather")):
            raise TypeError(
                f"group must be a process group, a Bootstrap or None, got {type(group).__name__}"
            )
        return group
    if group is not None or (dist.is_available() and dist.is_initialized()):
        return _ProcessGroup(group)
    world_size = env.launcher_world_size()
    if world_size > 1:
        raise ValueError(
            f"the launcher started {world_size} processes (WORLD_SIZE) but torch.distributed is not "
            "initialized; call torch.distributed.init_process_group first"
        )
    return _SingleRank()


def process_group_of(bootstrap: Bootstrap) -> dist.ProcessGroup | None:
    """The torch.distributed group behind a bootstrap, None where there is none any more or never was."""
    if not isinstance(bootstrap, _ProcessGroup) or not dist.is_initialized():
        return None
    return dist.group.WORLD if bootstrap.group is None else bootstrap.group


def group_behind(bootstrap: Bootstrap) -> dist.ProcessGroup | Bootstrap | None:
    """The group that `bootstrap_for` made it of, the default one by its object."""
    return None if isinstance(bootstrap, _SingleRank) else process_group_of(bootstrap) or bootstrap
