"""Tensors of a checkpoint by its own names, as views of the storage in which a rank holds them."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import weakref
from collections.abc import Callable, Iterable

import torch

from moe_comm.arguments import check_resolved, shown
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.expert_maps import ExpertMaps
from moe_comm.resharding.describe.intervals import Intervals
from moe_comm.resharding.describe.metadata import ParameterMetadata, ViewLayout
from moe_comm.resharding.describe.module_tensors import (
    ModuleState,
    TensorDict,
    TensorSide,
    local_tensor,
    module_state,
)
from moe_comm.resharding.describe.no_collection import no_collection
from moe_comm.resharding.describe.tensor_layout import common_shape
from moe_comm.resharding.describe.tensor_table import TensorTable
from moe_comm.tensors.memory import storage_id

_NUMBERED = re.compile(r" \(view [0-9]+\)$")


@dataclasses.dataclass(frozen=True)
class CheckpointView:
    """Elements of one tensor of a checkpoint, where a rank holds them.

    A model keeps a checkpoint's tensors fused, stacked, transposed or cut; a view undoes that by its
    offset and strides alone. A rank may have several views of one name.

    Args:
        name: Name of the tensor in the checkpoint.
        shape: Shape of the whole tensor, as the checkpoint has it or cut into finer dimensions.
        dims: Indices that `tensor` holds, per dimension of `shape`.
        tensor: View of the rank's storage, with any strides; dimension `i` has as many indices as
            `dims[i]`.
        disk_shape: Shape of the whole tensor as the checkpoint has it, where `shape` is cut into finer
            dimensions.

    Raises:
        ValueError: `dims` do not fit `shape` or `tensor`, or `shape` is no view of `disk_shape`.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[Intervals, ...]
    tensor: torch.Tensor
    disk_shape: tuple[int, ...] | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, as the checkpoint has it."""
        return self.disk_shape or self.shape

    def __post_init__(self) -> None:
        lengths = tuple(intervals.total_length(held) for held in self.dims)
        if len(self.dims) != len(self.shape) or lengths != tuple(self.tensor.shape):
            raise ValueError(
                f"{self.name}: intervals of {lengths} indices of a tensor of shape {self.shape} "
                f"cannot be a view of shape {tuple(self.tensor.shape)}"
            )
        if self.disk_shape is not None and common_shape((self.shape, self.disk_shape)) is None:
            raise ValueError(
                f"{self.name}: shape {self.shape} does not cut the dimensions of disk_shape "
                f"{self.disk_shape}"
            )
        for dim, (held, size) in enumerate(zip(self.dims, self.shape, strict=True)):
            held_so_far = 0
            for start, local_start, length in held:
                if start < 0 or start + length > size:
                    raise ValueError(
                        f"{self.name}: indices [{start}, {start + length}) of dimension {dim} are "
                        f"not in a tensor of shape {self.shape}"
                    )
                if local_start != held_so_far:
                    raise ValueError(
                        f"{self.name}: indices [{start}, {start + length}) of dimension {dim} lie at "
                        f"{local_start} of the view, after {held_so_far} others"
                    )
                held_so_far += length
            stop = 0
            for start, _, length in sorted(held) if len(held) > 1 else ():
                if start < stop:
                    raise ValueError(
                        f"{self.name}: index {start} of dimension {dim} is held twice; give each "
                        "place a view of its own"
                    )
                stop = start + length


class CheckpointViews(TensorSide):
    """One side of a refit, in a checkpoint's own names: what a rank holds, and in which storage.

    Takes the place of a module in `Refit` and wherever else resharding takes one. The other side may be
    views or a module, whose names and shapes then are those of the checkpoint.

    Keeps the views and their owner alive. Every refit sees whether the tensors of the owner and the
    storages are what and where they were, and has the views described again where they are not.

    Args:
        describe: Callable without arguments that gives the views; called now, and when the owner has changed.
            Or the views themselves, for storages that stay where they are.
        owner: Object whose weights they are. Of a module, parameters and buffers are watched, a failed refit
            marks it stale, its caches are refreshed after every refit, and so are views described again once
            the maps have changed by which its engine finds experts. Anything else is only kept alive, unless it
            has a module as `refit_module`, which is then watched in its place.

    Attributes:
        owner: Object that was given.
        module: The owner if that is a module, its `refit_module`, or one that carries marks alone.

    Raises:
        TypeError: `describe` gives something else than views.
        ValueError: A view is not of plain, strided memory.
        Exception: Error that `describe` raises.
    """

    def __init__(
        self,
        describe: Callable[[], Iterable[CheckpointView]] | Iterable[CheckpointView],
        owner: object = None,
    ) -> None:
        self.owner = owner
        module = (
            owner if isinstance(owner, torch.nn.Module) else getattr(owner, "refit_module", None)
        )
        self.module = module if isinstance(module, torch.nn.Module) else torch.nn.Module()
        self._describe = describe if callable(describe) else None
        module_state(self.module)  # FSDP gives up whole copies, before views could lie in them
        self._list(describe() if callable(describe) else describe)

    @property
    def views(self) -> list[CheckpointView]:
        """The views, as they were described last."""
        return list(self._views)

    def _list(self, views: Iterable[CheckpointView]) -> None:
        """Take over what was described."""
        owner_state = module_state(self.module)
        owned = _storages_of(owner_state)
        self._views = list(views)
        numbers: dict[int, int] = {}
        self._places: list[tuple[int, int]] = []
        watched: list[torch.Tensor] = []
        for view in self._views:
            if not isinstance(view, CheckpointView):
                raise TypeError(f"views must be CheckpointView, got {shown(view)}")
            tensor = view.tensor
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or (
                tensor.layout is not torch.strided or tensor.is_quantized
            ):
                raise ValueError(
                    f"{view.name}: a view must be a plain, strided tensor, got a "
                    f"{type(tensor).__name__} of layout {tensor.layout}"
                )
            check_resolved(f"{view.name}: a view", tensor)
            storage = storage_id(tensor)
            if storage not in numbers:
                numbers[storage] = len(numbers)
                if storage not in owned:
                    watched.append(tensor)
            self._places.append((numbers[storage], int(tensor.storage_offset())))
        self._owner_state = owner_state
        self._viewed = owned.keys() & numbers
        self._owned = {name: each for key in self._viewed for name, each in owned[key].items()}
        self._expert_maps = ExpertMaps(self.module)
        self._watched = watched
        self._table = TensorTable(watched)
        self._names = unique_names([view.name for view in self._views])
        tensors = TensorDict(
            zip(self._names, (view.tensor.detach() for view in self._views), strict=True)
        )
        cuts = [
            (*place, view.shape, view.dims, view.tensor.stride())
            for place, view in zip(self._places, self._views, strict=True)
        ]
        self._tensors = tensors
        self._state = ModuleState(weakref.ref(tensors), tensors, cuts)

    @property
    def owned(self) -> dict[str, torch.Tensor]:
        """Tensors of the owner that the views lie in, by its names. For a caller that has just got the state."""
        return self._owned

    def state(self) -> ModuleState:
        """Return the state: the same object until a tensor is replaced, moved, reshaped or cut anew.

        Raises:
            ValueError: The owner has changed, and nothing describes the views again; or its experts lie elsewhere,
                and its engine's loader, which would describe them, does not know.
        """
        owner_state = module_state(self.module)
        is_moved = not self._table.matches(self._watched, has_dtensors=False)
        map_moved = self._expert_maps.moved()
        if not is_moved and owner_state is self._owner_state and map_moved is None:
            return self._state
        if map_moved is not None and not (map_moved.is_followed and self._describe):
            raise ValueError(
                f"{map_moved.path}: its expert map was {map_moved.then} when the checkpoint views of "
                f"{self._names[0]} and {len(self._names) - 1} others were described, and is {map_moved.now}: "
                + (
                    "make CheckpointViews of a function that describes them"
                    if map_moved.is_followed
                    else "the engine's loader keeps the first one, so its views would be of other experts"
                )
            )
        if self._describe is not None:
            self._list(self._describe())
        elif is_moved or not self._viewed <= _storages_of(owner_state).keys():
            raise ValueError(
                f"checkpoint views of {self._names[0]} and {len(self._names) - 1} others are not where "
                "they were: their owner holds other tensors, or a storage was resized. Make "
                "CheckpointViews of a function that describes them"
            )
        self._owner_state = owner_state
        return self._state

    def metadata(self, owner_rank: int, *, is_written: bool) -> list[ParameterMetadata]:
        """Return the metadata of the views that ranks exchange. For a caller that has just got the state.

        Args:
            owner_rank: This rank in the plan's group.
            is_written: Views of the very same memory are left out, but the first.
        """
        left_out = {name for tie in self._state.ties for name in tie[1:]} if is_written else set()
        with no_collection():
            return self._metadata(owner_rank, left_out)

    def _metadata(self, owner_rank: int, left_out: set[str]) -> list[ParameterMetadata]:
        return [
            ParameterMetadata(
                name=name,
                shape=tuple(view.tensor.shape),
                dtype=view.tensor.dtype,
                element_size=view.tensor.element_size(),
                owner_rank=owner_rank,
                resolved_name=view.name,
                view=ViewLayout(view.shape, view.dims, view.tensor.stride(), view.disk_shape),
                place=place,
            )
            for name, view, place in zip(self._names, self._views, self._places, strict=True)
            if name not in left_out
        ]

    def ties(self) -> list[tuple[str, ...]]:
        """Names in the checkpoint of the memory that has several. For a caller as of `metadata`."""
        resolved = dict(zip(self._names, (view.name for view in self._views), strict=True))
        ties = (tuple(dict.fromkeys(resolved[name] for name in tie)) for tie in self._state.ties)
        return [tie for tie in ties if len(tie) > 1]


def _storages_of(state: ModuleState) -> dict[int, dict[str, torch.Tensor]]:
    """Return a module's tensors by ids that tell their storages from all others that are alive, and by names."""
    storages: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in state.tensors.items():
        # Other kinds of tensors need not have a storage of their own.
        with contextlib.suppress(NotImplementedError, RuntimeError):
            local = local_tensor(tensor)
            storages.setdefault(storage_id(local), {})[name] = local
    return storages


def unique_names(names: Iterable[str]) -> list[str]:
    """Names that tell the views of one tensor apart: a number behind all but the first of equal ones.

    A name that ends like that itself gets its number, too, so that no two tensors share one.
    """
    counts: dict[str, int] = {}
    unique = []
    for name in names:
        count = counts[name] = counts.get(name, 0) + 1
        is_plain = count == 1 and not (name.endswith(")") and _NUMBERED.search(name))
        unique.append(name if is_plain else f"{name} (view {count})")
    return unique
