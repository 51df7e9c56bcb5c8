"""Plans of where experts and their copies go: valid ones, better than equal shares, worth their moves."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm import _host
from moe_comm.ep.placement import Placement
from moe_comm.ep.planner import plan_placement
from tests.helpers.replica_ranks import rows_by_rank


def zipf(exponent: float, num_experts: int, num_layers: int, seed: int) -> torch.Tensor:
    """Loads `[num_layers, num_experts]` of a million rows a layer, in random orders of experts."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -exponent
    loads = ranks * 1e6 / ranks.sum()
    return torch.stack(
        [loads[torch.randperm(num_experts, generator=generator)] for _ in range(num_layers)]
    )


def scattered(loads: torch.Tensor, seed: int, deviation: float = 0.3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(loads.shape, generator=generator, dtype=torch.float64)
    return loads * torch.exp(deviation * noise)


def shared_out(placement: Placement, loads: torch.Tensor) -> int:
    """Load of the fullest rank where rows go to slots as they fit best."""
    return max(rows_by_rank(placement, [loads.long().tolist()]))


def in_equal_shares(placement: Placement, loads: torch.Tensor) -> float:
    """Load of the fullest rank where each slot of an expert gets the same."""
    shares = [
        float(load) / len(slots)
        for load, slots in zip(loads, placement.slots_of_expert, strict=True)
    ]
    return max(sum(shares[e] for e in own if e >= 0) for own in placement.slots)


def packed(loads: torch.Tensor, num_ranks: int, num_slots: int) -> Placement:
    """The usual plan: copies of what has most load per copy, then the largest first to the emptiest rank."""
    num_copies = torch.ones(len(loads), dtype=torch.int64)
    for _ in range(num_ranks * num_slots - len(loads)):
        num_copies[(loads / num_copies).argmax()] += 1
    shares = loads / num_copies
    slots: list[list[int]] = [[] for _ in range(num_ranks)]
    rank_loads = [0.0] * num_ranks
    for expert_idx in shares.argsort(descending=True).tolist():
        for _ in range(int(num_copies[expert_idx])):
            rank_idx = min(
                (r for r in range(num_ranks) if len(slots[r]) < num_slots),
                key=lambda r: (expert_idx in slots[r], rank_loads[r]),
            )
            slots[rank_idx].append(expert_idx)
            rank_loads[rank_idx] += float(shares[expert_idx])
    return Placement(slots, len(loads))


def moves(before: Placement, after: Placement) -> int:
    pairs = zip(before.slots, after.slots, strict=True)
    return sum(len({*new} - {*old} - {-1}) for old, new in pairs)


def cases(seed: int) -> tuple[random.Random, torch.Tensor, int, int]:
    """Loads of 3 layers, ranks, slots that hold all experts."""
    rng = random.Random(seed)
    num_experts, num_ranks = rng.randrange(1, 20), rng.randrange(1, 9)
    num_slots = -(-num_experts // num_ranks) + rng.randrange(4)
    loads = torch.tensor(
        [[rng.paretovariate(0.8) * (rng.random() < 0.8) for _ in range(num_experts)]] * 3
    )
    return rng, loads * torch.tensor([[1.0], [0.0], [1e12]]), num_ranks, num_slots


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32))
def test_plans_are_placements_and_the_same_each_time(seed: int) -> None:
    rng, loads, num_ranks, num_slots = cases(seed)
    node_size = rng.choice([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
    plans = plan_placement(loads, num_ranks, num_slots, ranks_per_node=node_size)
    for present, price in ((None, 0.0), (plans, 0.0), (plans, rng.random())):
        number = num_slots if present is None else num_slots + rng.randrange(2)
        options: dict[str, Any] = {
            "ranks_per_node": node_size,
            "present": present,
            "bytes_per_expert": 1,
            "price_per_byte": price,
        }
        planned = plan_placement(scattered(loads, seed), num_ranks, number, **options)
        for plan in planned:
            assert plan == Placement(plan.slots, loads.shape[1])
            assert [len(own) for own in plan.slots] == [number] * num_ranks
        assert planned == plan_placement(scattered(loads, seed), num_ranks, number, **options)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.01, 0.1, 1.0]))
