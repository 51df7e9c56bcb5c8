"""Calls of `ElasticBuffer` and `EPBuffer`, below their signatures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.arguments import as_int
from moe_comm.compat.deep_ep import elastic_rows
from moe_comm.compat.deep_ep.arguments import begin, check_bools, check_ints, check_tensor, passed
from moe_comm.compat.deep_ep.combining import (
    Bias,
    Combined,
    check_biases,
    combine_rows,
    start_reduced,
    start_with_biases,
)
from moe_comm.compat.deep_ep.elastic_rows import EPHandle, Received, Sending
from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.rows import Rows
from moe_comm.compat.deep_ep.streams import in_callers_stream, running
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap, wait_for
from moe_comm.compat.deep_ep.utils.math import align
from moe_comm.ep.buffer import EpBuffer
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.missed_calls import Telling
from moe_comm.tensors import arithmetic

PreviousEvent = EventOverlap | EventHandle | None
Group = dist.ProcessGroup | Bootstrap | None

NUM_QPS = 17
"""`num_allocated_qps` where none is asked for and ranks are one domain."""
SIZE_BYTES = 2 << 20
"""Sizes of buffers are multiples of this."""
_NUM_TOPK_IF_UNKNOWN = 32
_LEAST_NUM_SMS = 4
_NUM_SMS_WITHOUT_OVERLAP = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dispatching:
    """Arguments of a dispatch, as they were passed; see `ElasticBuffer.dispatch`."""

    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    stats: torch.Tensor | None
    num_experts: int | None
    num_max_tokens_per_rank: int | None
    expert_alignment: int | None
    handle: EPHandle | None
    do_handle_copy: bool
    do_cpu_sync: bool | None
    do_expand: bool
    do_zero_padding: bool
    is_column_major: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Running:
    """Arguments of both calls that say how it runs, as they were passed.

    Args:
        num_sms: See `ElasticBuffer.dispatch`.
        num_qps: Likewise.
        events: Waited for.
        is_async: The result has an event.
        allocate_on_comm_stream: Validated.
        is_deferred: The result is an event whose first wait finishes and returns what the call does.
        rules: Further checks; raises what is told to all ranks.
    """

    num_sms: int
    num_qps: int
    events: tuple[PreviousEvent, ...]
    is_async: bool
    allocate_on_comm_stream: bool
    is_deferred: bool = False
    rules: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Check, and wait for what the call is to come after."""
        begin(None, self.is_async, False)
        check_bools(allocate_on_comm_stream=self.allocate_on_comm_stream)
        check_ints(0, num_sms=self.num_sms, num_qps=self.num_qps)
        self.rules()
        for event in self.events:
            wait_for(event)


