"""Rows that travel for `HybridEPBuffer`, and the places of its handles."""

from __future__ import annotations

import dataclasses
import functools

import torch

from moe_comm.compat.deep_ep.arguments import check_tensor
from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.handle_counts import rows_on_ranks, tokens_in_ranks
from moe_comm.compat.deep_ep.handles import HybridHandle
from moe_comm.compat.deep_ep.hybrid_config import HybridEpConfigInstance
from moe_comm.compat.deep_ep.streams import (
    Place,
    on_call_device,
    plan_on_call_device,
    resumed,
    running,
)
from moe_comm.ep.backends.base import PlanTensors
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.handles import DispatchResult
from moe_comm.ep.routing_map import (
    dense_of_topk,
    routing_map_of_topk,
    topk_of_routing_map,
)

Pair = tuple[torch.Tensor, torch.Tensor]
_INT_TYPES = (torch.int8, torch.int16, torch.int32, torch.int64)


def indices_to_map(
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_of_tokens: int,
    num_of_experts: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Dense form of choices. Local.

    Args:
        topk_idx: `[N, K]` integers; -1 marks an unused choice.
        topk_weights: `[N, K]`, or None.
        num_of_tokens: N.
        num_of_experts: E.

    Returns:
        bool `[N, E]` and float32 `[N, E]`, 0 elsewhere, or None.

    Raises:
        ValueError: A shape is wrong.
        TypeError: A dtype is wrong.
    """
    device = topk_idx.device if isinstance(topk_idx, torch.Tensor) else torch.device("cpu")
    with resumed(Place(device, None)):
        check_tensor("topk_idx", topk_idx, (num_of_tokens, None), *_INT_TYPES, strided=True)
        if topk_weights is not None:
            check_tensor("topk_weights", topk_weights, tuple(topk_idx.shape), strided=True)
            topk_weights = topk_weights.to(torch.float32)
        return routing_map_of_topk(topk_idx.to(torch.int64), topk_weights, num_of_experts)


@dataclasses.dataclass(frozen=True)
class Routing:
    """Routing of tokens, from whichever form was passed.

    Args:
        topk_idx: int64 `[N, K]`.
        topk_weights: float32 `[N, K]` or None.
        probs: float32 `[N, E]` or None.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor | None
    dense_probs: torch.Tensor | None
    num_experts: int

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        num_experts: int,
        routing_map: torch.Tensor | None,
        probs: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        known: HybridHandle | None,
    ) -> Routing:
        """Check the routing that was passed, or take the handle's.

        Raises:
            ValueError: Neither form was passed, or a shape is wrong.
            TypeError: A dtype or type is wrong.
        """
        num_tokens = check_tensor("hidden", hidden, (None, None)).shape[0]
        if routing_map is not None and topk_idx is not None:
            # Two forms of one thing, of which HybridEP takes the map.
            topk_idx = topk_weights = None
        dense_shape = (num_tokens, num_experts)
        if probs is not None:
            probs = check_tensor("probs", probs, dense_shape, torch.float32).detach()
            if topk_weights is not None:
                raise ValueError("probs and topk_weights are two forms of one thing, got both")
        if topk_weights is not None:
            shape = (num_tokens, None) if topk_idx is None else tuple(topk_idx.shape)
            weights = check_tensor("topk_weights", topk_weights, shape, torch.float32)
            topk_weights = weights.detach()
        if known is not None:
            return cls._of_known(num_experts, probs, topk_idx, topk_weights, known)
        if routing_map is None and topk_idx is None:
            raise ValueError("dispatch needs routing_map or topk_idx, got neither")
        if routing_map is None:
            choices = check_tensor("topk_idx", topk_idx, (num_tokens, None), *_INT_TYPES)
            choices = choices.to(torch.int64)
            if probs is not None:
                topk_weights = gathered(probs, choices)
            return cls(choices, topk_weights, probs, num_experts)
        if topk_weights is not None:
            raise ValueError("topk_weights need topk_idx, got None")
        mapped = check_tensor("routing_map", routing_map, dense_shape, torch.bool)
        choices, chosen_probs = topk_of_routing_map(mapped, probs)
        return cls(choices, chosen_probs, probs, num_experts)

    @classmethod
    def _of_known(
        cls,
        num_experts: int,
        probs: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        known: HybridHandle,
    ) -> Routing:
        if topk_weights is not None:
            if topk_idx is None:
                raise ValueError("topk_weights need topk_idx, got None")
            _, probs = routing_map_of_topk(topk_idx.to(torch.int64), topk_weights, num_experts)
        weights = None if probs is None else gathered(probs, known.topk_idx)
        return cls(known.topk_idx, weights, probs, num_experts)

    @property
    def probs(self) -> torch.Tensor | None:
        """float32 `[N, E]` or None."""
        if self.dense_probs is not None or self.topk_weights is None:
            return self.dense_probs
        return dense_of_topk(self.topk_weights, self.topk_idx, self.num_experts)


