"""Full tensors by name, put together from the parts of all ranks, some at a time."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.arguments import as_int
from moe_comm.peers.agree import FirstError, agree, raise_different
from moe_comm.peers.gather_objects import gather_objects_of_group
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.checkpoint_views import CheckpointView, CheckpointViews
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.hold.refit import Refit
from moe_comm.resharding.hold.refit_options import Verify
from moe_comm.resharding.hold.refit_services import RefitBackendName

__all__ = ["FullTensors"]

_ALIGNMENT = 64  # bytes, of a tensor in the buffer


class FullTensors:
    """Full tensors of what ranks hold in parts, for ranks that want them. Collective.

    Every rank iterates, as often as the weights have changed: ranks that want none get none, and send. A refit for every `bucket_bytes` is planned with the object and runs again.

    Args:
        side: Part of the model that this rank holds; None for nothing.
        group: Process group of all ranks, those that hold and those that want.
        is_wanted: Whether this rank gets the tensors.
        bucket_bytes: Most bytes of tensors at a time, and of memory beside the models; a larger tensor
            comes alone.
        method: Transport of the refits, as `refit_method` of `Refit`.
        verify: As of `Refit`.

    Raises:
        PlanError: Ranks hold a tensor of one name with different shapes or dtypes; or what `Refit` finds.
        ValueError: `side` is none, or `bucket_bytes` is not positive or not equal on all ranks. All of
            these on every rank.
    """

    def __init__(
        self,
        side: CheckpointViews | None,
        group: dist.ProcessGroup,
        *,
        is_wanted: bool = True,
        bucket_bytes: int = 1 << 30,
        method: RefitBackendName = "gloo",
        verify: Verify = "plan",
    ) -> None:
        self._is_wanted = is_wanted
        self._buckets = []
        placed = [_placed(names, tensors) for names, tensors in _buckets(side, group, bucket_bytes)]
        largest = max((size for _, size in placed), default=0)
        device = side.views[0].tensor.device if side is not None and side.views else "cpu"
        buffer = torch.empty(largest if is_wanted else 0, dtype=torch.uint8, device=device)
        for places, _ in placed:
            tensors = {
                name: buffer[start : start + size].view(dtype).view(shape)
                for name, (start, size, dtype, shape) in places.items()
                if is_wanted
            }
            whole = [
                CheckpointView(
                    name, tuple(each.shape), tuple(map(intervals.whole, each.shape)), each
                )
                for name, each in tensors.items()
            ]
            held = None if side is None else _part_of(side, places.keys())
            refit = Refit(
                held, CheckpointViews(whole) if whole else None, method, group, verify=verify
            )
            self._buckets.append((refit, tensors))

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and full tensor, which stays what it is until the next but those of its bucket.

        One who stops before the end still takes part in the rest, which others wait for.
        """
        rest = iter(self._buckets)
        for refit, tensors in rest:
            refit.run()
            try:
                yield from tensors.items()
            except GeneratorExit:
                for other, _ in rest:
                    other.run()
                raise


_Tensor = tuple[torch.dtype, tuple[int, ...]]


def _buckets(
    side: CheckpointViews | None, group: dist.ProcessGroup, bucket_bytes: int
) -> Iterator[tuple[list[str], dict[str, _Tensor]]]:
    """Names of as many tensors as fit, in the order in which the first rank that holds them has them."""
    mine: dict[str, tuple[str, tuple[int, ...]]] = {}
    with FirstError() as problem:
        as_int("bucket_bytes", bucket_bytes, 1)
        if not isinstance(side, CheckpointViews | None):
            raise TypeError(f"side must be CheckpointViews or None, got a {type(side).__name__}")
        for view in () if side is None else side.views:
            dtype = str(view.tensor.dtype).removeprefix("torch.")
            mine.setdefault(view.name, (dtype, view.whole_shape))
    gather = functools.partial(gather_objects_of_group, group)
    told: list[Any] = agree(gather, problem.take_line(), (bucket_bytes, list(mine.items())))
    raise_different("ranks make different buckets", [{"bucket_bytes": its} for its, _ in told])
    found: dict[str, tuple[int, Any]] = {}
    for rank, (_, said) in enumerate(told):
        for name, (dtype, shape) in said:
            tensor = dtype, tuple(shape)
            first, other = found.setdefault(name, (rank, tensor))
            if other != tensor:
                raise PlanError(
                    f"{name}: is {other[0]} of shape {other[1]} on rank {first}, and {dtype} of shape "
                    f"{tensor[1]} on rank {rank}"
                )
    tensors = {name: (getattr(torch, dtype), shape) for name, (_, (dtype, shape)) in found.items()}
    names: list[str] = []
    total = 0
    for name, tensor in tensors.items():
        size = _aligned(_num_bytes(tensor))
        if names and total + size > bucket_bytes:
            yield names, tensors
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names, tensors


def _num_bytes(tensor: _Tensor) -> int:
    return int(tensor[0].itemsize) * intervals.num_elements(tensor[1])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _placed(
    names: list[str], tensors: dict[str, _Tensor]
) -> tuple[dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]], int]:
    """Places in the buffer (start, bytes, dtype, shape), and its number of bytes."""
    places, start = {}, 0
    for name in names:
        size = _num_bytes(tensors[name])
        places[name] = (start, size, *tensors[name])
        start += _aligned(size)
    return places, start


def _part_of(side: CheckpointViews, names: Any) -> CheckpointViews:
    """The views of some names, which are described again when those of all are."""
    chosen = frozenset(names)

    def describe() -> list[CheckpointView]:
        side.state()
        return [view for view in side.views if view.name in chosen]

    return CheckpointViews(describe, side.owner)
