"""Placements of experts with replicas: what a description must keep, and what it says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_comm.ep.placement import Placement


def test_slots_are_numbered_rank_by_rank() -> None:
    placement = Placement([[0, 1], [], [2, -1, 0]], 3)
    assert placement.num_ranks == 3
    assert placement.num_slots == 5
    assert placement.slot_rank == (0, 0, 2, 2, 2)
    assert placement.slot_expert == (0, 1, 2, -1, 0)
    assert placement.slots_of_expert == ((0, 4), (1,), (2,))
    assert placement.has_replicas
    assert not Placement([[1], [0]], 2).has_replicas


def test_equal_placements_are_equal() -> None:
    of_lists = Placement([[0, 1], [1, 2]], 3)
    of_table = Placement.of_table(torch.tensor([0, 1, 1, 2]), 2)
    of_numpy = Placement(np.array([[0, 1], [1, 2]]), np.int64(3))  # type: ignore[arg-type]
    assert of_lists == of_table == of_numpy
    assert len({of_lists, of_table, of_numpy}) == 1
    assert of_lists != Placement([[0, 1], [2, 1]], 3)
    assert of_lists != Placement([[0, 1, 1, 2][:2], [1, 2, -1]], 3)


def test_a_table_may_have_empty_slots_and_more_experts_than_it_names() -> None:
    assert Placement.of_table([2, -1, 0, 1], 2).slots == ((2, -1), (0, 1))
    with pytest.raises(ValueError, match="expert 3 of 4 lies in no slot"):
        Placement.of_table([2, -1, 0, 1], 2, 4)


def test_an_expert_twice_on_a_rank_of_a_table_lies_in_the_first_slot() -> None:
    placement = Placement.of_table([0, 2, 0, 0, -1, -1, 1, 2], 2)
    assert placement.slots == ((0, 2, -1, -1), (-1, -1, 1, 2))
    with pytest.raises(ValueError, match="slot 3 of rank 1 holds expert -2, which is not in"):
        Placement.of_table([0, 1, 0, 1, 0, -1, -1, -2], 2)


@pytest.mark.parametrize(
    ("slots", "num_experts", "message"),
    [
        ([[0, 1], [1, 3]], 3, r"slot 1 of rank 1 holds expert 3, which is not in \[-1, 3\)"),
        ([[0, -2]], 1, "slot 1 of rank 0 holds expert -2"),
        ([[0, 1], [2, 0, 2]], 3, "slots 0 and 2 of rank 1 both hold expert 2"),
        ([[0, -1], [2, -1]], 3, "expert 1 of 3 lies in no slot"),
        ([[0]], 10**12, "expert 1 of 1000000000000 lies in no slot"),
        ([], 3, "slots must hold a list for every rank, got none"),
        ([[0]], 0, "num_experts must be >= 1, got 0"),
    ],
)
def test_what_is_no_placement(slots: list[list[int]], num_experts: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Placement(slots, num_experts)


@pytest.mark.parametrize("slots", [[[0, 1.0]], [[True]], [[None]]])
def test_slots_hold_ints(slots: list[list[object]]) -> None:
    with pytest.raises(TypeError, match=r"slots\[0\]\[\d\] must be an int"):
        Placement(slots, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"slots\[1\] must be a list, got None"):
        Placement([[0], None], 1)  # type: ignore[list-item]


def test_what_is_no_table() -> None:
    with pytest.raises(ValueError, match=r"a multiple of num_ranks=2, got \(3,\)"):
        Placement.of_table([0, 1, 2], 2)
    with pytest.raises(ValueError, match=r"got \(2, 2\)"):
        Placement.of_table(torch.zeros(2, 2, dtype=torch.int64), 2)
    with pytest.raises(TypeError, match=r"must hold integers, got torch\.float32"):
        Placement.of_table(torch.zeros(2), 2)
    with pytest.raises(TypeError, match=r"must hold integers, got torch\.complex64"):
        Placement.of_table(torch.zeros(2, dtype=torch.complex64), 2)
