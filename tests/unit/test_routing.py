from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm import _host
from moe_comm.ep.backends import collective_capacity, expert_ranks
from moe_comm.ep.backends.base import PlanTensors
from moe_comm.ep.backends.collective_plan import CollectivePlan
from moe_comm.ep.backends.expert_ranks import Placement
from moe_comm.ep.backends.rows import as_bytes
from moe_comm.ep.config import Layout
from moe_comm.ep.spec import Dispatch


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[list[list[int]]], list[int], int, int]:
    """(choices of every rank, rank of every expert, alignment, choices per token)."""
    num_ranks = draw(st.integers(1, 4))
    num_experts = draw(st.integers(1, 6))
    num_topk = draw(st.integers(1, 5))
    expert_rank = draw(
        st.lists(st.integers(0, num_ranks - 1), min_size=num_experts, max_size=num_experts)
    )
    token = st.lists(st.integers(-1, num_experts - 1), min_size=num_topk, max_size=num_topk)
    choices = [draw(st.lists(token, max_size=6)) for _ in range(num_ranks)]
    return choices, expert_rank, draw(st.sampled_from([1, 2, 4, 8])), num_topk


@settings(max_examples=150)
@given(routings(), st.sampled_from(list(Layout)))
def test_slots_and_windows_are_those_of_the_definition(
    routing_case: tuple[list[list[list[int]]], list[int], int, int], layout: Layout
) -> None:
    choices, expert_rank, alignment, num_topk = routing_case
    num_ranks = len(choices)
    placement = Placement.of(torch.tensor(expert_rank, dtype=torch.int32), num_ranks)
    tensors = [torch.tensor(tokens, dtype=torch.int64).reshape(-1, num_topk) for tokens in choices]
    is_low_latency = layout is Layout.LOW_LATENCY
    num_places = num_ranks * 6 * num_topk if is_low_latency else 0
    alignment = 1 if is_low_latency else alignment
    arrangement = _host.layout.Arrangement(int(layout), alignment, num_places)
    counts = torch.stack([collective_capacity.ask(tensor, placement, None) for tensor in tensors])
    dispatch = Dispatch(tensors, expert_rank, layout, alignment, num_places)
    assert torch.equal(dispatch.counts, counts)
    plans = [
        CollectivePlan.of(
            counts,
            topk_idx,
            dispatch.asked_rows(rank_idx),
            layout,
            alignment,
            rank_idx=rank_idx,
            placement=placement,
            arrangement=arrangement,
        )
        for rank_idx, topk_idx in enumerate(tensors)
    ]

    arriving: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for source_idx, plan in enumerate(plans):
        assert torch.equal(plan.slots, dispatch.slots(source_idx))
        # Rows are sent by ascending slot.
        sent = plan.slots.flatten()[plan.sent_slots].tolist()
        assert sent == sorted(slot for slot in plan.slots.flatten().tolist() if slot >= 0)
        positions = {slot: position for position, slot in enumerate(sent)} | {-1: -1}
        assert plan.slot_positions.tolist() == [
            [positions[slot] for slot in token] for token in plan.slots.tolist()
        ]
        assert plan.choice_positions.tolist() == [
            [
                positions[-1 if place is None else place.rank_idx << 48 | place.row_idx]
                for place in token
            ]
            for token in dispatch.places[source_idx]
        ]
        assert plan.is_kept().tolist() == [
            [place is not None for place in token] for token in dispatch.places[source_idx]
        ]
        assert plan.send_splits == [
            sum(slot >> 48 == peer for slot in sent) for peer in range(num_ranks)
        ]
        for slot in sent:
            arriving[slot >> 48].append((source_idx, slot & (2**48 - 1)))

    for rank_idx, (plan, window) in enumerate(zip(plans, dispatch.windows, strict=True)):
        assert plan.num_recv_tokens == len(window.rows)
        # Senders that sort their rows by slot send them in this order.
        assert plan.source_rows.tolist() == [row for _, row in arriving[rank_idx]]
        assert plan.recv_splits == [
            sum(source == peer for source, _ in arriving[rank_idx]) for peer in range(num_ranks)
        ]
        assert plan.num_tokens_per_expert.tolist() == window.num_tokens_per_expert
        assert plan.expert_offsets.tolist() == window.expert_offsets
        assert plan.expert_offsets.dtype is torch.int32
        assert plan.num_tokens_per_expert.dtype is torch.int64


