from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm.backends import admission, routing
from moe_comm.backends.base import PlanTensors
from moe_comm.backends.routing import Placement, RowOrder
from moe_comm.config import Layout
from moe_comm.spec import Dispatch


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
    order = RowOrder(layout, alignment)
    if layout is Layout.LOW_LATENCY:
        order = RowOrder(layout, 1, num_ranks * 6 * num_topk)
    counts = torch.stack([admission.ask(tensor, placement, None) for tensor in tensors])
    dispatch = Dispatch(
        tensors, expert_rank, layout, order.expert_alignment, order.num_places_per_expert
    )
    assert torch.equal(dispatch.counts, counts)

    arriving: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    for source_idx, topk_idx in enumerate(tensors):
        slots = routing.send_slots(source_idx, topk_idx, counts, placement, order)
        assert torch.equal(slots, dispatch.slots(source_idx))
        plan = PlanTensors(counts, slots, topk_idx, layout, order.expert_alignment)
        routing.validate_plan_tensors(plan, placement)
        assert routing.choice_slots(plan, placement).tolist() == [
            [-1 if place is None else place.rank_idx << 48 | place.row_idx for place in token]
            for token in dispatch.places[source_idx]
        ]
        for slot in sorted({int(slot) for slot in slots.flatten() if slot >= 0}):
            arriving[slot >> 48].append((source_idx, slot & (2**48 - 1)))

    for rank_idx, window in enumerate(dispatch.windows):
        got = routing.window_of(rank_idx, counts, placement, order)
        assert got.num_recv_tokens == len(window.rows)
        # Senders that sort their rows by slot send them in this order.
        assert got.source_rows.tolist() == [row for _, row in arriving[rank_idx]]
        assert got.num_rows_per_source.tolist() == [
            sum(source == peer for source, _ in arriving[rank_idx]) for peer in range(num_ranks)
        ]
        assert got.num_tokens_per_expert.tolist() == window.num_tokens_per_expert
        assert got.expert_offsets.tolist() == window.expert_offsets
        assert got.expert_offsets.dtype is torch.int32
        assert got.num_tokens_per_expert.dtype is torch.int64


def test_docstring_examples() -> None:
    placement = Placement.of(torch.tensor([1, 0, 1]), 2)
    assert placement.local_expert_idx.tolist() == [0, 0, 1]
    blocks = Placement.of(torch.tensor([0, 0, 1, 1]), 2)
    counts = routing.count_choices(torch.tensor([[0, 1], [3, -1]]), blocks)
    assert counts.tolist() == [1, 1, 0, 1, 1, 1]
    assert counts.dtype is torch.int32
    one_rank = Placement.of(torch.tensor([0, 0]), 1)
    aligned = RowOrder(Layout.EXPERT_MAJOR, 4)
    starts, padded = routing.expert_starts(torch.tensor([[3, 5, 8]]), one_rank, aligned)
    assert (starts.tolist(), padded.tolist()) == ([0, 4], [4, 8])
    places = RowOrder(Layout.LOW_LATENCY, 1, 9)
    starts, padded = routing.expert_starts(torch.tensor([[3, 5, 8]]), one_rank, places)
    assert (starts.tolist(), padded.tolist()) == ([0, 9], [9, 9])


def test_local_topk_idx() -> None:
    placement = Placement.of(torch.tensor([1, 0, 1]), 2)
    local = routing.local_topk_idx(torch.tensor([[2, -1, 1], [0, 2, 2]]), 1, placement)
    assert local.tolist() == [[1, -1, -1], [0, 1, 1]]


@pytest.mark.parametrize(
    ("topk_idx", "found"),
    [
        ([[0, 1], [-1, 3]], None),
        ([[0, 1], [4, 9]], (1, 0, 4)),
        ([[0, -2], [4, 9]], (0, 1, -2)),
        ([[0, 1 << 40]], (0, 1, 1 << 40)),
    ],
)
def test_first_bad_expert_id(topk_idx: list[list[int]], found: tuple[int, int, int] | None) -> None:
    assert routing.first_bad_expert_id(torch.tensor(topk_idx), 4) == found


def test_validate_plan_tensors_names_both_shapes() -> None:
    placement = Placement.of(torch.tensor([0, 1]), 2)
    topk_idx = torch.zeros(3, 2, dtype=torch.int64)
    plan = PlanTensors(
        torch.zeros(2, 3, dtype=torch.int32), topk_idx, topk_idx, Layout.EXPERT_MAJOR, 1
    )
    with pytest.raises(ValueError, match=r"counts .* \(2, 6\), got \(2, 3\)"):
        routing.validate_plan_tensors(plan, placement)


@pytest.mark.parametrize("dtype", [torch.complex128, torch.uint8, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_as_bytes_shares_memory(dtype: torch.dtype, num_rows: int) -> None:
    rows = torch.zeros(num_rows, 1, dtype=dtype)
    raw = routing.as_bytes(rows)
    assert raw.shape == (num_rows, dtype.itemsize)
    raw.fill_(0xFF)
    assert bool(rows.view(-1).view(torch.uint8).eq(0xFF).all())


@pytest.mark.parametrize("strides", [(1, 1), (8, 1), (1, 8), (8, 8)])
def test_as_bytes_of_one_element_with_any_strides(strides: tuple[int, int]) -> None:
    row = torch.tensor([258, 0, 0, 0], dtype=torch.int32).as_strided((1, 1), strides)
    assert routing.as_bytes(row).tolist() == [[2, 1, 0, 0]]
