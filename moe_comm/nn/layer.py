"""A Mixture-of-Experts layer whose experts are spread over the ranks of a group."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist
from torch import nn

from moe_comm.arguments import as_int, check_kind, shown
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.ep.autograd import QuantizedRows
from moe_comm.ep.placement import Placement
from moe_comm.nn.experts import GroupedExperts
from moe_comm.nn.router import Routing, TopKRouter
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.missed_calls import GATHER, Telling, keep, keeps_unbound

if TYPE_CHECKING:
    from moe_comm.replicas import ExpertBalancer


class MoELayer(nn.Module):
    """Router, dispatch, experts, combine.

    Every rank of the group makes it and calls it in the same order. The router is the same on every
    rank, and its gradient is of this rank's tokens: reduce it like other replicated parameters. The
    experts are those of this rank, and their gradients are whole.

    Args:
        hidden: Elements of a token.
        ffn_hidden: Elements between the two matrices of an expert.
        num_experts: Experts over all ranks.
        num_topk: Choices per token.
        group: Process group, bootstrap, or None for the default group.
        dispatcher: Dispatcher to use instead of one made for `group`: with quantization, a
            capacity, another placement of experts, replicas.
        balancer: Moves the experts from now on, with the dispatcher's buffer, whose placement it
            replaces. The caller calls its `reduce_gradients` and `step`.
        num_kept_slots: Slots that `add_layer` of the balancer is told to keep. None: those that
            hold every expert once, in equal parts, so that what an optimizer keeps by slot stays
            with its expert; 0 where no such part of the slots does.
        activation: Activation of the experts.
        method: Method of `GroupedExperts`.
        dtype: Dtype of the experts' parameters.
        seed: Seed of the first parameters, which do not depend on the number of ranks.

    Raises:
        ValueError: A number breaks a rule on some rank, ranks differ, or `dispatcher` is for another
            number of experts; on every rank.
        TypeError: An argument of some rank is of a wrong type; on every rank.

    Example:
        ```python
        layer = MoELayer(hidden=512, ffn_hidden=1024, num_experts=64, num_topk=4)
        y = x + layer(x)
        ```
    """

    @keeps_unbound
    def __init__(
        self,
        hidden: int,
        ffn_hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        group: dist.ProcessGroup | Bootstrap | None = None,
        dispatcher: TokenDispatcher | None = None,
        balancer: ExpertBalancer | None = None,
        num_kept_slots: int | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu,
        method: Literal["auto", "loop", "grouped_mm"] = "auto",
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        with Telling(keep, GATHER):
            check_kind("dispatcher", dispatcher, TokenDispatcher, is_optional=True)
            if balancer is not None:
                # Here, because it imports what moves weights.
                from moe_comm.replicas import ExpertBalancer

                check_kind("balancer", balancer, ExpertBalancer)
        if dispatcher is None:
            dispatcher = TokenDispatcher(
                num_experts,
                group=group,
                # The alignment that torch._grouped_mm asks for on a GPU, and that costs little.
                expert_alignment=8 if dtype is torch.bfloat16 else 1,
                weighted_by="combine",
            )
        self.dispatcher = dispatcher
        found = dispatcher.num_experts
        buffer = dispatcher.buffer
        placement = buffer.config.placement

        def make() -> str:
            if found != num_experts:
                raise ValueError(f"num_experts is {shown(num_experts)}, the dispatcher has {found}")
            if not callable(activation):
                raise TypeError(f"activation must be callable, got {shown(activation)}")
            width = as_int("hidden", hidden, 1)
            rank_idx = buffer.communicator.rank_idx
            experts = (
                (buffer.expert_rank == rank_idx).nonzero().flatten().tolist()
                if placement is None
                else placement.slots[rank_idx]
            )
            self.router = TopKRouter(width, found, as_int("num_topk", num_topk, 1), seed=seed)
            self.experts = GroupedExperts(
                experts,
                width,
                as_int("ffn_hidden", ffn_hidden, 1),
                activation=activation,
                method=method,
                dtype=dtype,
                seed=seed,
            )
            return (
                f"MoELayer(hidden={width}, num_experts={found}, num_topk={num_topk}, seed={seed}, "
                f"{'a' if balancer else 'no'} balancer)"
            )

        buffer.communicator.check_together(make)
        if balancer is not None:
            kept = num_kept_slots
            if kept is None:
                kept = _num_slots_to_keep(placement) if placement is not None else 0
            balancer.add_layer(buffer, [self.experts.up, self.experts.down], num_kept_slots=kept)

    def forward(self, hidden: torch.Tensor, routing: Routing | None = None) -> torch.Tensor:
        """Collective.

        Args:
            hidden: `[..., hidden]`, any number of tokens, which may differ between ranks.
            routing: Routing of these tokens, if a router elsewhere chose; None: this layer's router
                does.

        Returns:
            `[..., hidden]`, dtype of `hidden`: the weighted sum of every token's experts.
        """
        if routing is None:
            routing = self.router(hidden)
        routed = self.dispatcher.dispatch(hidden, routing.topk_weights, topk_idx=routing.topk_idx)
        rows = routed.tokens
        if isinstance(rows, QuantizedRows):
            rows = rows.dequantize()  # once: each look at quantized rows does it anew
        out = self.experts(rows, routed.expert_offsets)
        if routed.probs is not None:
            out = (out * routed.probs[:, None]).to(out.dtype)
        return self.dispatcher.combine(out, routed).to(hidden.dtype)


def _num_slots_to_keep(placement: Placement) -> int:
    """Equal parts of the experts, where the first slots of every rank hold them; 0 where they do not."""
    num_slots = placement.num_experts // placement.num_ranks
    try:
        placement.first_slots(num_slots)
    except ValueError:
        return 0
    return num_slots
