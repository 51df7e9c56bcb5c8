"""Plain torch: the readable specification of every operation.

Every rank gathers every rank's input and computes its own output from all of it, eagerly, also when
`async_op` is set. The pure functions `received` and `combined` are the specification proper; tests
call them to know what any backend must return.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch

from moe_comm.backends import arithmetic, messages, routing
from moe_comm.backends.agreement import Peers, agree_on_config
from moe_comm.backends.base import (
    Backend,
    CombineOutput,
    Completed,
    DispatchOutput,
    Operation,
    Plan,
    PlanTensors,
)
from moe_comm.backends.routing import Placement
from moe_comm.config import EpConfig, Layout

__all__ = ["ReferenceBackend", "ReferencePlan", "Sent", "combined", "plan_dispatch", "received"]

ValueT = TypeVar("ValueT")


@dataclasses.dataclass(frozen=True, eq=False)
class Sent:
    """What one rank puts into a dispatch.

    Args:
        x: `[T, hidden]`.
        topk_weights: None or `[T, K]`.
        plan: Where its rows go.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor | None
    plan: PlanTensors


@dataclasses.dataclass(frozen=True, eq=False)
class ReferencePlan:
    """A plan that is its tensors.

    Args:
        tensors: Own their memory.
        num_recv_tokens: M of the rank that holds the plan.
    """

    tensors: PlanTensors
    num_recv_tokens: int

    @property
    def num_tokens(self) -> int:
        """Tokens this rank dispatched."""
        return self.tensors.topk_idx.shape[0]

    def to_tensors(self) -> PlanTensors:
        """A copy of the tensors."""
        return dataclasses.replace(
            self.tensors,
            counts=self.tensors.counts.clone(),
            slots=self.tensors.slots.clone(),
            topk_idx=self.tensors.topk_idx.clone(),
        )


def plan_dispatch(
    topk_idx: Sequence[torch.Tensor],
    placement: Placement,
    layout: Layout,
    expert_alignment: int,
) -> list[PlanTensors]:
    """Where the rows of every rank go, from the choices `[T, K]` of every rank."""
    counts = torch.stack([routing.count_choices(choices, placement) for choices in topk_idx])
    return [
        PlanTensors(
            counts=counts,
            slots=routing.send_slots(
                rank_idx, choices, counts, placement, layout, expert_alignment
            ),
            topk_idx=choices,
            layout=layout,
            expert_alignment=expert_alignment,
        )
        for rank_idx, choices in enumerate(topk_idx)
    ]


def received(
    rank_idx: int, sent: Sequence[Sent], placement: Placement, *, is_cached: bool = False
) -> DispatchOutput:
    """What a rank receives when every rank sends `sent[r]`.

    Rows are copied as bytes, NaN payloads included; padding rows and their weights are zero.
    """
    mine = sent[rank_idx].plan
    window = routing.window_of(rank_idx, mine.counts, placement, mine.layout, mine.expert_alignment)
    num_topk = mine.topk_idx.shape[1]
    is_expert_major = mine.layout is Layout.EXPERT_MAJOR
    num_recv_tokens = window.num_recv_tokens

    x = torch.zeros(num_recv_tokens, sent[0].x.shape[1], dtype=sent[0].x.dtype)
    topk_idx = None
    if not is_expert_major and not is_cached:
        topk_idx = torch.full((num_recv_tokens, num_topk), -1, dtype=torch.int64)
    topk_weights = None
    if sent[0].topk_weights is not None:
        shape = (num_recv_tokens,) if is_expert_major else (num_recv_tokens, num_topk)
        topk_weights = torch.zeros(shape, dtype=sent[0].topk_weights.dtype)

    for source in sent:
        slot_rank, row = routing.decode_slots(source.plan.slots)
        token_idx, slot_pos = (slot_rank == rank_idx).nonzero(as_tuple=True)
        rows = row[token_idx, slot_pos]
        routing.as_bytes(x)[rows] = routing.as_bytes(source.x)[token_idx]
        local = routing.local_topk_idx(source.plan.topk_idx[token_idx], rank_idx, placement)
        if topk_idx is not None:
            topk_idx[rows] = local
        if topk_weights is not None and source.topk_weights is not None:
            if is_expert_major:
                topk_weights[rows] = source.topk_weights[token_idx, slot_pos]
            else:
                zero = torch.zeros((), dtype=topk_weights.dtype)
                topk_weights[rows] = torch.where(local < 0, zero, source.topk_weights[token_idx])

    return DispatchOutput(
        x=x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_expert=window.num_tokens_per_expert,
        expert_offsets=window.expert_offsets,
        plan=ReferencePlan(tensors=mine, num_recv_tokens=num_recv_tokens),
    )


