from __future__ import annotations

import pytest
import torch

from moe_comm.backends import admission
from moe_comm.backends.admission import CapacityRequest
from moe_comm.backends.routing import Placement, RowOrder
from moe_comm.config import Capacity, Layout
from moe_comm.errors import CapacityError

# Rank 0 has experts 0 and 1, rank 1 has expert 2.
PLACEMENT = Placement.of(torch.tensor([0, 0, 1]), 2)
ALIGNED = RowOrder(Layout.EXPERT_MAJOR, 4)
# Two ranks: choices of experts 0 to 2; tokens for ranks 0 and 1; rows allowed; choices per token.
COUNTS = [[3, 2, 4, 4, 3, -1, 2], [5, 0, 1, 5, 1, -1, 3]]


def asked(
    counts: list[list[int]] = COUNTS,
    num_rows: tuple[int, int] = (-1, -1),
    masked: tuple[int, ...] = (),
) -> CapacityRequest:
    matrix = torch.tensor(counts, dtype=torch.int32)
    matrix[:, 5] = torch.tensor(num_rows)
    is_masked = torch.zeros(2, dtype=torch.bool)
    is_masked[list(masked)] = True
    return CapacityRequest(matrix, is_masked)


def test_ask_appends_the_limit_and_the_width() -> None:
    topk_idx = torch.tensor([[0, 2], [1, -1]])
    assert admission.ask(topk_idx, PLACEMENT, None).tolist() == [1, 1, 1, 2, 1, -1, 2]
    limit = Capacity(num_rows=8)
    assert admission.ask(topk_idx, PLACEMENT, limit).tolist() == [1, 1, 1, 2, 1, 8, 2]
    limit = Capacity(num_rows_per_expert=8, on_overflow="drop")
    assert admission.ask(topk_idx, PLACEMENT, limit).tolist() == [1, 1, 1, 2, 1, -1, 2]


@pytest.mark.parametrize("layout", list(Layout))
def test_without_limits_everything_is_kept(layout: Layout) -> None:
    admitted = admission.admit(asked(), PLACEMENT, RowOrder(layout, 1, 40), None)
    assert admitted.counts.tolist() == COUNTS
    assert admitted.counts.dtype is torch.int32
    assert admitted.num_dropped_per_expert.tolist() == [0, 0, 0]
    rows = {Layout.EXPERT_MAJOR: [10, 5], Layout.RANK_MAJOR: [9, 4], Layout.LOW_LATENCY: [80, 40]}
    assert admitted.num_required_rows.tolist() == rows[layout]


def test_an_expert_keeps_its_first_rows() -> None:
    limit = Capacity(num_rows_per_expert=4, on_overflow="drop")
    admitted = admission.admit(asked(), PLACEMENT, ALIGNED, limit)
    # Expert 0: three of rank 0, one of rank 1. Expert 2: four of rank 0; rank 1 sends rank 1 nothing.
    assert admitted.counts.tolist() == [[3, 2, 4, 4, 3, -1, 2], [1, 0, 0, 5, 0, -1, 3]]
    assert admitted.num_dropped_per_expert.tolist() == [4, 0, 1]
    assert admitted.num_required_rows.tolist() == [12, 8]


def test_a_window_keeps_what_lies_in_it() -> None:
    limit = Capacity(num_rows=8, on_overflow="drop")  # only what is equal on every rank is read
    admitted = admission.admit(asked(num_rows=(8, 4)), PLACEMENT, ALIGNED, limit)
    # Rank 0: expert 0 fills rows 0 to 7 with all its eight, so that nothing of expert 1 is kept.
    assert admitted.counts.tolist() == [[3, 0, 4, 4, 3, 8, 2], [5, 0, 0, 5, 0, 4, 3]]
    assert admitted.num_dropped_per_expert.tolist() == [0, 2, 1]
    admitted = admission.admit(asked(num_rows=(4, 0)), PLACEMENT, ALIGNED, limit)
    assert admitted.counts.tolist() == [[3, 0, 0, 4, 0, 4, 2], [1, 0, 0, 5, 0, 0, 3]]
    admitted = admission.admit(asked(num_rows=(-1, 100)), PLACEMENT, ALIGNED, limit)
    assert admitted.counts[:, :5].tolist() == [row[:5] for row in COUNTS]
    assert admitted.counts[:, 5].tolist() == [-1, 100]


