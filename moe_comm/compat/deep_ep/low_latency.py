"""Dispatch and combine of `Buffer` in its low-latency mode: shapes that do not depend on the routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from moe_comm.compat.deep_ep import handle_counts
from moe_comm.compat.deep_ep.arguments import check_bools, check_tensor
from moe_comm.compat.deep_ep.config import topk_idx_t
from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.handles import LowLatencyHandle
from moe_comm.compat.deep_ep.streams import on_call_device, plan_on_call_device
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap
from moe_comm.compat.deep_ep.utils.math import fp8_quantization
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import Layout
from moe_comm.ep.handles import CombineResult, DispatchResult
from moe_comm.ep.validation import check_apart
from moe_comm.peers.missed_calls import Telling

_LARGEST_EXACT_INDEX = 1 << 24  # token indices travel as float32


@dataclasses.dataclass(frozen=True)
class Completion:
    """Form in which a call is to end.

    Args:
        async_finish: Return before the end, with an event.
        return_recv_hook: Return before the end, with a function that waits for it.
    """

    async_finish: bool
    return_recv_hook: bool

    def check(self) -> None:
        """Both are bools and not both true."""
        check_bools(async_finish=self.async_finish, return_recv_hook=self.return_recv_hook)
        if self.async_finish and self.return_recv_hook:
            raise ValueError("async_finish and return_recv_hook exclude each other, both are True")

    @property
    def is_deferred(self) -> bool:
        """Return whether the call returns before the end."""
        return self.async_finish or self.return_recv_hook

    def finish(self, handle: EventHandle) -> tuple[EventOverlap, Callable[[], None] | None]:
        """Event and hook to hand out; waits where neither was asked for."""
        if self.return_recv_hook:
            return EventOverlap(), handle.current_stream_wait
        if self.async_finish:
            return EventOverlap(handle), None
        handle.current_stream_wait()
        return EventOverlap(), None


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Tensors to which a dispatch adds what it saw.

    Args:
        expert_counts: int32 `[El]`, tokens of every local expert, or None.
        wait_ns: int64 `[R]`, nanoseconds this rank waited for each rank, or None.
    """

    expert_counts: torch.Tensor | None
    wait_ns: torch.Tensor | None

    def check(self, num_local_experts: int, num_ranks: int) -> None:
        """Shapes and dtypes."""
        if self.expert_counts is not None:
            check_tensor(
                "cumulative_local_expert_recv_stats",
                self.expert_counts,
                (num_local_experts,),
                torch.int32,
            )
        _check_wait_stats("dispatch_wait_recv_cost_stats", self.wait_ns, num_ranks)
        if self.expert_counts is not None and self.wait_ns is not None:
            check_apart(
                "cumulative_local_expert_recv_stats",
                self.expert_counts,
                dispatch_wait_recv_cost_stats=self.wait_ns,
            )

    def add(self, result: DispatchResult) -> None:
        """Add a dispatch that has ended."""
        if self.expert_counts is not None:
            self.expert_counts.add_(result.num_tokens_per_expert.to(self.expert_counts))
        if self.wait_ns is not None:
            self.wait_ns.add_(on_call_device(result.wait_ns))


def dispatch(
    owner: GroupOwner,
    buffer: EpBuffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    statistics: Statistics,
    completion: Completion,
    *,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
) -> tuple[
    torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    torch.Tensor,
    LowLatencyHandle,
    EventOverlap,
    Callable[[], None] | None,
]:
    """Send rows to the fixed places of their experts. Collective. See `Buffer`."""
    with Telling(buffer.reject, "dispatch"):
        completion.check()
        check_bools(use_fp8=use_fp8, round_scale=round_scale, use_ue8m0=use_ue8m0)
        fp8_quantization(round_scale=round_scale, use_ue8m0=use_ue8m0)
        statistics.check(buffer.num_local_experts, owner.num_ranks)
        rows = check_tensor("x", x, (None, None))
        choices = check_tensor("topk_idx", topk_idx, (rows.shape[0], None), topk_idx_t)
        if rows.shape[0] > _LARGEST_EXACT_INDEX:
            raise ValueError(f"x must have at most {_LARGEST_EXACT_INDEX} rows, got {len(rows)}")
        # Every row takes its index along in the place of a weight.
        index = torch.arange(rows.shape[0], dtype=torch.float32)[:, None]
        rows, indices = rows.detach(), index.repeat(1, choices.shape[1])
    quantization = None
    if use_fp8:
        quantization = fp8_quantization(
            round_scale=round_scale, use_ue8m0=use_ue8m0, is_column_major=True
        )
    result = buffer.dispatch(
        rows,
        topk_idx,
        indices,
        layout=Layout.LOW_LATENCY,
        quantization=quantization,
        async_op=completion.is_deferred,
    )
    num_max_tokens = buffer.config.num_max_tokens_per_rank
    assert num_max_tokens is not None
    num_local_experts = buffer.num_local_experts
    num_places = owner.num_ranks * num_max_tokens
    recv_count = torch.zeros(num_local_experts, dtype=torch.int32)
    src_info = torch.full((num_local_experts, num_places), -1, dtype=torch.int32)
    layout_range = torch.zeros(num_local_experts, owner.num_ranks, dtype=torch.int64)

    hidden = rows.shape[1]
    handle = LowLatencyHandle.of(
        (src_info, layout_range, num_max_tokens, hidden, buffer.config.num_experts),
        buffer=buffer,
        pending=result,
        topk_idx=topk_idx.clone(),
    )

    def finish() -> None:
        recv_count.copy_(result.num_tokens_per_expert)
        plan = plan_on_call_device(result.plan)
        _, counts = handle_counts.received_choices(plan, buffer.expert_rank, owner.rank_idx)
        layout_range.copy_(handle_counts.packed_layout_range(counts))
        assert result.topk_weights is not None
        is_filled = torch.arange(num_places) < recv_count[:, None]
        arrived = result.topk_weights.view(num_local_experts, num_places)
        src_info[is_filled] = arrived[is_filled].to(torch.int32)
        statistics.add(result)
        _ = handle.native  # lets go of the rows, which may be dropped before the handle

    recv_x = result.x.view(num_local_experts, num_places, hidden)
    event, hook = completion.finish(EventHandle.of(result.event, finish))
    return (
        recv_x if result.x_sf is None else (recv_x, result.x_sf),
        recv_count,
        handle,
        event,
        hook,
    )


