"""Collectives of torch.distributed carry the rows: Gloo, NCCL or any other, over any number of machines.

A call exchanges one row of numbers (status, hash of the call, counts), then bytes with
`all_to_all_single`. Senders sort rows by slot, so a receiver knows every row's place from the counts
alone. Combine carries the rows of a token unreduced and adds them at home, in the order of
every other backend.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

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
from moe_comm.backends.carrier import Carrier, ProgressThread
from moe_comm.backends.collective_plan import CollectivePlan
from moe_comm.config import EpConfig, Layout

__all__ = ["CollectiveBackend"]

OutputT = TypeVar("OutputT")

_STATUS_OK = 0
_STATUS_REJECTED = 1
_NUM_HEADER_WORDS = 2


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

    def __init__(self, communicator: object, config: EpConfig) -> None:
        super().__init__(communicator, config)
        self._peers = cast("_GroupPeers", communicator)
        self._rank_idx = self._peers.rank_idx
        self._placement = agree_on_config(self._peers, config, self.name)
        self._carrier = Carrier(
            self._peers.group, self._peers.bootstrap, self._peers.arrival_timeout_s
        )
        self._progress = ProgressThread("moe_comm collective")
        self._staging: dict[str, torch.Tensor] = {}

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
        del copy_out
        call = messages.describe_dispatch(x, topk_weights, layout, expert_alignment)
        choices = topk_idx.to("cpu", copy=True)

        def work() -> DispatchOutput:
            counts = self._exchange_counts(call, choices)
            slots = routing.send_slots(
                self._rank_idx, choices, counts, self._placement, layout, expert_alignment
            )
            plan = self._plan(PlanTensors(counts, slots, choices, layout, expert_alignment))
            return self._move_to_experts(x, topk_weights, plan, is_cached=False)

        return self._run(work, async_op=async_op)

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
        del copy_out
        assert isinstance(plan, CollectivePlan)
        known = plan
        call = messages.describe_dispatch_cached(x, topk_weights, plan.tensors)

        def work() -> DispatchOutput:
            self._agree(call)
            return self._move_to_experts(x, topk_weights, known, is_cached=True)

        return self._run(work, async_op=async_op)

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
        del copy_out
        assert isinstance(plan, CollectivePlan)
        known = plan
        call = messages.describe_combine(x, row_weights, plan.tensors)

        def work() -> CombineOutput:
            self._agree(call)
            return CombineOutput(
                x=None if x is None else self._move_home(x, known, topk_weights, out),
                topk_weights=None if row_weights is None else self._pull(row_weights, known),
            )

        return self._run(work, async_op=async_op)

    def weighted_gradient(
        self, gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """See `Backend.weighted_gradient`."""
        dots = arithmetic.dot_rows(gradient, expert_out, weights.dtype)
        gradient.copy_(arithmetic.scale_rows(gradient, weights))
        return dots

    def empty_expert_output(self, plan: Plan, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """See `Backend.empty_expert_output`; an ordinary tensor."""
        return torch.empty(plan.num_recv_tokens, hidden, dtype=dtype, device=self._carrier.device)

    def import_plan(self, tensors: PlanTensors) -> Plan:
        """See `Backend.import_plan`."""
        routing.validate_plan_tensors(tensors, self._placement)
        return self._plan(tensors)

    def reject(self, operation: str, error: Exception) -> NoReturn:
        """See `Backend.reject`."""
        self._run(lambda: self._agree(operation, error), async_op=False).wait()
        raise AssertionError("an agreement with an error raises it")

    def destroy(self) -> None:
        """See `Backend.destroy`; what is in flight ends first."""
        if self._progress.is_idle():
            self._progress.stop()
            self._carrier.destroy()
        else:
            self._progress.submit(self._carrier.destroy)
            self._progress.stop()

    def _run(self, work: Callable[[], OutputT], *, async_op: bool) -> Operation[OutputT]:
        """Now, or after what is in flight: collectives of a group keep the order of the calls."""
        if async_op or not self._progress.is_idle():
            pending = self._progress.submit(work)
            if not async_op:
                pending.wait()
            return pending
        with torch.no_grad():
            return Completed(work())

    def _plan(self, tensors: PlanTensors) -> CollectivePlan:
        return CollectivePlan.of(tensors, self._rank_idx, self._placement)

    def _exchange_counts(self, call: str, topk_idx: torch.Tensor) -> torch.Tensor:
        """The count matrix, or the error that every rank raises."""
        bad = routing.first_bad_expert_id(topk_idx, self._placement.num_experts)
        if bad is not None:
            error = messages.bad_expert_id(*bad, self._placement.num_experts)
            return self._agree(call, error)
        return self._agree(call, None, routing.count_choices(topk_idx, self._placement))

    def _agree(
        self, call: str, error: Exception | None = None, counts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Exchange the row of a call.

        Returns:
            int32 `[R, E + R]`, the counts of every rank.

        Raises:
            Exception: On every rank: `error` of some rank, or ValueError where calls differ.
        """
        num_counts = self._placement.num_experts + self._placement.num_ranks
        row = torch.zeros(_NUM_HEADER_WORDS + num_counts, dtype=torch.int64)
        row[0] = _STATUS_OK if error is None else _STATUS_REJECTED
        row[1] = messages.call_hash(call)
        if counts is not None:
            row[_NUM_HEADER_WORDS:] = counts
        operation = call.partition("(")[0]
        rows = self._carrier.all_gather_row(row, operation)
        if bool((rows[:, 0] != _STATUS_OK).any()) or bool((rows[:, 1] != rows[0, 1]).any()):
            self._raise_disagreement(operation, call, error)
        return rows[:, _NUM_HEADER_WORDS:].to(torch.int32)

    def _raise_disagreement(self, operation: str, call: str, error: Exception | None) -> NoReturn:
        # Every rank read the same rows, so every rank comes here.
        gathered: list[tuple[str, Exception | None]] = self._carrier.all_gather_object(
            (call, error), operation
        )
        rejected = messages.rejected([peer_error for _, peer_error in gathered])
        if rejected is not None:
            raise rejected from error
        differs = messages.calls_differ([peer_call for peer_call, _ in gathered])
        assert differs is not None
        raise differs

    def _move_to_experts(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor | None,
        plan: CollectivePlan,
        *,
        is_cached: bool,
    ) -> DispatchOutput:
        token_idx = plan.send_token_idx
        sent = self._stage("send", token_idx.numel(), _row_bytes(x))
        _gather_rows(routing.as_bytes(x), token_idx, sent)
        return DispatchOutput(
            x=self._place(sent, plan).to(x.device).view(x.dtype),
            topk_idx=(
                self._send_topk_idx(plan, token_idx).to(x.device)
                if plan.tensors.layout is Layout.RANK_MAJOR and not is_cached
                else None
            ),
            topk_weights=(
                None
                if topk_weights is None
                else self._send_weights(topk_weights, plan, token_idx).to(x.device)
            ),
            num_tokens_per_expert=plan.window.num_tokens_per_expert,
            expert_offsets=plan.window.expert_offsets.to(x.device),
            plan=plan,
        )

    def _place(self, sent: torch.Tensor, plan: CollectivePlan) -> torch.Tensor:
        """Carry dispatched rows and put them into their slots; uint8 `[M, row_bytes]`."""
        window = plan.window
        num_arriving = window.source_rows.numel()
        row_bytes = sent.shape[1]
        x = torch.empty(window.num_recv_tokens, row_bytes, dtype=torch.uint8, device=sent.device)
        if plan.tensors.layout is Layout.RANK_MAJOR:
            self._carry(x, sent, plan.recv_splits, plan.send_splits, "dispatch")
            return x
        # One more row, of zeros, is where padding comes from.
        arrived = self._stage("receive", num_arriving + 1, row_bytes)
        arrived[num_arriving].zero_()
        self._carry(arrived[:num_arriving], sent, plan.recv_splits, plan.send_splits, "dispatch")
        origin = torch.full((window.num_recv_tokens,), num_arriving)
        origin[window.source_rows] = torch.arange(num_arriving)
        _gather_rows(arrived, origin, x)
        return x

    def _send_topk_idx(self, plan: CollectivePlan, token_idx: torch.Tensor) -> torch.Tensor:
        return self._send_small(self._local_topk_idx(plan, token_idx), plan)

    def _send_weights(
        self, topk_weights: torch.Tensor, plan: CollectivePlan, token_idx: torch.Tensor
    ) -> torch.Tensor:
        weights = topk_weights.cpu()
        if plan.tensors.layout is Layout.EXPERT_MAJOR:
            arrived = self._send_small(weights.flatten()[plan.send_order].unsqueeze(1), plan)
            placed = torch.zeros(plan.num_recv_tokens, dtype=weights.dtype)
            placed[plan.window.source_rows] = arrived.squeeze(1)
            return placed
        zero = torch.zeros((), dtype=weights.dtype)
        is_absent = self._local_topk_idx(plan, token_idx) < 0
        return self._send_small(torch.where(is_absent, zero, weights[token_idx]), plan)

    def _local_topk_idx(self, plan: CollectivePlan, token_idx: torch.Tensor) -> torch.Tensor:
        """RANK_MAJOR: choices of every sent row in its receiver's own expert ids, -1 elsewhere."""
        local = torch.empty(token_idx.numel(), plan.tensors.topk_idx.shape[1], dtype=torch.int64)
        first = 0
        for rank_idx, num_rows in enumerate(plan.send_splits):
            some = slice(first, first + num_rows)
            choices = plan.tensors.topk_idx[token_idx[some]]
            local[some] = routing.local_topk_idx(choices, rank_idx, self._placement)
            first += num_rows
        return local

    def _move_home(
        self,
        x: torch.Tensor,
        plan: CollectivePlan,
        topk_weights: torch.Tensor | None,
        out: torch.Tensor | None,
    ) -> torch.Tensor:
        source_rows = plan.window.source_rows
        if plan.tensors.layout is Layout.RANK_MAJOR and x.device == self._carrier.device:
            sent = routing.as_bytes(x)  # every row, in the order in which it came
        else:
            sent = self._stage("send", source_rows.numel(), _row_bytes(x))
            _gather_rows(routing.as_bytes(x), source_rows, sent)
        arrived = self._stage("receive", plan.send_order.numel(), _row_bytes(x))
        self._carry(arrived, sent, plan.send_splits, plan.recv_splits, "combine")
        rows = arrived.to(x.device).view(x.dtype)
        positions = plan.sent_positions(plan.tensors.slots).to(x.device)
        return arithmetic.sum_rows(rows, positions, topk_weights, out=out)

    def _pull(self, row_weights: torch.Tensor, plan: CollectivePlan) -> torch.Tensor:
        weights = row_weights.cpu()
        if weights.dim() == 1:
            weights = weights.unsqueeze(1)
        arrived = self._carry_small(
            weights[plan.window.source_rows], plan.send_splits, plan.recv_splits, "combine"
        )
        pulled = torch.zeros(plan.tensors.topk_idx.shape, dtype=weights.dtype)
        token_idx, topk_pos = (plan.tensors.topk_idx >= 0).nonzero(as_tuple=True)
        slots = routing.choice_slots(plan.tensors, self._placement)[token_idx, topk_pos]
        column = (
            topk_pos if plan.tensors.layout is Layout.RANK_MAJOR else torch.zeros_like(topk_pos)
        )
        pulled[token_idx, topk_pos] = arrived[plan.sent_positions(slots), column]
        return pulled.to(row_weights.device)

    def _send_small(self, values: torch.Tensor, plan: CollectivePlan) -> torch.Tensor:
        return self._carry_small(values, plan.recv_splits, plan.send_splits, "dispatch")

    def _carry_small(
        self, values: torch.Tensor, recv_splits: list[int], send_splits: list[int], operation: str
    ) -> torch.Tensor:
        """Carry weights or ids `[n, k]` from the CPU to the CPU."""
        sent = routing.as_bytes(values.contiguous()).to(self._carrier.device)
        arrived = torch.empty(
            sum(recv_splits), sent.shape[1], dtype=torch.uint8, device=sent.device
        )
        self._carry(arrived, sent, recv_splits, send_splits, operation)
        return arrived.cpu().view(values.dtype)

    def _carry(
        self,
        arrived: torch.Tensor,
        sent: torch.Tensor,
        recv_splits: list[int],
        send_splits: list[int],
        operation: str,
    ) -> None:
        self._carrier.all_to_all(arrived, sent, recv_splits, send_splits, operation)

    def _stage(self, name: str, num_rows: int, row_bytes: int) -> torch.Tensor:
        """A uint8 `[num_rows, row_bytes]` that the next call may use again.

        Fresh memory for every call would cost more than the call: the kernel zeroes its pages.
        """
        num_bytes = num_rows * row_bytes
        kept = self._staging.get(name)
        if kept is None or kept.numel() < num_bytes:
            kept = torch.empty(num_bytes, dtype=torch.uint8, device=self._carrier.device)
            self._staging[name] = kept
        return kept[:num_bytes].view(num_rows, row_bytes)


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.shape[1] * rows.element_size()


def _gather_rows(rows: torch.Tensor, row_idx: torch.Tensor, out: torch.Tensor) -> None:
    """`out[i] = rows[row_idx[i]]`, also from one device to another."""
    row_idx = row_idx.to(rows.device)
    if rows.device == out.device:
        torch.index_select(rows, 0, row_idx, out=out)
    else:
        out.copy_(rows.index_select(0, row_idx))
