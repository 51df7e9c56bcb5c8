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

from moe_comm import arithmetic, quantized
from moe_comm.backends import admission, messages, routing
from moe_comm.backends.admission import Admission, Asked
from moe_comm.backends.agreement import Peers, agree_on_config, node_reduction_of
from moe_comm.backends.base import (
    Backend,
    CombineOutput,
    Completed,
    DispatchOutput,
    Operation,
    Plan,
    PlanTensors,
)
from moe_comm.backends.gradients import applying, clash, unite
from moe_comm.backends.routing import NodeReduction, Placement, RowOrder
from moe_comm.config import Capacity, EpConfig, Layout
from moe_comm.quantization import Quantization

__all__ = ["ReferenceBackend", "ReferencePlan", "Sent", "combined", "plan_dispatch", "received"]

ValueT = TypeVar("ValueT")


@dataclasses.dataclass(frozen=True, eq=False)
class Sent:
    """What one rank puts into a dispatch.

    Args:
        x: `[T, hidden]`, quantised already where it is to be.
        x_sf: None or `[T, num_scales]`, any strides.
        topk_weights: None or `[T, K]`.
        plan: Where its rows go.
    """

    x: torch.Tensor
    x_sf: torch.Tensor | None
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

    @property
    def num_topk(self) -> int:
        """Choices per token of this rank."""
        return self.tensors.topk_idx.shape[1]

    @property
    def num_recv_topk(self) -> int:
        """Largest number of choices per token of all ranks."""
        return int(self.tensors.counts[:, -1].max())

    def to_tensors(self) -> PlanTensors:
        """A copy of the tensors."""
        return dataclasses.replace(
            self.tensors,
            counts=self.tensors.counts.clone(),
            slots=self.tensors.slots.clone(),
            topk_idx=self.tensors.topk_idx.clone(),
        )


def plan_dispatch(
    topk_idx: Sequence[torch.Tensor], counts: torch.Tensor, placement: Placement, order: RowOrder
) -> list[PlanTensors]:
    """Where the rows of every rank go, from its choices `[T, K]` and what is kept of them.

    Args:
        topk_idx: Of every rank.
        counts: Of `admission.admit`.
        placement: Of the experts.
        order: Of the rows.
    """
    return [
        PlanTensors(
            counts=counts,
            slots=routing.send_slots(rank_idx, choices, counts, placement, order),
            topk_idx=choices,
            layout=order.layout,
            expert_alignment=order.expert_alignment,
        )
        for rank_idx, choices in enumerate(topk_idx)
    ]


