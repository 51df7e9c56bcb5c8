"""`ElasticBuffer`: dispatch and combine of DeepEP's second interface."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
import torch.distributed as dist

from moe_comm.arguments import as_int
from moe_comm.compat.deep_ep import elastic_rows
from moe_comm.compat.deep_ep.arguments import (
    begin,
    check_bools,
    check_ints,
    check_tensor,
    ints_as_bools,
    passed,
)
from moe_comm.compat.deep_ep.combining import Bias, check_biases, combine_reduced, combine_rows
from moe_comm.compat.deep_ep.elastic_rows import EPHandle, Sending
from moe_comm.compat.deep_ep.group import GroupOwner, checked, rejects_unbound_of
from moe_comm.compat.deep_ep.rows import Rows
from moe_comm.compat.deep_ep.streams import on_device
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap, wait_for
from moe_comm.compat.deep_ep.utils.math import align
from moe_comm.ep.buffer import EpBuffer
from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for
from moe_comm.peers.missed_calls import keeps_unbound, tells_peers
from moe_comm.tensors import arithmetic

__all__ = [
    "EPHandle",
    "ElasticBuffer",
    "get_logical_domain_size",
    "get_physical_domain_size",
]

PreviousEvent = EventOverlap | EventHandle | None
Group = dist.ProcessGroup | Bootstrap | None

_SIZE_BYTES = 2 << 20
_NUM_TOPK_IF_UNKNOWN = 32
_LEAST_NUM_SMS = 4
_NUM_SMS_WITHOUT_OVERLAP = 64
_NUM_QPS = 17


def _reject_barrier(error: Exception, args: tuple[Any, ...], _: dict[str, Any]) -> None:
    args[0]._owner.shared().communicator.reject(error)


class ElasticBuffer:
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
        hidden: For the size hint.
        num_topk: For the size hint.
        use_fp8_dispatch: For the size hint.
        deterministic: No effect: everything is.
        allow_hybrid_mode: No effect.
        allow_multiple_reduction: With `do_expand`, a combine adds and rounds the rows of a token on the
            rank that has them, and the sums again. False: it rounds once, which takes one exchange.
        prefer_overlap_with_compute: For `get_theoretical_num_sms`.
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
                _not_offered("memory of num_cpu_bytes")
            return "an ElasticBuffer"

        self.group = group
        self._owner = GroupOwner(group)
        self._owner.shared().check_together(check)
        self.runtime: GroupOwner | None = self._owner
        self.rank_idx = self.scaleup_rank_idx = self._owner.rank_idx
        self.num_ranks = self.num_scaleup_ranks = self.num_nvlink_ranks = self._owner.num_ranks
        self.num_scaleout_ranks = self.num_rdma_ranks = 1
        self.scaleout_rank_idx = 0
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or _NUM_QPS
        self.explicitly_destroy = explicitly_destroy
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        if num_bytes is None:
            num_bytes = _buffer_bytes(
                self.num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
            )
        self.num_bytes = align(num_bytes, _SIZE_BYTES)

    def destroy(self) -> None:
        """Let go of the group; idempotent.

        Raises:
            ValueError: The buffer was made without `explicitly_destroy`.
        """
        if not self.explicitly_destroy:
            raise ValueError("destroy() needs explicitly_destroy=True, got False")
        self._owner.release()
        self.runtime = None

    @ints_as_bools
    @tells_peers(_reject_barrier)
    def barrier(
        self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """All ranks arrive. Collective. The arguments are for GPUs and have no effect."""
        communicator = self._owner.shared().communicator
        try:
            check_bools(
                use_comm_stream=use_comm_stream, with_cpu_sync=with_cpu_sync, sequential=sequential
            )
        except TypeError as error:
            communicator.reject(error)
        communicator.exchange("barrier", b"")

    @staticmethod
    def capture() -> EventHandle:
        """The end of what the current stream holds; on the CPU, the present."""
        return EventHandle()

    def get_comm_stream(self) -> torch.cuda.Stream | torch.cpu.Stream:
        """As in `Buffer`."""
        return self._owner.current_comm_stream()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Ranks between machines and within one: all are on one."""
        return 1, self.num_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Ranks of scale-out and of scale-up."""
        return 1, self.num_ranks

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
        num_bytes = _buffer_bytes(
            num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
        )
        return align(num_bytes, _SIZE_BYTES)

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
        check_ints(1, num_experts=num_experts, num_topk=num_topk)
        check_ints(0, num_scaleout_topk=num_scaleout_topk)
        for name, value in (
            ("rdma_gbs", rdma_gbs),
            ("nvlink_gbs", nvlink_gbs),
            ("sm_read_gbs", sm_read_gbs),
            ("sm_write_gbs", sm_write_gbs),
        ):
            if not value >= 0:
                raise ValueError(f"{name} must be >= 0, got {value}")
        return _LEAST_NUM_SMS if self.prefer_overlap_with_compute else _NUM_SMS_WITHOUT_OVERLAP

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
            handle: Of an earlier dispatch: send to its places; shape, order and padding hold.
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
        buffer = handle.buffer if isinstance(handle, EPHandle) else self._buffer_for(num_experts)

        def prepare() -> Sending:
            begin(None, async_with_compute_stream, False)
            if handle is None:
                check_ints(1, num_experts=num_experts)
            check_bools(
                allocate_on_comm_stream=allocate_on_comm_stream,
                do_handle_copy=do_handle_copy,
                do_cpu_sync=True if do_cpu_sync is None else do_cpu_sync,
                do_expand=do_expand,
                do_zero_padding=do_zero_padding,
                use_tma_aligned_col_major_sf=use_tma_aligned_col_major_sf,
            )
            check_ints(0, num_sms=num_sms, num_qps=num_qps)
            wait_for(previous_event)
            wait_for(previous_event_before_epilogue)
            if cumulative_local_expert_recv_stats is not None:
                check_tensor(
                    "cumulative_local_expert_recv_stats",
                    cumulative_local_expert_recv_stats,
                    (buffer.num_local_experts,),
                    torch.int32,
                )
            sending = Sending(
                x=x,
                topk_idx=topk_idx,
                topk_weights=topk_weights,
                num_max_tokens=self._most_tokens(num_max_tokens_per_rank, handle),
                expert_alignment=1 if expert_alignment is None else expert_alignment,
                is_exact=do_cpu_sync is not False,
                is_expanded=do_expand,
                is_column_major=use_tma_aligned_col_major_sf,
                copies_topk_idx=do_handle_copy,
                num_sms=num_sms,
            )
            sending.check(buffer, handle)
            return sending

        sending = checked(buffer, "dispatch", prepare)
        if handle is None:
            arrived = elastic_rows.dispatch(self._owner, buffer, sending)
        else:
            arrived = elastic_rows.dispatch_cached(handle, sending)
        if cumulative_local_expert_recv_stats is not None:
            counts = arrived.handle.num_unaligned_recv_tokens_per_expert
            cumulative_local_expert_recv_stats.add_(counts)
        return (
            arrived.x,
            arrived.topk_idx,
            arrived.topk_weights,
            arrived.handle,
            passed(async_with_compute_stream),
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
            handle: Of the dispatch.
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
        is_known = isinstance(handle, EPHandle)
        buffer = handle.buffer if is_known else self._buffer_for(None)

        def prepare() -> tuple[torch.Tensor, list[torch.Tensor]]:
            begin(None, async_with_compute_stream, False)
            check_bools(allocate_on_comm_stream=allocate_on_comm_stream)
            check_ints(0, num_sms=num_sms, num_qps=num_qps)
            wait_for(previous_event)
            wait_for(previous_event_before_epilogue)
            if not is_known:
                raise TypeError(f"handle must be an EPHandle, got {type(handle).__name__}")
            shape = (handle.native.num_recv_tokens, None)
            rows = check_tensor("x", x, shape, *arithmetic.ADDABLE_DTYPES)
            sums_shape = (handle.native.num_tokens, rows.shape[1])
            if topk_weights is not None and not isinstance(topk_weights, torch.Tensor):
                raise TypeError(f"topk_weights must be a tensor, got {type(topk_weights).__name__}")
            return rows.detach(), check_biases(bias, sums_shape, rows.dtype)

        rows, biases = checked(buffer, "combine", prepare)
        if self._reduces_before(handle):
            metadata = handle.recv_src_metadata.to(torch.int64)
            combined = combine_reduced(
                self._owner,
                buffer,
                handle.native,
                rows,
                None if topk_weights is None else topk_weights.detach(),
                biases,
                places=metadata[:, 2:],
                sources=metadata[:, 0] // handle.num_max_tokens_per_rank,
            )
        else:
            combined = combine_rows(
                self._owner,
                buffer,
                handle.native,
                rows,
                topk_weights,
                biases,
                async_op=async_with_compute_stream,
            )
        event = EventOverlap(combined.event, (x,)) if async_with_compute_stream else EventOverlap()
        return combined.x, combined.topk_weights, event

    def _reduces_before(self, handle: EPHandle) -> bool:
        """Whether a combine adds rows of one token before they travel; equal on all ranks."""
        is_alone = handle.num_experts <= self.num_ranks or handle.topk_idx.shape[1] == 1
        return handle.do_expand and self.allow_multiple_reduction and not is_alone

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
            most = self.num_max_tokens_per_rank
        check_ints(1, num_max_tokens_per_rank=most)
        return int(most)

    def engram_write(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("engram_write")

    def engram_fetch(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("engram_fetch")

    @staticmethod
    def get_engram_storage_size_hint(*_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("get_engram_storage_size_hint")

    def pp_set_config(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("pp_set_config")

    def pp_send(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("pp_send")

    def pp_recv(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("pp_recv")

    def create_agrs_session(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("create_agrs_session")

    def destroy_agrs_session(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("destroy_agrs_session")

    def agrs_new_session(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("agrs_new_session")

    def agrs_set_config(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("agrs_set_config")

    def agrs_get_inplace_tensor(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("agrs_get_inplace_tensor")

    def all_gather(self, *_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("all_gather")

    @staticmethod
    def get_agrs_num_max_session_bytes(*_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("get_agrs_num_max_session_bytes")

    @staticmethod
    def get_agrs_buffer_size_hint(*_: Any, **__: Any) -> None:
        """Not offered."""
        _not_offered("get_agrs_buffer_size_hint")


def get_physical_domain_size(group: Group = None) -> tuple[int, int]:
    """Ranks between machines and within one. Local."""
    return 1, bootstrap_for(group).num_ranks


def get_logical_domain_size(group: Group = None) -> tuple[int, int]:
    """Ranks of scale-out and of scale-up. Local."""
    return 1, bootstrap_for(group).num_ranks


def _buffer_bytes(
    num_ranks: int, num_max_tokens: int, hidden: int, num_topk: int, use_fp8: bool
) -> int:
    num_topk = num_topk or _NUM_TOPK_IF_UNKNOWN
    metadata_bytes = align(8 + 12 * num_topk, 32)
    scale_bytes = align(4 * -(-hidden // 128), 32) if use_fp8 else 0
    row_bytes = align(hidden * (1 if use_fp8 else 2), 32) + scale_bytes + metadata_bytes
    sum_bytes = align(hidden * 2, 32) + metadata_bytes
    dispatch_bytes = num_ranks * num_max_tokens * row_bytes
    return dispatch_bytes + min(num_ranks, num_topk) * num_max_tokens * sum_bytes


def _not_offered(what: str) -> NoReturn:
    raise NotImplementedError(
        f"{what} belongs to the experimental parts of ElasticBuffer; only dispatch and combine are here"
    )
