"""The definition (`moe_comm.ep.spec`) as a backend.

Every rank gathers every rank's input and computes its own output from all of it, eagerly, also when
`async_op` is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar, cast

import torch

from moe_comm.ep import spec
from moe_comm.ep.backends import messages
from moe_comm.ep.backends.base import (
    Backend,
    CombineOutput,
    DispatchOutput,
    Operation,
    Plan,
    PlanTensors,
)
from moe_comm.ep.backends.buffer_agreement import Peers, agree_on_config
from moe_comm.ep.backends.rows import as_bytes
from moe_comm.ep.call_options import CombineOptions, DispatchOptions, describe_options
from moe_comm.ep.config import Capacity, EpConfig, Layout, num_places_per_expert
from moe_comm.ep.gradient_word import clash, unite, with_applied_weights
from moe_comm.ep.placement import Placement
from moe_comm.ep.replica_spec import choose_slots
from moe_comm.errors import CapacityError
from moe_comm.peers.agree import agree, raise_unequal
from moe_comm.tensors import arithmetic
from moe_comm.tensors.quantization import Quantization

ValueT = TypeVar("ValueT")
# Options that ranks agree on and the definition has as fields of a dispatch.
_PLACING = [
    name
    for name, option in describe_options(DispatchOptions).items()
    if option.ranks == "equal" and name in spec.Dispatch.__annotations__
]


@dataclasses.dataclass(frozen=True, eq=False)
class ReferencePlan(PlanTensors):
    """A plan that is its tensors.

    Args:
        dispatch: Dispatch of all ranks, which the plan is a part of; None if the plan was imported.
    """

    dispatch: spec.Dispatch | None


@dataclasses.dataclass(frozen=True, eq=False)
class _Contribution:
    """Message of a rank to every rank in one operation.

    Dispatched rows and scale factors travel as bytes: not every dtype can be pickled.
    """

    call: str
    error: Exception | None = None
    x: torch.Tensor | None = None
    x_sf: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    row_weights: torch.Tensor | None = None
    capacity: Capacity | None = None
    masked_ranks: tuple[int, ...] = ()
    gradients: int = 0


class ReferenceBackend(Backend):
    """The definition as a backend; any bootstrap carries it.

    Computes eagerly: with `async_op` the operation has ended when the call returns, so calls on several
    buffers must come in one order on all ranks. There are no windows: `copy_out` changes nothing,
    because every output is memory of its own.
    """

    name = "reference"
    has_node_reduction = True
    has_rank_reduction = True
    has_balanced_replicas = True

    def __init__(self, communicator: object, config: EpConfig) -> None:
        super().__init__(communicator, config)
        self._peers = cast("Peers", communicator)
        self._expert_rank = agree_on_config(self._peers, config, self.name)
        self._balanced: Placement | None = None
        self._num_local_ranks = self._peers.num_local_ranks if config.node_reduction else None

    def dispatch(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        call = messages.describe_dispatch(x, x_sf, topk_weights, options)
        placement = self._balanced
        num_ids = self.config.num_slots if placement is None else placement.num_experts
        bad = _bad_expert_id(topk_idx, num_ids)
        if bad is not None:
            self._exchange(_Contribution(call, bad))
        rows = _Rows.of(x, x_sf, options.quantization)
        gathered = self._exchange(
            _Contribution(
                call,
                x=as_bytes(rows.x),
                x_sf=rows.scale_bytes,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                capacity=options.capacity,
                masked_ranks=options.masked_ranks,
                gradients=options.gradients,
            )
        )
        if placement is not None:
            gathered = self._with_slots(gathered, placement)
        dispatch = self._dispatch_of(gathered, options)
        if dispatch.overflows:
            raise _beyond_limits(dispatch, rows.x.shape[1] * rows.x.element_size())
        plan = ReferencePlan(
            counts=dispatch.counts,
            slots=dispatch.slots(self._peers.rank_idx),
            topk_idx=_present(gathered[self._peers.rank_idx].topk_idx),
            layout=options.layout,
            expert_alignment=options.expert_alignment,
            num_recv_tokens=len(dispatch.windows[self._peers.rank_idx].rows),
            asked=dispatch.asked_rows(self._peers.rank_idx),
            dispatch=dispatch,
        )
        return self._received(rows, gathered, dispatch, plan)

    def dispatch_cached(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        assert isinstance(plan, ReferencePlan)
        call = messages.describe_dispatch_cached(x, x_sf, topk_weights, plan, options.quantization)
        rows = _Rows.of(x, x_sf, options.quantization)
        gathered = self._exchange(
            _Contribution(
                call,
                x=as_bytes(rows.x),
                x_sf=rows.scale_bytes,
                topk_idx=plan.topk_idx,
                topk_weights=topk_weights,
                gradients=options.gradients,
            )
        )
        dispatch = self._earlier(plan, gathered).again
        return self._received(
            rows, gathered, dispatch, dataclasses.replace(plan, dispatch=dispatch)
        )

    def combine(
        self,
        x: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        options: CombineOptions,
    ) -> Operation[CombineOutput]:
        assert isinstance(plan, ReferencePlan)
        call = messages.describe_combine(x, row_weights, plan)
        gathered = self._exchange(
            _Contribution(
                call,
                x=x,
                topk_idx=plan.topk_idx,
                row_weights=row_weights,
                gradients=with_applied_weights(options.gradients, topk_weights),
            )
        )
        dispatch, rank_idx = self._earlier(plan, gathered), self._peers.rank_idx
        sums, pulled = None, None
        if x is not None:
            expert_out = [_present(rank.x) for rank in gathered]
            sums = dispatch.sums(
                rank_idx,
                expert_out,
                topk_weights,
                num_local_ranks=self._num_local_ranks,
                rank_reduction=self.config.rank_reduction,
            )
            sums = sums if out is None else out.copy_(sums)
        if row_weights is not None:
            pulled = dispatch.pulled(rank_idx, [_present(rank.row_weights) for rank in gathered])
        wait_ns = torch.zeros(self._peers.num_ranks, dtype=torch.int64)
        return CombineOutput(sums, pulled, wait_ns, _united(gathered))

    def empty_expert_output(self, plan: Plan, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        # An ordinary tensor: there is no heap.
        return arithmetic.empty_rows(plan.num_recv_tokens, hidden, dtype)

    def import_plan(self, tensors: PlanTensors) -> Plan:
        shape = [self._peers.num_ranks, self.config.num_slots + self._peers.num_ranks + 2]
        if [*tensors.counts.shape] != shape:
            raise ValueError(f"counts must be int32 {shape}, got {[*tensors.counts.shape]}")
        # Choices of peers are not known here: they say them again with every call.
        return ReferencePlan(
            counts=tensors.counts,
            slots=tensors.slots,
            topk_idx=tensors.topk_idx,
            layout=tensors.layout,
            expert_alignment=tensors.expert_alignment,
            num_recv_tokens=tensors.num_recv_tokens,
            asked=tensors.asked,
            dispatch=None,
        )

    def balance_replicas(self, placement: Placement | None) -> None:
        self._balanced = placement

    def _with_slots(
        self, gathered: Sequence[_Contribution], placement: Placement
    ) -> list[_Contribution]:
        """Return the contributions of the ranks, with slots for the logical experts that they chose."""
        slots = choose_slots(
            [_present(rank.topk_idx) for rank in gathered],
            placement,
            "balanced",
            self._peers.num_local_ranks,
            frozenset(peer for rank in gathered for peer in rank.masked_ranks),
        )
        return [
            dataclasses.replace(rank, topk_idx=of_rank)
            for rank, of_rank in zip(gathered, slots, strict=True)
        ]

    def reject(self, operation: str, error: Exception) -> NoReturn:
        self._exchange(_Contribution(operation, error))
        raise AssertionError("an exchange with an error raises it")

    def destroy(self) -> None:
        """Nothing to release."""

    def _dispatch_of(
        self,
        gathered: Sequence[_Contribution],
        said: DispatchOptions | ReferencePlan,
        counts_of_earlier: torch.Tensor | None = None,
    ) -> spec.Dispatch:
        num_places = num_places_per_expert(self.config, said.layout, self._peers.num_ranks)
        return spec.Dispatch(
            topk_idx=[_present(rank.topk_idx) for rank in gathered],
            expert_rank=self._expert_rank.tolist(),
            num_places_per_expert=num_places,
            **{name: getattr(said, name) for name in _PLACING if hasattr(said, name)},
            capacities=[rank.capacity for rank in gathered],
            masked_ranks=frozenset(peer for rank in gathered for peer in rank.masked_ranks),
            counts_of_earlier=counts_of_earlier,
        )

    def _earlier(self, plan: ReferencePlan, gathered: Sequence[_Contribution]) -> spec.Dispatch:
        """The dispatch that the plan is a part of."""
        return plan.dispatch or self._dispatch_of(gathered, plan, plan.counts)

    def _received(
        self,
        rows: _Rows,
        gathered: Sequence[_Contribution],
        dispatch: spec.Dispatch,
        plan: ReferencePlan,
    ) -> Operation[DispatchOutput]:
        """Return the output of a dispatch on this rank."""
        received = dispatch.received(
            self._peers.rank_idx,
            [_present(rank.x).view(rows.x.dtype) for rank in gathered],
            None
            if gathered[0].topk_weights is None
            else [_present(rank.topk_weights) for rank in gathered],
            x_sf=None
            if rows.x_sf is None
            else [_present(rank.x_sf).view(rows.x_sf.dtype) for rank in gathered],
            is_column_major=rows.is_column_major,
        )
        return DispatchOutput(
            x=received.x,
            x_sf=received.x_sf,
            topk_idx=received.topk_idx,
            topk_weights=received.topk_weights,
            num_tokens_per_expert=received.num_tokens_per_expert,
            num_dropped_per_expert=received.num_dropped_per_expert,
            num_required_rows=received.num_required_rows,
            expert_offsets=received.expert_offsets,
            wait_ns=torch.zeros(self._peers.num_ranks, dtype=torch.int64),
            plan=plan,
            gradients=_united(gathered),
        )

    def _exchange(self, mine: _Contribution) -> list[_Contribution]:
        """Every rank's contribution, or the error that every rank raises."""
        gathered = agree(self._peers.bootstrap.all_gather, mine.error, _private(mine))
        raise_unequal("ranks disagree", [rank.call for rank in gathered])
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
        """Quantize x where it is not a pair already."""
        if quantization is not None and x_sf is None:
            x, x_sf = spec.quantize_rows(x, quantization)
        if x_sf is not None:
            x_sf = x_sf.contiguous()
        return cls(x, x_sf, quantization is not None and quantization.is_column_major)

    @property
    def scale_bytes(self) -> torch.Tensor | None:
        return None if self.x_sf is None else as_bytes(self.x_sf)