def received(
    rank_idx: int,
    sent: Sequence[Sent],
    placement: Placement,
    order: RowOrder,
    *,
    admitted: Admission | None,
    is_column_major: bool = False,
    gradients: int = 0,
) -> DispatchOutput:
    """What a rank receives when every rank sends `sent[r]`.

    Rows and scale factors are copied as bytes, NaN payloads included; rows that nobody sends, and
    their weights, are zero.

    Args:
        rank_idx: Of the receiver.
        sent: By every rank.
        placement: Of the experts.
        order: Of the rows.
        admitted: For the plans; None in a cached dispatch.
        is_column_major: Of the scale factors.
        gradients: Of the output.
    """
    mine = sent[rank_idx].plan
    window = routing.window_of(rank_idx, mine.counts, placement, order)
    plan = ReferencePlan(tensors=mine, num_recv_tokens=window.num_recv_tokens)
    by_choice = order.layout is Layout.RANK_MAJOR
    num_rows, num_topk = plan.num_recv_tokens, plan.num_recv_topk

    x = torch.zeros(num_rows, sent[0].x.shape[1], dtype=sent[0].x.dtype)
    scales = None
    if sent[0].x_sf is not None:
        scales = torch.zeros(num_rows, sent[0].x_sf.shape[1], dtype=sent[0].x_sf.dtype)
    topk_idx = None
    if by_choice and admitted is not None:
        topk_idx = torch.full((num_rows, num_topk), -1, dtype=torch.int64)
    topk_weights = None
    if sent[0].topk_weights is not None:
        shape = (num_rows, num_topk) if by_choice else (num_rows,)
        topk_weights = torch.zeros(shape, dtype=sent[0].topk_weights.dtype)

    for source in sent:
        slot_rank, row = routing.decode_slots(source.plan.slots)
        token_idx, slot_pos = (slot_rank == rank_idx).nonzero(as_tuple=True)
        rows = row[token_idx, slot_pos]
        routing.as_bytes(x)[rows] = routing.as_bytes(source.x)[token_idx]
        if scales is not None and source.x_sf is not None:
            routing.as_bytes(scales)[rows] = routing.as_bytes(source.x_sf.contiguous())[token_idx]
        local = routing.local_topk_idx(source.plan.topk_idx[token_idx], rank_idx, placement)
        if topk_idx is not None:
            topk_idx[rows, : local.shape[1]] = local
        if topk_weights is not None and source.topk_weights is not None:
            if by_choice:
                zero = torch.zeros((), dtype=topk_weights.dtype)
                topk_weights[rows, : local.shape[1]] = torch.where(
                    local < 0, zero, source.topk_weights[token_idx]
                )
            else:
                topk_weights[rows] = source.topk_weights[token_idx, slot_pos]

    counts = window.num_tokens_per_expert
    return DispatchOutput(
        x=x,
        x_sf=(
            None
            if scales is None
            else routing.arrange_scales(
                scales, order, counts.numel(), is_column_major=is_column_major
            )
        ),
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_expert=counts,
        num_dropped_per_expert=(
            torch.zeros_like(counts)
            if admitted is None
            else admitted.num_dropped_per_expert[placement.experts_of(rank_idx)]
        ),
        num_required_rows=(
            window.num_filled_rows
            if admitted is None
            else int(admitted.num_required_rows[rank_idx])
        ),
        expert_offsets=window.expert_offsets,
        wait_ns=torch.zeros(placement.num_ranks, dtype=torch.int64),
        plan=plan,
        gradients=gradients,
    )


def combined(
    plan: PlanTensors,
    topk_weights: torch.Tensor | None,
    expert_out: Sequence[torch.Tensor] | None,
    row_weights: Sequence[torch.Tensor] | None,
    placement: Placement,
    node_reduction: NodeReduction | None = None,
) -> CombineOutput:
    """What a rank gets back when rank r's experts give `expert_out[r]` and `row_weights[r]`.

    Sums start at +0.0 and add one row after the other: in rank order for RANK_MAJOR, else in top-k
    order. What was dropped is skipped.

    Args:
        plan: Of the rank that gets the sums.
        topk_weights: `[T, K]` of that rank, or None.
        expert_out: `[M, hidden]` of every rank, or None.
        row_weights: `[M, K]` (RANK_MAJOR) or `[M]` of every rank, or None.
        placement: Of the experts.
        node_reduction: Rows of a node are added among themselves first, and rounded where that is
            not the rank's own; None for the order above.
    """
    sums = None
    if expert_out is not None:
        rows = torch.cat(list(expert_out))
        positions = _positions_in_concatenation(plan.slots, expert_out)
        if node_reduction is None:
            sums = arithmetic.sum_rows(rows, positions, topk_weights)
        else:
            nodes = node_reduction.node_of(plan.slots)
            sums = arithmetic.sum_rows_by_node(
                rows, positions, nodes, node_reduction.own_node, topk_weights
            )
    pulled = None
    if row_weights is not None:
        positions = _positions_in_concatenation(routing.choice_slots(plan, placement), row_weights)
        values = torch.cat(list(row_weights))
        pulled = torch.zeros(plan.topk_idx.shape, dtype=values.dtype)
        token_idx, topk_pos = (positions >= 0).nonzero(as_tuple=True)
        place = positions[token_idx, topk_pos]
        pulled[token_idx, topk_pos] = (
            values[place, topk_pos] if plan.layout is Layout.RANK_MAJOR else values[place]
        )
    wait_ns = torch.zeros(placement.num_ranks, dtype=torch.int64)
    return CombineOutput(x=sums, topk_weights=pulled, wait_ns=wait_ns)