def combine(
    owner: GroupOwner,
    handle: LowLatencyHandle,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    completion: Completion,
    *,
    use_logfmt: bool,
    zero_copy: bool,
    out: torch.Tensor | None,
    wait_stats: torch.Tensor | None,
) -> tuple[torch.Tensor, EventOverlap, Callable[[], None] | None]:
    """Weigh rows and sum them back to their tokens. Collective. See `Buffer`."""
    buffer = handle.buffer
    num_places = owner.num_ranks * handle[2]
    with Telling(buffer.reject, "combine"):
        completion.check()
        check_bools(use_logfmt=use_logfmt, zero_copy=zero_copy)
        if use_logfmt and zero_copy:
            raise ValueError("use_logfmt and zero_copy exclude each other, both are True")
        _check_wait_stats("combine_wait_recv_cost_stats", wait_stats, owner.num_ranks)
        shape = (buffer.num_local_experts, num_places, None)
        rows = check_tensor("x", x, shape).detach()
        if zero_copy:
            if handle.combine_buffer is None:
                raise ValueError(
                    "zero_copy needs rows in what get_next_low_latency_combine_buffer(handle) gives, "
                    "which was not called for this handle"
                )
            rows = handle.combine_buffer
        if not torch.equal(check_tensor("topk_idx", topk_idx, (None, None)), handle.topk_idx):
            raise ValueError("topk_idx must be that of the dispatch, got another one")
        weights = check_tensor(
            "topk_weights", topk_weights, tuple(handle.topk_idx.shape), torch.float32
        )
        shape_of_out = (handle.topk_idx.shape[0], rows.shape[2])
        if out is not None:
            sums = check_tensor("out", out, shape_of_out, rows.dtype)
            if wait_stats is not None:
                check_apart("out", sums, combine_wait_recv_cost_stats=wait_stats)
        else:
            sums = rows.new_empty(shape_of_out)
        rows, weights = rows.flatten(0, 1), weights.detach()
    if not completion.is_deferred and wait_stats is None:
        buffer.combine(rows, handle.native, topk_weights=weights, out=sums)
        event, hook = completion.finish(EventHandle())
        return sums, event, hook
    pending = buffer.combine(rows, handle.native, topk_weights=weights, out=sums, async_op=True)
    assert isinstance(pending, CombineResult)

    def finish() -> None:
        if wait_stats is not None:
            wait_stats.add_(on_call_device(pending.wait_ns))

    event, hook = completion.finish(EventHandle.of(pending.event, finish))
    return sums, event, hook


def next_combine_buffer(handle: LowLatencyHandle) -> torch.Tensor:
    """`[El, R * num_max, H]` bfloat16, uninitialized, which combine reads in place. Local."""
    if handle.combine_buffer is None:
        native = handle.native
        rows = handle.buffer.empty_expert_output(native, hidden=handle[3], dtype=torch.bfloat16)
        handle.combine_buffer = rows.view(*handle[0].shape, handle[3])
    return handle.combine_buffer


def _check_wait_stats(name: str, stats: torch.Tensor | None, num_ranks: int) -> None:
    if stats is not None:
        check_tensor(name, stats, (num_ranks,), torch.int64)
