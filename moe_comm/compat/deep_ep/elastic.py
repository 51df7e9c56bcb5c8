"""`ElasticBuffer`: dispatch and combine of DeepEP's second interface."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from moe_comm.compat.deep_ep.arguments import check_bools, check_ints, ints_as_bools
from moe_comm.compat.deep_ep.base_buffer import BufferBase
from moe_comm.compat.deep_ep.combining import Bias
from moe_comm.compat.deep_ep.elastic_calls import (
    NUM_QPS,
    SIZE_BYTES,
    Dispatching,
    ElasticCalls,
    Group,
    PreviousEvent,
    Running,
    buffer_bytes,
    meet,
    reject_barrier,
    theoretical_num_sms,
)
from moe_comm.compat.deep_ep.elastic_rows import EPHandle
from moe_comm.compat.deep_ep.group import GroupOwner, rejects_unbound_of
from moe_comm.compat.deep_ep.rows import Rows
from moe_comm.compat.deep_ep.streams import on_device
from moe_comm.compat.deep_ep.utils.event import EventOverlap
from moe_comm.compat.deep_ep.utils.math import align
from moe_comm.peers.bootstrap import bootstrap_for
from moe_comm.peers.missed_calls import keeps_unbound, tells_peers

__all__ = [
    "EPHandle",
    "ElasticBuffer",
    "get_logical_domain_size",
    "get_physical_domain_size",
]


class _NotOffered:
    """A method of the experimental parts, whatever it is called with."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse(self._name)


def _refuse(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} belongs to the experimental parts of ElasticBuffer; only dispatch and combine are here"
    )


