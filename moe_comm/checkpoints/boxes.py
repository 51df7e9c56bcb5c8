"""Boxes of whole tensors that lie in a rank's memory, so that those of all ranks are disjoint or equal."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.intervals import Box, Intervals
from moe_comm.resharding.describe.tensor_layout import Layout, Shape


class HeldBox(NamedTuple):
    """A box of a whole tensor, and where it lies in the memory of one that a rank holds.

    Args:
        box: Box of the whole tensor.
        start: Offset of its first element behind the first of the rank's tensor, in elements.
        strides: Strides of its dimensions, in elements.
    """

    box: Box
    start: int
    strides: tuple[int, ...]


class _Run(NamedTuple):
    """Neighboring indices of one dimension: where they begin, how many, and the same in memory."""

    first: int
    length: int
    start: int
    stride: int


def _joined(outer: _Run, inner: _Run, inner_size: int) -> list[_Run]:
    """Indices of two dimensions as of the one that they cut, in as few runs as memory allows."""
    is_whole = inner.length == inner_size
    if outer.length == 1 or (is_whole and outer.stride == inner.stride * inner_size):
        length = outer.length * inner.length
        first, start = outer.first * inner_size + inner.first, outer.start + inner.start
        return [_Run(first, length, start, inner.stride)]
    return [
        _Run(
            (outer.first + i) * inner_size + inner.first,
            inner.length,
            outer.start + i * outer.stride + inner.start,
            inner.stride,
        )
        for i in range(outer.length)
    ]


def boxes_of(layout: Layout, strides: Sequence[int], shape: Shape) -> list[HeldBox]:
    """Return the boxes of a rank's tensor.

    Args:
        layout: Layout of the tensor; holds an element at least.
        strides: Strides of the tensor viewed as `layout.view`.
        shape: Shape of the whole tensor; `layout.global_shape` cuts its dimensions more finely, or is the
            same.
    """
    finer = [
        (size, held, stride)
        for size, held, stride in zip(layout.global_shape, layout.dims, strides, strict=True)
        if size != 1 or layout.global_shape == shape
    ]
    runs_by_dim: list[list[_Run]] = []
    for size in shape:
        factors: list[tuple[int, Intervals, int]] = []
        reached = 1
        while reached < size or (layout.global_shape == shape and not factors):
            factors.append(finer.pop(0))
            reached *= factors[-1][0]
        runs, inner_size = [_Run(0, 1, 0, 1)], 1
        for number, (factor, held, stride) in enumerate(reversed(factors)):
            own = [_Run(part[0], part[2], part[1] * stride, stride) for part in held]
            runs = (
                [run for one in own for inner in runs for run in _joined(one, inner, inner_size)]
                if number
                else own
            )
            inner_size *= factor
        runs_by_dim.append(runs)
    return [
        HeldBox(
            tuple((run.first, run.first + run.length) for run in runs),
            sum(run.start for run in runs),
            tuple(run.stride for run in runs),
        )
        for runs in itertools.product(*runs_by_dim)
    ]


def is_within(inner: Box, outer: Box) -> bool:
    """Return whether all of a box is in another."""
    return all(a <= c and d <= b for (c, d), (a, b) in zip(inner, outer, strict=True))


def _overlap(one: Box, other: Box) -> Box | None:
    box = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return box if all(start < stop for start, stop in box) else None


def cells_of(shape: Shape, boxes: Iterable[Box]) -> list[Box]:
    """Return disjoint boxes of which each of `boxes` is a union.

    Args:
        shape: Shape of the whole tensor.
        boxes: Boxes, which may overlap; the same order of the same boxes gives the same cells on all ranks.
    """
    distinct = list(dict.fromkeys(boxes))
    if intervals.find_defect(shape, distinct) is None:
        return distinct
    cells: list[Box] = []
    for box in distinct:
        rest = [box]
        kept: list[Box] = []
        for cell in cells:
            shared = _overlap(cell, box)
            if shared is None:
                kept.append(cell)
                continue
            kept += [shared, *intervals.subtract(cell, box)]
            rest = [part for some in rest for part in intervals.subtract(some, shared)]
        cells = kept + rest
    return cells


def part_of(tensor: torch.Tensor, held: HeldBox, cell: Box) -> torch.Tensor:
    """Return a view of the memory in which a cell of a held box lies.

    Args:
        tensor: Tensor that `held` is a box of.
        held: A box of it.
        cell: Cell in that box.
    """
    offset = held.start + sum(
        (start - first) * stride
        for (start, _), (first, _), stride in zip(cell, held.box, held.strides, strict=True)
    )
    sizes = [stop - start for start, stop in cell]
    return tensor.as_strided(sizes, held.strides, int(tensor.storage_offset()) + offset)