def test_moves_are_worth_their_price(seed: int, price: float) -> None:
    _, loads, num_ranks, num_slots = cases(seed)
    loads = loads[:1] * 1e6 / loads[:1].sum().clamp(min=1e-6)
    (present,) = plan_placement(loads, num_ranks, num_slots)
    later = scattered(loads, seed, deviation=1.0)
    rows = price * float(later.sum()) / num_ranks / 1000
    (plan,) = plan_placement(
        later,
        num_ranks,
        num_slots,
        present=[present],
        bytes_per_expert=1000,
        price_per_byte=rows,
        scatter=0.0,
    )
    gain = shared_out(present, later[0]) - shared_out(plan, later[0])
    # Rows are whole here, and a millionth of the mean in the planner.
    assert gain >= moves(present, plan) * rows * 1000 - 3 - float(later.sum()) * 1e-5


@pytest.mark.parametrize("exponent", [0.6, 0.9, 1.2])
def test_later_loads_fit_several_times_better_than_equal_shares(exponent: float) -> None:
    true = zipf(exponent, 64, 4, seed=1)
    seen = torch.stack([scattered(true, seed) for seed in range(100, 108)]).mean(0)
    mean_excess = {"usual": 0.0, "planned": 0.0}
    for layer, plan in enumerate(plan_placement(seen, 8, 9)):
        usual = packed(seen[layer], 8, 9)
        for seed in range(20):
            loads = scattered(true[layer], seed)
            mean = float(loads.sum()) / 8
            mean_excess["usual"] += in_equal_shares(usual, loads) / mean - 1
            mean_excess["planned"] += shared_out(plan, loads) / mean - 1
    assert 10 < mean_excess["usual"] < 20
    assert mean_excess["planned"] < 0.25 * mean_excess["usual"]


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.2])
def test_planned_loads_are_as_even_as_of_the_usual_plan(exponent: float) -> None:
    loads = zipf(exponent, 256, 3, seed=2)
    mean = 1e6 / 32
    for layer, plan in enumerate(plan_placement(loads, 32, 9)):
        assert shared_out(plan, loads[layer]) <= 1.003 * mean
        usual = in_equal_shares(packed(loads[layer], 32, 9), loads[layer])
        assert in_equal_shares(plan, loads[layer]) <= max(usual, 1.003 * mean)


def test_every_rank_can_hand_rows_on_to_every_other() -> None:
    for plan in plan_placement(scattered(zipf(0.6, 64, 16, seed=3), 9), 8, 9):
        reached = {0}
        for _ in plan.slots:
            held = {e for rank in reached for e in plan.slots[rank] if e >= 0}
            reached |= {rank for rank, own in enumerate(plan.slots) if not held.isdisjoint(own)}
        assert reached == set(range(8))


