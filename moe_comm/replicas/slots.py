"""Tensors of slots: what ranks must agree on before any bytes of theirs move, and pieces of slots."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from moe_comm.arguments import as_int, check_kind, shown
from moe_comm.ep.placement import Placement
from moe_comm.tensors.memory import check_memory
from moe_comm.tensors.memory_overlap import first_overlap, has_element_twice

SlotShape = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of one slot of a tensor."""


class SlotTensors:
    """This rank's tensors by slot: `views[tensor_idx][slot_idx]`, detached.

    Args:
        tensors: `[num_local_slots, ...]` each, on the CPU; or lists of tensors that follow each other by slots. A
            DTensor stands for its local part.
        num_slots: Slots of this rank.
        name: Name of the argument, for errors.

    Raises:
        ValueError: A tensor has another number of slots, no memory, or shares bytes with itself or another.
        TypeError: Something is no dense tensor.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor | Sequence[torch.Tensor]],
        num_slots: int,
        name: str,
    ) -> None:
        if not isinstance(tensors, list | tuple) or not tensors:
            raise TypeError(f"{name} must be a list of one or more tensors, got {shown(tensors)}")
        self.views: list[list[torch.Tensor]] = []
        self.shapes: list[SlotShape] = []
        self._given: list[tuple[torch.Tensor, int]] = []
        for tensor_idx, given in enumerate(tensors):
            parts = list(given) if isinstance(given, list | tuple) else [given]
            views: list[torch.Tensor] = []
            for part_idx, part in enumerate(parts):
                this = f"{name}[{tensor_idx}]"
                check_kind(this, part, torch.Tensor)
                as_given = part
                part = parts[part_idx] = _local_part(part)
                if part.layout is not torch.strided or part.device.type != "cpu" or not part.dim():
                    raise TypeError(
                        f"{this} must be a dense tensor [num_local_slots, ...] on the CPU, got "
                        f"{part.layout} of shape {tuple(part.shape)} on {part.device}"
                    )
                check_memory(this, part)
                self._given.append((as_given, part.data_ptr()))
                views += part.detach().unbind(0)
                self._check_equal(this, views, part)
            if len(views) != num_slots:
                shapes = [tuple(part.shape) for part in parts]
                raise ValueError(
                    f"{name}[{tensor_idx}] must have {num_slots} slots, got {len(views)} in a tensor of shape "
                    f"{', '.join(map(str, shapes))}"
                )
            self.views.append(views)
            first = parts[0]
            self.shapes.append((first.dtype, tuple(first.shape[1:])))
        places = [view for views in self.views for view in views]
        if first_overlap(places) is not None or any(map(has_element_twice, places)):
            raise ValueError(f"slots of {name} share bytes with each other")
        self._places = [view.data_ptr() for view in places]

    @staticmethod
    def _check_equal(this: str, views: list[torch.Tensor], part: torch.Tensor) -> None:
        if views and (views[0].dtype != part.dtype or views[0].shape != part.shape[1:]):
            raise ValueError(
                f"parts of {this} must be alike, got {views[0].dtype} [*, "
                f"{tuple(views[0].shape)}] and {part.dtype} [*, {tuple(part.shape[1:])}]"
            )

    def stated(self, name: str) -> dict[str, str]:
        """Return the facts that must be equal on all ranks, by their names in errors."""
        return {f"number of {name}": str(len(self.shapes))} | {
            f"a slot of {name}[{tensor_idx}]": f"{dtype} {list(shape)}"
            for tensor_idx, (dtype, shape) in enumerate(self.shapes)
        }

    def check_places(self, name: str) -> None:
        """Check that all slots lie where they did.

        Raises:
            ValueError: One has been moved or freed.
        """
        places = [view for views in self.views for view in views]
        for view in places:
            check_memory(f"a slot of {name}", view)
        # Views keep memory that their tensor has been taken from.
        owners = [(_local_part(given), place) for given, place in self._given]
        for tensor, place in [*owners, *zip(places, self._places, strict=True)]:
            if tensor.data_ptr() != place:
                raise ValueError(f"a slot of {name} has moved since its copies were prepared")


def addresses_of(tensors: Sequence[torch.Tensor | Sequence[torch.Tensor]]) -> list[int]:
    """Return the addresses of tensors, and of parts of tensors, as `SlotTensors` takes them."""
    return [
        _local_part(part).data_ptr()
        for given in tensors
        for part in ((given,) if isinstance(given, torch.Tensor) else given)
    ]


@torch.no_grad()
def _local_part(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Piece(NamedTuple):
    """Part of a slot: what moves at once.

    Args:
        tensor_idx: Position of the tensor in the list.
        begin: First row of the slot's first dimension.
        num_rows: Rows; None for a slot that has no dimension.
        num_bytes: Bytes of the piece.
    """

    tensor_idx: int
    begin: int
    num_rows: int | None
    num_bytes: int

    def of(self, views: Sequence[Sequence[torch.Tensor]], slot_idx: int) -> torch.Tensor:
        """The piece of one slot."""
        return self.within(views[self.tensor_idx][slot_idx])

    def within(self, slot: torch.Tensor) -> torch.Tensor:
        """The piece of a tensor of the slot's shape."""
        return slot if self.num_rows is None else slot.narrow(0, self.begin, self.num_rows)


def pieces_of(slots: SlotTensors, most_bytes: int | None) -> Iterator[Piece]:
    """Pieces that a slot of every tensor is cut into, each of `most_bytes` or one row."""
    for tensor_idx, (dtype, shape) in enumerate(slots.shapes):
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            continue
        if not shape:
            yield Piece(tensor_idx, 0, None, num_bytes)
            continue
        row_bytes = num_bytes // shape[0]
        rows = shape[0] if most_bytes is None else max(1, most_bytes // row_bytes)
        for begin in range(0, shape[0], rows):
            num_rows = min(rows, shape[0] - begin)
            yield Piece(tensor_idx, begin, num_rows, num_rows * row_bytes)


def batches_of(loads: Iterable[Iterable[tuple[object, int]]], most_bytes: int | None) -> list[int]:
    """Return the batch that every unit belongs to, so that no place takes too much in one batch.

    Args:
        loads: Loads that each unit puts on places: `(place, bytes)`.
        most_bytes: Most bytes of a place in a batch, unless one unit has more; None for one batch.
    """
    batch_of_place: dict[object, tuple[int, int]] = {}
    found = []
    for load in loads:
        load = list(load)
        known = [(*batch_of_place.get(place, (0, 0)), num_bytes) for place, num_bytes in load]
        batch_idx = max((batch for batch, _, _ in known), default=0)
        if most_bytes is not None and any(
            batch == batch_idx and taken and taken + num_bytes > most_bytes
            for batch, taken, num_bytes in known
        ):
            batch_idx += 1
        for (place, _), (batch, taken, num_bytes) in zip(load, known, strict=True):
            batch_of_place[place] = batch_idx, num_bytes + (taken if batch == batch_idx else 0)
        found.append(batch_idx)
    return found


def check_step_bytes(step_bytes: int | None) -> int | None:
    """Check what a caller bounds a step by.

    Raises:
        ValueError: It is less than 1.
        TypeError: It is no int.
    """
    return None if step_bytes is None else as_int("step_bytes", step_bytes, 1)


def placement_stated(name: str, placement: Placement) -> dict[str, str]:
    """Return the facts of a placement that must be equal on all ranks."""
    return {
        f"{name} slots of rank {rank_idx}": str(list(held))
        for rank_idx, held in enumerate(placement.slots)
    } | {f"{name} experts": str(placement.num_experts)}