@dataclasses.dataclass(frozen=True, eq=False)
class _Contribution:
    """What a rank tells every rank in one operation.

    Dispatched rows and scale factors travel as bytes: not every dtype can be pickled.
    """

    call: str
    error: Exception | None = None
    x: torch.Tensor | None = None
    x_sf: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None
    asked: torch.Tensor | None = None
    masked_ranks: tuple[int, ...] = ()
    plan: PlanTensors | None = None
    gradients: int = 0


class ReferenceBackend(Backend):
    """The specification as a backend; any bootstrap carries it.

    Computes eagerly: with `async_op` the operation has ended when the call returns, so calls on several
    buffers must come in one order on all ranks. There are no windows: `copy_out` changes nothing,
    because every output is memory of its own.
    """

    name = "reference"
    has_node_reduction = True

    def __init__(self, communicator: object, config: EpConfig) -> None:
        super().__init__(communicator, config)
        self._peers = cast("Peers", communicator)
        self._placement = agree_on_config(self._peers, config, self.name)
        self._node_reduction = node_reduction_of(self._peers, config)

    def dispatch(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        *,
        layout: Layout,
        expert_alignment: int,
        quantization: Quantization | None,
        capacity: Capacity | None,
        masked_ranks: tuple[int, ...],
        copy_out: bool | None,
        async_op: bool,
        gradients: int = 0,
    ) -> Operation[DispatchOutput]:
        """See `Backend.dispatch`."""
        del copy_out, async_op
        placement = self._placement
        order = RowOrder.of(layout, expert_alignment, self.config, placement.num_ranks)
        call = messages.describe_dispatch(
            x,
            x_sf,
            topk_weights,
            layout=layout,
            expert_alignment=expert_alignment,
            quantization=quantization,
            capacity=capacity,
        )
        bad = routing.first_bad_expert_id(topk_idx, self.config.num_experts)
        if bad is not None:
            self._exchange(
                _Contribution(call, messages.bad_expert_id(*bad, self.config.num_experts))
            )
        rows = _Rows.of(x, x_sf, quantization)
        gathered = self._exchange(
            _Contribution(
                call,
                x=routing.as_bytes(rows.x),
                x_sf=rows.scale_bytes,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                asked=admission.ask(topk_idx, placement, capacity),
                masked_ranks=masked_ranks,
                gradients=gradients,
            )
        )
        is_masked = torch.zeros(placement.num_ranks, dtype=torch.bool)
        is_masked[[peer for rank in gathered for peer in rank.masked_ranks]] = True
        asked = Asked(torch.stack([_present(rank.asked) for rank in gathered]), is_masked)
        row_bytes = rows.x.shape[1] * rows.x.element_size()
        admitted = admission.admit(asked, placement, order, capacity, row_bytes=row_bytes)
        plans = plan_dispatch(
            [_present(rank.topk_idx) for rank in gathered], admitted.counts, placement, order
        )
        return Completed(
            received(
                self._peers.rank_idx,
                rows.sent_by(gathered, plans),
                placement,
                order,
                admitted=admitted,
                is_column_major=rows.is_column_major,
                gradients=_united(gathered),
            )
        )

    def dispatch_cached(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        *,
        quantization: Quantization | None,
        copy_out: bool | None,
        async_op: bool,
        gradients: int = 0,
    ) -> Operation[DispatchOutput]:
        """See `Backend.dispatch_cached`."""
        del copy_out, async_op
        tensors = _tensors_of(plan)
        call = messages.describe_dispatch_cached(x, x_sf, topk_weights, tensors, quantization)
        rows = _Rows.of(x, x_sf, quantization)
        gathered = self._exchange(
            _Contribution(
                call,
                x=routing.as_bytes(rows.x),
                x_sf=rows.scale_bytes,
                topk_weights=topk_weights,
                plan=tensors,
                gradients=gradients,
            )
        )
        return Completed(
            received(
                self._peers.rank_idx,
                rows.sent_by(gathered, [_present(rank.plan) for rank in gathered]),
                self._placement,
                self._order_of(tensors),
                admitted=None,
                is_column_major=rows.is_column_major,
                gradients=_united(gathered),
            )
        )

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
        gradients: int = 0,
    ) -> Operation[CombineOutput]:
        """See `Backend.combine`."""
        del copy_out, async_op
        tensors = _tensors_of(plan)
        call = messages.describe_combine(x, row_weights, tensors)
        word = applying(gradients, topk_weights)
        gathered = self._exchange(_Contribution(call, x=x, row_weights=row_weights, gradients=word))
        output = combined(
            tensors,
            topk_weights,
            None if x is None else [_present(rank.x) for rank in gathered],
            None if row_weights is None else [_present(rank.row_weights) for rank in gathered],
            self._placement,
            self._node_reduction,
        )
        if out is not None and output.x is not None:
            output = dataclasses.replace(output, x=out.copy_(output.x))
        return Completed(dataclasses.replace(output, gradients=_united(gathered)))

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
            self._peers.rank_idx, tensors.counts, self._placement, self._order_of(tensors)
        )
        return ReferencePlan(tensors=tensors, num_recv_tokens=window.num_recv_tokens)

    def reject(self, operation: str, error: Exception) -> NoReturn:
        """See `Backend.reject`."""
        self._exchange(_Contribution(operation, error))
        raise AssertionError("an exchange with an error raises it")

    def destroy(self) -> None:
        """See `Backend.destroy`; the garbage collector does it all."""

    def _order_of(self, tensors: PlanTensors) -> RowOrder:
        return RowOrder.of(
            tensors.layout, tensors.expert_alignment, self.config, self._placement.num_ranks
        )

    def _exchange(self, mine: _Contribution) -> list[_Contribution]:
        """Every rank's contribution, or the error that every rank raises."""
        gathered: list[_Contribution] = self._peers.bootstrap.all_gather(_private(mine))
        rejected = messages.rejected([rank.error for rank in gathered])
        if rejected is not None:
            raise rejected from mine.error
        differs = messages.calls_differ([rank.call for rank in gathered])
        if differs is not None:
            raise differs
        clashing = clash([rank.gradients for rank in gathered], mine.call.partition("(")[0])
        if clashing is not None:
            raise clashing
        return gathered


