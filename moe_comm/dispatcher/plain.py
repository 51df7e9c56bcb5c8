"""A token dispatcher for MoE layers that belong to no framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist

from moe_comm.arguments import as_dense, check_kind, shown
from moe_comm.ep.autograd import combine, dispatch
from moe_comm.ep.buffer import EpBuffer, rejects_unbound
from moe_comm.ep.call_options import check_alignment
from moe_comm.ep.config import Capacity
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.ep.handles import DispatchHandle
from moe_comm.ep.routing_map import topk_of_routing_map
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.missed_calls import GATHER, Telling, keep, keeps_unbound
from moe_comm.tensors.quantization import Quantization


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class DispatchedTokens:
    """Result of one dispatch, and all that its combine needs: the dispatcher keeps nothing.

    Args:
        tokens: `[M, hidden]`, grouped by local expert; rows of local expert e are
            `tokens[expert_offsets[e]:expert_offsets[e] + num_tokens_per_expert[e]]`, padding is zero.
            A `QuantizedRows` where the dispatcher quantizes. With a placement, a local expert is a local
            slot here and below.
        num_tokens_per_expert: int64 `[num_local_experts]` on the host, without padding.
        expert_offsets: int32 `[num_local_experts + 1]`: padded starts, as grouped GEMMs take them.
        probs: `[M]`, the weight of every row, 0 in padding; None where combine applies the weights, or
            none were given.
        num_dropped_per_expert: int64 `[num_local_experts]` on the host: rows beyond the capacity.
        handle: Handle of the dispatch.
        topk_weights: `[num_tokens, num_topk]` for combine to apply, or None.
        shape: Shape of the tokens on this rank, without hidden.
    """

    tokens: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    probs: torch.Tensor | None
    num_dropped_per_expert: torch.Tensor
    handle: DispatchHandle
    topk_weights: torch.Tensor | None
    shape: tuple[int, ...]


class TokenDispatcher:
    """Brings tokens to their experts and the experts' outputs back; differentiable and compilable.

    Collective like the calls beneath: every rank of the group makes it, and calls it in the same order.
    Where any rank needs a gradient, what it returns requires one on every rank. It holds no state of a
    call, so any number of micro-batches may be between dispatch and combine. A mistake of one rank is
    raised on every rank.

    Args:
        num_experts: Experts over all ranks.
        group: Process group, bootstrap, or None for the default group; dispatchers of one group share a
            buffer.
        buffer: Buffer to use in place of `group` and `expert_rank`; for `num_experts`. It may have
            a placement, which may be replaced between a combine and the next dispatch.
        expert_rank: The rank of every expert; see `EpConfig`.
        expert_alignment: Rows of every local expert are padded with zero rows to a multiple of this.
        quantization: Rows are quantized while they are written; gradients are not.
        capacity: Limits on the rows of this rank; see `Capacity`.
        weighted_by: Place where an expert's output is multiplied by its weight. "experts": dispatch
            brings `probs` along and the caller applies them. "combine": combine does, in float32.

    Raises:
        ValueError: An argument of some rank is wrong, `num_experts` is not that of `buffer`, or ranks
            differ; on every rank.
        TypeError: An argument of some rank is of a wrong type; on every rank.

    Example:
        dispatcher = TokenDispatcher(num_experts=64, weighted_by="combine")
        routed = dispatcher.dispatch(x, topk_weights, topk_idx=topk_idx)
        y = dispatcher.combine(experts(routed.tokens, routed.expert_offsets), routed)
    """

    @keeps_unbound
    def __init__(
        self,
        num_experts: int,
        *,
        group: dist.ProcessGroup | Bootstrap | None = None,
        buffer: EpBuffer | None = None,
        expert_rank: torch.Tensor | Sequence[int] | None = None,
        expert_alignment: int = 1,
        quantization: Quantization | None = None,
        capacity: Capacity | None = None,
        weighted_by: Literal["experts", "combine"] = "experts",
    ) -> None:

        def check() -> None:
            if weighted_by not in ("experts", "combine"):
                raise ValueError(
                    f'weighted_by must be "experts" or "combine", got {shown(weighted_by)}'
                )
            check_alignment(expert_alignment)
            check_kind("quantization", quantization, Quantization, is_optional=True)
            check_kind("capacity", capacity, Capacity, is_optional=True)

        self._group_buffers = None
        if buffer is None:
            # Held here: those of a bootstrap live as long as somebody holds them.
            self._group_buffers = group_buffers(group)
            buffer = self._group_buffers.get_together(
                "TokenDispatcher",
                num_experts,
                expert_rank=expert_rank,
                check=check,
            )
        else:
            with Telling(keep, GATHER):
                check_kind("buffer", buffer, EpBuffer)
            found = buffer.config.num_experts

            def state() -> str:
                check()
                if buffer.is_destroyed:
                    raise ValueError("the buffer has been destroyed")
                if found != num_experts:
                    raise ValueError(f"num_experts is {shown(num_experts)}, the buffer has {found}")
                return f"TokenDispatcher(num_experts={found}, of a buffer)"

            buffer.communicator.check_together(state)
        self.buffer = buffer
        self.num_experts = num_experts
        self.num_local_experts = buffer.num_local_experts
        self.expert_alignment = expert_alignment
        self.quantization = quantization
        self.capacity = capacity
        self.weighted_by = weighted_by

    def __deepcopy__(self, memo: dict[int, object]) -> TokenDispatcher:
        """Itself: copies of a layer share the buffer, and a dispatcher holds no state of a call."""
        return self

    @rejects_unbound("dispatch", lambda args, _: args[0].buffer)
    def dispatch(
        self,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        *,
        topk_idx: torch.Tensor | None = None,
        routing_map: torch.Tensor | None = None,
    ) -> DispatchedTokens:
        """Send every token to the ranks of its experts. Collective.

        Args:
            hidden: `[..., hidden]`, any float dtype whose rows are a multiple of 16 bytes; any number
                of tokens, which may differ between ranks.
            probs: Router's weights, of the shape of `topk_idx` or of `routing_map`; any float dtype,
                used in float32 (float64 where hidden is float64). None: 1.
            topk_idx: Integers `[..., num_topk]`; -1 marks an unused choice.
            routing_map: bool `[..., num_experts]`, in place of `topk_idx`; tokens may have any number
                of experts, choices are in ascending order of expert. Reads the map on the host:
                `torch.compile` breaks its graph here.

        Raises:
            ValueError: Shapes do not fit, or both or neither of `topk_idx` and `routing_map` are given.
            TypeError: A dtype is wrong.
        """
        with Telling(self.buffer.reject, "dispatch"):
            self._check(hidden, probs, topk_idx, routing_map)
        num_features = hidden.shape[-1]
        if topk_idx is not None:
            choices = topk_idx.reshape(-1, topk_idx.shape[-1]).to(torch.int64)
            weights = None if probs is None else probs.reshape(-1, probs.shape[-1])
        else:
            assert routing_map is not None
            choices, weights = topk_of_routing_map(
                routing_map.reshape(-1, routing_map.shape[-1]).contiguous(),
                None if probs is None else probs.reshape(-1, probs.shape[-1]),
            )
        if weights is not None and not (
            weights.dtype is torch.float64 and hidden.dtype is torch.float64
        ):
            weights = weights.float()
        by_experts = self.weighted_by == "experts"
        result = dispatch(
            hidden.reshape(-1, num_features),
            choices,
            weights if by_experts else None,
            buffer=self.buffer,
            expert_alignment=self.expert_alignment,
            quantization=self.quantization,
            capacity=self.capacity,
        )
        return DispatchedTokens(
            tokens=result.x,
            num_tokens_per_expert=result.num_tokens_per_expert,
            expert_offsets=result.expert_offsets,
            probs=result.topk_weights,
            num_dropped_per_expert=result.num_dropped_per_expert,
            handle=result.handle,
            topk_weights=None if by_experts else weights,
            shape=tuple(hidden.shape[:-1]),
        )

    @rejects_unbound("combine", lambda args, _: args[0].buffer)
    def combine(self, expert_out: torch.Tensor, routed: DispatchedTokens) -> torch.Tensor:
        """Return the experts' outputs to their tokens and sum them. Collective.

        Args:
            expert_out: `[M, any hidden]`, one row for every row of `routed.tokens`, in that order. Rows
                of padding are not read.
            routed: Result of this dispatcher's dispatch; may be used again.

        Returns:
            `[..., hidden]`, dtype of `expert_out`; added in top-k order in float32.
        """
        with Telling(self.buffer.reject, "combine"):
            if not isinstance(routed, DispatchedTokens):
                raise TypeError(f"routed must be DispatchedTokens, got {type(routed).__name__}")
        y = combine(expert_out, routed.handle, buffer=self.buffer, topk_weights=routed.topk_weights)
        if len(routed.shape) == 1:
            return y  # not as a view: what FSDP wraps must not return one
        return y.reshape(*routed.shape, y.shape[-1])

    def _check(
        self,
        hidden: torch.Tensor,
        probs: torch.Tensor | None,
        topk_idx: torch.Tensor | None,
        routing_map: torch.Tensor | None,
    ) -> None:
        """Raise what is wrong with the input beyond what the buffer checks."""
        if (topk_idx is None) == (routing_map is None):
            given = "neither" if topk_idx is None else "both"
            raise ValueError(f"give topk_idx or routing_map, got {given}")
        name = "routing_map" if topk_idx is None else "topk_idx"
        as_dense("hidden", hidden)
        choices = as_dense(name, routing_map if topk_idx is None else topk_idx)
        weights = None if probs is None else as_dense("probs", probs)
        is_bool = choices.dtype is torch.bool
        is_inexact = choices.is_floating_point() or choices.is_complex()
        if is_inexact or is_bool is (topk_idx is not None):
            wanted = "bool" if topk_idx is None else "integers"
            raise TypeError(f"{name} must be {wanted}, got {choices.dtype}")
        if hidden.dim() < 1 or hidden.shape[:-1] != choices.shape[:-1] or choices.dim() < 1:
            raise ValueError(
                f"hidden {tuple(hidden.shape)} and {name} {tuple(choices.shape)} must agree in all "
                f"dimensions but the last"
            )
        num_ids = self.buffer.config.num_ids
        if topk_idx is None and choices.shape[-1] != num_ids:
            raise ValueError(f"routing_map must have {num_ids} columns, got {choices.shape[-1]}")
        if weights is None:
            return
        if not weights.is_floating_point():
            raise TypeError(f"probs must be a floating-point tensor, got {shown(weights)}")
        if weights.shape != choices.shape:
            raise ValueError(
                f"probs must have the shape of {name} {tuple(choices.shape)}, got {tuple(weights.shape)}"
            )
