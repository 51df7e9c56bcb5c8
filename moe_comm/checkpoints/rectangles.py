"""Rectangles of tensors of any strides, to and from where they lie in a file."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from moe_comm.checkpoints.tensor_file import crc32c
from moe_comm.resharding.describe.intervals import Box, Piece, cut_piece
from moe_comm.tensors.memory import bytes_of

__all__ = ["Rectangle", "read_rectangle", "rectangle_checksum", "write_rectangle"]

# What waits in memory beside the model.
_CHUNK_BYTES = 16 << 20
# Runs are read with what lies between them where that is less than reading them one by one would take.
_MAX_GAP_BYTES = 4096

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rectangle(NamedTuple):
    """A box of a tensor of a file.

    Args:
        start: Of the tensor's first byte in the file.
        shape: That the tensor is viewed as.
        box: Of that view.
        dtype: Of the tensor.
    """

    start: int
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Of the box alone."""
        return math.prod(stop - start for start, stop in self.box) * self.dtype.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """Of the box."""
        return tuple(stop - start for start, stop in self.box)


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes with a dtype that every operation of torch has."""
    return tensor.view(_INTEGERS[tensor.element_size()])


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in CPU memory."""
    data: Any = bytes_of(tensor).numpy()
    return memoryview(data)


def _chunks(
    rectangle: Rectangle, element_bytes: int | None = None
) -> Iterator[tuple[tuple[slice, ...], Rectangle]]:
    """Parts of at most `_CHUNK_BYTES` in order: where each lies in the box, and in the file.

    Args:
        rectangle: What is cut.
        element_bytes: That an element takes in memory; None for those of the file.
    """
    inner: Box = tuple((0, size) for size in rectangle.sizes)
    most = max(1, _CHUNK_BYTES // (element_bytes or rectangle.dtype.itemsize))
    for piece in cut_piece(Piece(inner, rectangle.box), most):
        yield (
            tuple(slice(start, stop) for start, stop in piece.src_box),
            rectangle._replace(box=piece.dst_box),
        )


def _runs(rectangle: Rectangle) -> tuple[int, range | list[int]]:
    """Bytes of each run of neighbors in the file, and where the runs begin."""
    run_bytes = rectangle.dtype.itemsize
    dim = len(rectangle.shape)
    stride = run_bytes
    offset = rectangle.start
    while dim:
        dim -= 1
        start, stop = rectangle.box[dim]
        run_bytes *= stop - start
        offset += start * stride
        stride *= rectangle.shape[dim]
        if stop - start < rectangle.shape[dim]:
            break
    steps: list[range] = []
    for outer in reversed(range(dim)):
        start, stop = rectangle.box[outer]
        offset += start * stride
        steps.append(range(0, (stop - start) * stride, stride))
        stride *= rectangle.shape[outer]
    if len(steps) == 1:
        return run_bytes, range(offset, offset + steps[0].stop, steps[0].step)
    steps.reverse()
    return run_bytes, [offset + sum(each) for each in itertools.product(*steps)]


def write_rectangle(descriptor: int, rectangle: Rectangle, tensor: torch.Tensor) -> int:
    """Write a tensor to its place in a file.

    Args:
        descriptor: Of the file, open for writing.
        rectangle: Where it goes.
        tensor: Of the rectangle's sizes and dtype; any strides, any device.

    Returns:
        The CRC-32C of what was written, row by row.

    Raises:
        OSError: It could not be written.
    """
    crc = 0
    plain = _as_integers(tensor.detach().resolve_conj().resolve_neg())
    for within, part in _chunks(rectangle):
        chunk = _memory(plain[within].contiguous().cpu())
        crc = crc32c(chunk, crc)
        run_bytes, offsets = _runs(part)
        for number, offset in enumerate(offsets):
            _write_all(descriptor, chunk[number * run_bytes : (number + 1) * run_bytes], offset)
    return crc


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def read_rectangle(
    descriptor: int,
    rectangle: Rectangle,
    tensor: torch.Tensor,
    factors: Callable[[tuple[int, ...], Box], torch.Tensor] | None = None,
) -> None:
    """Read a rectangle of a file into a tensor, whose dtype its values take.

    Args:
        descriptor: Of the file, open for reading.
        rectangle: What is read.
        tensor: Of the rectangle's sizes; any strides, any device. Written.
        factors: Of the elements of a box of the view, which they are multiplied by; None for none.

    Raises:
        EOFError: The file ends before.
        OSError: It could not be read.
    """
    is_alike = tensor.dtype == rectangle.dtype and factors is None
    target = _as_integers(tensor) if is_alike else tensor
    # Products are made of data, values and factors.
    for within, part in _chunks(rectangle, None if factors is None else 9):
        place = target[within]
        is_in_place = is_alike and place.is_contiguous() and place.device.type == "cpu"
        chunk = (
            place if is_in_place else torch.empty(part.num_bytes, dtype=torch.uint8, device="cpu")
        )
        _read_runs(descriptor, _memory(chunk), part)
        if not is_in_place:
            values = chunk.view(place.dtype if is_alike else rectangle.dtype)
            values = values.view(place.shape)
            if factors is not None:
                values = values.float().mul_(factors(part.shape, part.box))
            place.copy_(values)


def rectangle_checksum(descriptor: int, rectangle: Rectangle) -> int:
    """Return the CRC-32C of a rectangle of a file, row by row, as `write_rectangle` does.

    Raises:
        EOFError: The file ends before.
        OSError: It could not be read.
    """
    crc = 0
    for _, part in _chunks(rectangle):
        chunk = bytearray(part.num_bytes)
        _read_runs(descriptor, memoryview(chunk), part)
        crc = crc32c(chunk, crc)
    return crc


def _read_runs(descriptor: int, memory: memoryview, rectangle: Rectangle) -> None:
    run_bytes, offsets = _runs(rectangle)
    first = offsets[0]
    num_runs = len(offsets)
    if isinstance(offsets, range) and num_runs > 1 and offsets.step - run_bytes <= _MAX_GAP_BYTES:
        # Whole rows, of which a part is kept; in turns, so that no more waits than is asked for.
        rows = torch.empty(
            (max(1, _CHUNK_BYTES // offsets.step), offsets.step), dtype=torch.uint8, device="cpu"
        )
        kept: Any = torch.frombuffer(memory, dtype=torch.uint8).view(num_runs, run_bytes)
        for start in range(0, num_runs, len(rows)):
            count = min(len(rows), num_runs - start)
            num_bytes = (count - 1) * offsets.step + run_bytes
            _read_all(descriptor, _memory(rows)[:num_bytes], first + start * offsets.step)
            kept[start : start + count] = rows[:count, :run_bytes]
        return
    for number, offset in enumerate(offsets):
        _read_all(descriptor, memory[number * run_bytes : (number + 1) * run_bytes], offset)


def _read_all(descriptor: int, memory: memoryview, offset: int) -> None:
    while memory:
        count = os.preadv(descriptor, [memory], offset)
        if not count:
            raise EOFError(f"the file ends at byte {offset}, {len(memory)} bytes too early")
        memory, offset = memory[count:], offset + count
