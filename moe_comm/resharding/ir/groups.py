"""Process groups of some ranks of a group, made once and found again."""

from __future__ import annotations

import contextlib
import datetime as dt
import weakref
from collections.abc import Iterable

import torch
import torch.distributed as dist

__all__ = ["create_subgroups", "resolve_group", "subgroup"]

# Groups die with the group they were cut from: a process may leave a group and join another.
_subgroups: weakref.WeakKeyDictionary[
    dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]
] = weakref.WeakKeyDictionary()


def resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """`group`, or the default one; None where torch.distributed was never initialised."""
    if group is None and dist.is_available() and dist.is_initialized():
        return dist.group.WORLD
    return group


def subgroup(group: dist.ProcessGroup | None, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    """The group of `ranks`, which are ranks of `group`. Collective among them when it is new.

    It has the backend and the timeout of `group`, and numbers `ranks` in ascending order.

    Raises:
        RuntimeError: There is no process group, or not all ranks came within the timeout.
    """
    parent = resolve_group(group)
    if parent is None:
        raise RuntimeError(
            f"ranks {ranks} need a process group, and torch.distributed is not initialised"
        )
    key = tuple(sorted(ranks))
    if key == tuple(range(parent.size())):
        return parent
    known = _subgroups.setdefault(parent, {})
    if key not in known:
        try:
            made = dist.new_group(
                [dist.get_global_rank(parent, rank) for rank in key],
                backend=dist.get_backend(parent),
                timeout=_timeout_of(parent),
                # Ranks that are not members need not come: nobody else knows of this group.
                use_local_synchronization=True,
            )
        except RuntimeError as error:
            raise RuntimeError(f"could not make a process group of ranks {key}: {error}") from error
        known[key] = made
    return known[key]


def create_subgroups(
    group: dist.ProcessGroup | None, rank_sets: Iterable[tuple[int, ...]], rank: int
) -> None:
    """Make the groups that `rank` is a member of.

    In ascending order, so that ranks that share several groups never wait for each other in
    different ones.
    """
    for ranks in sorted({tuple(sorted(ranks)) for ranks in rank_sets if rank in ranks}):
        subgroup(group, ranks)


def _timeout_of(group: dist.ProcessGroup) -> dt.timedelta | None:
    """None: the default of the backend."""
    for device in ("cuda", "cpu"):
        with contextlib.suppress(RuntimeError, AttributeError):
            timeout = group._get_backend(torch.device(device)).options._timeout
            if isinstance(timeout, dt.timedelta):
                return timeout
    return None