def test_copies_go_to_different_nodes_where_that_costs_little() -> None:
    num_copied, num_apart = 0, {4: 0, 8: 0}
    for size in num_apart:
        for plan in plan_placement(zipf(0.6, 64, 16, seed=4), 8, 9, ranks_per_node=size):
            copied = [slots for slots in plan.slots_of_expert if len(slots) > 1]
            num_copied += len(copied)
            for slots in copied:
                num_apart[size] += len({plan.slot_rank[slot] // 4 for slot in slots}) - 1
    assert num_copied == 2 * 96
    assert num_apart[8] < 60 < 75 < num_apart[4]


def test_the_example() -> None:
    plan = plan_placement(torch.tensor([[6, 2, 2]]), 2, 2)
    assert plan == [Placement([[0, 1], [0, 2]], 3)]


def test_one_hot_expert_takes_few_moves_and_others_keep_their_slots() -> None:
    loads = zipf(0.6, 64, 1, seed=5)
    (present,) = plan_placement(loads, 8, 9)
    single = next(e for e, slots in enumerate(present.slots_of_expert) if len(slots) == 1)
    loads[0, single] = 3e5
    (plan,) = plan_placement(
        loads, 8, 9, present=[present], bytes_per_expert=1000, price_per_byte=5.0
    )
    assert 1 <= moves(present, plan) <= 4
    assert shared_out(plan, loads[0]) < 0.6 * shared_out(present, loads[0])
    for old, new in zip(present.slots, plan.slots, strict=True):
        assert [e if e in new else -1 for e in old] == [e if e in old else -1 for e in new]


def test_no_price_is_too_high_to_stay() -> None:
    loads = zipf(0.9, 64, 2, seed=6)
    present = plan_placement(loads, 8, 9)
    later = scattered(loads, 7, deviation=1.0)
    options: dict[str, Any] = {"present": present, "bytes_per_expert": 1 << 20}
    assert plan_placement(later, 8, 9, price_per_byte=1.0, **options) == present
    assert plan_placement(later, 8, 9, price_per_byte=0.0, **options) != present


def test_slots_that_nothing_needs_stay_empty_or_as_they_are() -> None:
    (plan,) = plan_placement(torch.zeros(1, 3), 2, 3)
    assert sorted(plan.slot_expert) == [-1, -1, -1, 0, 1, 2]
    (plan,) = plan_placement(torch.tensor([[4.0, 4.0]]), 2, 3)
    assert [sorted(own) for own in plan.slots] == [[-1, 0, 1], [-1, 0, 1]]
    present = Placement([[1, 0, 2], [-1, 1, -1]], 3)
    assert plan_placement(torch.zeros(1, 3), 2, 3, present=[present]) == [present]


@pytest.mark.parametrize("exponent", [0.6, 1.2])
def test_copies_alone_go_where_experts_stay(exponent: float) -> None:
    home = Placement.in_blocks(64, 8, 1)
    loads = zipf(exponent, 64, 3, 5)
    plans = plan_placement(loads, 8, 9, present=[home] * 3, num_kept_slots=8)
    for plan, of_layer in zip(plans, loads, strict=True):
        assert plan.first_slots(8) == home
        mean = int(of_layer.sum()) / 8
        assert shared_out(home, of_layer) > 1.4 * mean
        assert shared_out(plan, of_layer) < 1.05 * mean
    # A placement that is still the best stays, and a price is heeded.
    assert plan_placement(loads, 8, 9, present=plans, num_kept_slots=8) == plans
    dear = {"bytes_per_expert": 1, "price_per_byte": 1e7}
    assert plan_placement(loads, 8, 9, present=plans, num_kept_slots=8, **dear) == plans  # type: ignore[arg-type]
    assert plan_placement(loads, 8, 9, present=[home] * 3, num_kept_slots=8, **dear) == [home] * 3  # type: ignore[arg-type]


def test_copies_alone_even_out_many_experts() -> None:
    loads = zipf(0.9, 256, 4, 5)
    home = Placement.in_blocks(256, 32, 1)
    plans = plan_placement(loads, 32, 9, present=[home] * 4, num_kept_slots=8)
    fullest = [shared_out(plan, of_layer) for plan, of_layer in zip(plans, loads, strict=True)]
    assert sum(fullest) / 4 < 1.045 * 1e6 / 32


@pytest.mark.parametrize("price", [0.0005, 0.002])
def test_at_a_price_later_loads_cost_less_than_to_stay_or_to_plan_anew(price: float) -> None:
    true = zipf(0.6, 64, 6, seed=1)
    present = plan_placement(scattered(true, 50), 8, 9)
    now = scattered(true, 51, deviation=0.8)
    plans = {
        "present": present,
        "anew": plan_placement(now, 8, 9),
        "planned": plan_placement(
            now,
            8,
            9,
            present=present,
            bytes_per_expert=1,
            price_per_byte=price * float(now.sum()) / 6 / 8,
        ),
    }
    cost = dict.fromkeys(plans, 0.0)
    for name, of_layers in plans.items():
        for layer, plan in enumerate(of_layers):
            cost[name] += price * moves(present[layer], plan) / 6
            for seed in range(10):
                later = scattered(now[layer], 100 + seed)
                cost[name] += (shared_out(plan, later) * 8 / float(later.sum()) - 1) / 60
    assert cost["planned"] < 0.8 * min(cost["present"], cost["anew"])


def test_a_table_of_another_shape_is_refused() -> None:
    given = _host.layout.plan_placement
    loads = LOADS.double()
    rules: dict[str, Any] = {
        "num_experts": 4,
        "num_ranks": 2,
        "num_slots": 2,
        "ranks_per_node": 2,
        "move_price": 1.0,
        "scatter": 0.3,
        "num_kept": 0,
    }
    table = torch.tensor([[0, 1, 2, 3]] * 2, dtype=torch.int32)
    assert given(loads, table, **rules).tolist() == table.tolist()
    for wrong, words in (
        (table[:1], r"got \[1, 4\] of 4 bytes each"),
        (table[:, :3].contiguous(), r"got \[2, 3\] of 4 bytes each"),
        (table[:, :0], r"got \[2, 0\] of 4 bytes each"),
        (table.long(), r"got \[2, 4\] of 8 bytes each"),
    ):
        with pytest.raises(ValueError, match=r"must be int32 \[2, a multiple of 2\], " + words):
            given(loads, wrong, **rules)


def test_slots_that_are_kept_hold_every_expert() -> None:
    loads = torch.ones(1, 4)
    with pytest.raises(ValueError, match="num_kept_slots = 2 needs present, got None"):
        plan_placement(loads, 2, 3, num_kept_slots=2)
    with pytest.raises(ValueError, match="expert 1 lies in 2 of them"):
        present = [Placement([[0, 1, 2], [2, 1, 3]], 4)]
        plan_placement(loads, 2, 3, present=present, num_kept_slots=2)
    with pytest.raises(ValueError, match="has 3 slots on a rank, num_slots_per_rank is 2"):
        plan_placement(loads, 2, 2, present=[Placement.in_blocks(4, 2, 1)], num_kept_slots=2)
    with pytest.raises(ValueError, match="must be a multiple of num_ranks=2, got 3"):
        Placement.in_blocks(3, 2)


def test_plans_for_more_and_fewer_slots_begin_with_the_present_ones() -> None:
    loads = zipf(0.6, 16, 1, seed=8)
    (present,) = plan_placement(loads, 4, 5)
    options: dict[str, Any] = {"bytes_per_expert": 1, "price_per_byte": 1e9, "present": [present]}
    (more,) = plan_placement(loads, 4, 6, **options)
    assert more.slots == tuple((*own, -1) for own in present.slots)
    (fewer,) = plan_placement(loads, 4, 4, **options)
    assert fewer == Placement(fewer.slots, 16)
    assert moves(present, fewer) <= 4


@pytest.mark.parametrize("num_slots", [2, 3])
def test_extreme_loads_and_prices_are_planned(num_slots: int) -> None:
    larger = Placement([[0, 1, 2, -1], [3, -1, -1, 0]], 4)
    options: dict[str, Any] = {"bytes_per_expert": 10**6, "scatter": 2.0}
    for present in (PLACED, larger):
        for exponent in (-320, -310, -305, 0, 18):
            for price in (0.0, 1e-300, 1e308):
                loads = torch.tensor([[4.0, 1.0, 1.0, 1.0]], dtype=torch.float64) * 10.0**exponent
                (plan,) = plan_placement(
                    loads, 2, num_slots, present=[present], price_per_byte=price, **options
                )
                assert plan == Placement(plan.slots, 4)
                if price > 1 and present is PLACED:
                    assert moves(present, plan) == 0


def test_empty_slots_beyond_those_planned_do_not_keep_experts_from_staying() -> None:
    present = Placement([[0, 1, -1], [-1, 2, 3]], 4)
    options: dict[str, Any] = {"bytes_per_expert": 1, "price_per_byte": 1.0}
    (plan,) = plan_placement(torch.full((1, 4), 5.0), 2, 2, present=[present], **options)
    assert plan == Placement([[0, 1], [3, 2]], 4)
    loads, (wide,) = zipf(1.2, 24, 1, 3), [Placement([[-1, e] for e in range(24)], 24)]
    (plan,) = plan_placement(loads, 24, 1, present=[wide], bytes_per_expert=1, price_per_byte=1e9)
    assert moves(wide, plan) == 0


def test_scattered_loads_do_not_get_past_a_price() -> None:
    present = [Placement([[0], [-1]], 1)]
    options: dict[str, Any] = {"bytes_per_expert": 1, "price_per_byte": 1e12, "scatter": 2.0}
    assert plan_placement(torch.ones(1, 1), 2, 1, present=present, **options) == present


def test_a_load_of_minus_zero_is_none() -> None:
    loads = torch.tensor([[0.0, 0.0, 6.0, 2.0, 2.0]])
    negative = loads.where(loads != 0, -0.0)
    assert plan_placement(negative, 4, 2) == plan_placement(loads, 4, 2)


def test_no_layers_have_no_plans() -> None:
    assert plan_placement(LOADS[:0], 2, 2, present=[]) == []
    assert plan_placement(LOADS[:0], 2, 2) == []


LOADS = torch.ones(2, 4)
EXTREME = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 0.0, 0.0, 300.0]], dtype=torch.float64)
PLACED = Placement([[0, 1], [2, 3]], 4)


