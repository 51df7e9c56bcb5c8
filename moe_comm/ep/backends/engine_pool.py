"""Process groups and communicators of MPI: made once, never destroyed, lent to one buffer after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

EngineT = TypeVar("EngineT")
AllGather = Callable[[Any], list[Any]]


@dataclasses.dataclass(frozen=True)
class Lease(Generic[EngineT]):
    """An engine that one buffer uses.

    Args:
        engine: A group of torch.distributed, a communicator of MPI.
        kept: Pool that it came from.
        idx: Its number there, the same on every rank.
    """

    engine: EngineT
    kept: EnginePool[EngineT]
    idx: int

    def give_back(self) -> None:
        """Leave it to a later buffer. Only where nothing is under way on it; otherwise drop the lease."""
        self.kept.idle.add(self.idx)


@dataclasses.dataclass(eq=False)
class EnginePool(Generic[EngineT]):
    """Engines made for buffers of the same ranks; equal indices are one engine on all its ranks.

    Args:
        kinds: Kind of every engine, by index, also of those that this rank could not make.
        made: Engines that this rank has, by index.
        idle: Indices of those that no buffer of this rank uses.
    """

    kinds: list[Hashable] = dataclasses.field(default_factory=list)
    made: dict[int, EngineT] = dataclasses.field(default_factory=dict)
    idle: set[int] = dataclasses.field(default_factory=set)

    def take(
        self, kind: Hashable, all_gather: AllGather, make: Callable[[], EngineT]
    ) -> Lease[EngineT]:
        """One of that kind that is idle on every rank, or a new one. Collective.

        Args:
            kind: Kind of the engine.
            all_gather: Function that gathers from the ranks that share these engines.
            make: Makes one. Collective.
        """
        fitting = [idx for idx in sorted(self.idle) if self.kinds[idx] == kind]
        idle_everywhere: set[int] = set.intersection(*map(set, all_gather(fitting)))
        if idle_everywhere:
            idx = min(idle_everywhere)
            self.idle.remove(idx)
        else:
            idx = len(self.kinds)
            # Counted first: where one rank alone cannot make it, indices stay equal.
            self.kinds.append(kind)
            self.made[idx] = make()
        return Lease(self.made[idx], self, idx)


def make_group(
    ranks: list[int], backend: str, timeout_s: float, all_gather: AllGather
) -> dist.ProcessGroup:
    """A group of global ranks that include this one. Called by every rank of `all_gather` at once.

    Kept for later buffers, never destroyed: torch names a group after its ranks and a number, and a
    second one of the same name would read the addresses that the first one left in the store. Where
    the number differs, ranks would wait for each other under two names.
    """
    most = max(all_gather(_name_number()))
    while _name_number() < most:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
    group = dist.new_group(
        ranks,
        timeout=timedelta(seconds=timeout_s),
        backend=backend,
        use_local_synchronization=True,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _name_number() -> int:
    """Return the count in torch's names of groups: of all it has named, before 2.14 of those it is in."""
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    return _world.group_count if version >= (2, 14) else len(_world.pg_names)
