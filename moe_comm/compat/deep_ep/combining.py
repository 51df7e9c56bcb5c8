"""Combine: sums, weights pulled with them, biases added before them, early return."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from moe_comm.compat.deep_ep.arguments import check_tensor
from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.handle_counts import last_choices, row_sources
from moe_comm.compat.deep_ep.streams import plan_on_call_device
from moe_comm.compat.deep_ep.utils.event import EventHandle
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import Layout
from moe_comm.ep.handles import CombineResult, DispatchHandle
from moe_comm.tensors import arithmetic

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


def announcement(native: DispatchHandle) -> torch.Tensor:
    """`row_weights` of a combine that `sum_columns` follows, on every rank or on none.

    The ranks agree in the first of both calls that there is a second: no peer waits in vain.

    Args:
        native: Native handle of the dispatch, RANK_MAJOR.
    """
    return torch.zeros(native.num_recv_tokens, native.num_recv_topk, dtype=torch.float32)


def sum_columns(
    buffer: EpBuffer, native: DispatchHandle, columns: torch.Tensor, *, async_op: bool = False
) -> tuple[torch.Tensor, EventHandle]:
    """Add float32 columns `[M, C]` of received rows over ranks, in rank order. Collective.

    Returns:
        float32 `[N, C]`, and when it is there.
    """
    num_columns = columns.shape[1]
    padded = torch.nn.functional.pad(columns.detach(), (0, -num_columns % 4))
    if not async_op:
        return buffer.combine(padded, native)[:, :num_columns].contiguous(), EventHandle()
    result = torch.empty(native.num_tokens, num_columns, dtype=torch.float32)
    sums = torch.empty(native.num_tokens, padded.shape[1], dtype=torch.float32)
    pending = buffer.combine(padded, native, out=sums, async_op=True)
    assert isinstance(pending, CombineResult)

    def finish() -> None:
        result.copy_(sums[:, :num_columns])

    return result, EventHandle.of(pending.event, finish)


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
        owner: Owner of the buffers.
        buffer: Buffer of the dispatch.
        native: Native handle of the dispatch.
        rows: `[M, H]`.
        topk_weights: float32 `[M, K]` (RANK_MAJOR) or `[M]`, brought back from the ranks of the choices,
            or None.
        biases: `[N, H]` each, dtype of rows, at most two.
        async_op: Return before the end; not with biases.
    """
    weights = None if topk_weights is None else topk_weights.detach()
    if biases:
        return start_with_biases(owner, buffer, native, rows, weights, biases)()
    if not async_op:
        if weights is None:
            return Combined(buffer.combine(rows, native), None, EventHandle())
        combined = buffer.combine(rows, native, row_weights=weights)
        assert isinstance(combined, CombineResult)
        return Combined(combined.x, combined.topk_weights, EventHandle())
    # Shapes are known, so memory of our own can be handed out before the sums are in it.
    sums = rows.new_empty((native.num_tokens, rows.shape[1]))
    pulled = None
    if weights is not None:
        pulled = torch.empty(native.num_tokens, native.num_topk, dtype=torch.float32)
    pending = buffer.combine(rows, native, row_weights=weights, out=sums, async_op=True)
    assert isinstance(pending, CombineResult)

    def finish() -> None:
        if pulled is not None and pending.topk_weights is not None:
            pulled.copy_(pending.topk_weights)

    return Combined(sums, pulled, EventHandle.of(pending.event, finish))


