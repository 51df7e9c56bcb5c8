"""Intervals and boxes against plain lists of indices."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.intervals import Box, Interval, Intervals, Piece


def indices(held: Intervals) -> list[int]:
    """Global index of each local one."""
    assert [i.local_start for i in held] == list(
        itertools.accumulate((i.length for i in held), initial=0)
    )[: len(held)]
    return [i.global_start + k for i in held for k in range(i.length)]


def of_indices(places: list[int]) -> Intervals:
    """The intervals of a list of global indices."""
    held: list[Interval] = []
    for local, place in enumerate(places):
        held.append(Interval(place, local, 1))
    return tuple(held)


def cells(box: Box) -> list[tuple[int, ...]]:
    return list(itertools.product(*(range(*bounds) for bounds in box)))


def test_the_example_of_component_intervals() -> None:
    held = intervals.component_intervals([[2, 1], [3, 1]], 1)
    assert held == (Interval(2, 0, 3), Interval(6, 3, 1))
    assert intervals.component_intervals([[2, 1], [3, 1]], 0) == (
        Interval(0, 0, 2),
        Interval(5, 2, 1),
    )


def test_neighbouring_components_of_one_member_are_joined() -> None:
    assert intervals.component_intervals([[4, 3, 2]], 0) == (Interval(0, 0, 9),)


def test_cells_lie_in_the_order_of_the_rank() -> None:
    """Global 10..15 lie first here, then 2..5; cells begin at 0, 2, 4, 6, 10 and 12 of 16."""
    held = (Interval(10, 0, 6), Interval(2, 6, 4))
    cells = intervals.cells_at(held, [0, 2, 4, 6, 10, 12, 16])
    assert list(cells.items()) == [
        (4, slice(0, 2)),
        (5, slice(2, 6)),
        (1, slice(6, 8)),
        (2, slice(8, 10)),
    ]
    assert intervals.cells_at((), [0, 3]) == {}


@given(st.integers(0, 40), st.integers(1, 9), st.data())
def test_chunks_are_those_of_torch(size: int, num_chunks: int, data: st.DataObject) -> None:
    places = data.draw(st.permutations(range(size)))
    expected = list(torch.tensor(places, dtype=torch.int64).chunk(num_chunks))
    expected += [torch.empty(0, dtype=torch.int64)] * (num_chunks - len(expected))
    held = of_indices(list(places))
    for chunk_idx in range(num_chunks):
        cut = intervals.chunk(held, num_chunks, chunk_idx)
        assert indices(cut) == expected[chunk_idx].tolist()


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 5))
def test_strided_chunks_are_chunks_of_chunks(size: int, split: int, num_chunks: int) -> None:
    for chunk_idx in range(num_chunks):
        expected: list[int] = []
        for part in torch.arange(size).chunk(split):
            if part.numel():
                parts = part.chunk(num_chunks)
                expected += parts[chunk_idx].tolist() if chunk_idx < len(parts) else []
        cut = intervals.strided_chunk(intervals.whole(size), split, num_chunks, chunk_idx)
        assert indices(cut) == expected


subsets = st.lists(st.integers(0, 30), unique=True)


@given(subsets, subsets)
def test_runs_name_every_common_index_once(source: list[int], destination: list[int]) -> None:
    runs = intervals.intersect(of_indices(source), of_indices(destination))
    pairs = [(run.src_start + k, run.dst_start + k) for run in runs for k in range(run.length)]
    assert pairs == [
        (source.index(place), local) for local, place in enumerate(destination) if place in source
    ]
    for before, after in itertools.pairwise(runs):
        joinable = (
            before.src_start + before.length == after.src_start
            and before.dst_start + before.length == after.dst_start
        )
        assert not joinable


bounds = st.tuples(st.integers(0, 4), st.integers(0, 4)).map(lambda ab: (min(ab), max(ab)))
boxes = st.tuples(bounds, bounds, bounds)
filled_boxes = boxes.filter(lambda box: all(a < b for a, b in box))


@given(filled_boxes, boxes)
def test_what_is_left_of_a_box(box: Box, hole: Box) -> None:
    rest = intervals.subtract(box, hole)
    left = [cell for part in rest for cell in cells(part)]
    assert len(left) == len(set(left))
    assert set(left) == set(cells(box)) - set(cells(hole))


@given(st.lists(boxes, max_size=5))
def test_a_defect_is_found_where_there_is_one(given_boxes: list[Box]) -> None:
    counts = torch.zeros(4, 4, 4, dtype=torch.int64)
    for (a, b), (c, d), (e, f) in given_boxes:
        counts[a:b, c:d, e:f] += 1
    defect = intervals.find_defect((4, 4, 4), given_boxes)
    if defect is None:
        assert bool((counts == 1).all())
    else:
        (a, b), (c, d), (e, f) = defect.box
        found = counts[a:b, c:d, e:f]
        assert found.numel() > 0
        assert bool((found == 0).all() if defect.kind == "hole" else (found > 1).all())


@given(st.data())
def test_an_exact_cover_has_no_defect(data: st.DataObject) -> None:
    parts: list[Box] = [((0, 4), (0, 5), (0, 3))]
    for _ in range(data.draw(st.integers(0, 6))):
        idx = data.draw(st.integers(0, len(parts) - 1))
        part = parts.pop(idx)
        dim = data.draw(st.integers(0, 2))
        start, stop = part[dim]
        cut = data.draw(st.integers(start, stop))
        parts += [(*part[:dim], (start, cut), *part[dim + 1 :])]
        parts += [(*part[:dim], (cut, stop), *part[dim + 1 :])]
    assert intervals.find_defect((4, 5, 3), parts) is None


@pytest.mark.parametrize("shape", [(), (0,), (3, 0)])
def test_tensors_without_dimensions_or_elements(shape: tuple[int, ...]) -> None:
    assert intervals.find_defect(shape, [tuple((0, size) for size in shape)]) is None
    assert (intervals.find_defect(shape, []) is None) == (0 in shape)


def test_a_scalar_written_twice() -> None:
    assert intervals.find_defect((), [(), ()]) == intervals.Defect("overlap", ())


def test_pieces_join_only_where_both_sides_are_neighbours() -> None:
    def piece(src: Box, dst: Box) -> Piece:
        return Piece(src, dst)

    quarters = [
        piece(((a, a + 1), (b, b + 2)), ((a, a + 1), (b + 4, b + 6)))
        for a in range(2)
        for b in (0, 2)
    ]
    assert intervals.join_pieces(quarters) == [piece(((0, 2), (0, 4)), ((0, 2), (4, 8)))]
    apart = [piece(((0, 1),), ((0, 1),)), piece(((2, 3),), ((1, 2),))]
    assert intervals.join_pieces(apart) == apart
    assert intervals.join_pieces([]) == []