class ElasticBuffer(BufferBase):
    """Dispatch and combine with the arguments of DeepEP's second interface.

    On the device of the first tensors. Any number of ranks and experts, any top-k (equal on all ranks),
    rows of a multiple of 16 bytes. N tokens of this rank, H hidden, K choices, R ranks, E experts of
    which El are here. Collective: every rank makes it and calls it in the same order. What one rank
    gets wrong is raised on every rank, as ValueError or TypeError.

    Args:
        group: Process group, bootstrap, or None for the default process group.
        num_bytes: Kept; nothing depends on it. None for the size hint.
        num_cpu_bytes: Only 0: memory for the experimental parts, which are not offered.
        num_max_tokens_per_rank: Most tokens of a rank; a call may say otherwise.
        hidden: Elements of a row, for the size hint.
        num_topk: Choices per token, for the size hint.
        use_fp8_dispatch: Whether rows are dispatched in FP8, for the size hint.
        deterministic: No effect: everything is.
        allow_hybrid_mode: No effect.
        allow_multiple_reduction: Whether a combine with `do_expand` adds and rounds the rows of a
            token on the rank that has them, and the sums again. False: it rounds once, which takes
            one exchange.
        prefer_overlap_with_compute: Whether `get_theoretical_num_sms` returns the fewest SMs.
        sl_idx: No effect.
        num_allocated_qps: Kept, no effect.
        num_cpu_timeout_secs: Validated; the communicator has limits of its own.
        num_gpu_timeout_secs: No effect.
        explicitly_destroy: `destroy()` may be called.

    Raises:
        ValueError: A size is wrong.
        TypeError: An argument has another type.
        NotImplementedError: `num_cpu_bytes` is not 0.
    """

    @ints_as_bools
    @keeps_unbound
    def __init__(
        self,
        group: Group,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:

        def check() -> str:
            check_ints(
                0,
                num_cpu_bytes=num_cpu_bytes,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                hidden=hidden,
                num_topk=num_topk,
                sl_idx=sl_idx,
                num_allocated_qps=num_allocated_qps,
            )
            check_ints(
                1,
                num_cpu_timeout_secs=num_cpu_timeout_secs,
                num_gpu_timeout_secs=num_gpu_timeout_secs,
            )
            check_bools(
                use_fp8_dispatch=use_fp8_dispatch,
                deterministic=deterministic,
                allow_hybrid_mode=allow_hybrid_mode,
                allow_multiple_reduction=allow_multiple_reduction,
                prefer_overlap_with_compute=prefer_overlap_with_compute,
                explicitly_destroy=explicitly_destroy,
            )
            if num_bytes is not None:
                check_ints(0, num_bytes=num_bytes)
            if num_cpu_bytes:
                _refuse("memory of num_cpu_bytes")
            return "an ElasticBuffer"

        self.group = group
        owner = GroupOwner(group)
        owner.shared().check_together(check)
        super().__init__(explicitly_destroy, owner=owner)
        self.rank_idx = self.scaleup_rank_idx = self._owner.rank_idx
        self.num_ranks = self.num_scaleup_ranks = self.num_nvlink_ranks = self._owner.num_ranks
        self.num_scaleout_ranks = self.num_rdma_ranks = 1
        self.scaleout_rank_idx = 0
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or NUM_QPS
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self._calls = ElasticCalls(self._owner, num_max_tokens_per_rank, allow_multiple_reduction)
        if num_bytes is None:
            num_bytes = buffer_bytes(
                self.num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
            )
        self.num_bytes = align(num_bytes, SIZE_BYTES)

    @ints_as_bools
    @tells_peers(reject_barrier)
    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """All ranks arrive. Collective. The arguments are for GPUs and have no effect."""
        meet(
            self._owner,
            use_comm_stream=use_comm_stream,
            with_cpu_sync=with_cpu_sync,
            sequential=sequential,
        )

    @staticmethod
    @ints_as_bools
    def get_buffer_size_hint(
        group: Group,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that worst-case buffers would take, in units of 2 MiB; nothing here needs them."""
        check_ints(
            0, num_max_tokens_per_rank=num_max_tokens_per_rank, hidden=hidden, num_topk=num_topk
        )
        check_bools(
            use_fp8_dispatch=use_fp8_dispatch,
            allow_hybrid_mode=allow_hybrid_mode,
            allow_multiple_reduction=allow_multiple_reduction,
        )
        num_ranks = bootstrap_for(group).num_ranks
        num_bytes = buffer_bytes(
            num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
        )
        return align(num_bytes, SIZE_BYTES)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes by DeepEP's formula; pipeline transfers are not offered."""
        check_ints(
            0,
            num_max_tensor_bytes=num_max_tensor_bytes,
            num_max_inflight_tensors=num_max_inflight_tensors,
        )
        return align(num_max_tensor_bytes, 32) * num_max_inflight_tensors * 4

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """The least that DeepEP's rules allow: rows are moved by cores, not by SMs."""
        return theoretical_num_sms(
            num_experts,
            num_topk,
            num_scaleout_topk,
            prefers_overlap=self.prefer_overlap_with_compute,
            rdma_gbs=rdma_gbs,
            nvlink_gbs=nvlink_gbs,
            sm_read_gbs=sm_read_gbs,
            sm_write_gbs=sm_write_gbs,
        )

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """`num_allocated_qps`."""
        check_ints(0, num_sms=num_sms)
        return self.num_allocated_qps

    @ints_as_bools
    @on_device
    @rejects_unbound_of("dispatch")
    def dispatch(
        self,
        x: Rows,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: PreviousEvent = None,
        previous_event_before_epilogue: PreviousEvent = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send every token to the ranks, or with `do_expand` to the experts, it goes to. Collective.

        Args:
            x: `[N, H]`, contiguous, any dtype; or (data of one-byte elements, scales float32 or
                int32 `[N, S]`, any strides), both sent as they are.
            topk_idx: int64 `[N, K]`; None with `handle`.
            topk_weights: float32 `[N, K]`, or None.
            cumulative_local_expert_recv_stats: int32 `[El]`: counts are added.
            num_experts: E; None with `handle`.
            num_max_tokens_per_rank: None for the constructor's; at least 1, equal on all ranks.
            expert_alignment: None for 1; rows per expert are padded to a multiple with `do_expand`,
                else only counts are rounded.
            num_sms: Kept in the handle, no effect.
            num_qps: No effect.
            previous_event: Waited for.
            previous_event_before_epilogue: Waited for.
            async_with_compute_stream: The result has an event, for which the host has waited.
            allocate_on_comm_stream: No effect.
            handle: Handle of an earlier dispatch: send to its places; shape, order and padding hold.
            do_handle_copy: The handle has a copy of `topk_idx`, not the tensor.
            do_cpu_sync: None for True. False: the worst case of rows, unfilled ones zero.
            do_expand: One row per token and local expert, grouped by expert.
            do_zero_padding: No effect: padding is zero.
            use_tma_aligned_col_major_sf: Scales have strides `(1, rows rounded up to 16 bytes)`.

        Returns:
            recv_x, like x, M rows in order of (source rank, token), with `do_expand` within each
            expert; recv_topk_idx int64 `[M, K]`, local ids, -1 elsewhere, with `handle` that of its
            dispatch (None with `do_expand`); recv_topk_weights `[M, K]`, all weights of a token, with `do_expand` `[M]`, or
            None; handle, see `EPHandle`; event.

        Raises:
            ValueError: A rule above is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
        """
        return self._calls.dispatch(  # type: ignore[no-any-return]
            x,
            Dispatching(
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                stats=cumulative_local_expert_recv_stats,
                num_experts=num_experts,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                expert_alignment=expert_alignment,
                handle=handle,
                do_handle_copy=do_handle_copy,
                do_cpu_sync=do_cpu_sync,
                do_expand=do_expand,
                do_zero_padding=do_zero_padding,
                is_column_major=use_tma_aligned_col_major_sf,
            ),
            Running(
                num_sms=num_sms,
                num_qps=num_qps,
                events=(previous_event, previous_event_before_epilogue),
                is_async=async_with_compute_stream,
                allocate_on_comm_stream=allocate_on_comm_stream,
            ),
        )

    @ints_as_bools
    @on_device
    @rejects_unbound_of("combine")
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: PreviousEvent = None,
        previous_event_before_epilogue: PreviousEvent = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sum rows back to their tokens, unweighted. Collective.

        Args:
            x: `[M, H]`, contiguous: bfloat16, float16, float32 or float64.
            handle: Handle of the dispatch.
            topk_weights: float32 `[M, K]`, with `do_expand` `[M]`: each comes back from the rank of
                its choice.
            bias: As in `Buffer.combine`.
            num_sms: No effect.
            num_qps: No effect.
            previous_event: Waited for.
            previous_event_before_epilogue: Waited for.
            async_with_compute_stream: Return before the end; wait for the event before the result is
                read.
            allocate_on_comm_stream: No effect.

        Returns:
            `[N, H]` sums, in float32: biases, then rows by rank, rounded once. With `do_expand` see
            `allow_multiple_reduction`: sums of ranks in order of the last choice that led to each, or
            rows in order of choices. float32 `[N, K]` weights or None; event.

        Raises:
            ValueError: A rule above is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
        """
        return self._calls.combine(  # type: ignore[no-any-return]
            x,
            handle,
            topk_weights,
            bias,
            Running(
                num_sms=num_sms,
                num_qps=num_qps,
                events=(previous_event, previous_event_before_epilogue),
                is_async=async_with_compute_stream,
                allocate_on_comm_stream=allocate_on_comm_stream,
            ),
        )

    engram_write = _NotOffered()
    engram_fetch = _NotOffered()
    get_engram_storage_size_hint = _NotOffered()
    pp_set_config = _NotOffered()
    pp_send = _NotOffered()
    pp_recv = _NotOffered()
    create_agrs_session = _NotOffered()
    destroy_agrs_session = _NotOffered()
    agrs_new_session = _NotOffered()
    agrs_set_config = _NotOffered()
    agrs_get_inplace_tensor = _NotOffered()
    all_gather = _NotOffered()
    get_agrs_num_max_session_bytes = _NotOffered()
    get_agrs_buffer_size_hint = _NotOffered()


def get_physical_domain_size(group_or_buffer: Group | BufferBase = None) -> tuple[int, int]:
    """Ranks between machines and within one, of a group or a buffer. Local."""
    if isinstance(group_or_buffer, BufferBase):
        return group_or_buffer.get_physical_domain_size()
    return 1, bootstrap_for(group_or_buffer).num_ranks


@ints_as_bools
def get_logical_domain_size(
    group_or_buffer: Group | BufferBase = None, allow_hybrid_mode: bool | None = None
) -> tuple[int, int]:
    """Ranks of scale-out and of scale-up, which `allow_hybrid_mode` does not change. Local."""
    check_bools(allow_hybrid_mode=True if allow_hybrid_mode is None else allow_hybrid_mode)
    return get_physical_domain_size(group_or_buffer)
