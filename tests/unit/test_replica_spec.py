"""Replicas that take rows, held to results by hand and to a search for the least largest load."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from moe_comm.ep.placement import Placement
from moe_comm.ep.replica_spec import balance, choose_slots, share
from tests.helpers.replica_ranks import least_largest_load, rows_by_rank


def _random_placement(rng: random.Random, num_ranks: int, num_experts: int) -> Placement:
    """Every expert on some rank, and more slots than that, some of them empty."""
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    for expert in range(num_experts):
        for rank_idx in rng.sample(range(num_ranks), rng.randint(1, min(3, num_ranks))):
            slots[rank_idx].append(expert)
    for of_rank in slots:
        of_rank += [-1] * rng.randint(0, 1)
        rng.shuffle(of_rank)
    return Placement(slots, num_experts)


@pytest.mark.parametrize("seed", range(60))
def test_no_rank_has_more_rows_than_the_placement_makes_necessary(seed: int) -> None:
    rng = random.Random(seed)
    num_ranks, num_experts = rng.randint(1, 6), rng.randint(1, 9)
    placement = _random_placement(rng, num_ranks, num_experts)
    counts = [[rng.choice((0, 0, 1, 7, 100)) for _ in range(num_experts)] for _ in range(num_ranks)]
    masked = frozenset(rank for rank in range(num_ranks) if seed % 3 == 0 and rng.random() < 0.3)
    allowed = [rank for rank in range(num_ranks) if rank not in masked]
    loads = rows_by_rank(placement, counts, rng.choice((1, num_ranks)), masked)
    totals = [sum(counts[rank][expert] for rank in allowed) for expert in range(num_experts)]
    assert max(loads) == least_largest_load(totals, placement, allowed)
    assert all(loads[rank] == 0 for rank in masked)

    shares = share(counts, placement, num_ranks, masked)
    for rank_idx, expert in itertools.product(range(num_ranks), range(num_experts)):
        slots = placement.slots_of_expert[expert]
        assert sum(shares[rank_idx][slot] for slot in slots) == counts[rank_idx][expert]


def _closed_mean(placement: Placement, rows: list[int], loads: list[int]) -> int:
    """Mean, rounded up, of the ranks that rows of the fullest rank could go to, from slot to slot: no
    division gives less, as none of their rows has a slot elsewhere."""
    found = [loads.index(max(loads))]
    for rank_idx in found:
        for source, expert in enumerate(placement.slot_expert):
            if placement.slot_rank[source] == rank_idx and rows[source] > 0:
                ends = {placement.slot_rank[slot] for slot in placement.slots_of_expert[expert]}
                found += sorted(ends.difference(found))
    return -(-sum(loads[rank_idx] for rank_idx in found) // len(found))


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(64, 8), (256, 32), (128, 48)])
def test_no_division_of_a_large_placement_is_better(num_experts: int, num_ranks: int) -> None:
    for seed in range(4):
        rng = random.Random(seed)
        placement = _random_placement(rng, num_ranks, num_experts)
        counts = [
            [int(rng.paretovariate(0.7)) - 1 for _ in range(num_experts)] for _ in range(num_ranks)
        ]
        rows = balance(counts, placement, 8)
        loads = rows_by_rank(placement, counts, 8)
        assert max(loads) == _closed_mean(placement, rows, loads)


def test_rows_stay_at_home_where_loads_are_equal() -> None:
    placement = Placement([[0, 1], [1, 0]], 2)
    assert share([[3, 5], [4, 4]], placement, 2) == [[3, 5, 0, 0], [0, 0, 4, 4]]


def test_rows_go_on_the_node_first() -> None:
    # Expert 0 is on ranks 0 and 2, of nodes (0, 1) and (2, 3); what rank 3 sends stays there.
    placement = Placement([[0], [1], [0], [2]], 3)
    assert share([[2, 0, 0], [1, 0, 0], [0, 0, 0], [3, 0, 0]], placement, 2) == [
        [2, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 3, 0]
    ]  # fmt: skip


def test_rows_reach_a_rank_through_another() -> None:
    # Only expert 1 can leave rank 1, which makes room for expert 0 there.
    placement = Placement([[0], [0, 1], [1]], 2)
    assert balance([[9, 3], [0, 0], [0, 0]], placement, 3) == [5, 4, 0, 3]
    assert balance([[12, 6], [0, 0], [0, 0]], placement, 3) == [6, 6, 0, 6]


def test_runs_of_a_rank_follow_its_tokens() -> None:
    placement = Placement([[0], [0]], 1)
    chosen = [torch.zeros(5, 1, dtype=torch.int64), torch.tensor([[-1]])]
    slots = choose_slots(chosen, placement, "balanced", 2)
    assert slots[0].flatten().tolist() == [0, 0, 0, 1, 1]
    assert slots[1].tolist() == [[-1]]


def test_masked_ranks_take_nothing_that_others_can() -> None:
    placement = Placement([[0, 1], [0], [2]], 3)
    chosen = [torch.tensor([[0, 1]]), torch.tensor([[0, 2]]), torch.tensor([[0, 2]])]
    slots = choose_slots(chosen, placement, "balanced", 3, frozenset({0}))
    # Expert 1 lies on the masked rank alone, and rank 0's own rows go nowhere.
    assert [of_rank.tolist() for of_rank in slots] == [[[0, 1]], [[2, 3]], [[2, 3]]]


def test_rules_that_no_count_decides() -> None:
    placement = Placement([[0, 1], [0], [2], [0, 2]], 3)
    chosen = [torch.tensor([[0, 2], [-1, 1]])] * 4
    nearest = choose_slots(chosen, placement, "nearest", 2)
    assert [of_rank.tolist() for of_rank in nearest] == [
        [[0, 3], [-1, 1]], [[2, 5], [-1, 1]], [[4, 3], [-1, 1]], [[4, 5], [-1, 1]]
    ]  # fmt: skip
    hashed = choose_slots([torch.zeros(6, 1, dtype=torch.int64)] * 4, placement, "hash", 2)
    expected = [(0, 2, 4)[token * 2654435769 % 2**32 % 3] for token in range(6)]
    assert [of_rank.flatten().tolist() for of_rank in hashed] == [expected] * 4
    assert choose_slots(chosen, placement, "given", 2) == chosen
