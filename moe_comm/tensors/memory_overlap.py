"""Tells whether tensors share bytes, by the places of their elements: the one answer that checks rest on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

# Steps that an exact answer may take; what takes more counts as sharing bytes.
_MOST_STEPS = 1_000_000
# NumPy takes any number of steps, of which its stubs do not know.
_shares_memory: Any = np.shares_memory


class Overlap(NamedTuple):
    """Two tensors of one call that share bytes.

    Args:
        written: Position of one that is written.
        other: Position of the other.
        is_read: Whether the other is one that is read.
    """

    written: int
    other: int
    is_read: bool


def shares_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether an element of one tensor has a byte in common with an element of the other.

    Exact for any strides: columns of one matrix that interleave do not share bytes. Addresses are
    compared, so a place that is mapped twice counts as two.
    """
    if one.device != other.device:
        return False
    return _overlap(_Place(one), _Place(other))


def is_same_place(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same elements in the same order."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype is other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )


def has_element_twice(tensor: torch.Tensor) -> bool:
    """Return whether two elements of a tensor share memory."""
    if tensor.numel() == 0 or tensor.is_contiguous():
        return False
    dims = sorted(
        (stride, size)
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )
    reach = 0
    for stride, size in dims:
        if stride <= reach:
            break
        reach += (size - 1) * stride
    else:
        return False
    # Dimensions that interleave, such as strides (2, 3), may still keep clear of each other.
    offsets = torch.zeros(1, dtype=torch.int64, device="cpu")
    for stride, size in dims:
        offsets = (offsets[:, None] + stride * torch.arange(size, device="cpu")).flatten()
    return len(torch.unique(offsets)) < len(offsets)


def first_overlap(
    written: Sequence[torch.Tensor],
    read: Sequence[torch.Tensor] = (),
    is_harmless: Callable[[int, int], bool] = lambda written, read: False,
) -> Overlap | None:
    """A written tensor that shares bytes with another written one or with a read one, or None.

    Many tensors that lie apart cost little: they are looked at in the order of their addresses.

    Args:
        written: Tensors that a call writes.
        read: Tensors that it reads.
        is_harmless: Says of positions in `written` and `read` that the pair may share bytes.
    """
    places = [
        (place.begin, place.end, is_read, position, place)
        for is_read, tensors in ((False, written), (True, read))
        for position, tensor in enumerate(tensors)
        if (place := _Place(tensor)).begin < place.end
    ]
    places.sort(key=lambda entry: entry[:4])
    # Reads are compared with writes only, of which most end before the read begins.
    open_places: dict[bool, list[tuple[int, int, bool, int, _Place]]] = {False: [], True: []}
    for entry in places:
        begin, _, is_read, position, place = entry
        for other_is_read in (False,) if is_read else (False, True):
            still_open = [other for other in open_places[other_is_read] if other[1] > begin]
            open_places[other_is_read] = still_open
            for _, _, _, other_position, other_place in still_open:
                if other_place.device != place.device or not _overlap(other_place, place):
                    continue
                if is_read == other_is_read:
                    return Overlap(other_position, position, is_read=False)
                pair = (other_position, position) if is_read else (position, other_position)
                if not is_harmless(*pair):
                    return Overlap(*pair, is_read=True)
        open_places[is_read].append(entry)
    return None


class _Place:
    """Position of the elements of a tensor: nowhere where it has none, or is of the meta device."""

    __slots__ = ("begin", "device", "dims", "end", "run_bytes")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.device = tensor.device
        self.begin = tensor.data_ptr() if tensor.numel() else 0
        self.run_bytes = tensor.element_size()
        self.dims: list[tuple[int, int]] = []
        """(size, bytes between neighbors), outermost first, of what is no run of bytes."""
        if self.begin == 0:
            self.end = 0
            return
        if tensor.is_contiguous():
            self.run_bytes *= tensor.numel()
            self.end = self.begin + self.run_bytes
            return
        item_bytes = self.run_bytes
        strides = (
            (stride * item_bytes, size)
            for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        )
        for stride_bytes, size in sorted(strides):
            if size == 1:
                continue
            if stride_bytes == self.run_bytes and not self.dims:
                self.run_bytes *= size
            elif self.dims and stride_bytes == self.dims[0][0] * self.dims[0][1]:
                inner_size, inner_bytes = self.dims[0]
                self.dims[0] = (inner_size * size, inner_bytes)
            else:
                self.dims.insert(0, (size, stride_bytes))
        reach = sum((size - 1) * stride_bytes for size, stride_bytes in self.dims)
        self.end = self.begin + reach + self.run_bytes

    def as_array(self) -> np.ndarray[Any, Any]:
        """Bytes at the same addresses; never to be looked into."""
        stub = _Addresses()
        stub.__array_interface__ = {
            "data": (self.begin, True),
            "shape": (*(size for size, _ in self.dims), self.run_bytes),
            "strides": (*(stride_bytes for _, stride_bytes in self.dims), 1),
            "typestr": "|u1",
            "version": 3,
        }
        return np.asarray(stub)


class _Addresses:
    __array_interface__: dict[str, Any]


def _overlap(one: _Place, other: _Place) -> bool:
    """Return whether two places of one device have a byte in common."""
    if one.begin >= other.end or other.begin >= one.end:
        return False
    if not one.dims and not other.dims:
        return True
    rows = (
        _overlap_in_rows(one, other) if one.begin <= other.begin else _overlap_in_rows(other, one)
    )
    if rows is not None:
        return rows
    try:
        return bool(_shares_memory(one.as_array(), other.as_array(), max_work=_MOST_STEPS))
    except np.exceptions.TooHardError:
        return True


def _overlap_in_rows(lower: _Place, upper: _Place) -> bool | None:
    """The answer for pieces of one matrix, such as the columns of shards; None for others."""
    if len(lower.dims) > 1 or len(upper.dims) > 1:
        return None
    num_rows, row_bytes = (lower.dims or upper.dims)[0]
    if not lower.dims:
        num_rows = 1
    elif upper.dims and upper.dims[0][1] != row_bytes:
        return None
    if not 0 < max(lower.run_bytes, upper.run_bytes) <= row_bytes:
        return None
    # Row j of the upper lies `distance` behind row j + row of the lower, before the next one.
    row, distance = divmod(upper.begin - lower.begin, row_bytes)
    return (row < num_rows and distance < lower.run_bytes) or (
        row + 1 < num_rows and row_bytes - distance < upper.run_bytes
    )
