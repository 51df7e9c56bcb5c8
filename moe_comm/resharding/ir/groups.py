"""Process groups for broadcasts: made once by all ranks, and found again."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch.distributed as dist

from moe_comm.resharding.copy_services.process_group import timeout_of

# Groups die with the group they were cut from: a process may leave a group and join another.
_subgroups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group`, or the default one; None where torch.distributed was never initialized."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def create_subgroups(group: dist.ProcessGroup | None, rank_sets: Iterable[tuple[int, ...]]) -> None:
    """Make the groups of `rank_sets`, in ascending order. Collective, with equal `rank_sets`.

    torch.distributed names a group by how many a process has seen, so that all processes must take
    part in making each. A `group` that lacks some of them makes none.

    Args:
        group: Group that ranks are numbered in; new groups have its backend and timeout.
        rank_sets: Sets of ranks, each ascending.

    Raises:
        RuntimeError: Some member did not come within the timeout.
    """
    parent = resolve_group(group)
    if parent is None or parent.size() < dist.get_world_size():
        return
    known = _subgroups.setdefault(parent, {})
    for ranks in sorted(set(rank_sets) - known.keys()):
        if len(ranks) == parent.size():
            continue
        try:
            known[ranks] = dist.new_group(
                [dist.get_global_rank(parent, rank) for rank in ranks],
                backend=None if parent is dist.group.WORLD else dist.get_backend(parent),
                timeout=timeout_of(parent),
            )
        except RuntimeError as error:
            raise RuntimeError(f"could not make a group of ranks {ranks}: {error}") from error


def find_subgroup(
    group: dist.ProcessGroup | None, ranks: tuple[int, ...]
) -> dist.ProcessGroup | None:
    """The group of `ranks`, ascending ranks of `group`; None where there is none, on no rank."""
    parent = resolve_group(group)
    if parent is None or len(ranks) == parent.size():
        return parent
    return _subgroups.get(parent, {}).get(ranks)
