from __future__ import annotations

import pytest
import torch

from moe_comm import _host
from moe_comm.ep.backends import collective_capacity
from moe_comm.ep.backends.collective_capacity import CapacityDecision
from moe_comm.ep.backends.expert_ranks import Placement
from moe_comm.ep.config import Capacity, Layout
from moe_comm.errors import CapacityError

# Rank 0 has experts 0 and 1, rank 1 has expert 2.
PLACEMENT = Placement.of(torch.tensor([0, 0, 1], dtype=torch.int32), 2)
# Two ranks: choices of experts 0 to 2; tokens for ranks 0 and 1; rows allowed; choices per token.
COUNTS = [[3, 2, 4, 4, 3, -1, 2], [5, 0, 1, 5, 1, -1, 3]]


def asked(
    counts: list[list[int]] = COUNTS,
    num_rows: tuple[int, int] = (-1, -1),
    masked: tuple[int, ...] = (),
) -> torch.Tensor:
    """Matrix of what ranks say: rank 0 says who is masked."""
    matrix = torch.tensor(counts, dtype=torch.int32)
    matrix[:, 5] = torch.tensor(num_rows)
    for rank_idx in masked:
        matrix[0, 3 + rank_idx] = -1
    return matrix


def decide(
    matrix: torch.Tensor,
    capacity: Capacity | None = None,
    *,
    layout: Layout = Layout.EXPERT_MAJOR,
    alignment: int = 4,
    num_places: int = 0,
    row_bytes: int = 0,
) -> tuple[CapacityDecision, CapacityDecision]:
    """Decision of either rank; the counts are the same."""
    arrangement = _host.layout.Arrangement(int(layout), alignment, num_places)
    before = matrix.clone()
    first, second = (
        collective_capacity.decide(
            matrix, rank_idx, PLACEMENT, layout, arrangement, capacity, row_bytes=row_bytes
        )
        for rank_idx in range(2)
    )
    assert torch.equal(first.counts, second.counts)
    assert torch.equal(matrix, before)
    return first, second


def dropped(decisions: tuple[CapacityDecision, CapacityDecision]) -> list[int]:
    wanted = torch.cat([each.asked[1:] for each in decisions])
    return (wanted - decisions[0].counts[:, :3].sum(0)).tolist()


def required(decisions: tuple[CapacityDecision, CapacityDecision]) -> list[int]:
    return [int(each.asked[0]) for each in decisions]


def test_ask_appends_the_limit_and_the_width() -> None:
    topk_idx = torch.tensor([[0, 2], [1, -1]])
    assert collective_capacity.ask(topk_idx, PLACEMENT, None).tolist() == [1, 1, 1, 2, 1, -1, 2]
    limit = Capacity(num_rows=8)
    assert collective_capacity.ask(topk_idx, PLACEMENT, limit).tolist() == [1, 1, 1, 2, 1, 8, 2]
    limit = Capacity(num_rows_per_expert=8, on_overflow="drop")
    assert collective_capacity.ask(topk_idx, PLACEMENT, limit).tolist() == [1, 1, 1, 2, 1, -1, 2]
    assert collective_capacity.ask(topk_idx, PLACEMENT, None, (0,)).tolist() == [
        1,
        1,
        1,
        -1,
        1,
        -1,
        2,
    ]


@pytest.mark.parametrize("layout", list(Layout))
def test_without_limits_everything_is_kept(layout: Layout) -> None:
    decisions = decide(asked(), layout=layout, alignment=1, num_places=40)
    assert decisions[0].counts.tolist() == COUNTS
    assert decisions[0].counts.dtype is torch.int32
    assert dropped(decisions) == [0, 0, 0]
    rows = {Layout.EXPERT_MAJOR: [10, 5], Layout.RANK_MAJOR: [9, 4], Layout.LOW_LATENCY: [80, 40]}
    assert required(decisions) == rows[layout]


def test_an_expert_keeps_its_first_rows() -> None:
    decisions = decide(asked(), Capacity(num_rows_per_expert=4, on_overflow="drop"))
    # Expert 0: three of rank 0, one of rank 1. Expert 2: four of rank 0; rank 1 sends rank 1 nothing.
    kept = [[3, 2, 4, 4, 3, -1, 2], [1, 0, 0, 5, 0, -1, 3]]
    assert decisions[0].counts.tolist() == kept
    assert dropped(decisions) == [4, 0, 1]
    assert required(decisions) == [12, 8]


