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

# Bytes that wait in memory beside the model.
_CHUNK_BYTES = 4 << 20
# Bytes that stay in a core's own cache between two passes over them.
_CACHED_BYTES = 256 << 10
# Runs are read with what lies between them where that is less than reading them one by one would take.
_MAX_GAP_BYTES = 4096
# Written at a time, up to a multiple of it: then the system holds the file in larger pages, which it also reads
# faster. Pages of several MiB take it long to find where memory is short.
_WRITTEN_BYTES = 512 << 10

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Rectangle(NamedTuple):
    """A box of a tensor of a file.

    Args:
        start: Offset of the tensor's first byte in the file.
        shape: Shape that the tensor is viewed as.
        box: Box of that view.
        dtype: Dtype of the tensor.
    """

    start: int
    shape: tuple[int, ...]
    box: Box
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of the box alone."""
        return math.prod(stop - start for start, stop in self.box) * self.dtype.itemsize

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the box."""
        return tuple(stop - start for start, stop in self.box)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
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
        rectangle: Rectangle that is cut.
        element_bytes: Bytes that an element takes in memory; None for those of the file.
    """
    inner: Box = tuple((0, size) for size in rectangle.sizes)
    most = max(1, _CHUNK_BYTES // (element_bytes or rectangle.dtype.itemsize))
    for piece in cut_piece(Piece(inner, rectangle.box), most):
        yield (
            tuple(slice(start, stop) for start, stop in piece.src_box),
            rectangle._replace(box=piece.dst_box),
        )


def _waiting_bytes(rectangle: Rectangle) -> int:
    """Return the bytes that hold each of `_chunks`."""
    return min(rectangle.num_bytes, max(_CHUNK_BYTES, rectangle.dtype.itemsize))


class _Rows(NamedTuple):
    """Runs of neighbors in a file that follow each other at one distance.

    Args:
        offset: Offset of the first run.
        num_runs: Number of runs.
        run_bytes: Bytes of each run.
        step: Distance from one run to the next; `run_bytes` or more.
    """

    offset: int
    num_runs: int
    run_bytes: int
    step: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the runs alone."""
        return self.num_runs * self.run_bytes

    @property
    def stop(self) -> int:
        """Behind the last run."""
        return self.offset + (self.num_runs - 1) * self.step + self.run_bytes


def _rows(rectangle: Rectangle) -> Iterator[_Rows]:
    """Yield the runs of a rectangle in order, as many at a time as follow each other at one distance."""
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
    count, step = 1, run_bytes
    outer: list[range] = []
    for its_dim in reversed(range(dim)):
        start, stop = rectangle.box[its_dim]
        offset += start * stride
        if count == 1:
            count, step = stop - start, stride
        elif not outer and stride == count * step:
            count *= stop - start
        else:
            outer.append(range(0, (stop - start) * stride, stride))
        stride *= rectangle.shape[its_dim]
    for each in itertools.product(*reversed(outer)):
        yield _Rows(offset + sum(each), count, run_bytes, step)


def write_rectangle(descriptor: int, rectangle: Rectangle, tensor: torch.Tensor) -> int:
    """Write a tensor to its place in a file.

    Args:
        descriptor: Descriptor of the file, open for writing.
        rectangle: Place in the file.
        tensor: Tensor of the rectangle's sizes and dtype; any strides, any device.

    Returns:
        The CRC-32C of what was written, row by row.

    Raises:
        OSError: It could not be written.
    """
    plain = as_integers(tensor.detach().resolve_conj().resolve_neg())
    if plain.is_contiguous() and plain.device.type == "cpu":
        return _write_rows(descriptor, _memory(plain), rectangle, 0)
    crc = 0
    for within, part in _chunks(rectangle):
        crc = _write_rows(descriptor, _memory(plain[within].contiguous().cpu()), part, crc)
    return crc


def _write_rows(descriptor: int, memory: memoryview, rectangle: Rectangle, crc: int) -> int:
    """Write what lies in a row in memory; return its checksum, going on from that of what was before."""
    for rows in _rows(rectangle):
        if not memory:
            break
        if rows.step == rows.run_bytes:
            rows = rows._replace(num_runs=1, run_bytes=rows.num_bytes)
        most = max(1, _CACHED_BYTES // rows.run_bytes) * rows.run_bytes
        for first in range(0, rows.num_bytes, most):
            # Bytes that the checksum has read are in the cache when they are written.
            some = memory[first : min(first + most, rows.num_bytes)]
            offset = rows.offset + first // rows.run_bytes * rows.step
            if rows.num_runs == 1:
                crc = _write_checked(descriptor, some, offset, crc)
                continue
            crc = crc32c(some, crc)
            for start in range(0, len(some), rows.run_bytes):
                write_all(descriptor, some[start : start + rows.run_bytes], offset)
                offset += rows.step
        memory = memory[rows.num_bytes :]
    return crc


def _write_checked(descriptor: int, memory: memoryview, offset: int, crc: int) -> int:
    from moe_comm import _host

    while memory:
        some = memory[: _WRITTEN_BYTES - offset % _WRITTEN_BYTES]
        crc = crc32c(some, crc)
        write_all(descriptor, some, offset)
        memory, offset = memory[len(some) :], offset + len(some)
        if offset % _WRITTEN_BYTES == 0:
            # The disk works while the next is copied.
            _host.files.begin_writeback(descriptor, offset - _WRITTEN_BYTES, _WRITTEN_BYTES)
    return crc


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write bytes at a place of a file, however many the system takes at a time."""
    data = memoryview(data)
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
        descriptor: Descriptor of the file, open for reading.
        rectangle: Rectangle that is read.
        tensor: Tensor of the rectangle's sizes; any strides, any device. Written.
        factors: Callable that gives the factors of the elements of a box of the view, to multiply them by;
            None for none.

    Raises:
        EOFError: The file ends before.
        OSError: It could not be read.
    """
    is_alike = tensor.dtype == rectangle.dtype and factors is None
    target = as_integers(tensor) if is_alike else tensor
    if is_alike and target.is_contiguous() and target.device.type == "cpu":
        _read_rows(descriptor, _memory(target), rectangle)
        return
    waiting = torch.empty(_waiting_bytes(rectangle), dtype=torch.uint8, device="cpu")
    # Products are made of data, values and factors.
    for within, part in _chunks(rectangle, None if factors is None else 9):
        place = target[within]
        chunk = waiting[: part.num_bytes]
        _read_rows(descriptor, _memory(chunk), part)
        values = chunk.view(place.dtype if is_alike else rectangle.dtype).view(place.shape)
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
    waiting = bytearray(_waiting_bytes(rectangle))
    for _, part in _chunks(rectangle):
        chunk = memoryview(waiting)[: part.num_bytes]
        _read_rows(descriptor, chunk, part)
        crc = crc32c(chunk, crc)
    return crc


def _read_rows(descriptor: int, memory: memoryview, rectangle: Rectangle) -> None:
    """Read what is to lie in a row in memory."""
    from moe_comm import _host

    for rows in _rows(rectangle):
        if not memory:
            break
        its, memory = memory[: rows.num_bytes], memory[rows.num_bytes :]
        end = _host.files.read_rows(descriptor, *rows, its, _CACHED_BYTES, _MAX_GAP_BYTES)
        if end is not None:
            raise EOFError(f"the file ends at byte {end}, {rows.stop - end} bytes too early")
