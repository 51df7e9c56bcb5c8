"""Parts of a tensor that deltas have: runs of elements that lie over those of older files."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from moe_comm.checkpoints.blocks import Segment, boxes_of_run, num_neighbors, place_of
from moe_comm.checkpoints.rectangles import Rectangle
from moe_comm.resharding.describe.intervals import Box


class StoredRun(NamedTuple):
    """Elements of a segment in a file.

    Args:
        segment: Segment of which they are.
        start: First element.
        stop: End of the elements, behind the last.
        path: Path of the file.
        offset: Offset of the first element's first byte.
    """

    segment: Segment
    start: int
    stop: int
    path: Path
    offset: int

    def part(self, start: int, stop: int) -> StoredRun:
        """Return some of the elements."""
        offset = self.offset + (start - self.start) * self.segment.itemsize
        return self._replace(start=start, stop=stop, offset=offset)


class OverlaidBox(NamedTuple):
    """A part of a box that is asked for, where a delta has it.

    Args:
        path: Path of the file.
        rectangle: Rectangle of that file.
        box: The same, of the view that was asked for.
    """

    path: Path
    rectangle: Rectangle
    box: Box

    def within(self, box: Box) -> tuple[slice, ...]:
        """Return where it lies in the box that was asked for."""
        return tuple(
            slice(start - first, stop - first)
            for (start, stop), (first, _) in zip(self.box, box, strict=True)
        )

    def factors(
        self, view: tuple[int, ...], factors_at: Callable[[tuple[int, ...], Box], torch.Tensor]
    ) -> Callable[[tuple[int, ...], Box], torch.Tensor]:
        """Return what gives the factors of a box of `rectangle`.

        Args:
            view: View that was asked for.
            factors_at: Callable that gives the factors of a box of it.
        """
        shifts = [
            its - inner for (its, _), (inner, _) in zip(self.box, self.rectangle.box, strict=True)
        ]

        def shifted(_: tuple[int, ...], box: Box) -> torch.Tensor:
            return factors_at(
                view,
                tuple(
                    (start + by, stop + by) for (start, stop), by in zip(box, shifts, strict=True)
                ),
            )

        return shifted


class Overlay:
    """Runs of a tensor.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        layers: Runs of each delta, the oldest first.
        is_whole: The oldest one has all elements.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        layers: Sequence[Sequence[StoredRun]],
        *,
        is_whole: bool,
    ) -> None:
        self._dtype = dtype
        keys = {run.segment.key for layer in layers for run in layer}
        if _are_disjoint([*keys]):
            self._runs = [run for key in keys for run in _newest(layers, key)]
            num_elements = sum(run.stop - run.start for run in self._runs)
            is_whole = is_whole or num_elements == math.prod(shape)
        else:
            self._runs = [run for layer in layers for run in layer]
        self.is_whole = is_whole
        self._starts = [run.start for run in self._runs] if keys == {((), ())} else None

    def runs(self) -> Sequence[StoredRun]:
        """Return the runs; where some overlap, the last one counts."""
        return self._runs

    def boxes(self, view: tuple[int, ...], box: Box) -> Iterator[OverlaidBox]:
        """Yield where elements of a box lie, in the order in which they are to be read.

        Args:
            view: Shape that the tensor is viewed as.
            box: Box of the view, with elements.
        """
        runs = self._runs
        if self._starts is not None:
            low, high = (
                place_of(view, box, element)
                for element in (0, math.prod(stop - start for start, stop in box) - 1)
            )
            first = max(0, bisect.bisect_right(self._starts, low) - 1)
            runs = runs[first : bisect.bisect_right(self._starts, high)]
        for run in runs:
            if run.segment.view != view or _overlap(run.segment.box, box):
                yield from self._boxes_of(run, view, box)

    def _boxes_of(self, run: StoredRun, view: tuple[int, ...], box: Box) -> Iterator[OverlaidBox]:
        segment = run.segment
        if segment.view not in ((), view):
            # Elements that are neighbors in this view as well as in that of the run.
            count = num_neighbors(segment.view, segment.box)
            for number in range(run.start // count, -(-run.stop // count)):
                first, last = max(run.start, number * count), min(run.stop, (number + 1) * count)
                shift = place_of(segment.view, segment.box, first) - first
                row = run.part(first, last)._replace(
                    segment=Segment(segment.tensor, (), (), 0, 0, segment.itemsize),
                    start=first + shift,
                    stop=last + shift,
                )
                yield from self._boxes_of(row, view, box)
            return
        sizes = segment.sizes if segment.view else view
        corner = [start for start, _ in segment.box] if segment.view else [0] * len(view)
        # The offset is that of a file in which all of the segment lay.
        begin = run.offset - run.start * segment.itemsize
        for inner in boxes_of_run(sizes, run.start, run.stop):
            common = tuple(
                (max(start + first, low), min(stop + first, high))
                for (start, stop), first, (low, high) in zip(inner, corner, box, strict=True)
            )
            if all(start < stop for start, stop in common):
                within = tuple(
                    (start - first, stop - first)
                    for (start, stop), first in zip(common, corner, strict=True)
                )
                yield OverlaidBox(run.path, Rectangle(begin, sizes, within, self._dtype), common)


def _overlap(one: Box, other: Box) -> bool:
    return all(max(a[0], b[0]) < min(a[1], b[1]) for a, b in zip(one, other, strict=True))


def _are_disjoint(keys: Sequence[tuple[tuple[int, ...], Box]]) -> bool:
    """Return whether no element has a number by two of the keys."""
    return all(
        one_view == other_view and not _overlap(one_box, other_box)
        for (one_view, one_box), (other_view, other_box) in itertools.combinations(keys, 2)
    )


def _newest(
    layers: Sequence[Sequence[StoredRun]], key: tuple[tuple[int, ...], Box]
) -> list[StoredRun]:
    """Runs of one key, each from the newest layer that has it, in order."""
    kept: list[StoredRun] = []
    for layer in reversed(layers):
        stops = [run.stop for run in kept]
        fresh = []
        for run in layer:
            if run.segment.key != key:
                continue
            start = run.start
            for number in range(bisect.bisect_right(stops, start), len(kept)):
                newer = kept[number]
                if newer.start >= run.stop:
                    break
                if start < newer.start:
                    fresh.append(run.part(start, newer.start))
                start = newer.stop
            if start < run.stop:
                fresh.append(run.part(start, run.stop))
        kept = sorted([*kept, *fresh], key=lambda run: run.start)
    return kept