@pytest.mark.parametrize(
    ("kind", "words", "options"),
    [
        (TypeError, "loads must be a dense tensor", {"loads": [[1.0]]}),
        (TypeError, "loads must be a dense tensor", {"loads": LOADS.to_sparse()}),
        (ValueError, r"loads must be \[layers, num_experts\] .* got \(4,\)", {"loads": LOADS[0]}),
        (ValueError, r"loads must be .* got \(2, 0\)", {"loads": LOADS[:, :0]}),
        (ValueError, "expert 1 in layer 0 .* got -1.0", {"loads": torch.tensor([[1.0, -1.0]])}),
        (
            ValueError,
            "expert 0 in layer 1 .* got nan",
            {"loads": LOADS.log() / torch.tensor([[1.0], [0.0]])},
        ),
        (ValueError, "2 ranks of 1 slots do not hold 4 experts", {"num_slots_per_rank": 1}),
        (ValueError, "num_ranks must be >= 1, got 0", {"num_ranks": 0}),
        (ValueError, "num_ranks must be <= 131072, got 131073", {"num_ranks": 131073}),
        (ValueError, "ranks_per_node = 3 must divide num_ranks = 2", {"ranks_per_node": 3}),
        (ValueError, "each of 2 layers, got 1", {"present": [PLACED]}),
        (TypeError, r"present\[1\] must be a Placement, got", {"present": [PLACED, [[0]]]}),
        (
            ValueError,
            r"present\[0\] must place 4 experts on 2 ranks, got 1 on 1",
            {"present": [Placement([[0]], 1)] * 2},
        ),
        (ValueError, "bytes_per_expert must be >= 0, got -1", {"bytes_per_expert": -1}),
        (ValueError, "bytes_per_expert must be <= .*, got 1000", {"bytes_per_expert": 10**400}),
        (ValueError, "price_per_byte must be finite and >= 0, got -1", {"price_per_byte": -1.0}),
        (ValueError, "price_per_byte must be finite .* got 1000", {"price_per_byte": 10**400}),
        (ValueError, r"scatter must be in \[0, 2.0\], got inf", {"scatter": float("inf")}),
        (ValueError, r"scatter must be in \[0, 2.0\], got 2.1", {"scatter": 2.1}),
        (
            ValueError,
            r"layer 1 must be fewer than 2\*\*63 rows, got 1e\+300",
            {"loads": 10.0**EXTREME},
        ),
        (TypeError, "scatter must be a number, got", {"scatter": "0.3"}),
    ],
)
def test_arguments_that_are_wrong_are_refused(
    kind: type[Exception], words: str, options: dict[str, Any]
) -> None:
    arguments: dict[str, Any] = {"loads": LOADS, "num_ranks": 2, "num_slots_per_rank": 2, **options}
    with pytest.raises(kind, match=words):
        plan_placement(**arguments)