def _private(contribution: _Contribution) -> _Contribution:
    """A copy: ranks that are threads read it while the caller may already change its tensors."""
    copies: dict[str, Any] = {
        field.name: value.detach().clone()
        for field in dataclasses.fields(contribution)
        if isinstance(value := getattr(contribution, field.name), torch.Tensor)
    }
    return dataclasses.replace(contribution, **copies)


def _bad_expert_id(topk_idx: torch.Tensor, num_experts: int) -> ValueError | None:
    """Return the error for the first entry outside `[-1, num_experts)`, or None if there is none."""
    for token_idx, token in enumerate(topk_idx.tolist()):
        for topk_pos, expert_idx in enumerate(token):
            if not -1 <= expert_idx < num_experts:
                return ValueError(
                    f"topk_idx[{token_idx}, {topk_pos}] = {expert_idx} is not an expert id in "
                    f"[-1, {num_experts})"
                )
    return None


def _beyond_limits(dispatch: spec.Dispatch, row_bytes: int) -> Exception:
    """Return the error that every rank raises where a dispatch asks for more rows than there is room for."""
    first = dispatch.overflows[0]
    text = "; ".join(
        ("" if each.expert_idx is None else f"expert {each.expert_idx} on ")
        + f"rank {each.rank_idx} would receive {each.num_needed} rows, "
        f"it has room for {each.num_available}"
        for each in dispatch.overflows
    )
    if dispatch.layout is Layout.LOW_LATENCY:
        return ValueError(text)
    return CapacityError(
        text,
        needed_bytes=first.num_needed * row_bytes,
        available_bytes=first.num_available * row_bytes,
        ranks=list(dict.fromkeys(each.rank_idx for each in dispatch.overflows)),
        needed_rows=[len(dispatch.kept[idx]) for idx in dispatch.experts_of(first.rank_idx)],
    )


def _present(value: ValueT | None) -> ValueT:
    assert value is not None  # the call that was agreed on says that it is there
    return value
