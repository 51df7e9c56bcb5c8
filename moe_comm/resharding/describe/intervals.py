"""Elements of a whole tensor that a rank holds: intervals along each dimension, and boxes of them."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "Box",
    "Defect",
    "Interval",
    "Intervals",
    "Piece",
    "Run",
    "cells_at",
    "chunk",
    "component_intervals",
    "cut_piece",
    "find_defect",
    "intersect",
    "join_pieces",
    "join_runs",
    "num_elements",
    "strided_chunk",
    "subtract",
    "take",
    "total_length",
    "whole",
]


class Interval(NamedTuple):
    """Neighboring indices of one dimension, in the whole tensor and in a rank's own."""

    global_start: int
    local_start: int
    length: int


# Intervals of one dimension of one rank's tensor: by `local_start`, without a gap there, disjoint globally.
Intervals = tuple[Interval, ...]


class Run(NamedTuple):
    """Neighboring indices of one dimension that two ranks hold, in the tensor of each."""

    src_start: int
    dst_start: int
    length: int


# One (start, stop) per dimension.
Box = tuple[tuple[int, int], ...]


class Piece(NamedTuple):
    """Elements that two ranks hold: equal boxes of their tensors, except for where they begin."""

    src_box: Box
    dst_box: Box


class Defect(NamedTuple):
    """Defect of boxes that should cover a tensor exactly once."""

    kind: str
    box: Box


def num_elements(shape: Iterable[int]) -> int:
    """Product of the sizes; 1 for no dimensions."""
    product = 1
    for size in shape:
        product *= size
    return product


def whole(size: int) -> Intervals:
    """All of a dimension."""
    return (Interval(0, 0, size),) if size else ()


def total_length(intervals: Intervals) -> int:
    """Size of the dimension in the rank's own tensor."""
    return sum(interval.length for interval in intervals)


def _joined(parts: Iterable[tuple[int, int]]) -> Intervals:
    """Intervals of `(global_start, length)` parts that lie one after the other locally."""
    intervals: list[Interval] = []
    local_start = 0
    for global_start, length in parts:
        if not length:
            continue
        last = intervals[-1] if intervals else None
        if last is not None and last.global_start + last.length == global_start:
            intervals[-1] = Interval(last.global_start, last.local_start, last.length + length)
        else:
            intervals.append(Interval(global_start, local_start, length))
        local_start += length
    return tuple(intervals)


def component_intervals(sizes: Sequence[Sequence[int]], member_idx: int) -> Intervals:
    """Return the intervals that a member of a group holds of components packed one after the other.

    Args:
        sizes: Sizes of each member's part of each component.
        member_idx: The member.

    Example:
        `component_intervals([[2, 1], [3, 1]], 1)`: the first component has 5 elements, of which
        member 1 holds the last 3; the second has 2, of which it holds the last: globally 2..4
        and 6.
    """
    parts = []
    component_start = 0
    for component_idx, length in enumerate(sizes[member_idx]):
        before = sum(member[component_idx] for member in sizes[:member_idx])
        parts.append((component_start + before, length))
        component_start += sum(member[component_idx] for member in sizes)
    return _joined(parts)


def take(intervals: Intervals, start: int, stop: int) -> Intervals:
    """Return the part of local indices `[start, stop)`, as the intervals of a tensor of just these."""
    return _joined(_parts(intervals, start, stop))


def _parts(intervals: Intervals, start: int, stop: int) -> Iterator[tuple[int, int]]:
    for interval in intervals:
        first = max(start, interval.local_start)
        last = min(stop, interval.local_start + interval.length)
        if first < last:
            yield interval.global_start + first - interval.local_start, last - first


