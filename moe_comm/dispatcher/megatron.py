"""Megatron's six-call token dispatcher protocol, with TP folded into the group of the experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from moe_comm.dispatcher.megatron_experts import balance_experts
from moe_comm.dispatcher.megatron_manager import MegatronManager, alignment_of
from moe_comm.dispatcher.permuted import PermutedCombine
from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for
from moe_comm.peers.missed_calls import keeps_unbound
from moe_comm.tensors.quantization import Quantization

__all__ = [
    "MegatronManager",
    "MegatronTokenDispatcher",
    "SharedExperts",
    "alignment_of",
    "balance_experts",
]


class SharedExperts(Protocol):
    """Interface of Megatron's shared experts, by which they run while tokens travel."""

    def pre_forward_comm(self, hidden_states: torch.Tensor) -> None:
        """Take the tokens, in their original shape."""

    def linear_fc1_forward_and_act(self, overlapped: torch.Tensor | None = None) -> None:
        """Called while the dispatch is in flight."""

    def linear_fc2_forward(self, overlapped: torch.Tensor | None = None) -> None:
        """Called while the combine is in flight."""

    def post_forward_comm(self) -> None:
        """Called behind `linear_fc2_forward`."""

    def get_output(self) -> torch.Tensor:
        """Return the tensor that is added to the output of the experts."""


