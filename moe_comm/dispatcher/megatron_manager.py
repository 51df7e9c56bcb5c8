"""The manager behind a flexible token dispatcher, in the shape of Megatron's `_DispatchManager`."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.arguments import as_int, check_kind
from moe_comm.dispatcher.permuted import (
    PermutedCombine,
    PermutedDispatch,
    PermutedHandle,
    check_no_transform,
    start_combine,
    start_dispatch,
)
from moe_comm.dispatcher.spare_slots import with_spare_slots
from moe_comm.ep.autograd.gradient_agreement import combine_word, dispatch_word
from moe_comm.ep.buffer import EpBuffer, rejects_unbound
from moe_comm.ep.call_options import check_alignment
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.missed_calls import Telling, keep, keeps_unbound
from moe_comm.tensors.quantization import Quantization


def alignment_of(config: Any) -> int:
    """Rows an expert's segment is padded to, as Megatron's configuration asks for it.

    32 for MXFP8, 16 for other FP8 recipes, 128 for FP4, 256 where the grouped GEMM is fused or takes
    grouped tensors, else 1: the rule of `get_align_size_for_quantization`, in Megatron's moe_utils.

    Args:
        config: A `TransformerConfig`, or anything with some of its attributes.
    """
    if getattr(config, "use_transformer_engine_op_fuser", False) or getattr(
        config, "moe_use_grouped_tensor", False
    ):
        return 256
    if getattr(config, "fp8", None):
        recipe = getattr(config, "fp8_recipe", None)
        return 32 if getattr(recipe, "value", recipe) == "mxfp8" else 16
    return 128 if getattr(config, "fp4", None) else 1


@dataclasses.dataclass(frozen=True, eq=False)
class _InFlight:
    """A dispatch that `get_permuted_hidden_states_by_experts` ends."""

    pending: PermutedDispatch
    probs: torch.Tensor


class MegatronManager:
    """Brings tokens to their experts by routing map; differentiable.

    Can be the `_comm_manager` of Megatron's `MoEFlexTokenDispatcher`, and works without Megatron.
    Collective like the calls beneath: every rank of the group makes it, and calls it in the same order.
    It holds the state of one micro-batch, from `setup_metadata` to `combine`; several managers of a
    group, of other layers or micro-batches, may have operations in flight together.

    Args:
        group: The group over all TP and EP ranks; process group, bootstrap, or None for the default.
        num_local_experts: Experts of a rank, equal on every rank.
        router_topk: Experts of a token, times the TP ranks; decides the budget only. None without one.
        expert_alignment: Rows of every local expert are padded with zero rows to a multiple of this.
        rank_capacity_factor: Rows of this rank's result over those of a balanced routing; what does not
            fit is dropped and reported in `over_budget`. The result has a fixed shape then. None: as
            many rows as arrive.
        quantization: Rows are quantized while they are written; gradients are not.

    Attributes:
        num_experts: Experts over the ranks of the group.
        token_probs: `[num_tokens, num_experts]`, of `setup_metadata`.
        routing_map: bool `[num_tokens, num_experts]`, of `setup_metadata`.
        dispatched_probs: float32 `[M]`, 0 in padding.
        tokens_per_expert: int64 `[num_local_experts]` on the host, padding included.
        handle: Handle of the latest dispatch; its last element is the overflow flag. None after
            combine.
        over_budget: bool `[1]`: whether rows for this rank were dropped since the last reset.
        required_recv: int64 `[1]`: most rows that a dispatch needed since the last reset.

    Raises:
        ValueError: A number of some rank is out of range, a factor is given without `router_topk`, or
            ranks differ; on every rank.
        TypeError: An argument of some rank is of a wrong type; on every rank.

    Example:
        dispatcher._comm_manager = MegatronManager(group, num_local_experts)
    """

    @keeps_unbound
    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None,
        num_local_experts: int,
        *,
        router_topk: int | None = None,
        expert_alignment: int = 1,
        rank_capacity_factor: float | None = None,
        quantization: Quantization | None = None,
    ) -> None:

        def check() -> None:
            check_alignment(expert_alignment)
            check_kind("quantization", quantization, Quantization, is_optional=True)
            if router_topk is not None:
                as_int("router_topk", router_topk, 1)
            if rank_capacity_factor is not None:
                if not rank_capacity_factor > 0.0:
                    raise ValueError(
                        f"rank_capacity_factor must be > 0, got {rank_capacity_factor}"
                    )
                if router_topk is None:
                    raise ValueError("rank_capacity_factor needs router_topk, got None")

        # Held here: those of a bootstrap live as long as somebody holds them.
        self._group_buffers = group_buffers(group)
        self._buffer = self._group_buffers.get_together(
            "MegatronManager", num_local_experts=num_local_experts, check=check
        )
        self.group = group
        self.num_local_experts = self._buffer.num_local_experts
        self.num_experts = self._buffer.config.num_experts
        self.router_topk = router_topk
        self.expert_alignment = expert_alignment
        self.rank_capacity_factor = rank_capacity_factor
        self.quantization = quantization
        self._capacity_override = 0
        self._in_flight: _InFlight | None = None

        self.routing_map: torch.Tensor | None = None
        self.token_probs: torch.Tensor | None = None
        self.dispatched_probs: torch.Tensor | None = None
        self.tokens_per_expert: torch.Tensor | None = None
        self.handle: PermutedHandle | None = None
        device = self._group_buffers.device  # where Megatron reduces them over ranks
        self.over_budget = torch.zeros(1, dtype=torch.bool, device=device)
        self.required_recv = torch.zeros(1, dtype=torch.int64, device=device)
        # Megatron looks at these; memory is sized by every call, so nothing is ever to be remade.
        self._bootstrapped = True
        self._zc_fwd_token_buf: torch.Tensor | None = None
        self._zc_bwd_token_buf: torch.Tensor | None = None

    @classmethod
    @keeps_unbound
    def from_config(
        cls,
        group: dist.ProcessGroup | Bootstrap | None,
        num_local_experts: int,
        router_topk: int,
        config: Any,
        *,
        quantization: Quantization | None = None,
    ) -> MegatronManager:
        """A manager with the alignment and the budget of Megatron's configuration.

        Args:
            group: As in `MegatronManager`.
            num_local_experts: As in `MegatronManager`.
            router_topk: As in `MegatronManager`.
            config: A `TransformerConfig`, or anything with some of its attributes. A capacity per
                expert is applied by Megatron's router, whose map then has it in it.
            quantization: As in `MegatronManager`.
        """
        return cls(
            group,
            num_local_experts,
            router_topk=router_topk,
            expert_alignment=alignment_of(config),
            rank_capacity_factor=getattr(config, "moe_expert_rank_capacity_factor", None),
            quantization=quantization,
        )

    @property
    def moe_expert_rank_capacity_factor(self) -> float | None:
        """`rank_capacity_factor`, by the name by which Megatron lifts and restores the budget."""
        return self.rank_capacity_factor

    @moe_expert_rank_capacity_factor.setter
    def moe_expert_rank_capacity_factor(self, factor: float | None) -> None:
        self.rank_capacity_factor = factor

    @property
    def buffer(self) -> EpBuffer:
        """Buffer that moves the tokens."""
        return self._buffer

    def add_spare_slots(self, num_spare_slots: int) -> None:
        """Have every rank get rows for so many replicas too, behind those of its own experts. Collective."""
        self._buffer = with_spare_slots(self._buffer, num_spare_slots)

    def setup_metadata(self, routing_map: torch.Tensor, probs: torch.Tensor) -> None:
        """Take the routing of the next dispatch. Local.

        Args:
            routing_map: bool `[num_tokens, num_ranks, num_local_experts]`, or any shape with as many
                elements. What has another number is raised by `dispatch`, on every rank.
            probs: Probabilities of the same shape, any float dtype.
        """
        self.routing_map = self._by_expert(routing_map)
        self.token_probs = self._by_expert(probs)

    def budget(self, num_tokens: int) -> int | None:
        """Rows of this rank's result for so many tokens a rank, or None for as many as arrive."""
        if self.rank_capacity_factor is None or self.router_topk is None:
            return None
        num_rows = int(num_tokens * self.router_topk * self.rank_capacity_factor)
        num_rows = max(num_rows, self._capacity_override)
        return -(-num_rows // self.expert_alignment) * self.expert_alignment

    @rejects_unbound("dispatch", lambda args, _: args[0]._buffer)
    def dispatch(
        self,
        hidden_states: torch.Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> torch.Tensor:
        """Send tokens to their experts.

        Args:
            hidden_states: `[num_tokens, hidden]`.
            async_finish: Return while the rows are in flight. What is returned, and
                `dispatched_probs`, then stand for the rows, and only
                `get_permuted_hidden_states_by_experts` makes use of them.
            allocate_on_comm_stream: No effect.

        Returns:
            `[M, hidden]`, permuted by expert; see `async_finish`.
        """
        routing_map, probs = self.routing_map, self.token_probs
        if routing_map is None or probs is None:
            with Telling(keep, "dispatch"):
                raise RuntimeError("dispatch needs the routing of setup_metadata, got none")
        if self._in_flight is not None:
            raise RuntimeError(
                "a dispatch of this manager is in flight: "
                "get_permuted_hidden_states_by_experts comes before the next"
            )
        with Telling(self._buffer.reject, "dispatch"):
            check_no_transform()
            num_rows = self.budget(hidden_states.shape[0])
        pending = start_dispatch(
            self._buffer,
            hidden_states,
            routing_map,
            probs,
            expert_alignment=self.expert_alignment,
            num_rows=num_rows,
            quantization=self.quantization,
            async_op=async_finish,
            gradients=dispatch_word(hidden_states, probs),
        )
        self._in_flight = _InFlight(pending, probs)
        self.dispatched_probs = probs
        return hidden_states if async_finish else self._arrived(hidden_states)

    def get_permuted_hidden_states_by_experts(
        self, hidden_states: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows as experts take them, and their probabilities; waits for a dispatch in flight.

        Args:
            hidden_states: Result of `dispatch`.
        """
        if self._in_flight is not None:
            hidden_states = self._arrived(hidden_states)
        return hidden_states, self.dispatched_probs

    def get_number_of_tokens_per_expert(self) -> torch.Tensor | None:
        """`tokens_per_expert`."""
        return self.tokens_per_expert

    def get_restored_hidden_states_by_experts(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Rows as combine takes them, which is as they are."""
        return hidden_states

    @rejects_unbound("combine", lambda args, _: args[0]._buffer)
    def combine(
        self,
        hidden_states: torch.Tensor,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> torch.Tensor:
        """Sum the experts' outputs back to their tokens, unweighted.

        Args:
            hidden_states: `[M, hidden]`; rows of padding are not read.
            async_finish: No effect: the sums are there on return. `start_combine` has two phases.
            allocate_on_comm_stream: No effect.

        Returns:
            `[num_tokens, hidden]`.
        """
        return self.start_combine(hidden_states).wait_differentiable(hidden_states)

    def start_combine(
        self, hidden_states: torch.Tensor, *, async_op: bool = False
    ) -> PermutedCombine:
        """The first phase of `combine`; `wait_differentiable(hidden_states)` of the result ends it."""
        if self.handle is None:
            raise RuntimeError("combine needs the handle of a dispatch, got none")
        handle, self.handle = self.handle, None
        with Telling(self._buffer.reject, "combine"):
            check_no_transform()
        word = combine_word(hidden_states, None, handle.places.link)
        return start_combine(hidden_states, handle, async_op=async_op, gradients=word)

    def grow_recv_capacity(self, new_capacity: int) -> None:
        """Raise the budget to `new_capacity` rows, such as `required_recv` of a step that dropped.

        Without effect where there is no budget.

        Raises:
            ValueError: It would not grow.
        """
        if self.rank_capacity_factor is None:
            return
        if new_capacity <= self._capacity_override:
            raise ValueError(
                f"the capacity must grow beyond {self._capacity_override}, got {new_capacity}"
            )
        self._capacity_override = int(new_capacity)

    def reset_over_budget(self) -> None:
        """Forget what was reported; in place, so that tensors handed out follow."""
        self.over_budget.zero_()
        self.required_recv.zero_()

    def empty_rows(self, hidden: int, dtype: torch.dtype) -> torch.Tensor | None:
        """`[M, hidden]`, uninitialized, which combine reads in place; None before a dispatch."""
        if self.handle is None:
            return None
        return self._buffer.empty_expert_output(self.handle.places, hidden=hidden, dtype=dtype)

    def _by_expert(self, dense: torch.Tensor) -> torch.Tensor:
        if (
            not isinstance(dense, torch.Tensor)
            or dense.layout is not torch.strided
            or not dense.dim()
        ):
            return dense  # refused by the dispatch, on every rank
        shape = (dense.shape[0], self.num_experts)
        return dense.reshape(shape) if dense.numel() == shape[0] * shape[1] else dense

    def _arrived(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert self._in_flight is not None
        in_flight, self._in_flight = self._in_flight, None
        rows = in_flight.pending.wait_differentiable(hidden_states, self.dispatched_probs)
        self.dispatched_probs = rows.probs
        self.tokens_per_expert = rows.tokens_per_expert
        self.handle = rows.handle
        self.over_budget |= (rows.handle.overflow != 0).to(self.over_budget.device)
        self.required_recv.clamp_(min=rows.handle.num_required_rows)
        return rows.hidden