def start_reduced(
    owner: GroupOwner,
    buffer: EpBuffer,
    native: DispatchHandle,
    rows: torch.Tensor,
    topk_weights: torch.Tensor | None,
    biases: list[torch.Tensor],
    *,
    places: torch.Tensor,
    sources: torch.Tensor,
) -> Callable[[], Combined]:
    """Begin what `combine_rows` does with expanded rows, but those of one token are added before they travel. Collective.

    So they are rounded here, and their sums again; a token's sums are added in the order of the last
    choice that led to each rank.

    Args:
        owner: Owner of the buffers.
        buffer: Buffer of the dispatch.
        native: Native handle of the dispatch.
        rows: `[M, H]`.
        topk_weights: float32 `[M]`, brought back, or None.
        biases: `[N, H]` each, dtype of rows, at most two.
        places: int64 `[m, K]`, rows of the choices of every received token, -1 for none.
        sources: int64 `[m]`, the ranks that received tokens came from, ascending.

    Returns:
        A function that adds what came back to the biases, which are read no earlier. Local.
    """
    pulled = _pulled_weights(buffer, native, topk_weights)
    returned = _return_rows(owner, arithmetic.sum_rows(rows, places), sources)
    topk_idx = plan_on_call_device(native.plan).topk_idx
    ranks, place = last_choices(topk_idx, buffer.expert_rank, owner.num_ranks)
    # Rows come back in order of (rank that held it, token here).
    num_from = torch.bincount(ranks[ranks >= 0], minlength=owner.num_ranks)
    start = (num_from.cumsum(0) - num_from)[ranks]  # where there is no rank, it is not used
    positions = torch.where(ranks >= 0, start + place, -1)
    return _adding(biases, returned, positions, None if topk_weights is None else pulled)


def start_with_biases(
    owner: GroupOwner,
    buffer: EpBuffer,
    native: DispatchHandle,
    rows: torch.Tensor,
    topk_weights: torch.Tensor | None,
    biases: list[torch.Tensor],
) -> Callable[[], Combined]:
    """Begin a sum of biases first, then rows in the order that combine adds them. Collective.

    Adding a bias to finished sums would round twice and in another order.

    Args:
        owner: Owner of the buffers.
        buffer: Buffer of the dispatch.
        native: Native handle of the dispatch.
        rows: `[M, H]`.
        topk_weights: `[M, K]` (RANK_MAJOR) or `[M]`, brought back, or None.
        biases: `[N, H]` each, dtype of rows.

    Returns:
        As `start_reduced`.
    """
    pulled = _pulled_weights(buffer, native, topk_weights)
    plan = plan_on_call_device(native.plan)
    sources = row_sources(plan, buffer.expert_rank, owner.rank_idx)
    returned = _return_rows(owner, rows, sources)
    # Rows come back in order of (rank that held it, row there), which is the order of slots.
    is_used = plan.slots >= 0
    order = plan.slots[is_used].argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    positions = torch.full_like(plan.slots, -1)
    positions[is_used] = place
    return _adding(biases, returned, positions, None if topk_weights is None else pulled)


def _pulled_weights(
    buffer: EpBuffer, native: DispatchHandle, topk_weights: torch.Tensor | None
) -> torch.Tensor | None:
    """Weights of rows or choices, brought back. Collective.

    Also where there are none: it tells the ranks that are in another kind of combine.
    """
    weights = topk_weights
    if weights is None:
        by_choice = native.layout is Layout.RANK_MAJOR
        columns = (native.num_recv_topk,) if by_choice else ()
        weights = torch.zeros(native.num_recv_tokens, *columns, dtype=torch.float32)
    pulled = buffer.combine(None, native, row_weights=weights)
    assert isinstance(pulled, CombineResult)
    return pulled.topk_weights


def _return_rows(owner: GroupOwner, rows: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    """Send rows back to the ranks they came from, unsummed; -1 is none. Collective."""
    by_rank = owner.shared().get(owner.num_ranks)
    return by_rank.dispatch(rows, sources[:, None], layout=Layout.RANK_MAJOR).x


def _adding(
    biases: list[torch.Tensor],
    rows: torch.Tensor,
    positions: torch.Tensor,
    topk_weights: torch.Tensor | None,
) -> Callable[[], Combined]:
    """A function that adds every token's biases, then its rows by `positions` `[N, K]`, -1 for none."""

    def add() -> Combined:
        num_tokens = positions.shape[0]
        num_before = len(biases) * num_tokens
        of_biases = torch.arange(num_before).view(len(biases), num_tokens).T
        after = torch.where(positions < 0, -1, positions + num_before)
        places = torch.cat([of_biases, after], dim=1)
        sums = arithmetic.sum_rows(torch.cat([*biases, rows]), places)
        return Combined(sums, topk_weights, EventHandle())

    return add