def gathered(probs: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
    """Probs of choices `[N, K]`, 0 at unused ones."""
    if probs.numel() == 0:
        return probs.new_zeros(topk_idx.shape)
    # An id that is out of range is refused by the dispatch, which names it.
    inside = topk_idx.clamp(0, probs.shape[1] - 1)
    return probs.gather(1, inside).masked_fill_(topk_idx < 0, 0.0)


@dataclasses.dataclass(frozen=True)
class Wire:
    """Rows as they travel: alone, or as bytes with float32 columns beside them.

    Args:
        payload: Rows for `EpBuffer.dispatch`.
        dtype: Dtype of hidden.
        num_scales: Columns of the scaling factor.
        num_probs: Columns of probs that follow them.
    """

    payload: torch.Tensor | Pair
    dtype: torch.dtype
    num_scales: int
    num_probs: int

    @classmethod
    def of(
        cls,
        hidden: torch.Tensor,
        scaling_factor: torch.Tensor | None,
        probs: torch.Tensor | None,
    ) -> Wire:
        """Check and pack.

        Raises:
            ValueError: A shape is wrong, or one-byte rows have no scaling factor.
            TypeError: A dtype or type is wrong.
        """
        rows = check_tensor("hidden", hidden, (None, None)).detach()
        columns = []
        if rows.dtype.itemsize == 1:
            if scaling_factor is None:
                raise ValueError(f"hidden of {rows.dtype} needs a scaling_factor, got None")
            shape = (rows.shape[0], None)
            columns.append(
                check_tensor("scaling_factor", scaling_factor, shape, torch.float32).detach()
            )
        num_scales = columns[0].shape[1] if columns else 0
        if probs is not None:
            columns.append(probs)
        if not columns:
            return cls(rows, rows.dtype, 0, 0)
        beside = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        data = rows if rows.dtype.itemsize == 1 else rows.view(torch.uint8)
        num_probs = 0 if probs is None else probs.shape[1]
        return cls((data, beside), rows.dtype, num_scales, num_probs)

    def unpack(
        self, result: DispatchResult
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Rows, probs and scaling factor that arrived."""
        if result.x_sf is None:
            return result.x, None, None
        token = result.x.view(self.dtype)
        scales = result.x_sf[:, : self.num_scales].contiguous() if self.num_scales else None
        probs = result.x_sf[:, self.num_scales :].contiguous() if self.num_probs else None
        return token, probs, scales


def rank_major_places(
    owner: GroupOwner,
    buffer: EpBuffer,
    result: DispatchResult,
    routing: Routing,
    config: HybridEpConfigInstance,
) -> tuple[object, ...]:
    """The seven places of a handle of `dispatch`."""
    plan = plan_on_call_device(result.handle.plan)
    num_tokens = routing.topk_idx.shape[0]
    local_ids = result.topk_idx
    assert local_ids is not None
    num_rows = max(local_ids.shape[0], num_tokens * owner.num_ranks)
    local_map = torch.zeros(num_rows, buffer.num_local_experts, dtype=torch.bool)
    is_local, _ = routing_map_of_topk(local_ids, None, buffer.num_local_experts)
    local_map[: local_ids.shape[0]] = is_local
    return (
        _sparse_to_dense(owner, buffer, plan, routing.topk_idx),
        torch.ones(num_tokens, 1, dtype=torch.bool),
        torch.ones(num_tokens, 0, dtype=torch.bool),
        _num_dispatched(owner, plan),
        local_map,
        num_tokens,
        config,
    )


def permuted_places(
    owner: GroupOwner,
    buffer: EpBuffer,
    result: DispatchResult,
    routing: Routing,
    config: HybridEpConfigInstance,
    *,
    has_budget: bool,
) -> tuple[object, ...]:
    """The eleven places of a handle of `dispatch_with_permute`; `has_budget`: rows may be missing.

    What only kernels read is empty: there are no dense rows that it could describe.
    """
    num_tokens = routing.topk_idx.shape[0]
    of_shape = _of_shape(owner.num_ranks, buffer.num_local_experts, num_tokens, running().device)
    return (
        *of_shape[:3],
        _num_dispatched(owner, plan_on_call_device(result.handle.plan)),
        *of_shape[3:],
        on_call_device(result.num_tokens_per_expert).to(torch.int32),
        num_tokens,
        config,
        torch.full((1,), has_budget and bool(result.has_overflow), dtype=torch.int32),
    )


@functools.lru_cache(maxsize=64)
def _of_shape(
    num_ranks: int, num_local_experts: int, num_tokens: int, device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Places 0 to 2 and 4 to 6 of a permuted handle, which follow from a call's shape.

    Handles share them: nobody has a reason to write to them, and to make them anew takes longer than
    a small exchange.
    """
    of_device = functools.partial(torch.zeros, device=device)
    return (
        of_device(0, num_ranks, dtype=torch.int32),
        torch.ones(num_tokens, 1, dtype=torch.bool, device=device),
        torch.ones(num_tokens, 0, dtype=torch.bool, device=device),
        of_device(0, num_local_experts, dtype=torch.bool),
        of_device(0, dtype=torch.int32),
        of_device(0, num_local_experts, dtype=torch.int32),
    )


def _num_dispatched(owner: GroupOwner, plan: PlanTensors) -> torch.Tensor:
    """int32 `[1]`, tokens received here, each once."""
    return plan.sent_tokens[:, owner.rank_idx].sum(0, keepdim=True, dtype=torch.int32)


def _sparse_to_dense(
    owner: GroupOwner, buffer: EpBuffer, plan: PlanTensors, topk_idx: torch.Tensor
) -> torch.Tensor:
    """int32 `[N, R]`: the row of every token on every rank, or -1."""
    is_in_rank, _ = tokens_in_ranks(topk_idx, buffer.expert_rank, owner.num_ranks)
    return rows_on_ranks(is_in_rank, plan.sent_tokens, owner.rank_idx).to(torch.int32)