def _united(gathered: Sequence[_Contribution]) -> int:
    return unite([rank.gradients for rank in gathered])


@dataclasses.dataclass(frozen=True, eq=False)
class _Rows:
    """Rows as they travel."""

    x: torch.Tensor
    x_sf: torch.Tensor | None
    is_column_major: bool

    @classmethod
    def of(
        cls, x: torch.Tensor, x_sf: torch.Tensor | None, quantization: Quantization | None
    ) -> _Rows:
        """Quantise x where it is not a pair already."""
        if quantization is not None and x_sf is None:
            x, x_sf = quantized.quantize_rows(x, quantization)
        if x_sf is not None:
            x_sf = x_sf.contiguous()
        return cls(x, x_sf, quantization is not None and quantization.is_column_major)

    @property
    def scale_bytes(self) -> torch.Tensor | None:
        return None if self.x_sf is None else routing.as_bytes(self.x_sf)

    def sent_by(self, gathered: list[_Contribution], plans: list[PlanTensors]) -> list[Sent]:
        """Everybody's rows, of the dtypes that these have."""
        return [
            Sent(
                x=_present(rank.x).view(self.x.dtype),
                x_sf=None if self.x_sf is None else _present(rank.x_sf).view(self.x_sf.dtype),
                topk_weights=rank.topk_weights,
                plan=plan,
            )
            for rank, plan in zip(gathered, plans, strict=True)
        ]


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
