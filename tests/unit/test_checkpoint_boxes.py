"""Boxes of a whole tensor that lie in a rank's memory, against every element of it."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from moe_comm.checkpoints.boxes import HeldBox, boxes_of, cells_of, is_within, part_of
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.intervals import Box, Interval
from moe_comm.resharding.describe.tensor_layout import Layout
from tests.helpers.checkpoint_layouts import intervals_of
from tests.helpers.checkpoint_layouts import part_of as part_of_whole


def _elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(start, stop) for start, stop in box)))


def _drawn_layout(rng: random.Random, shape: tuple[int, ...]) -> Layout:
    dims: list[intervals.Intervals] = []
    for size in shape:
        cuts = sorted(rng.sample(range(1, size), min(size - 1, rng.randint(0, 2))))
        parts = [(a, b - a) for a, b in itertools.pairwise([0, *cuts, size])]
        dims.append(intervals_of(rng.sample(parts, rng.randint(1, len(parts)))))
    return Layout(tuple(map(intervals.total_length, dims)), shape, tuple(dims))


@pytest.mark.parametrize("seed", range(30))
def test_boxes_hold_what_the_layout_says(seed: int) -> None:
    """Of a tensor of any strides, whose layout cuts dimensions more finely than the whole tensor has."""
    rng = random.Random(seed)
    finer = tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(0, 4)))
    shape: list[int] = []
    for size in finer:
        if shape and rng.random() < 0.5:
            shape[-1] *= size
        else:
            shape.append(size)
    layout = _drawn_layout(rng, finer)
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    order = rng.sample(range(len(finer)), len(finer))
    memory = torch.full((3 + 2 * torch.Size(layout.view).numel(),), -1.0)
    laid = memory[3:][: torch.Size(layout.view).numel()].view([layout.view[dim] for dim in order])
    tensor = laid.permute([order.index(dim) for dim in range(len(finer))])
    tensor.copy_(part_of_whole(whole, finer, layout.dims))
    boxes = boxes_of(layout, tensor.stride(), tuple(shape))
    assert sum(len(_elements(held.box)) for held in boxes) == tensor.numel()
    found = set().union(*(_elements(held.box) for held in boxes))
    assert len(found) == tensor.numel()
    for held in boxes:
        within = whole[tuple(slice(*bounds) for bounds in held.box)]
        assert torch.equal(part_of(tensor, held, held.box), within)
        cell = tuple((rng.randint(start, stop - 1), stop) for start, stop in held.box)
        within = whole[tuple(slice(*bounds) for bounds in cell)]
        assert torch.equal(part_of(tensor, held, cell), within)


def test_runs_that_memory_keeps_together_are_one_box() -> None:
    """A checkpoint has as many chunks as there are boxes: rows of a fused tensor are one, not four."""
    dims = (Interval(1, 0, 2),), intervals.whole(2), intervals.whole(5)
    layout = Layout((2, 2, 5), (4, 2, 5), dims)
    assert boxes_of(layout, (10, 5, 1), (8, 5)) == [HeldBox(((2, 6), (0, 5)), 0, (5, 1))]
    # The same rows, each pair swapped with its neighbor in memory.
    apart = boxes_of(layout, (5, 10, 1), (8, 5))
    assert [held.box[0] for held in apart] == [(2, 4), (4, 6)]
    assert [held.strides for held in apart] == [(10, 1)] * 2


@pytest.mark.parametrize("seed", range(30))
def test_cells_are_disjoint_and_make_up_every_box(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.choice((1, 3, 5)) for _ in range(rng.randint(1, 3)))
    boxes: list[Box] = []
    for _ in range(rng.randint(1, 5)):
        ends = (sorted(rng.sample(range(size + 1), 2)) for size in shape)
        boxes.append(tuple((start, stop) for start, stop in ends))
    cells = cells_of(shape, boxes)
    for one, other in itertools.combinations(cells, 2):
        assert not _elements(one) & _elements(other)
    for box in boxes:
        parts = [cell for cell in cells if is_within(cell, box)]
        assert sum(len(_elements(part)) for part in parts) == len(_elements(box))
    assert set().union(*map(_elements, cells)) == set().union(*map(_elements, boxes))


def test_boxes_that_do_not_overlap_stay_as_they_are() -> None:
    halves: list[Box] = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    assert cells_of((4, 3), [*halves, halves[0]]) == halves
