"""`EPBuffer`: dispatch and combine of DeepEP V2.5, with epilogues that may come later."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.arguments import as_int
from moe_comm.compat.deep_ep.allocator import BufferAllocator, storage_of
from moe_comm.compat.deep_ep.arguments import check_bools, check_ints, ints_as_bools
from moe_comm.compat.deep_ep.base_buffer import BufferBase
from moe_comm.compat.deep_ep.combining import Bias
from moe_comm.compat.deep_ep.elastic import ElasticBuffer
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
from moe_comm.compat.deep_ep.load_balancing import LoadBalancing, Payload
from moe_comm.compat.deep_ep.rows import Rows
from moe_comm.compat.deep_ep.streams import on_device
from moe_comm.compat.deep_ep.utils.event import EventOverlap
from moe_comm.compat.deep_ep.utils.math import align
from moe_comm.peers.missed_calls import keeps_unbound, tells_peers

Dispatched = tuple[Rows, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]
Combined = tuple[torch.Tensor, torch.Tensor | None, EventOverlap]


def _reject_lb(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell peers, who are in a call of the same buffer."""
    args[0]._load_balancing().copies.communicator.reject(error)


def _on_cpu(device: torch.device) -> str:
    """Say what ranks make, for peers.

    Raises:
        NotImplementedError: The device is a GPU.
    """
    if device.type != "cpu":
        raise NotImplementedError(
            f"redundant experts lie on the CPU, this deep_ep has none on {device}; dispatch and combine "
            "of EPBuffer have"
        )
    return "room for redundant experts"