def test_a_window_keeps_what_lies_in_it() -> None:
    limit = Capacity(num_rows=8, on_overflow="drop")  # only what is equal on every rank is read
    decisions = decide(asked(num_rows=(8, 4)), limit)
    # Rank 0: expert 0 fills rows 0 to 7 with all its eight, so that nothing of expert 1 is kept.
    assert decisions[0].counts.tolist() == [[3, 0, 4, 4, 3, 8, 2], [5, 0, 0, 5, 0, 4, 3]]
    assert dropped(decisions) == [0, 2, 1]
    kept = decide(asked(num_rows=(4, 0)), limit)[0].counts
    assert kept.tolist() == [[3, 0, 0, 4, 0, 4, 2], [1, 0, 0, 5, 0, 0, 3]]
    kept = decide(asked(num_rows=(-1, 100)), limit)[0].counts
    assert kept[:, :5].tolist() == [row[:5] for row in COUNTS]
    assert kept[:, 5].tolist() == [-1, 100]


def test_a_window_begins_after_what_an_expert_kept() -> None:
    limit = Capacity(num_rows=8, num_rows_per_expert=2, on_overflow="drop")
    kept = decide(asked(num_rows=(8, 8)), limit)[0].counts
    # Expert 0 keeps two rows and ends at row 4, so that expert 1 has room.
    assert kept[:, :3].tolist() == [[2, 2, 2], [0, 0, 0]]
    assert kept[:, 3:5].tolist() == [[4, 3], [0, 0]]


def test_growing_keeps_all() -> None:
    for layout, rows in ((Layout.EXPERT_MAJOR, [12, 8]), (Layout.RANK_MAJOR, [9, 4])):
        decisions = decide(asked(num_rows=(10, 4)), Capacity(num_rows=1), layout=layout)
        kept = decisions[0].counts
        assert kept[:, :5].tolist() == [row[:5] for row in COUNTS]
        assert required(decisions) == rows
        assert kept[:, 5].tolist() == [max(10, rows[0]), max(4, rows[1])]


def test_raising_names_both_values() -> None:
    limit = Capacity(num_rows_per_expert=7, on_overflow="raise")
    with pytest.raises(
        CapacityError, match=r"expert 0 on rank 0 would receive 8 rows, it has room for 7$"
    ) as info:
        decide(asked(), limit)
    assert (info.value.ranks, info.value.needed_rows) == ((0,), (8, 2))
    limit = Capacity(num_rows=1, on_overflow="raise")
    with pytest.raises(
        CapacityError, match=r"^rank 1 would receive 8 rows, it has room for 4$"
    ) as info:
        decide(asked(num_rows=(12, 4)), limit)
    assert (info.value.ranks, info.value.needed_rows) == ((1,), (5,))
    with pytest.raises(CapacityError, match=r"rank 0 .* 12 .* 0; rank 1 .* 8 .* 4$") as info:
        decide(asked(num_rows=(0, 4)), limit, row_bytes=10)
    error = info.value
    assert (error.ranks, error.needed_rows) == ((0, 1), (8, 2))
    assert (error.needed_bytes, error.available_bytes) == (120, 0)
    assert decide(asked(num_rows=(12, 8)), limit)[0].counts[:, 5].tolist() == [12, 8]


LOW_LATENCY = {"layout": Layout.LOW_LATENCY, "alignment": 1}


def test_a_masked_rank_sends_and_gets_nothing() -> None:
    decisions = decide(asked(masked=(1,)), num_places=8, **LOW_LATENCY)  # type: ignore[arg-type]
    kept = [[3, 2, 0, 4, 0, -1, 2], [0, 0, 0, 0, 0, -1, 3]]
    assert decisions[0].counts.tolist() == kept
    assert dropped(decisions) == [5, 0, 5]
    assert required(decisions) == [16, 8]


def test_an_expert_without_places_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"expert 0 on rank 0 would receive 8 rows, it has room for 7"
    ):
        decide(asked(), num_places=7, **LOW_LATENCY)  # type: ignore[arg-type]
    # Choices of a masked rank take no place.
    decide(asked(masked=(1,)), num_places=7, **LOW_LATENCY)  # type: ignore[arg-type]