def combined(
    plan: PlanTensors,
    topk_weights: torch.Tensor | None,
    expert_out: Sequence[torch.Tensor] | None,
    row_weights: Sequence[torch.Tensor] | None,
    placement: Placement,
) -> CombineOutput:
    """What a rank gets back when rank r's experts give `expert_out[r]` and `row_weights[r]`.

    Sums start at +0.0 and add one row after the other: in top-k order for EXPERT_MAJOR, in rank order
    for RANK_MAJOR.

    Args:
        plan: Of the rank that gets the sums.
        topk_weights: `[T, K]` of that rank, or None.
        expert_out: `[M, hidden]` of every rank, or None.
        row_weights: `[M]` (EXPERT_MAJOR) or `[M, K]` (RANK_MAJOR) of every rank, or None.
        placement: Of the experts.
    """
    sums = None
    if expert_out is not None:
        positions = _positions_in_concatenation(plan.slots, expert_out)
        sums = arithmetic.sum_rows(torch.cat(list(expert_out)), positions, topk_weights)
    pulled = None
    if row_weights is not None:
        positions = _positions_in_concatenation(routing.choice_slots(plan, placement), row_weights)
        values = torch.cat(list(row_weights))
        pulled = torch.zeros(plan.topk_idx.shape, dtype=values.dtype)
        token_idx, topk_pos = (plan.topk_idx >= 0).nonzero(as_tuple=True)
        place = positions[token_idx, topk_pos]
        pulled[token_idx, topk_pos] = (
            values[place] if plan.layout is Layout.EXPERT_MAJOR else values[place, topk_pos]
        )
    return CombineOutput(x=sums, topk_weights=pulled)


@dataclasses.dataclass(frozen=True, eq=False)
class _Contribution:
    """What a rank tells every rank in one operation.

    Dispatched rows travel as bytes: not every dtype can be pickled.
    """

    call: str
    error: Exception | None = None
    x: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None
    plan: PlanTensors | None = None