class EPBuffer(BufferBase):
    """Dispatch and combine with the arguments of DeepEP V2.5.

    Does what `ElasticBuffer` does, on the same devices and for any number of ranks and experts.
    Collective: every rank makes it and calls it in the same order. What one rank gets wrong is raised
    on every rank, as ValueError or TypeError, where DeepEP asserts.

    Args:
        group: Process group, bootstrap, or None for the default process group.
        num_bytes: A multiple of 2 MiB, kept; nothing depends on it. None for the size hint.
        num_max_tokens_per_rank: Most tokens of a rank; a call may say otherwise.
        hidden: Elements of a row, for the size hint.
        num_topk: Choices per token, for the size hint.
        use_fp8_dispatch: Whether rows are dispatched in FP8, for the size hint.
        lb_allocation_plan_or_num_bytes: A `BufferAllocator`, whose tensors lie in a storage for redundant
            experts from now on; or its bytes, a multiple of 2 MiB, 0 for none. On the CPU.
        deterministic: No effect: everything is.
        allow_hybrid_mode: No effect.
        allow_multiple_reduction: See `ElasticBuffer`.
        prefer_overlap_with_compute: Whether `get_theoretical_num_sms`, and `num_sms=0` of `dispatch`,
            stand for the fewest SMs.
        sl_idx: No effect.
        num_allocated_qps: Most of `num_qps`; 0 for 17.
        num_cpu_timeout_secs: Validated; the communicator has limits of its own.
        num_gpu_timeout_secs: No effect.
        explicitly_destroy: `destroy()` may be called.

    Raises:
        ValueError: A size is wrong.
        TypeError: An argument has another type.
        NotImplementedError: `lb_allocation_plan_or_num_bytes` is not 0 on a GPU.
    """

    @ints_as_bools
    @keeps_unbound
    def __init__(
        self,
        group: Group,
        num_bytes: int | None = None,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        lb_allocation_plan_or_num_bytes: BufferAllocator | int = 0,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int | None = None,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:

        def check() -> str:
            check_ints(
                0,
                num_max_tokens_per_rank=num_max_tokens_per_rank,
                hidden=hidden,
                num_topk=num_topk,
                sl_idx=0 if sl_idx is None else sl_idx,
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
                if num_bytes % SIZE_BYTES:
                    raise ValueError(
                        f"num_bytes must be a multiple of {SIZE_BYTES}, got {num_bytes}"
                    )
            if isinstance(plan, BufferAllocator):
                return f"an EPBuffer with redundant experts of {plan.check()}"
            if as_int("lb_allocation_plan_or_num_bytes", plan, 0) % SIZE_BYTES:
                raise ValueError(
                    f"lb_allocation_plan_or_num_bytes must be a multiple of {SIZE_BYTES}, got {plan}"
                )
            return f"an EPBuffer with redundant experts of {plan} bytes"

        def allocate() -> str:
            _on_cpu(owner.shared().device if torch.empty(0).is_cpu else torch.empty(0).device)
            owner.lb_storage = storage_of(owner.shared().communicator, num_lb_bytes)
            return "the storage of an EPBuffer"

        plan = lb_allocation_plan_or_num_bytes
        owner = GroupOwner(group)
        owner.shared().check_together(check)
        num_lb_bytes = plan.num_bytes if isinstance(plan, BufferAllocator) else plan
        if num_lb_bytes:
            owner.shared().check_together(allocate)
        super().__init__(explicitly_destroy, owner=owner)
        self.group = group
        self.context = owner
        self.nccl_comm_handle = None
        self.rank_idx = self.scaleup_rank_idx = owner.rank_idx
        self.num_ranks = self.num_scaleup_ranks = self.num_nvlink_ranks = owner.num_ranks
        self.num_scaleout_ranks = self.num_rdma_ranks = 1
        self.scaleout_rank_idx = 0
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_allocated_qps = num_allocated_qps or NUM_QPS
        self.num_lb_bytes = num_lb_bytes
        self._replicas: LoadBalancing | None = None
        if isinstance(plan, BufferAllocator):
            assert owner.lb_storage is not None
            plan.materialize(owner.lb_storage)
        self.deterministic = deterministic
        self.allow_hybrid_mode = allow_hybrid_mode
        self.allow_multiple_reduction = allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self._calls = ElasticCalls(
            owner, num_max_tokens_per_rank, allow_multiple_reduction, is_watching=True
        )
        if num_bytes is None:
            num_bytes = align(
                buffer_bytes(
                    self.num_ranks, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch
                ),
                SIZE_BYTES,
            )
        self.num_bytes = num_bytes

    @ints_as_bools
    @tells_peers(reject_barrier)
    def barrier(
        self, wait_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True
    ) -> None:
        """All ranks arrive. Collective. The arguments are for GPUs and have no effect."""
        meet(
            self._owner,
            wait_comm_stream=wait_comm_stream,
            with_cpu_sync=with_cpu_sync,
            sequential=sequential,
        )

    get_buffer_size_hint = staticmethod(ElasticBuffer.get_buffer_size_hint)

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 0,
        sm_write_gbs: float = 0,
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
        """Return what DeepEP's rule says for one domain: `num_sms`, at most 9 and `num_allocated_qps`."""
        check_ints(0, num_sms=num_sms)
        return min(num_sms, 9, self.num_allocated_qps)

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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = False,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
        defer_epilogue: bool = False,
    ) -> Dispatched | EventOverlap:
        """Dispatch like `ElasticBuffer.dispatch`, but for what is said of an argument here. Collective.

        Args:
            x: See there.
            topk_idx: The handle keeps this tensor: as long as it lives, nobody may write to it.
            topk_weights: See there.
            cumulative_local_expert_recv_stats: See there; added to in the wait if deferred.
            num_experts: E; with `handle`, None or that of the handle, as for the next two.
            num_max_tokens_per_rank: See there.
            expert_alignment: See there.
            num_sms: Rounded up to an even number, 0 for the least; kept in the handle.
            num_qps: No effect; at most `num_allocated_qps`.
            previous_event: Waited for; needs `allocate_on_comm_stream`.
            async_with_compute_stream: The result has an event.
            allocate_on_comm_stream: No effect.
            handle: See there.
            do_handle_copy: False.
            do_cpu_sync: See there; with `handle`, None or False.
            do_expand: See there.
            do_zero_padding: No effect: padding is zero. Needs `do_expand`, or a handle with it.
            use_tma_aligned_col_major_sf: See there.
            defer_epilogue: Return before the end, an event alone. Its first wait makes the results, and
                returns them without an event. Needs `async_with_compute_stream`.

        Returns:
            As there, or the event.

        Raises:
            ValueError: A rule is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
        """

        def rules() -> None:
            self._check_running(
                num_qps,
                previous_event,
                allocate_on_comm_stream,
                async_with_compute_stream,
                defer_epilogue,
            )
            if do_handle_copy:
                raise ValueError(
                    "do_handle_copy must be False, the handle keeps topk_idx; got True"
                )
            known = handle if isinstance(handle, EPHandle) else None
            is_expanded = do_expand or (known is not None and known.do_expand)
            if do_zero_padding and not is_expanded:
                raise ValueError("do_zero_padding needs do_expand=True, got False")
            if known is None:
                return
            if do_cpu_sync:
                raise ValueError("do_cpu_sync must be None or False with a handle, got True")
            for name, value, kept in (
                ("num_experts", num_experts, known.num_experts),
                ("expert_alignment", expert_alignment, known.expert_alignment),
                ("num_max_tokens_per_rank", num_max_tokens_per_rank, known.num_max_tokens_per_rank),
            ):
                if value is not None and value != kept:
                    raise ValueError(f"{name} is {value}, the handle's is {kept}")

        least = theoretical_num_sms(1, 1, 0, prefers_overlap=self.prefer_overlap_with_compute)
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
                num_sms=align(num_sms or least, 2) if isinstance(num_sms, int) else num_sms,
                num_qps=num_qps,
                events=(previous_event,),
                is_async=async_with_compute_stream,
                allocate_on_comm_stream=allocate_on_comm_stream,
                is_deferred=defer_epilogue,
                rules=rules,
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
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        defer_epilogue: bool = False,
    ) -> Combined | EventOverlap:
        """Combine like `ElasticBuffer.combine`, but for what is said of an argument here. Collective.

        Args:
            x: See there.
            handle: Handle of the dispatch; its `topk_idx` is as it was.
            topk_weights: See there; None with `do_expand` and `allow_multiple_reduction=False`.
            bias: See there. If deferred, it may be written until the wait.
            num_sms: No effect.
            num_qps: As in `dispatch`, like all that follow.
            previous_event: See there.
            async_with_compute_stream: See there.
            allocate_on_comm_stream: See there.
            defer_epilogue: See there.

        Returns:
            As there, or the event.

        Raises:
            ValueError: A rule is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
        """

        def rules() -> None:
            self._check_running(
                num_qps,
                previous_event,
                allocate_on_comm_stream,
                async_with_compute_stream,
                defer_epilogue,
            )
            is_expanded = isinstance(handle, EPHandle) and handle.do_expand
            if is_expanded and not self.allow_multiple_reduction and topk_weights is not None:
                raise ValueError(
                    "topk_weights must be None with do_expand and allow_multiple_reduction=False, "
                    "got a value"
                )

        return self._calls.combine(  # type: ignore[no-any-return]
            x,
            handle,
            topk_weights,
            bias,
            Running(
                num_sms=num_sms,
                num_qps=num_qps,
                events=(previous_event,),
                is_async=async_with_compute_stream,
                allocate_on_comm_stream=allocate_on_comm_stream,
                is_deferred=defer_epilogue,
                rules=rules,
            ),
        )

    def _check_running(
        self,
        num_qps: int,
        previous_event: PreviousEvent,
        allocate_on_comm_stream: bool,
        is_async: bool,
        is_deferred: bool,
    ) -> None:
        """Rules of both calls."""
        check_bools(defer_epilogue=is_deferred)
        if num_qps > self.num_allocated_qps:
            raise ValueError(
                f"num_qps is {num_qps}, more than num_allocated_qps = {self.num_allocated_qps}"
            )
        if previous_event is not None and not allocate_on_comm_stream:
            raise ValueError("previous_event needs allocate_on_comm_stream=True, got False")
        if is_deferred and not is_async:
            raise ValueError("defer_epilogue needs async_with_compute_stream=True, got False")

    def lb_get_theoretical_num_sms(self) -> int:
        """The least that DeepEP's rules allow: bytes are moved by cores, not by SMs."""
        return self.get_theoretical_num_sms(1, 1)

    @ints_as_bools
    @tells_peers(_reject_lb)
    def lb_prefetch_weights(
        self,
        redundant_expert_weights: Payload,
        expert_weights: Payload,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: PreviousEvent = None,
    ) -> EventOverlap:
        """Copy experts into the slots of other ranks. Collective, ranks without slots included.

        Args:
            redundant_expert_weights: `[S, *]` or a list of such: S slots of this rank, of any dtype and
                trailing shape, contiguous on the CPU, in the storage of the buffer (written in place) or
                elsewhere. Slots of -1 stay as they are.
            expert_weights: `[El, *]` or a list of as many: experts of this rank. Of equal bytes an expert,
                a multiple of 32. El is the same on all ranks.
            redundancy_mapping: int32 `[num_ranks, S]`, contiguous and equal on all ranks: rank * El + local
                index of the expert in every slot, of another rank than the slot's; or -1.
            num_sms: No effect.
            previous_event: Waited for.

        Returns:
            An event that has come.

        Raises:
            ValueError: A rule is broken on some rank, or ranks have different mappings or sizes; on every
                rank, before anything moves.
            TypeError: A type is wrong on some rank; likewise.
            NotImplementedError: The buffer works on a GPU.
        """
        return self._load_balancing().prefetch(
            redundant_expert_weights, expert_weights, redundancy_mapping, num_sms, previous_event
        )

    @ints_as_bools
    @tells_peers(_reject_lb)
    def lb_reduce_grads(
        self,
        redundant_expert_grads: torch.Tensor,
        expert_grads: torch.Tensor,
        redundancy_mapping: torch.Tensor,
        num_sms: int = 0,
        previous_event: PreviousEvent = None,
    ) -> EventOverlap:
        """Add the gradients in slots of other ranks to those of this rank's experts. Collective.

        They are added to what `expert_grads` holds, in the order of the mapping: always the same bits, where
        DeepEP's may differ.

        Args:
            redundant_expert_grads: float32 `[S, hidden]`, contiguous; not changed.
            expert_grads: float32 `[El, hidden]`, contiguous; `hidden` a multiple of 8.
            redundancy_mapping: As in `lb_prefetch_weights`, as all that follow.
            num_sms: See there.
            previous_event: See there.

        Returns:
            As there.

        Raises:
            ValueError, TypeError, NotImplementedError: As there.
        """
        return self._load_balancing().reduce(
            redundant_expert_grads, expert_grads, redundancy_mapping, num_sms, previous_event
        )

    def _load_balancing(self) -> LoadBalancing:
        """Return the object that copies replicas, made by the first call. Collective then."""
        if self._replicas is None:
            shared = self._owner.shared()
            shared.check_together(lambda: _on_cpu(shared.device))
            self._replicas = LoadBalancing(shared.communicator)
        return self._replicas

    def destroy(self) -> None:
        """Destroy the buffer, see `BufferBase.destroy`."""
        super().destroy()
        if self._replicas is not None:
            self._replicas.destroy()
