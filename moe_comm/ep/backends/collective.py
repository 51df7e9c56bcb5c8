"""Collectives of torch.distributed carry the rows: Gloo, NCCL or any other, over any number of machines.

A call exchanges one row of numbers (status, hash of the call, gradients, counts), then bytes with
`all_to_all_single`. Senders sort rows by slot, so a receiver knows every row's place from the counts
alone. Combine carries the rows of a token unreduced and adds them at home, in the order of
every other backend; with `node_reduction` too, which here saves no bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from moe_comm import _host
from moe_comm.ep import placement as placements
from moe_comm.ep.backends import collective_capacity, local_ops, messages
from moe_comm.ep.backends.base import (
    Backend,
    CombineOutput,
    DispatchOutput,
    Operation,
    Plan,
    PlanTensors,
)
from moe_comm.ep.backends.buffer_agreement import Peers, agree_on_config
from moe_comm.ep.backends.collective_plan import CollectivePlan
from moe_comm.ep.backends.collective_rows import NodeReduction, RowMover
from moe_comm.ep.backends.collective_transport import CollectiveTransport, ProgressThread
from moe_comm.ep.backends.expert_ranks import Placement, arrangement_of, replicas_of
from moe_comm.ep.backends.rows import arrange_scales
from moe_comm.ep.call_options import CombineOptions, DispatchOptions
from moe_comm.ep.config import EpConfig, Layout
from moe_comm.ep.gradient_word import clash, unite, with_applied_weights
from moe_comm.peers.agree import agree, raise_unequal
from moe_comm.tensors import arithmetic
from moe_comm.tensors.quantization import Quantization

OutputT = TypeVar("OutputT", DispatchOutput, CombineOutput)
ResultT = TypeVar("ResultT")

_STATUS_OK = 0
_STATUS_REJECTED = 1
_NUM_HEADER_WORDS = 3


class _GroupPeers(Peers, Protocol):
    @property
    def group(self) -> dist.ProcessGroup | None: ...

    @property
    def arrival_timeout_s(self) -> float: ...


class CollectiveBackend(Backend):
    """`all_to_all_single` moves rows; needs a torch.distributed group, or a single rank.

    Every buffer has a group of its own and, from its first asynchronous operation on, a progress
    thread. There are no windows: `copy_out` changes nothing, because every output is memory of its
    own. Staging memory is kept between calls and grows to the largest call.
    """

    name = "collective"
    has_node_reduction = True
    has_rank_reduction = True
    has_balanced_replicas = True

    def __init__(self, communicator: object, config: EpConfig) -> None:
        super().__init__(communicator, config)
        self._peers = cast("_GroupPeers", communicator)
        self._rank_idx = self._peers.rank_idx
        self._placement = Placement.of(
            agree_on_config(self._peers, config, self.name), self._peers.num_ranks
        )
        self._transport = CollectiveTransport(
            self._peers.group, self._peers.bootstrap, self._peers.arrival_timeout_s
        )
        self._replicas: _host.layout.Replicas | None = None
        self._num_counts = _host.layout.num_counts(
            self._placement.num_ranks, self._placement.num_experts
        )
        self._progress = ProgressThread("moe_comm collective")
        self._rows = RowMover(
            self._transport, self._placement, NodeReduction.of(self._peers, config)
        )

    def dispatch(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        call = messages.describe_dispatch(x, x_sf, topk_weights, options)
        choices = topk_idx.to("cpu", copy=True)
        layout, expert_alignment = options.layout, options.expert_alignment
        quantization = options.quantization
        replicas = self._replicas
        arrangement = arrangement_of(
            layout, expert_alignment, self.config, self._placement.num_ranks
        )

        def work() -> DispatchOutput:
            asked, united = self._exchange_counts(call, choices, options, replicas)
            slots = choices
            if replicas is not None:
                asked = _host.layout.share_rows(asked, replicas, self._placement.native)
                slots = _host.layout.choose_slots(
                    choices, asked, replicas, self._placement.native, self._rank_idx
                )
                if layout is Layout.RANK_MAJOR:
                    self._exchange_tokens(slots, asked)
            row_bytes = x.shape[1] * x.element_size()
            if quantization is not None and x_sf is None:
                row_bytes = quantization.row_bytes(x.shape[1])
            decision = collective_capacity.decide(
                asked,
                self._rank_idx,
                self._placement,
                layout,
                arrangement,
                options.capacity,
                row_bytes=row_bytes,
            )
            plan = self._plan(decision.counts, slots, decision.asked, layout, expert_alignment)
            return self._move_to_experts(x, x_sf, topk_weights, plan, quantization, united)

        return self._run(work, async_op=options.async_op)

    def dispatch_cached(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        assert isinstance(plan, CollectivePlan)
        known = plan
        quantization = options.quantization
        call = messages.describe_dispatch_cached(x, x_sf, topk_weights, plan, quantization)

        def work() -> DispatchOutput:
            _, united = self._agree(call, gradients=options.gradients)
            return self._move_to_experts(
                x, x_sf, topk_weights, known, quantization, united, is_cached=True
            )

        return self._run(work, async_op=options.async_op)

    def combine(
        self,
        x: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        options: CombineOptions,
    ) -> Operation[CombineOutput]:
        assert isinstance(plan, CollectivePlan)
        known = plan
        call = messages.describe_combine(x, row_weights, plan)

        def work() -> CombineOutput:
            word = with_applied_weights(options.gradients, topk_weights)
            _, united = self._agree(call, gradients=word)
            return CombineOutput(
                x=None if x is None else self._rows.sum_home(x, known, topk_weights, out),
                topk_weights=None if row_weights is None else self._rows.pull(row_weights, known),
                wait_ns=torch.zeros(self._placement.num_ranks, dtype=torch.int64),
                gradients=united,
            )

        return self._run(work, async_op=options.async_op)

    def empty_expert_output(self, plan: Plan, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        # An ordinary tensor: there is no heap.
        return arithmetic.empty_rows(plan.num_recv_tokens, hidden, dtype, self._transport.device)

    def import_plan(self, tensors: PlanTensors) -> Plan:
        return self._plan(
            tensors.counts.cpu().contiguous(),
            tensors.topk_idx.cpu().contiguous(),
            tensors.asked.cpu(),
            tensors.layout,
            tensors.expert_alignment,
        )

    def balance_replicas(self, placement: placements.Placement | None) -> None:
        self._replicas = replicas_of(placement, self._peers.num_local_ranks)

    def reject(self, operation: str, error: Exception) -> NoReturn:
        self._in_order(lambda: self._agree(operation, error))
        raise AssertionError("an agreement with an error raises it")

    def destroy(self) -> None:
        """Release what the buffer holds, after what is in flight."""
        if self._progress.is_idle():
            self._progress.stop()
            self._transport.destroy()
        else:
            self._progress.submit(self._transport.destroy)
            self._progress.stop()

    def _run(self, work: Callable[[], OutputT], *, async_op: bool) -> Operation[OutputT]:
        return self._progress.submit(work) if async_op else self._in_order(work)

    def _in_order(self, work: Callable[[], ResultT]) -> ResultT:
        """Now, or after what is in flight: collectives of a group keep the order of the calls."""
        if not self._progress.is_idle():
            return self._progress.submit(work).wait()
        with torch.no_grad():
            return work()

    def _plan(
        self,
        counts: torch.Tensor,
        topk_idx: torch.Tensor,
        asked: torch.Tensor,
        layout: Layout,
        expert_alignment: int,
    ) -> CollectivePlan:
        return CollectivePlan.of(
            counts,
            topk_idx,
            asked,
            layout,
            expert_alignment,
            rank_idx=self._rank_idx,
            placement=self._placement,
            arrangement=arrangement_of(
                layout, expert_alignment, self.config, self._placement.num_ranks
            ),
        )

    def _exchange_counts(
        self,
        call: str,
        topk_idx: torch.Tensor,
        options: DispatchOptions,
        replicas: _host.layout.Replicas | None,
    ) -> tuple[torch.Tensor, int]:
        """Return the requests and gradient words of every rank, or raise the error that every rank raises."""
        mine, problem = None, None
        try:
            mine = collective_capacity.ask(
                topk_idx, self._placement, options.capacity, options.masked_ranks, replicas
            )
        except ValueError as error:
            problem = error
        return self._agree(call, problem, mine, options.gradients)

    def _exchange_tokens(self, slots: torch.Tensor, asked: torch.Tensor) -> None:
        """Write into counts of slots how many tokens are bound for every rank, which choices decide."""
        num_experts, num_ranks = self._placement.num_experts, self._placement.num_ranks
        mine = torch.empty(self._num_counts, dtype=torch.int32)
        _host.layout.count_choices(self._placement.native, slots, mine)
        to_ranks = slice(num_experts, num_experts + num_ranks)
        asked[:, to_ranks] = self._transport.all_gather_row(mine[to_ranks].long(), "dispatch")

    def _agree(
        self,
        call: str,
        error: Exception | None = None,
        asked: torch.Tensor | None = None,
        gradients: int = 0,
    ) -> tuple[torch.Tensor, int]:
        """Exchange the row of a call.

        Args:
            call: Text that says what ranks must agree on.
            error: Reason why this rank cannot take part, or None.
            asked: int32 `[E + R + 2]`, see `collective_capacity.ask`; None where a plan is known.
            gradients: Word of this rank on gradients.

        Returns:
            int32 `[R, E + R + 2]`, those of every rank, and what all say of gradients.

        Raises:
            Exception: `error` of some rank, or ValueError if calls differ or words on gradients
                clash; on every rank.
        """
        row = torch.zeros(_NUM_HEADER_WORDS + self._num_counts, dtype=torch.int64)
        row[0] = _STATUS_OK if error is None else _STATUS_REJECTED
        row[1] = messages.call_hash(call)
        row[2] = gradients
        if asked is not None:
            row[_NUM_HEADER_WORDS:] = asked
        operation = call.partition("(")[0]
        rows = self._transport.all_gather_row(row, operation)
        if bool((rows[:, 0] != _STATUS_OK).any()) or bool((rows[:, 1] != rows[0, 1]).any()):
            self._raise_disagreement(operation, call, error)
        words = rows[:, 2].tolist()
        clashing = clash(words, operation)
        if clashing is not None:
            raise clashing
        return rows[:, _NUM_HEADER_WORDS:].to(torch.int32), unite(words)

    def _raise_disagreement(self, operation: str, call: str, error: Exception | None) -> NoReturn:
        # Every rank read the same rows, so every rank comes here.
        calls = agree(lambda item: self._transport.all_gather_object(item, operation), error, call)
        raise_unequal("ranks disagree", calls)
        raise AssertionError("rows of numbers differ where calls do")

    def _move_to_experts(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        plan: CollectivePlan,
        quantization: Quantization | None,
        gradients: int,
        *,
        is_cached: bool = False,
    ) -> DispatchOutput:
        """Carry everything of a dispatch."""
        if quantization is not None and x_sf is None:
            x, x_sf = local_ops.quantize_rows(x, quantization)
        moved = self._rows.dispatch(x, x_sf, topk_weights, plan, is_cached=is_cached)
        counts = plan.num_tokens_per_expert
        scales = moved.sf
        if scales is not None:
            is_by_expert = plan.layout is Layout.LOW_LATENCY
            scales = arrange_scales(
                scales,
                (counts.numel(), plan.num_places_per_expert) if is_by_expert else None,
                is_column_major=quantization is not None and quantization.is_column_major,
            )
        return DispatchOutput(
            x=moved.x,
            x_sf=scales,
            topk_idx=moved.topk_idx,
            topk_weights=moved.topk_weights,
            num_tokens_per_expert=counts,
            num_dropped_per_expert=plan.asked[1:] - counts,
            num_required_rows=int(plan.asked[0]),
            expert_offsets=plan.expert_offsets.to(x.device),
            wait_ns=torch.zeros(self._placement.num_ranks, dtype=torch.int64),
            plan=plan,
            gradients=gradients,
        )
