from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm.ep import routing_map as module
from moe_comm.ep.routing_map import (
    dense_of_topk,
    routing_map_of_topk,
    topk_of_routing_map,
)


def operators(is_used: bool) -> contextlib.AbstractContextManager[object]:
    """Inside, forms are made by operators of torch; without `is_used` by the native call where there is one."""
    if is_used:
        return mock.patch.object(module, "_native", return_value=None)
    return contextlib.nullcontext()


@st.composite
def routing_maps(draw: st.DrawFn) -> torch.Tensor:
    num_tokens = draw(st.integers(0, 6))
    num_experts = draw(st.integers(1, 19))
    same_width = draw(st.booleans())
    if same_width:
        num_topk = draw(st.integers(0, num_experts))
        rows = [
            draw(st.permutations([True] * num_topk + [False] * (num_experts - num_topk)))
            for _ in range(num_tokens)
        ]
    else:
        row = st.lists(st.booleans(), min_size=num_experts, max_size=num_experts)
        rows = [draw(row) for _ in range(num_tokens)]
    return torch.tensor(rows, dtype=torch.bool).view(num_tokens, num_experts)


@settings(max_examples=200)
@given(routing_maps(), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
@pytest.mark.parametrize("is_by_operators", [False, True], ids=["native", "operators"])
def test_topk_of_routing_map_lists_what_is_true(
    is_by_operators: bool, routing_map: torch.Tensor, dtype: torch.dtype
) -> None:
    with operators(is_by_operators):
        lists_what_is_true(routing_map, dtype)


def lists_what_is_true(routing_map: torch.Tensor, dtype: torch.dtype) -> None:
    num_tokens, num_experts = routing_map.shape
    # Maps of any strides.
    probs = (torch.rand(num_experts, num_tokens) + 1.0).to(dtype).T
    topk_idx, weights = topk_of_routing_map(routing_map, probs)
    chosen = [[e for e in range(num_experts) if row[e]] for row in routing_map.tolist()]
    num_topk = max([1, *map(len, chosen)])
    assert topk_idx.dtype is torch.int64
    assert topk_idx.tolist() == [ids + [-1] * (num_topk - len(ids)) for ids in chosen]
    assert weights.dtype is dtype
    assert weights.tolist() == [
        [probs[token, e].item() for e in ids] + [0.0] * (num_topk - len(ids))
        for token, ids in enumerate(chosen)
    ]
    back_map, back_probs = routing_map_of_topk(topk_idx, weights, num_experts)
    assert torch.equal(back_map, routing_map)
    assert torch.equal(back_probs, probs * routing_map)


@pytest.mark.parametrize("is_by_operators", [False, True], ids=["native", "operators"])
def test_dense_of_topk_ignores_what_stands_at_an_unused_choice(is_by_operators: bool) -> None:
    topk_idx = torch.tensor([[2, -1], [-1, -1], [0, 1]])
    values = torch.tensor([[1.0, float("nan")], [7.0, 8.0], [-0.0, 3.0]])
    with operators(is_by_operators):
        dense = dense_of_topk(values, topk_idx, 3)
    expected = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 0.0], [-0.0, 3.0, 0.0]])
    assert torch.equal(dense.view(torch.int32), expected.view(torch.int32))
    assert dense.is_contiguous()


@pytest.mark.parametrize("values", [None, torch.ones(2, 2)], ids=["map", "values"])
def test_an_expert_out_of_range_is_named(values: torch.Tensor | None) -> None:
    pytest.importorskip("moe_comm._host")
    topk_idx = torch.tensor([[0, 1], [-1, 3]])
    with pytest.raises(ValueError, match=r"below 3.*, got 3"):
        routing_map_of_topk(topk_idx, values, 3)
    with pytest.raises(ValueError, match=r"below 3.*, got 3"):
        dense_of_topk(torch.ones(2, 2), topk_idx, 3)


def test_what_is_watched_goes_through_operators() -> None:
    """A native call would be invisible to modes and profilers of torch."""
    routing_map = torch.tensor([[True, False, True], [False, True, True]])
    with torch.profiler.profile() as profile:
        topk_of_routing_map(routing_map, torch.rand(2, 3))
    assert "aten::gather" in {event.key for event in profile.key_averages()}


def test_lazily_negated_probs_have_their_values() -> None:
    routing_map = torch.tensor([[True, False, True], [False, True, True]])
    probs = torch.rand(2, 3)
    topk_idx, weights = topk_of_routing_map(routing_map, torch._neg_view(-probs))
    assert torch.equal(weights, probs.gather(1, topk_idx))
    _, dense = routing_map_of_topk(topk_idx, torch._neg_view(-weights), 3)
    assert torch.equal(dense, probs * routing_map)


def test_probs_get_their_gradient() -> None:
    routing_map = torch.tensor([[True, False, True], [False, True, False]])
    probs = torch.rand(2, 3, requires_grad=True)
    _, weights = topk_of_routing_map(routing_map, probs)
    weights.backward(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert probs.grad.tolist() == [[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]]


@pytest.mark.parametrize(
    ("routing_map", "probs", "error", "message"),
    [
        (torch.zeros(2, 3), None, TypeError, "torch.float32"),
        (torch.zeros(2, dtype=torch.bool), None, ValueError, r"\(2,\)"),
        (torch.zeros(3, 2, dtype=torch.bool).T, None, ValueError, "strides"),
        (torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 4), ValueError, r"\(2, 4\)"),
    ],
)
def test_a_wrong_map_is_refused(
    routing_map: torch.Tensor,
    probs: torch.Tensor | None,
    error: type[Exception],
    message: str,
) -> None:
    with pytest.raises(error, match=message):
        topk_of_routing_map(routing_map, probs)