class ReferenceBackend(Backend):
    """The specification as a backend; any bootstrap carries it.

    Computes eagerly: with `async_op` the operation has ended when the call returns, so calls on several
    buffers must come in one order on all ranks. There are no windows: `copy_out` changes nothing,
    because every output is memory of its own.
    """

    name = "reference"

    def __init__(self, communicator: object, config: EpConfig) -> None:
        super().__init__(communicator, config)
        self._peers = cast("Peers", communicator)
        self._placement = agree_on_config(self._peers, config, self.name)

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        layout: Layout,
        expert_alignment: int,
        copy_out: bool | None,
        async_op: bool,
    ) -> Operation[DispatchOutput]:
        """See `Backend.dispatch`."""
        del copy_out, async_op
        error: Exception | None = None
        bad = routing.first_bad_expert_id(topk_idx, self.config.num_experts)
        if bad is not None:
            error = messages.bad_expert_id(*bad, self.config.num_experts)
        call = messages.describe_dispatch(x, topk_weights, layout, expert_alignment)
        gathered = self._exchange(
            _Contribution(
                call, error, x=routing.as_bytes(x), topk_idx=topk_idx, topk_weights=topk_weights
            )
        )
        plans = plan_dispatch(
            [_present(rank.topk_idx) for rank in gathered],
            self._placement,
            layout,
            expert_alignment,
        )
        return self._receive(x.dtype, gathered, plans, is_cached=False)

    def dispatch_cached(
        self,
        x: torch.Tensor,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        *,
        copy_out: bool | None,
        async_op: bool,
    ) -> Operation[DispatchOutput]:
        """See `Backend.dispatch_cached`."""
        del copy_out, async_op
        tensors = _tensors_of(plan)
        call = messages.describe_dispatch_cached(x, topk_weights, tensors)
        gathered = self._exchange(
            _Contribution(call, x=routing.as_bytes(x), topk_weights=topk_weights, plan=tensors)
        )
        plans = [_present(rank.plan) for rank in gathered]
        return self._receive(x.dtype, gathered, plans, is_cached=True)

    def combine(
        self,
        x: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        *,
        out: torch.Tensor | None,
        copy_out: bool | None,
        async_op: bool,
    ) -> Operation[CombineOutput]:
        """See `Backend.combine`."""
        del copy_out, async_op
        tensors = _tensors_of(plan)
        call = messages.describe_combine(x, row_weights, tensors)
        gathered = self._exchange(_Contribution(call, x=x, row_weights=row_weights))
        output = combined(
            tensors,
            topk_weights,
            None if x is None else [_present(rank.x) for rank in gathered],
            None if row_weights is None else [_present(rank.row_weights) for rank in gathered],
            self._placement,
        )
        if out is not None and output.x is not None:
            output = dataclasses.replace(output, x=out.copy_(output.x))
        return Completed(output)

    def weighted_gradient(
        self, gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `Backend.weighted_gradient`."""
        dots = arithmetic.dot_rows(gradient, expert_out, weights.dtype)
        gradient.copy_(arithmetic.scale_rows(gradient, weights))
        return dots

    def empty_expert_output(self, plan: Plan, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Backend.empty_expert_output`; an ordinary tensor."""
        return torch.empty(plan.num_recv_tokens, hidden, dtype=dtype)

    def import_plan(self, tensors: PlanTensors) -> Plan:
        """See `Backend.import_plan`."""
        routing.validate_plan_tensors(tensors, self._placement)
        window = routing.window_of(
            self._peers.rank_idx,
            tensors.counts,
            self._placement,
            tensors.layout,
            tensors.expert_alignment,
        )
        return ReferencePlan(tensors=tensors, num_recv_tokens=window.num_recv_tokens)

    def reject(self, operation: str, error: Exception) -> NoReturn:
        """See `Backend.reject`."""
        self._exchange(_Contribution(operation, error))
        raise AssertionError("an exchange with an error raises it")

    def destroy(self) -> None:
        """See `Backend.destroy`; the garbage collector does it all."""

    def _receive(
        self,
        dtype: torch.dtype,
        gathered: Sequence[_Contribution],
        plans: Sequence[PlanTensors],
        *,
        is_cached: bool,
    ) -> Operation[DispatchOutput]:
        sent = [
            Sent(x=_present(rank.x).view(dtype), topk_weights=rank.topk_weights, plan=plan)
            for rank, plan in zip(gathered, plans, strict=True)
        ]
        return Completed(received(self._peers.rank_idx, sent, self._placement, is_cached=is_cached))

    def _exchange(self, mine: _Contribution) -> list[_Contribution]:
        """Every rank's contribution, or the error that every rank raises."""
        gathered: list[_Contribution] = self._peers.bootstrap.all_gather(_private(mine))
        rejected = messages.rejected([rank.error for rank in gathered])
        if rejected is not None:
            raise rejected from mine.error
        differs = messages.calls_differ([rank.call for rank in gathered])
        if differs is not None:
            raise differs
        return gathered


def _positions_in_concatenation(
    slots: torch.Tensor, windows: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Row of every slot in the windows of all ranks laid end to end, -1 for none."""
    num_rows = torch.tensor([window.shape[0] for window in windows])
    first_row = num_rows.cumsum(0) - num_rows
    slot_rank, row = routing.decode_slots(slots)
    return torch.where(slots < 0, -1, first_row[slot_rank.clamp(min=0)] + row)


def _private(contribution: _Contribution) -> _Contribution:
    """A copy: ranks that are threads read it while the caller may already change its tensors."""
    copies: dict[str, Any] = {
        field.name: value.detach().clone()
        for field in dataclasses.fields(contribution)
        if isinstance(value := getattr(contribution, field.name), torch.Tensor)
    }
    return dataclasses.replace(contribution, **copies)


def _present(value: ValueT | None) -> ValueT:
    assert value is not None  # the call that was agreed on says that it is there
    return value


def _tensors_of(plan: Plan) -> PlanTensors:
    assert isinstance(plan, ReferencePlan)
    return plan.tensors