class MegatronTokenDispatcher:
    """Drop-in for Megatron's `MoEFlexTokenDispatcher`; works without Megatron. Differentiable.

    Calls in order: `dispatch_preprocess`, `token_dispatch`, `dispatch_postprocess`, experts,
    `combine_preprocess`, `token_combine`, `combine_postprocess`. Collective: every rank of the group
    makes it, and calls it in the same order. It holds the state of one micro-batch; several dispatchers
    may have operations in flight together.

    Every TP rank of an expert gets every token of it: the group is TP x EP, experts are counted once for
    every TP rank, and the map is repeated. So a token has TP times as many choices, which is no limit.

    Args:
        num_local_experts: Experts of a rank, equal on every rank.
        local_expert_indices: Their ids, ascending: `[ep_rank * num_local_experts, ...]`.
        config: A `TransformerConfig`, or anything with `num_moe_experts` and `moe_router_topk` and some of
            its other attributes; see `MegatronManager.from_config`.
        pg_collection: Anything with the groups `ep`, `expt_tp` and `tp_ep`; the ranks of `tp_ep` are
            ordered by EP rank, then TP rank. None: the default group is `tp_ep`, without TP.
        quantization: Rows are quantized while they are written; gradients are not.

    Raises:
        ValueError: Experts, ids and groups do not fit.

    Example:
        layer.token_dispatcher = MegatronTokenDispatcher(
            layer.num_local_experts, layer.local_expert_indices, layer.config, pg_collection
        )
    """

    @keeps_unbound
    def __init__(
        self,
        num_local_experts: int,
        local_expert_indices: Sequence[int],
        config: Any,
        pg_collection: Any = None,
        *,
        quantization: Quantization | None = None,
    ) -> None:
        self.config = config
        self.num_local_experts = num_local_experts
        self.local_expert_indices = list(local_expert_indices)
        self.ep_group = getattr(pg_collection, "ep", None)
        self.tp_group = getattr(pg_collection, "expt_tp", None)
        self.tp_ep_group = getattr(pg_collection, "tp_ep", None)
        self.tp_size, _ = _size_and_rank(self.tp_group) if pg_collection is not None else (1, 0)
        self.ep_size, self.ep_rank = _size_and_rank(self.ep_group)
        self._check_experts()
        self._comm_manager = MegatronManager.from_config(
            self.tp_ep_group,
            num_local_experts,
            self.tp_size * config.moe_router_topk,
            config,
            quantization=quantization,
        )
        num_folded = self.tp_size * config.num_moe_experts
        if self._comm_manager.num_experts != num_folded:
            raise ValueError(
                f"the group has {self._comm_manager.num_experts} places for experts, num_moe_experts "
                f"x TP ranks is {num_folded}"
            )
        self.shared_experts: SharedExperts | None = None
        self.hidden_shape = torch.Size()
        self._combining: PermutedCombine | None = None
        # Attributes that Megatron's graph capture carries over a graph's edge.
        self.cudagraph_attrs = ["_comm_manager.token_probs", "_comm_manager.routing_map"]
        self.valid_cudagraph_attrs: list[str] | None = None

    def set_shared_experts(self, shared_experts: SharedExperts) -> None:
        """Run these while tokens travel, and add their output."""
        self.shared_experts = shared_experts

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the tokens and their routing. Local.

        Args:
            hidden_states: `[..., hidden]`, contiguous.
            routing_map: bool `[num_tokens, num_moe_experts]`, any number of experts a token.
            probs: `[num_tokens, num_moe_experts]`, any float dtype.

        Returns:
            `[num_tokens, hidden]`, and the probs of all places of experts.
        """
        self.hidden_shape = hidden_states.shape
        if self.shared_experts is not None:
            self.shared_experts.pre_forward_comm(hidden_states)
        self._comm_manager.setup_metadata(self._folded(routing_map), self._folded(probs))
        assert self._comm_manager.token_probs is not None
        return hidden_states.view(-1, hidden_states.shape[-1]), self._comm_manager.token_probs

    def token_dispatch(
        self,
        hidden_states: torch.Tensor,
        probs: torch.Tensor | None = None,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Send tokens to their experts. Collective.

        Args:
            hidden_states: Tokens from `dispatch_preprocess`.
            probs: Probabilities from `dispatch_preprocess`; None for those it kept.
            async_finish: Return while the rows are in flight. What is returned then stands for them,
                and only `dispatch_postprocess` makes use of it.
            allocate_on_comm_stream: No effect.

        Returns:
            Rows and their probabilities.
        """
        manager = self._comm_manager
        if probs is not None:
            manager.token_probs = probs
        hidden_states = manager.dispatch(hidden_states, async_finish, allocate_on_comm_stream)
        return hidden_states, manager.dispatched_probs

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Wait for the rows. Shared experts run before, in the meantime.

        Args:
            hidden_states: Rows from `token_dispatch`.
            probs: Probabilities from `token_dispatch`.

        Returns:
            `[M, hidden]`, grouped by local expert (`QuantizedRows` where they are quantized); int64
            `[num_local_experts]` on the host, padding included; float32 `[M]`, 0 in padding.
        """
        if self.shared_experts is not None:
            self.shared_experts.linear_fc1_forward_and_act(hidden_states)
        manager = self._comm_manager
        manager.dispatched_probs = probs
        rows, row_probs = manager.get_permuted_hidden_states_by_experts(hidden_states)
        return rows, manager.get_number_of_tokens_per_expert(), row_probs

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows as `token_combine` takes them, which is as they are."""
        return self._comm_manager.get_restored_hidden_states_by_experts(hidden_states)

    def token_combine(
        self,
        hidden_states: torch.Tensor,
        async_finish: bool = True,
        allocate_on_comm_stream: bool = True,
    ) -> torch.Tensor:
        """Sum the experts' outputs back to their tokens, unweighted. Collective.

        Args:
            hidden_states: `[M, hidden]`; rows of padding are not read.
            async_finish: Return while the sums are in flight. What is returned then stands for them,
                and only `combine_postprocess` makes use of it.
            allocate_on_comm_stream: No effect.
        """
        if not async_finish:
            return self._comm_manager.combine(hidden_states)
        self._combining = self._comm_manager.start_combine(hidden_states, async_op=True)
        return hidden_states

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Wait for the sums, bring them into the shape of the tokens, add the shared experts' output.

        Args:
            hidden_states: Result of `token_combine`.

        Returns:
            `[..., hidden]`.
        """
        if self.shared_experts is not None:
            self.shared_experts.linear_fc2_forward(hidden_states)
            self.shared_experts.post_forward_comm()
        if self._combining is not None:
            combining, self._combining = self._combining, None
            hidden_states = combining.wait_differentiable(hidden_states)
        output = hidden_states.view(*self.hidden_shape[:-1], hidden_states.shape[-1])
        if self.shared_experts is not None:
            output = output + self.shared_experts.get_output()
        return output

    def get_expert_zero_copy_buffers(
        self, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Memory for the experts' output and for the gradient of their input, read in place. Local.

        Args:
            dtype: Dtype of the rows. None, as Megatron's `MoELayer` calls it, asks for none: most
                of its experts take no memory to write to.

        Returns:
            Two of `[M, hidden]`, uninitialized, after `dispatch_postprocess`; None and None before, and
            without a dtype.
        """
        if dtype is None:
            return None, None
        hidden = self.hidden_shape[-1] if self.hidden_shape else 0
        manager = self._comm_manager
        return manager.empty_rows(hidden, dtype), manager.empty_rows(hidden, dtype)

    def check_over_budget(self) -> torch.Tensor:
        """Return whether rows for this rank were dropped since `reset_over_budget`."""
        return self._comm_manager.over_budget

    def check_required_capacity(self) -> torch.Tensor:
        """int64 `[1]`: most rows that a dispatch needed on this rank since `reset_over_budget`."""
        return self._comm_manager.required_recv

    def grow_ep_recv_capacity(self, new_capacity: int) -> None:
        """Raise the budget to `new_capacity` rows; without effect where there is none.

        Raises:
            ValueError: It would not grow.
        """
        self._comm_manager.grow_recv_capacity(new_capacity)

    def invalidate_ep_bootstrap(self) -> None:
        """Nothing is ever to be remade: memory is sized by every call."""

    def reset_over_budget(self) -> None:
        """Forget what was reported."""
        self._comm_manager.reset_over_budget()

    def _folded(self, dense: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, TP x EP, num_local_experts]` of `[num_tokens, num_moe_experts]`."""
        if dense.shape[1:] != (self.ep_size * self.num_local_experts,):
            return dense  # refused by the dispatch, on every rank
        num_tokens = dense.shape[0]
        by_rank = dense.reshape(num_tokens, self.ep_size, 1, self.num_local_experts)
        return by_rank.expand(-1, -1, self.tp_size, -1).reshape(
            num_tokens, self.ep_size * self.tp_size, self.num_local_experts
        )

    def _check_experts(self) -> None:
        num_experts = self.config.num_moe_experts
        if self.num_local_experts * self.ep_size != num_experts:
            raise ValueError(
                f"{self.num_local_experts} local experts on {self.ep_size} EP ranks are not "
                f"num_moe_experts = {num_experts}"
            )
        first = self.ep_rank * self.num_local_experts
        expected = list(range(first, first + self.num_local_experts))
        if self.local_expert_indices != expected:
            raise ValueError(
                f"local_expert_indices must be {expected} on EP rank {self.ep_rank}, got "
                f"{self.local_expert_indices}"
            )


def _size_and_rank(group: dist.ProcessGroup | Bootstrap | None) -> tuple[int, int]:
    ranks = bootstrap_for(group)
    return ranks.num_ranks, ranks.rank_idx
