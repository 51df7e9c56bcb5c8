"""Combine: sums, weights pulled with them, biases added before them, early return."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm import arithmetic
from moe_comm.buffer import EpBuffer
from moe_comm.compat.deep_ep.arguments import check_tensor
from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.utils.event import EventHandle
from moe_comm.config import Layout
from moe_comm.handles import CombineResult, DispatchHandle

__all__ = ["Bias", "Combined", "check_biases", "combine_rows"]

Bias = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None


@dataclasses.dataclass(frozen=True)
class Combined:
    """Sums `[N, H]`, pulled weights `[N, K]` or None, and when both are there."""

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    event: EventHandle


def check_biases(bias: Bias, shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """None, one or two biases.

    Raises:
        ValueError: There are more, or a shape is wrong.
        TypeError: A dtype or type is wrong.
    """
    biases = [] if bias is None else list(bias) if isinstance(bias, tuple) else [bias]
    if len(biases) > 2:
        raise ValueError(f"bias must be None, a tensor or a pair, got {len(biases)} values")
    return [check_tensor("bias", each, shape, dtype).detach() for each in biases]


def combine_rows(
    owner: GroupOwner,
    buffer: EpBuffer,
    native: DispatchHandle,
    rows: torch.Tensor,
    topk_weights: torch.Tensor | None,
    biases: list[torch.Tensor],
    *,
    async_op: bool,
) -> Combined:
    """Sum rows back to their tokens. Collective.

    Args:
        owner: Of the buffers.
        buffer: Of the dispatch.
        native: Of the dispatch.
        rows: `[M, H]`.
        topk_weights: float32 `[M, K]` (RANK_MAJOR) or `[M]`, brought back, or None.
        biases: `[N, H]` each, dtype of rows, at most two.
        async_op: Return before the end; not with biases.
    """
    weights = None if topk_weights is None else topk_weights.detach()
    if biases:
        sums, pulled = _combine_with_biases(owner, buffer, native, rows, weights, biases)
        return Combined(sums, pulled, EventHandle())
    if not async_op:
        if weights is None:
            return Combined(buffer.combine(rows, native), None, EventHandle())
        combined = buffer.combine(rows, native, row_weights=weights)
        assert isinstance(combined, CombineResult)
        return Combined(combined.x, combined.topk_weights, EventHandle())
    # Shapes are known, so memory of our own can be handed out before the sums are in it.
    sums = rows.new_empty((native.num_tokens, rows.shape[1]))
    pulled = None if weights is None else torch.empty(native.num_tokens, native.num_topk)
    pending = buffer.combine(rows, native, row_weights=weights, out=sums, async_op=True)
    assert isinstance(pending, CombineResult)

    def finish() -> None:
        if pulled is not None and pending.topk_weights is not None:
            pulled.copy_(pending.topk_weights)

    return Combined(sums, pulled, EventHandle.of(pending.event, finish))


def _combine_with_biases(
    owner: GroupOwner,
    buffer: EpBuffer,
    native: DispatchHandle,
    rows: torch.Tensor,
    topk_weights: torch.Tensor | None,
    biases: list[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Biases first, then rows in the order that combine adds them. Collective.

    Adding a bias to finished sums would round twice and in another order.

    Args:
        owner: Of the buffers.
        buffer: Of the dispatch.
        native: Of the dispatch.
        rows: `[M, H]`.
        topk_weights: `[M, K]` (RANK_MAJOR) or `[M]`, brought back, or None.
        biases: `[N, H]` each, dtype of rows.

    Returns:
        `[N, H]` and the weights `[N, K]` or None.
    """
    # Also tells the ranks that give no bias, who are in another kind of combine.
    weights = topk_weights
    if weights is None:
        by_choice = native.layout is Layout.RANK_MAJOR
        columns = (native.num_recv_topk,) if by_choice else ()
        weights = torch.zeros(native.num_recv_tokens, *columns)
    pulled = buffer.combine(None, native, row_weights=weights)
    assert isinstance(pulled, CombineResult)

    plan = native.plan.to_tensors()
    by_rank = owner.shared().get(owner.num_ranks)
    sources = _sources(buffer, owner, native, plan.counts)[:, None]
    returned = by_rank.dispatch(rows, sources, layout=Layout.RANK_MAJOR).x

    # Rows come back in order of (rank that held it, row there), which is the order of slots.
    num_tokens = native.num_tokens
    is_used = plan.slots >= 0
    order = plan.slots[is_used].argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order)) + len(biases) * num_tokens
    positions = torch.full_like(plan.slots, -1)
    positions[is_used] = place
    of_biases = torch.arange(len(biases) * num_tokens).view(len(biases), num_tokens).T
    sums = arithmetic.sum_rows(
        torch.cat([*biases, returned]), torch.cat([of_biases, positions], dim=1)
    )
    return sums, None if topk_weights is None else pulled.topk_weights


def _sources(
    buffer: EpBuffer, owner: GroupOwner, native: DispatchHandle, counts: torch.Tensor
) -> torch.Tensor:
    """int64 `[M]`, the rank every received row came from, -1 for padding."""
    num_experts, num_ranks = buffer.config.num_experts, owner.num_ranks
    if native.layout is Layout.RANK_MAJOR:
        lengths = counts[:, num_experts + owner.rank_idx].to(torch.int64)
        rank_of_part = torch.arange(num_ranks)
    else:
        mine = (buffer.expert_rank == owner.rank_idx).nonzero().flatten()
        per_expert = counts[:, mine].T.to(torch.int64)
        padding = -per_expert.sum(1, keepdim=True) % native.expert_alignment
        lengths = torch.cat([per_expert, padding], dim=1).flatten()
        rank_of_part = torch.cat([torch.arange(num_ranks), torch.tensor([-1])]).repeat(len(mine))
    filled = torch.repeat_interleave(rank_of_part, lengths)[: native.num_recv_tokens]
    sources = torch.full((native.num_recv_tokens,), -1, dtype=torch.int64)
    sources[: len(filled)] = filled
    return sources
