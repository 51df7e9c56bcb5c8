"""A backward that the caller runs in parts, from tensors of its own between dispatch and combine.

So do pipeline schedules that put the communication of one micro-batch beside the experts of another, and
re-entrant checkpoints of the experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import moe_comm
from moe_comm import fused_a2a
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.dispatcher.megatron_manager import MegatronManager
from moe_comm.ep.config import Layout
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.testing import RankContext, run_ranks

Rows = tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]
"""Results of a dispatch and of its combine."""

NUM_EXPERTS = 4
HIDDEN = 16


def by_token_dispatcher(context: RankContext, x: torch.Tensor, topk_idx: torch.Tensor) -> Rows:
    dispatcher = TokenDispatcher(NUM_EXPERTS, group=context.group)
    routed = dispatcher.dispatch(x, topk_idx=topk_idx)
    return routed.tokens, lambda out: dispatcher.combine(out, routed)


def by_functions(context: RankContext, x: torch.Tensor, topk_idx: torch.Tensor) -> Rows:
    buffer = group_buffers(context.group).get(NUM_EXPERTS)
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer)
    return result.x, lambda out: moe_comm.combine(out, result.handle, buffer=buffer)


def by_manager(context: RankContext, x: torch.Tensor, topk_idx: torch.Tensor) -> Rows:
    manager = MegatronManager(context.group, NUM_EXPERTS // context.num_ranks)
    mask = torch.zeros(len(x), NUM_EXPERTS, dtype=torch.bool).scatter_(1, topk_idx, True)
    manager.setup_metadata(mask, mask.float())
    rows, _ = manager.get_permuted_hidden_states_by_experts(manager.dispatch(x))
    return rows, manager.combine


def by_fused_functions(context: RankContext, x: torch.Tensor, topk_idx: torch.Tensor) -> Rows:
    weights = torch.ones(topk_idx.shape)
    rows, _, _, _, handle = fused_a2a.fused_dispatch(
        x, topk_idx, weights, NUM_EXPERTS, context.group
    )
    return rows, lambda out: fused_a2a.fused_combine(out, context.group, handle)[0]


FACES = {
    "TokenDispatcher": by_token_dispatcher,
    "functions": by_functions,
    "MegatronManager": by_manager,
    "fused_a2a": by_fused_functions,
}


def gradient(context: RankContext, face: str, how: str) -> torch.Tensor:
    """Gradient of the step before the dispatch, which saves tensors for its own backward."""
    draw = torch.Generator().manual_seed(context.rank_idx)
    weight = torch.randn(HIDDEN, HIDDEN, generator=draw).requires_grad_()
    x = torch.sigmoid(torch.randn(8, HIDDEN, generator=draw) @ weight)
    rows, combine = FACES[face](context, x, torch.randint(0, NUM_EXPERTS, (8, 1), generator=draw))
    if how == "whole":
        combine(torch.tanh(rows)).sum().backward()
    elif how == "parts":
        inner = rows.detach().requires_grad_()
        combine(torch.tanh(inner)).sum().backward()
        assert inner.grad is not None
        assert weight.grad is None
        rows.backward(inner.grad)
    else:
        y = checkpoint(lambda given: combine(torch.tanh(given)), rows, use_reentrant=True)
        y.sum().backward()
    assert weight.grad is not None
    return weight.grad


def compare(context: RankContext, face: str) -> None:
    whole = gradient(context, face, "whole")
    assert bool((whole != 0).any())
    assert torch.equal(gradient(context, face, "parts"), whole)
    if face != "MegatronManager":  # which holds one micro-batch, and no second combine of it
        assert torch.equal(gradient(context, face, "checkpoint"), whole)


@pytest.mark.parametrize("face", FACES)
def test_parts_have_the_bits_of_the_whole(face: str) -> None:
    run_ranks(compare, 2, face)


def gradient_of_pairs(context: RankContext, *, in_parts: bool) -> torch.Tensor:
    """Gradient, as `gradient`, of rows that are tokens, which experts share, cut where every expert has its own."""
    draw = torch.Generator().manual_seed(context.rank_idx)
    weight = torch.randn(HIDDEN, HIDDEN, generator=draw).requires_grad_()
    x = torch.sigmoid(torch.randn(8, HIDDEN, generator=draw) @ weight)
    topk_idx = torch.rand(8, NUM_EXPERTS, generator=draw).topk(2).indices
    buffer = group_buffers(context.group).get(NUM_EXPERTS)
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer, layout=Layout.RANK_MAJOR)
    assert result.topk_idx is not None
    row_of_pair = (result.topk_idx >= 0).nonzero()[:, 0]
    assert len(row_of_pair) > len(result.x)
    pairs = result.x[row_of_pair]
    given = pairs.detach().requires_grad_() if in_parts else pairs
    out = torch.zeros(result.x.shape).index_add(0, row_of_pair, torch.tanh(given))
    moe_comm.combine(out, result.handle, buffer=buffer).sum().backward()
    if in_parts:
        assert given.grad is not None
        assert weight.grad is None
        pairs.backward(given.grad)
    assert weight.grad is not None
    return weight.grad


def compare_pairs(context: RankContext) -> None:
    whole = gradient_of_pairs(context, in_parts=False)
    assert bool((whole != 0).any())
    assert torch.equal(gradient_of_pairs(context, in_parts=True), whole)


def test_a_cut_between_the_rows_of_experts_is_seen() -> None:
    run_ranks(compare_pairs, 2)


def depend_on_weights(context: RankContext, face: str, kind: str) -> float:
    """The rows of rank 1 do not come from its dispatch: nobody but its combine begins that backward."""
    x = torch.ones(5, HIDDEN, requires_grad=True)
    topk_idx = torch.tensor([[0], [1], [1], [2], [3]])
    rows, combine = FACES[face](context, x, topk_idx)
    weight = torch.full((HIDDEN, HIDDEN), 3.0).requires_grad_()
    if kind == "parameter":
        weight = nn.Parameter(weight.detach())
    out = (rows if context.rank_idx == 0 else rows.detach()) @ weight
    combine(out).sum().backward()
    assert weight.grad is not None
    return float(x.grad.sum())


@pytest.mark.parametrize("kind", ["parameter", "tensor"])
@pytest.mark.parametrize("face", FACES)
def test_rows_that_come_from_weights_alone_leave_nobody_waiting(face: str, kind: str) -> None:
    # Three tokens of each rank went to rank 0.
    assert run_ranks(depend_on_weights, 2, face, kind) == [3.0 * 3.0 * HIDDEN * HIDDEN] * 2


def depend_on_tensors(context: RankContext, shape_of: str, detached_on: tuple[int, ...]) -> bool:
    """Rows of some ranks come from a tensor alone that has as many rows as arrived, or as choices did."""
    x = torch.ones(5, HIDDEN, requires_grad=True)
    topk_idx = torch.tensor([[0], [1], [1], [2], [3]])
    buffer = group_buffers(context.group).get(NUM_EXPERTS)
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer, expert_alignment=8)
    num_choices = int(result.num_tokens_per_expert.sum())
    assert num_choices < len(result.x)
    num_rows = {"rows": len(result.x), "choices": num_choices, "other": 3}[shape_of]
    weight = torch.ones(num_rows, HIDDEN, requires_grad=True)
    rows = result.x.detach() if context.rank_idx in detached_on else result.x
    moe_comm.combine(rows + weight.sum(0), result.handle, buffer=buffer).sum().backward()
    assert weight.grad is not None
    if x.grad is None:
        return False
    # The tokens of experts 0 and 1 went to rank 0.
    used = torch.tensor([rank_idx not in detached_on for rank_idx in (0, 0, 0, 1, 1)])
    assert torch.equal(x.grad, used.float()[:, None].expand(5, HIDDEN))
    return True


@pytest.mark.parametrize("detached_on", [(1,), (0,), (0, 1)])
@pytest.mark.parametrize("shape_of", ["rows", "choices", "other"])
def test_gradients_do_not_depend_on_how_many_rows_a_leaf_has(
    shape_of: str, detached_on: tuple[int, ...]
) -> None:
    has_gradient = len(detached_on) < 2  # as of a detached tensor in one process
    assert run_ranks(depend_on_tensors, 2, shape_of, detached_on) == [has_gradient] * 2


def skip_without_rows(context: RankContext, face: str, leaf: str, needs_dispatcher: bool) -> None:
    """Expert e multiplies by e + 2; all tokens go to expert 0, and rank 1 has rows of its own making."""
    for step in range(2):
        x = torch.ones(2, HIDDEN, requires_grad=True)
        topk_idx = torch.zeros(2, 1, dtype=torch.int64)
        watch = identity_hooks() if needs_dispatcher else contextlib.nullcontext()
        with watch:
            rows, combine = FACES[face](context, x, topk_idx)
            if context.rank_idx == 0:
                out = rows * 2
            elif leaf == "zeros":
                out = torch.zeros(0, HIDDEN, requires_grad=True)
            else:
                out = torch.zeros_like(rows, requires_grad=True) * 3
            combine(out).sum().backward()
        assert x.grad is not None, f"step {step}"
        assert torch.equal(x.grad, torch.full((2, HIDDEN), 2.0))


def identity_hooks() -> contextlib.AbstractContextManager[object]:
    return torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda kept: kept)


@pytest.mark.parametrize("needs_dispatcher", [False, True])
@pytest.mark.parametrize("leaf", ["zeros", "zeros_like"])
@pytest.mark.parametrize("face", FACES)
def test_a_rank_without_rows_may_pass_a_leaf(face: str, leaf: str, needs_dispatcher: bool) -> None:
    run_ranks(skip_without_rows, 2, face, leaf, needs_dispatcher, timeout_s=60.0)


def checkpoint_experts(context: RankContext, face: str, needs_dispatcher: bool) -> torch.Tensor:
    """A re-entrant checkpoint of experts and combine, whose inputs are the rows of each expert."""
    scale = torch.tensor([2.0, 3.0, 4.0, 5.0])
    x = torch.ones(4, HIDDEN, requires_grad=True)
    topk_idx = torch.tensor([[0], [1], [2], [2]])  # two rows of rank 0's experts, four of rank 1's
    first = 2 * context.rank_idx
    rows, combine = FACES[face](context, x, topk_idx)
    num_rows = [2, 2] if context.rank_idx == 0 else [4, 0]

    def experts(*rows_of_experts: torch.Tensor) -> torch.Tensor:
        scaled = [rows * scale[first + e] for e, rows in enumerate(rows_of_experts)]
        return combine(torch.cat(scaled))

    with identity_hooks() if needs_dispatcher else contextlib.nullcontext():
        y = checkpoint(experts, *rows.split(num_rows), use_reentrant=True)
        y.sum().backward()
    return x.grad[:, 0]


@pytest.mark.parametrize("needs_dispatcher", [False, True])
@pytest.mark.parametrize("face", ["TokenDispatcher", "functions"])
def test_rows_of_each_expert_may_be_checkpointed(face: str, needs_dispatcher: bool) -> None:
    for gradient_of_x in run_ranks(checkpoint_experts, 2, face, needs_dispatcher, timeout_s=60.0):
        assert gradient_of_x.tolist() == [2.0, 3.0, 4.0, 4.0]


def cut_and_copy(context: RankContext) -> torch.Tensor:
    """The caller goes on from copies of its own, in pieces, with more rows than arrived."""
    x = torch.ones(4, HIDDEN, requires_grad=True)
    topk_idx = torch.tensor([[0], [1], [2], [2]])
    buffer = group_buffers(context.group).get(NUM_EXPERTS)
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer)
    inner = torch.cat([result.x.detach().double(), torch.ones(7, HIDDEN)]).requires_grad_()
    out = inner[: len(result.x)].float() * (2.0 + context.rank_idx)
    moe_comm.combine(out, result.handle, buffer=buffer).sum().backward()
    assert x.grad is None
    result.x.backward(inner.grad[: len(result.x)].float())
    return x.grad[:, 0]


def test_a_cut_with_other_rows_than_arrived_is_seen() -> None:
    for gradient_of_x in run_ranks(cut_and_copy, 2, timeout_s=60.0):
        assert gradient_of_x.tolist() == [2.0, 2.0, 3.0, 3.0]


def weigh_by_rows(context: RankContext) -> list[float]:
    """The rows of no rank come from its dispatch, the weights of rank 0 do."""
    x = torch.ones(4, HIDDEN, requires_grad=True)
    topk_idx = torch.tensor([[0], [1], [2], [2]])
    buffer = group_buffers(context.group).get(NUM_EXPERTS)
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer)
    weights = torch.ones(4, 1)
    if context.rank_idx == 0:
        weights = weights + result.x.sum()
    rows = torch.ones_like(result.x, requires_grad=True)
    y = moe_comm.combine(rows, result.handle, buffer=buffer, topk_weights=weights)
    y.sum().backward()
    return x.grad[:, 0].tolist()


def test_weights_may_be_all_that_comes_from_the_dispatch() -> None:
    # Each of four weights is multiplied by a row of ones.
    expected = [4.0 * HIDDEN, 4.0 * HIDDEN, 0.0, 0.0]
    assert run_ranks(weigh_by_rows, 2, timeout_s=60.0) == [expected, expected]