def placement_of(*expert_rank: int, num_ranks: int = 2) -> Placement:
    return Placement.of(torch.tensor(expert_rank, dtype=torch.int32), num_ranks)


def test_local_experts_ascend_by_id() -> None:
    placement = placement_of(1, 0, 1)
    assert placement.local_expert_idx.tolist() == [0, 0, 1]
    assert [placement.native.num_local_experts(rank) for rank in range(2)] == [1, 2]


def test_a_placement_on_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"2 is not a rank of 2"):
        placement_of(0, 2)


def test_local_topk_idx() -> None:
    placement = placement_of(1, 0, 1)
    choices = torch.tensor([[2, -1, 1], [0, 2, 1]])
    local = expert_ranks.local_topk_idx(choices, torch.tensor([1, 0]), placement)
    assert local.tolist() == [[1, -1, -1], [-1, -1, 0]]


@pytest.mark.parametrize(
    ("topk_idx", "found"),
    [
        ([[0, 1], [-1, 3]], None),
        ([[0, 1], [4, 9]], "topk_idx[1, 0] = 4 is"),
        ([[0, -2], [4, 9]], "topk_idx[0, 1] = -2 is"),
        ([[0, 1 << 40]], "topk_idx[0, 1] = 1099511627776 is"),
    ],
)
def test_the_first_bad_expert_id_is_named(topk_idx: list[list[int]], found: str | None) -> None:
    placement = placement_of(0, 0, 1, 1)
    if found is None:
        assert collective_capacity.ask(torch.tensor(topk_idx), placement, None)[:4].tolist() == [
            1,
            1,
            0,
            1,
        ]
        return
    with pytest.raises(ValueError, match=re.escape(found)):
        collective_capacity.ask(torch.tensor(topk_idx), placement, None)


COUNTS = [[1, 1, 1, 1, -1, 2], [0, 0, 0, 0, -1, 2]]


@pytest.mark.parametrize(
    ("counts", "what"),
    [
        (COUNTS, None),
        ([row[:3] for row in COUNTS], "counts must be int32 [2, 6], got [2, 3]"),
        # More of an expert than was chosen; a token too many for a rank; another number of choices.
        ([[1, 2, *COUNTS[0][2:]], COUNTS[1]], "belong to different dispatches"),
        ([[1, 1, 1, 2, -1, 2], COUNTS[1]], "belong to different dispatches"),
        ([[*COUNTS[0][:5], 3], COUNTS[1]], "belong to different dispatches"),
    ],
)
@pytest.mark.parametrize("layout", list(Layout))
def test_a_plan_is_of_one_dispatch(
    counts: list[list[int]], what: str | None, layout: Layout
) -> None:
    def plan() -> PlanTensors:
        return CollectivePlan.of(
            torch.tensor(counts, dtype=torch.int32),
            torch.tensor([[0, 1]]),
            torch.tensor([1, 1]),
            layout,
            1,
            rank_idx=0,
            placement=placement_of(0, 1),
            arrangement=_host.layout.Arrangement(int(layout), 1, 2),
        )

    if what is None:
        assert plan().num_tokens == 1
        return
    with pytest.raises(ValueError, match=re.escape(what)):
        plan()


@pytest.mark.parametrize("dtype", [torch.complex128, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_as_bytes_shares_memory(dtype: torch.dtype, num_rows: int) -> None:
    rows = torch.zeros(num_rows, 1, dtype=dtype)
    raw = as_bytes(rows)
    assert raw.shape == (num_rows, dtype.itemsize)
    raw.fill_(0xFF)
    assert bool(rows.view(-1).view(torch.uint8).eq(0xFF).all())


@pytest.mark.parametrize("strides", [(1, 1), (8, 1), (1, 8), (8, 8)])
def test_as_bytes_of_one_element_with_any_strides(strides: tuple[int, int]) -> None:
    row = torch.tensor([258, 0, 0, 0], dtype=torch.int32).as_strided((1, 1), strides)
    assert as_bytes(row).tolist() == [[2, 1, 0, 0]]