class ElasticCalls:
    """Dispatch and combine of one object.

    Args:
        owner: Owner of the buffers.
        num_max_tokens_per_rank: Most tokens of a rank, if a call says nothing else.
        allow_multiple_reduction: See `ElasticBuffer`.
        is_watching: Handles have the caller's `topk_idx` and notice that it was written.
    """

    def __init__(
        self,
        owner: GroupOwner,
        num_max_tokens_per_rank: int,
        allow_multiple_reduction: bool,
        *,
        is_watching: bool = False,
    ) -> None:
        self._owner = owner
        self._num_max_tokens_per_rank = num_max_tokens_per_rank
        self._allow_multiple_reduction = allow_multiple_reduction
        self._is_watching = is_watching

    def dispatch(self, x: Rows, given: Dispatching, run: Running) -> Any:
        """Run `ElasticBuffer.dispatch` and return its result; deferred, an event. Collective."""
        handle, stats = given.handle, given.stats
        known = handle.buffer if isinstance(handle, EPHandle) else None
        buffer = self._buffer_for(given.num_experts) if known is None else known
        with Telling(buffer.reject, "dispatch"):
            if handle is None:
                check_ints(1, num_experts=given.num_experts)
            check_bools(
                do_handle_copy=given.do_handle_copy,
                do_cpu_sync=True if given.do_cpu_sync is None else given.do_cpu_sync,
                do_expand=given.do_expand,
                do_zero_padding=given.do_zero_padding,
                use_tma_aligned_col_major_sf=given.is_column_major,
            )
            run.begin()
            if stats is not None:
                check_tensor(
                    "cumulative_local_expert_recv_stats",
                    stats,
                    (buffer.num_local_experts,),
                    torch.int32,
                )
            unit = given.expert_alignment
            sending = Sending(
                x=x,
                topk_idx=given.topk_idx,
                topk_weights=given.topk_weights,
                num_max_tokens=self._most_tokens(given.num_max_tokens_per_rank, handle),
                expert_alignment=1 if unit is None else unit,
                is_exact=given.do_cpu_sync is not False,
                is_expanded=given.do_expand,
                is_column_major=given.is_column_major,
                copies_topk_idx=given.do_handle_copy,
                num_sms=run.num_sms,
                topk_idx_version=(
                    elastic_rows.version_of(given.topk_idx) if self._is_watching else None
                ),
            )
            sending.check(buffer, handle)
        started = elastic_rows.start(self._owner, buffer, sending, handle, async_op=run.is_deferred)

        def finish() -> Received:
            received = started.finish()
            if stats is not None:
                stats.add_(received.handle.num_unaligned_recv_tokens_per_expert)
            return received

        def parts(received: Received) -> tuple[Any, ...]:
            return received.x, received.topk_idx, received.topk_weights, received.handle

        if run.is_deferred:
            return _deferred(started.event, (x,), lambda: parts(finish()))
        return (*parts(finish()), passed(run.is_async))

    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None,
        bias: Bias,
        run: Running,
    ) -> Any:
        """Run `ElasticBuffer.combine` and return its result; deferred, an event. Collective."""
        is_known = isinstance(handle, EPHandle)
        buffer = handle.buffer if is_known else self._buffer_for(None)
        with Telling(buffer.reject, "combine"):
            run.begin()
            if not is_known:
                raise TypeError(f"handle must be an EPHandle, got {type(handle).__name__}")
            shape = (handle.native.num_recv_tokens, None)
            rows = check_tensor("x", x, shape, *arithmetic.ADDABLE_DTYPES)
            sums_shape = (handle.native.num_tokens, rows.shape[1])
            if topk_weights is not None and not isinstance(topk_weights, torch.Tensor):
                raise TypeError(f"topk_weights must be a tensor, got {type(topk_weights).__name__}")
            biases = check_biases(bias, sums_shape, rows.dtype)
            rows, reduces = rows.detach(), self._reduces_before(handle)
        weights = None if topk_weights is None else topk_weights.detach()
        event = EventHandle()
        if reduces:
            metadata = handle.recv_src_metadata.to(torch.int64)
            finish = start_reduced(
                self._owner,
                buffer,
                handle.native,
                rows,
                weights,
                biases,
                places=metadata[:, 2:],
                sources=metadata[:, 0] // handle.num_max_tokens_per_rank,
            )
        elif biases:
            finish = start_with_biases(self._owner, buffer, handle.native, rows, weights, biases)
        else:
            combined = combine_rows(
                self._owner, buffer, handle.native, rows, weights, [], async_op=run.is_async
            )
            event = combined.event

            def finish() -> Combined:
                return combined

        def parts() -> tuple[torch.Tensor, torch.Tensor | None]:
            result = finish()
            return result.x, result.topk_weights

        if run.is_deferred:
            return _deferred(event, (x, *biases), parts)
        sums, pulled = parts()
        if reduces or biases:
            event = EventHandle()
        return sums, pulled, EventOverlap(event, (x,)) if run.is_async else EventOverlap()

    def _reduces_before(self, handle: EPHandle) -> bool:
        """Return whether a combine adds rows of one token before they travel; equal on all ranks."""
        num_topk = handle.topk_idx.shape[1]
        is_alone = handle.num_experts <= self._owner.num_ranks or num_topk == 1
        return handle.do_expand and self._allow_multiple_reduction and not is_alone

    def _buffer_for(self, num_experts: Any) -> EpBuffer:
        """The buffer for so many experts, or the latest for a call that is going to be refused."""
        try:
            known = as_int("num_experts", num_experts, 1)
        except (TypeError, ValueError) as error:
            return self._owner.buffer_for(None, f"{error}; or an EPHandle is to be given")
        return self._owner.buffer_for(known)

    def _most_tokens(self, num_max_tokens_per_rank: Any, handle: object) -> int:
        if isinstance(handle, EPHandle):
            return handle.num_max_tokens_per_rank
        most = num_max_tokens_per_rank
        if most is None:
            most = self._num_max_tokens_per_rank
        check_ints(1, num_max_tokens_per_rank=most)
        return int(most)


def _deferred(event: EventHandle, kept: tuple[Any, ...], finish: Callable[[], Any]) -> EventOverlap:
    """An event whose first wait returns what `finish` does, in the stream that is current then."""
    place = running()
    overlap = EventOverlap(event, kept)
    overlap.register_hook_after_wait(lambda: in_callers_stream(place, finish))
    return overlap


def meet(owner: GroupOwner, **flags: Any) -> None:
    """A barrier; `flags` are bools and have no effect. Collective."""
    communicator = owner.shared().communicator
    with Telling(communicator.reject):
        check_bools(**flags)
    communicator.exchange("barrier", b"")


def reject_barrier(error: Exception, args: tuple[Any, ...], _: dict[str, Any]) -> None:
    """Raise on every rank that a barrier's arguments cannot be bound."""
    args[0]._owner.shared().communicator.reject(error)


def theoretical_num_sms(
    num_experts: Any,
    num_topk: Any,
    num_scaleout_topk: Any,
    *,
    prefers_overlap: bool,
    **bandwidths: float,
) -> int:
    """The least that DeepEP's rules allow."""
    check_ints(1, num_experts=num_experts, num_topk=num_topk)
    check_ints(0, num_scaleout_topk=num_scaleout_topk)
    for name, value in bandwidths.items():
        if not value >= 0:
            raise ValueError(f"{name} must be >= 0, got {value}")
    return _LEAST_NUM_SMS if prefers_overlap else _NUM_SMS_WITHOUT_OVERLAP


def buffer_bytes(
    num_ranks: int, num_max_tokens: int, hidden: int, num_topk: int, use_fp8: bool
) -> int:
    """Bytes that worst-case buffers would take."""
    num_topk = num_topk or _NUM_TOPK_IF_UNKNOWN
    metadata_bytes = align(8 + 12 * num_topk, 32)
    scale_bytes = align(4 * -(-hidden // 128), 32) if use_fp8 else 0
    row_bytes = align(hidden * (1 if use_fp8 else 2), 32) + scale_bytes + metadata_bytes
    sum_bytes = align(hidden * 2, 32) + metadata_bytes
    dispatch_bytes = num_ranks * num_max_tokens * row_bytes
    return dispatch_bytes + min(num_ranks, num_topk) * num_max_tokens * sum_bytes