def test_a_window_begins_after_what_an_expert_kept() -> None:
    limit = Capacity(num_rows=8, num_rows_per_expert=2, on_overflow="drop")
    admitted = admission.admit(asked(num_rows=(8, 8)), PLACEMENT, ALIGNED, limit)
    # Expert 0 keeps two rows and ends at row 4, so that expert 1 has room.
    assert admitted.counts[:, :3].tolist() == [[2, 2, 2], [0, 0, 0]]
    assert admitted.counts[:, 3:5].tolist() == [[4, 3], [0, 0]]


def test_growing_keeps_all() -> None:
    for layout, required in ((Layout.EXPERT_MAJOR, [12, 8]), (Layout.RANK_MAJOR, [9, 4])):
        admitted = admission.admit(
            asked(num_rows=(10, 4)), PLACEMENT, RowOrder(layout, 4), Capacity(num_rows=1)
        )
        assert admitted.counts[:, :5].tolist() == [row[:5] for row in COUNTS]
        assert admitted.num_required_rows.tolist() == required
        assert admitted.counts[:, 5].tolist() == [max(10, required[0]), max(4, required[1])]


def test_raising_names_both_values() -> None:
    limit = Capacity(num_rows_per_expert=7, on_overflow="raise")
    with pytest.raises(
        CapacityError, match=r"expert 0 on rank 0 would receive 8 rows, it has room for 7$"
    ) as info:
        admission.admit(asked(), PLACEMENT, ALIGNED, limit)
    assert (info.value.ranks, info.value.needed_rows) == ((0,), (8, 2))
    limit = Capacity(num_rows=1, on_overflow="raise")
    with pytest.raises(
        CapacityError, match=r"^rank 1 would receive 8 rows, it has room for 4$"
    ) as info:
        admission.admit(asked(num_rows=(12, 4)), PLACEMENT, ALIGNED, limit)
    assert (info.value.ranks, info.value.needed_rows) == ((1,), (5,))
    with pytest.raises(CapacityError, match=r"rank 0 .* 12 .* 0; rank 1 .* 8 .* 4$") as info:
        admission.admit(asked(num_rows=(0, 4)), PLACEMENT, ALIGNED, limit, row_bytes=10)
    error = info.value
    assert (error.ranks, error.needed_rows) == ((0, 1), (8, 2))
    assert (error.needed_bytes, error.available_bytes) == (120, 0)
    admitted = admission.admit(asked(num_rows=(12, 8)), PLACEMENT, ALIGNED, limit)
    assert admitted.counts[:, 5].tolist() == [12, 8]


def test_a_masked_rank_sends_and_gets_nothing() -> None:
    order = RowOrder(Layout.LOW_LATENCY, 1, 8)
    admitted = admission.admit(asked(masked=(1,)), PLACEMENT, order, None)
    assert admitted.counts.tolist() == [[3, 2, 0, 4, 0, -1, 2], [0, 0, 0, 0, 0, -1, 3]]
    assert admitted.num_dropped_per_expert.tolist() == [5, 0, 5]
    assert admitted.num_required_rows.tolist() == [16, 8]


def test_an_expert_without_places_is_named() -> None:
    order = RowOrder(Layout.LOW_LATENCY, 1, 7)
    with pytest.raises(
        ValueError, match=r"expert 0 on rank 0 would receive 8 rows, it has room for 7"
    ):
        admission.admit(asked(), PLACEMENT, order, None)
    # What a masked rank asks for takes no place.
    admission.admit(asked(masked=(1,)), PLACEMENT, order, None)