def _chunk_bounds(size: int, num_chunks: int, chunk_idx: int) -> tuple[int, int]:
    """Bounds of a chunk as `torch.chunk` cuts: all but the last non-empty ones are equal."""
    length = -(-size // num_chunks)
    return min(size, length * chunk_idx), min(size, length * (chunk_idx + 1))


def chunk(intervals: Intervals, num_chunks: int, chunk_idx: int) -> Intervals:
    """A chunk of what is held, as `torch.chunk` cuts it."""
    return take(intervals, *_chunk_bounds(total_length(intervals), num_chunks, chunk_idx))


def strided_chunk(
    intervals: Intervals, split_factor: int, num_chunks: int, chunk_idx: int
) -> Intervals:
    """Chunk `chunk_idx` of each of `split_factor` chunks, as `_StridedShard` of DTensor cuts."""
    size = total_length(intervals)
    parts: list[tuple[int, int]] = []
    for split_idx in range(split_factor):
        split_start, split_stop = _chunk_bounds(size, split_factor, split_idx)
        start, stop = _chunk_bounds(split_stop - split_start, num_chunks, chunk_idx)
        parts.extend(_parts(intervals, split_start + start, split_start + stop))
    return _joined(parts)


def cells_at(held: Intervals, cuts: Sequence[int]) -> dict[int, slice]:
    """Return the local indices of the cells that are held, by number, in the order they lie here.

    Args:
        held: Intervals that begin and end at cuts.
        cuts: Global indices where cells begin, ascending, and behind them the size.
    """
    cells: dict[int, slice] = {}
    for start, local_start, length in held:
        first = bisect.bisect_left(cuts, start)
        for cell in range(first, bisect.bisect_left(cuts, start + length)):
            shift = local_start - start
            cells[cell] = slice(cuts[cell] + shift, cuts[cell + 1] + shift)
    return cells


def intersect(source: Intervals, destination: Intervals) -> tuple[Run, ...]:
    """Indices that both hold, joined where they are neighbors on both sides, by `dst_start`."""
    by_global = sorted(source), sorted(destination)
    runs: list[Run] = []
    src_idx = dst_idx = 0
    while src_idx < len(source) and dst_idx < len(destination):
        src, dst = by_global[0][src_idx], by_global[1][dst_idx]
        start = max(src.global_start, dst.global_start)
        src_stop, dst_stop = src.global_start + src.length, dst.global_start + dst.length
        stop = min(src_stop, dst_stop)
        if start < stop:
            runs.append(
                Run(
                    src.local_start + start - src.global_start,
                    dst.local_start + start - dst.global_start,
                    stop - start,
                )
            )
        src_idx += src_stop == stop
        dst_idx += dst_stop == stop
    return join_runs(runs)


def join_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs by `dst_start`, joined where they are neighbors on both sides."""
    joined: list[Run] = []
    for run in sorted(runs, key=lambda run: run.dst_start):
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.src_start + last.length == run.src_start
            and last.dst_start + last.length == run.dst_start
        ):
            joined[-1] = Run(last.src_start, last.dst_start, last.length + run.length)
        else:
            joined.append(run)
    return tuple(joined)


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes of the elements of `box` that are not in `hole`."""
    if any(max(a, c) >= min(b, d) for (a, b), (c, d) in zip(box, hole, strict=True)):
        return [box]
    rest: list[Box] = []
    for dim, ((start, stop), (hole_start, hole_stop)) in enumerate(zip(box, hole, strict=True)):
        parts = (start, min(stop, hole_start)), (max(start, hole_stop), stop)
        rest += [(*box[:dim], part, *box[dim + 1 :]) for part in parts if part[0] < part[1]]
        box = (*box[:dim], (max(start, hole_start), min(stop, hole_stop)), *box[dim + 1 :])
    return rest


def join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """The same elements in fewer pieces: neighbors along one dimension, on both sides, joined."""
    result = sorted(pieces, key=lambda piece: piece.dst_box)
    num_dims = len(result[0].dst_box) if result else 0
    for dim in reversed(range(num_dims)):
        by_rest: dict[tuple[object, ...], list[Piece]] = {}
        for piece in result:
            rest = tuple(side[:dim] + side[dim + 1 :] for side in piece)
            by_rest.setdefault(rest, []).append(piece)
        result = [
            Piece(
                (*group[0].src_box[:dim], (src, src + length), *group[0].src_box[dim + 1 :]),
                (*group[0].dst_box[:dim], (dst, dst + length), *group[0].dst_box[dim + 1 :]),
            )
            for group in by_rest.values()
            for src, dst, length in join_runs(
                Run(piece.src_box[dim][0], piece.dst_box[dim][0], _length(piece.dst_box[dim]))
                for piece in group
            )
        ]
    return result


def cut_piece(piece: Piece, max_elements: int) -> Iterator[Piece]:
    """A piece in parts of at most so many elements, by `dst_box`: its outermost dimensions are cut."""
    sizes = [_length(bounds) for bounds in piece.dst_box]
    if num_elements(sizes) <= max_elements:
        yield piece
        return
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    step = max(1, max_elements // num_elements(sizes[dim + 1 :]))
    for start in range(0, sizes[dim], step):
        length = min(step, sizes[dim] - start)
        part = (
            (*box[:dim], (box[dim][0] + start, box[dim][0] + start + length), *box[dim + 1 :])
            for box in piece
        )
        yield from cut_piece(Piece(*part), max_elements)


def _length(bounds: tuple[int, int]) -> int:
    return bounds[1] - bounds[0]


def find_defect(shape: Sequence[int], boxes: Sequence[Box]) -> Defect | None:
    """The first elements of a tensor that boxes cover not at all ("hole") or twice ("overlap").

    Args:
        shape: Shape of the tensor.
        boxes: Boxes within its bounds.

    Returns:
        None where every element is covered exactly once.
    """
    if num_elements(shape) == 0:
        return None
    filled = [box for box in boxes if all(start < stop for start, stop in box)]
    return _find_defect(tuple(shape), filled, 0)


def _find_defect(shape: tuple[int, ...], boxes: list[Box], dim: int) -> Defect | None:
    """`find_defect` from dimension `dim` on, of boxes that share the dimensions before it."""
    rest: Box = tuple((0, size) for size in shape[dim:])
    if not boxes:
        return Defect("hole", rest)
    if len(boxes) == 1 and boxes[0][dim:] == rest:
        return None
    if dim == len(shape):
        return Defect("overlap", ())
    starts: dict[int, list[Box]] = {}
    for box in boxes:
        starts.setdefault(box[dim][0], []).append(box)
    cuts = sorted({0, shape[dim], *itertools.chain.from_iterable(box[dim] for box in boxes)})
    active: list[Box] = []
    for start, stop in itertools.pairwise(cuts):
        active = [box for box in active if box[dim][1] > start] + starts.get(start, [])
        defect = _find_defect(shape, active, dim + 1)
        if defect is not None:
            return Defect(defect.kind, ((start, stop), *defect.box))
    return None
