"""How ranks find each other before they share memory: one all-gather of Python objects."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, Protocol

import torch.distributed as dist

from moe_comm import env
from moe_comm.peers.gather_objects import gather_objects_of_group

__all__ = [
    "Bootstrap",
    "RankThreads",
    "bootstrap_for",
    "check_process_of",
    "group_behind",
    "process_group_of",
]


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
    """What a communicator needs of the launcher of its ranks."""

    @property
    def rank_idx(self) -> int:
        """This rank, in [0, num_ranks)."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        ...

    def all_gather(self, item: Any) -> list[Any]:
        """Every rank's `item`, in rank order. Collective."""
        ...


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


class RankThreads:
    """Ranks as threads of one process: make one object, give `[i]` to the thread of rank i.

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
        self._barrier = threading.Barrier(num_ranks)
        self._slots: list[Any] = [None] * num_ranks
        # One object per rank, so that it can be told from the same rank of other threads.
        self._members = [_ThreadRank(self, rank_idx) for rank_idx in range(num_ranks)]

    def __getitem__(self, rank_idx: int) -> Bootstrap:
        if not 0 <= rank_idx < self.num_ranks:
            raise IndexError(f"rank {rank_idx} is not in [0, {self.num_ranks})")
        return self._members[rank_idx]

    def exchange(self, rank_idx: int, item: Any) -> list[Any]:
        """Every thread's `item`, in rank order. Called by every rank's thread."""
        self._slots[rank_idx] = item
        self._barrier.wait()
        gathered = list(self._slots)
        # Nobody may store the next item before everybody has read this one.
        self._barrier.wait()
        return gathered

    def abort(self) -> None:
        """Make every exchange, under way or later, raise: a thread has given up."""
        self._barrier.abort()


class _ThreadRank:
    def __init__(self, ranks: RankThreads, rank_idx: int) -> None:
        self._ranks = ranks
        self.rank_idx = rank_idx
        self.num_ranks = ranks.num_ranks

    def all_gather(self, item: Any) -> list[Any]:
        return self._ranks.exchange(self.rank_idx, item)


def bootstrap_for(group: dist.ProcessGroup | Bootstrap | None) -> Bootstrap:
    """The bootstrap behind the `group` argument of `Communicator`.

    None means the default process group, or a single rank when torch.distributed was never
    initialized and no launcher started several processes.

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
    if dist.is_available() and dist.is_initialized():
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
