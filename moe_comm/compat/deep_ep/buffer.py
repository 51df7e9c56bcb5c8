"""`Buffer`: DeepEP's first interface, normal and low-latency mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from moe_comm.compat.deep_ep import config as configs
from moe_comm.compat.deep_ep import handle_counts, low_latency, rank_major
from moe_comm.compat.deep_ep.arguments import (
    begin,
    check_bools,
    check_ints,
    check_num_sms,
    check_tensor,
    in_order_of_lineage,
    ints_as_bools,
    num_channels,
    passed,
)
from moe_comm.compat.deep_ep.combining import Bias
from moe_comm.compat.deep_ep.config import Config
from moe_comm.compat.deep_ep.group import (
    GroupOwner,
    MpiRanks,
    refuse_not_offered,
    rejects_unbound_of,
)
from moe_comm.compat.deep_ep.handles import (
    RankMajorHandle,
    are_parts,
    from_parts,
    require_low_latency,
    require_rank_major,
)
from moe_comm.compat.deep_ep.local_memory import LocalMemory
from moe_comm.compat.deep_ep.masks import MaskedRanks
from moe_comm.compat.deep_ep.rows import Rows
from moe_comm.compat.deep_ep.streams import on_device
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import default_expert_rank
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.missed_calls import Telling, keeps_unbound

__all__ = ["Buffer"]

Hook = Callable[[], None]
PreviousEvent = EventOverlap | EventHandle | None
HandleParts = tuple[torch.Tensor, ...]


class Buffer(MaskedRanks):
    """Dispatch and combine with DeepEP's arguments, tuples and orders.

    On the device of the first tensors. Any number of ranks and experts, any row that is a multiple of
    16 bytes, any top-k, any number of tokens per rank. N tokens of this rank, H hidden, K choices, R
    ranks, E experts of which El are here, M received rows. Collective: every rank makes it and calls
    it in the same order. What one rank gets wrong is raised on every rank, as ValueError or TypeError.

    Args:
        group: Process group, bootstrap, or None for the default process group.
        num_nvl_bytes: Size of what `get_local_buffer_tensor` shows; no rows pass through it.
        num_rdma_bytes: The same with `use_rdma_buffer=True`.
        low_latency_mode: No effect: every buffer has both modes.
        num_qps_per_rank: No effect, like the next two and the last two.
        explicitly_destroy: `destroy()` may be called.
        enable_shrink: Ranks may be masked in low-latency mode.
        comm: An mpi4py communicator, in place of a group.

    Raises:
        ValueError: A size is negative, or both group and comm are given.
        TypeError: An argument has another type.
    """

    num_sms: ClassVar[int] = 20

    @ints_as_bools
    @keeps_unbound
    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None = None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
        *,
        allow_nvlink_for_normal_mode: bool = True,
        use_fabric: bool | None = False,
    ) -> None:

        def check() -> str:
            if group is not None and comm is not None:
                raise ValueError("a Buffer takes a group or an mpi4py comm, got both")
            check_ints(0, num_nvl_bytes=num_nvl_bytes, num_rdma_bytes=num_rdma_bytes)
            check_ints(1, num_qps_per_rank=num_qps_per_rank)
            check_bools(
                low_latency_mode=low_latency_mode,
                allow_nvlink_for_low_latency_mode=allow_nvlink_for_low_latency_mode,
                allow_mnnvl=allow_mnnvl,
                explicitly_destroy=explicitly_destroy,
                enable_shrink=enable_shrink,
                allow_nvlink_for_normal_mode=allow_nvlink_for_normal_mode,
                use_fabric=use_fabric or False,
            )
            return "a Buffer"

        self._owner = GroupOwner(MpiRanks(comm) if group is None and comm is not None else group)
        self._owner.shared().check_together(check)
        self.group = group
        self.num_nvl_bytes = num_nvl_bytes
        self.num_rdma_bytes = num_rdma_bytes
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self.runtime: GroupOwner | None = self._owner
        self.rank = self._owner.rank_idx
        self.group_size = self._owner.num_ranks
        self._masked = set()
        self._nvl_memory = LocalMemory(num_nvl_bytes)
        self._rdma_memory = LocalMemory(num_rdma_bytes)

    def destroy(self) -> None:
        """Let go of the group; idempotent. Other users of the group are not disturbed.

        Raises:
            ValueError: The buffer was made without `explicitly_destroy`.
        """
        if not self.explicitly_destroy:
            raise ValueError(
                "destroy() needs a Buffer made with explicitly_destroy=True, got False"
            )
        self._owner.release()
        self.runtime = None

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: FP8 is there, which is what DeepEP's users ask this for."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """`num_sms` of the default configurations; V1 handles have half as many channels.

        Raises:
            ValueError: It is odd or less than 2.
        """
        check_num_sms(new_num_sms)
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """The end of what the current stream holds; on the CPU, the present."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes by DeepEP's formula; nothing here needs them."""
        return configs.low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts
        )

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """DeepEP's recommendation, for any number of ranks."""
        return configs.recommended_dispatch_config(Buffer.num_sms, num_ranks)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """DeepEP's recommendation, for any number of ranks."""
        return configs.recommended_combine_config(Buffer.num_sms, num_ranks)

    def get_comm_stream(self) -> torch.cuda.Stream | torch.cpu.Stream:
        """The stream that calls work in on a GPU; that of the CPU orders nothing."""
        return self._owner.current_comm_stream()

    @ints_as_bools
    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | tuple[int, ...] | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """Memory of as many bytes as the constructor was told; no rows pass through it.

        Args:
            dtype: Dtype of the view.
            size: Shape of the view; None for all of it, one-dimensional.
            offset: Start of the view, in elements.
            use_rdma_buffer: The memory of `num_rdma_bytes` in place of `num_nvl_bytes`.

        Raises:
            ValueError: The view does not fit.
        """
        check_ints(0, offset=offset)
        check_bools(use_rdma_buffer=use_rdma_buffer)
        memory = self._rdma_memory if use_rdma_buffer else self._nvl_memory
        return memory.view(dtype, size, offset)

    @ints_as_bools
    @on_device
    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: PreviousEvent = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Return the layout of a dispatch: the ranks and experts that tokens of this rank go to. Local.

        Args:
            topk_idx: int64 `[N, K]`, contiguous; -1 marks an unused choice.
            num_experts: E, any number; `default_expert_rank` says where each lives.
            previous_event: Waited for.
            async_finish: The result has an event.
            allocate_on_comm_stream: No effect; needs the two before.

        Returns:
            num_tokens_per_rank int32 `[R]`, None (ranks are on one machine), num_tokens_per_expert
            int32 `[E]`, is_token_in_rank bool `[N, R]`, event.

        Raises:
            ValueError: An id is outside `[-1, num_experts)`, or a rule above is broken.
            TypeError: A dtype or type is wrong.
        """
        self._owner.shared()
        begin(previous_event, async_finish, allocate_on_comm_stream)
        check_ints(1, num_experts=num_experts)
        check_tensor("topk_idx", topk_idx, (None, None), configs.topk_idx_t)
        placement = default_expert_rank(num_experts, self.group_size)
        layout = handle_counts.dispatch_layout(topk_idx, placement, self.group_size)
        return (
            layout.num_tokens_per_rank,
            None,
            layout.num_tokens_per_expert,
            layout.is_token_in_rank,
            passed(async_finish),
        )

    @ints_as_bools
    @on_device
    @rejects_unbound_of("dispatch")
    def dispatch(
        self,
        x: Rows,
        handle: HandleParts | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: PreviousEvent = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        Rows,
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        HandleParts | None,
        EventOverlap,
    ]:
        """Send every token once to every rank that has one of its experts. Collective.

        Args:
            x: `[N, H]`, contiguous, any dtype; or a pair (data `[N, H]` of one-byte elements,
                contiguous, scales float32 or int32 `[N, S]`, any strides), both sent as they are; or a
                triple of four-bit rows: int32 `[N, H / 8]`, int32 `[N, S]`, float32 `[N, 1]`.
            handle: Handle of an earlier dispatch, or on all ranks a tuple of its tensors or of
                copies of them: send to its places. `topk_idx` and `topk_weights` must be None then,
                and the layout is not looked at.
            num_tokens_per_rank: As `get_dispatch_layout` gives it, like the next three.
            num_tokens_per_rdma_rank: None.
            is_token_in_rank: See above.
            num_tokens_per_expert: See above; its size says how many experts there are.
            topk_idx: int64 `[N, K]`; None, with `topk_weights`, sends by `is_token_in_rank` alone.
            topk_weights: float32 `[N, K]`.
            expert_alignment: The returned counts are rounded up to a multiple.
            num_worst_tokens: M is this; rows that are not filled are zero and have ids -1.
                0: as many as arrive.
            config: `num_sms / 2` is the number of channels in the handle.
            previous_event: Waited for.
            async_finish: The result has an event. The host has waited: the result's shapes are data.
            allocate_on_comm_stream: No effect; needs the two before.

        Returns:
            recv_x, like x: `[M, H]` in order of (source rank, token), and scales contiguous;
            recv_topk_idx int64 `[M, K]`, local ids, -1 elsewhere; recv_topk_weights `[M, K]`, 0
            elsewhere; counts of local experts, empty with `num_worst_tokens`; handle (see
            `RankMajorHandle`); event. With `handle`: recv_x, four times None, event.

        Raises:
            ValueError: A rule above is broken on some rank, or the layout is not that of the choices.
            TypeError: A dtype or type is wrong on some rank.
            CapacityError: More rows than `num_worst_tokens` arrive on some rank.
        """
        buffer = self._buffer_of(handle, num_tokens_per_expert)
        with Telling(buffer.reject, "dispatch"):
            begin(previous_event, async_finish, allocate_on_comm_stream)
            known = None
            if handle is not None:
                known = self._known_handle(handle, buffer)
                if topk_idx is not None or topk_weights is not None:
                    raise ValueError("topk_idx and topk_weights must be None with a handle")
            if num_tokens_per_rdma_rank is not None:
                raise ValueError(
                    "num_tokens_per_rdma_rank must be None, ranks are on one machine; got a value"
                )
            chosen = self.get_dispatch_config(self.group_size) if config is None else config
            channels = num_channels(chosen)
        if known is not None:
            rows = rank_major.dispatch_cached(known, x)
            return rows, None, None, None, None, passed(async_finish)
        sending = rank_major.Sending(
            x=x,
            num_tokens_per_rank=num_tokens_per_rank,
            is_token_in_rank=is_token_in_rank,
            num_tokens_per_expert=num_tokens_per_expert,
            topk_idx=topk_idx,
            topk_weights=topk_weights,
            expert_alignment=expert_alignment,
            num_worst_tokens=num_worst_tokens,
            num_channels=channels,
        )
        arrived = rank_major.dispatch(self._owner, buffer, sending)
        return (
            arrived.x,
            arrived.topk_idx,
            arrived.topk_weights,
            arrived.num_tokens_per_expert,
            arrived.handle,
            passed(async_finish),
        )

    @ints_as_bools
    @on_device
    @rejects_unbound_of("combine")
    def combine(
        self,
        x: torch.Tensor,
        handle: HandleParts,
        topk_weights: torch.Tensor | None = None,
        bias: Bias = None,
        config: Config | None = None,
        previous_event: PreviousEvent = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Sum rows back to their tokens, unweighted. Collective.

        Args:
            x: `[M, H]`, contiguous: bfloat16, float16, float32 or float64; H may differ from the
                dispatch.
            handle: Handle of the dispatch, or on all ranks a tuple of its tensors or of copies of them.
            topk_weights: float32 `[M, K]`, added over ranks, so that rows have 0 at choices that are
                elsewhere. Takes a second exchange.
            bias: `[N, H]` of x's dtype, or a pair, added first. All ranks give some or none does. Rows
                are then brought back one by one and added here, which is slower.
            config: Validated, no effect.
            previous_event: Waited for.
            async_finish: Return before the end; wait for the event before the result is read.
            allocate_on_comm_stream: No effect; needs the two before.

        Returns:
            `[N, H]` sums: biases, then ranks in ascending order, in float32 with one rounding; float32
            `[N, K]` weights or None; event.

        Raises:
            ValueError: A rule above is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
        """
        buffer = self._buffer_of(handle, None)
        with Telling(buffer.reject, "combine"):
            begin(previous_event, async_finish, allocate_on_comm_stream)
            if config is not None:
                num_channels(config)
            known = self._known_handle(handle, buffer)
        combined = rank_major.combine(
            self._owner, known, x, topk_weights, bias, async_op=async_finish
        )
        event = EventOverlap(combined.event, (x,)) if async_finish else EventOverlap()
        return combined.x, combined.topk_weights, event

    def internode_dispatch(self, *args: Any, **kwargs: Any) -> Any:
        """`dispatch`; how far apart ranks are makes no difference."""
        return self.dispatch(*args, **kwargs)

    def internode_combine(self, *args: Any, **kwargs: Any) -> Any:
        """`combine`; how far apart ranks are makes no difference."""
        return self.combine(*args, **kwargs)

    def dispatch_pcie(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: kernels for GPUs without NVLink."""
        raise NotImplementedError("dispatch_pcie is for GPUs without NVLink; use dispatch")

    def combine_pcie(self, *args: Any, **kwargs: Any) -> Any:
        """Not offered: kernels for GPUs without NVLink."""
        raise NotImplementedError("combine_pcie is for GPUs without NVLink; use combine")

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing to do: the modes share no memory."""
        self._owner.shared()
        check_ints(0, num_max_dispatch_tokens_per_rank=num_max_dispatch_tokens_per_rank)
        check_ints(1, hidden=hidden, num_experts=num_experts)

    @in_order_of_lineage
    @ints_as_bools
    @on_device
    @rejects_unbound_of("dispatch", "low latency")
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        *,
        topk_weights: torch.Tensor | None = None,
        x_global_scale: torch.Tensor | None = None,
        use_nvfp4: bool = False,
        use_ue8m0_for_sf: bool = False,
    ) -> tuple[Rows, torch.Tensor, HandleParts, EventOverlap, Hook | None]:
        """Send rows to fixed places, n = R * num_max per local expert. Collective.

        Args:
            x: `[N, H]`, contiguous, bfloat16 (float16 and float32 too), N <= num_max.
            topk_idx: int64 `[N, K]`, contiguous; -1 marks an unused choice.
            num_max_dispatch_tokens_per_rank: num_max, equal on all ranks.
            num_experts: E.
            cumulative_local_expert_recv_stats: int32 `[El]`: counts are added.
            dispatch_wait_recv_cost_stats: int64 `[R]`: nanoseconds waited for each rank are added.
            use_fp8: Rows are quantized on the way.
            round_scale: Scales are powers of two.
            use_ue8m0: Scales are exponents, four to an int32; needs `round_scale`.
            async_finish: Return before the end, with an event.
            return_recv_hook: Return before the end, with a function that waits for it. Not both.
            topk_weights: None. Like the next three of branch hybrid-ep; `in_order_of_lineage` tells orders.
            x_global_scale: Read with `use_nvfp4` only.
            use_nvfp4: False.
            use_ue8m0_for_sf: False.

        Returns:
            recv_x `[El, n, H]` or (e4m3 `[El, n, H]`, scales `[El, n, H / 128]`, column-major in the
            last two); recv_count int32 `[El]`; handle (see `LowLatencyHandle`); event; hook. Places
            beyond the counts are undefined. Counts and the handle are filled by event or hook.

        Raises:
            ValueError: A rule above is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
            NotImplementedError: `topk_weights`, `use_nvfp4` or `use_ue8m0_for_sf` asks for something.
        """
        buffer = self._low_latency_buffer(num_experts, num_max_dispatch_tokens_per_rank)
        refuse_not_offered(
            buffer,
            "dispatch",
            topk_weights=topk_weights,
            use_nvfp4=use_nvfp4,
            use_ue8m0_for_sf=use_ue8m0_for_sf,
        )
        buffer.mask_ranks(self._masked)
        return low_latency.dispatch(
            self._owner,
            buffer,
            x,
            topk_idx,
            low_latency.Statistics(
                cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
            ),
            low_latency.Completion(async_finish, return_recv_hook),
            use_fp8=use_fp8,
            round_scale=round_scale,
            use_ue8m0=use_ue8m0,
        )

    @ints_as_bools
    @on_device
    @rejects_unbound_of("combine", "low latency")
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: HandleParts,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
        overlap: bool = False,
        src_signals: torch.Tensor | None = None,
        src_signal_expect_value: int = 0,
        *,
        packed_recv_count: torch.Tensor | None = None,
        comp_signal: torch.Tensor | None = None,
        block_m: int = 64,
        threshold: int = 0,
        num_sms: int = 3,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Weigh rows and sum them back to their tokens, in top-k order. Collective.

        Args:
            x: `[El, n, H]`, contiguous.
            topk_idx: Choices of the dispatch.
            topk_weights: float32 `[N, K]`.
            handle: Handle of the dispatch.
            use_logfmt: No effect: rows travel exactly, not in ten bits.
            zero_copy: Rows are in what `get_next_low_latency_combine_buffer(handle)` gave; x is not
                read. Not with `use_logfmt`.
            async_finish: Return before the end, with an event.
            return_recv_hook: Return before the end, with a function that waits for it. Not both.
            out: `[N, H]` of x's dtype to write to.
            combine_wait_recv_cost_stats: int64 `[R]`: nanoseconds waited for each rank are added.
            overlap: False. It and what follows are of forks whose combine starts while experts compute.
            src_signals: None.
            src_signal_expect_value: Read with `src_signals` only.
            packed_recv_count: Read with `overlap` only, like the next four.
            comp_signal: See above.
            block_m: See above.
            threshold: See above.
            num_sms: See above.

        Returns:
            `[N, H]`, event, hook.

        Raises:
            ValueError: A rule above is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
            NotImplementedError: `overlap` or `src_signals` asks for something.
        """
        self._owner.shared()
        try:
            known = require_low_latency(handle)
        except TypeError as error:
            self._owner.low_latency_buffer_for(None, str(error)).reject("combine", error)
        refuse_not_offered(known.buffer, "combine", overlap=overlap, src_signals=src_signals)
        return low_latency.combine(
            self._owner,
            known,
            x,
            topk_idx,
            topk_weights,
            low_latency.Completion(async_finish, return_recv_hook),
            use_logfmt=use_logfmt,
            zero_copy=zero_copy,
            out=out,
            wait_stats=combine_wait_recv_cost_stats,
        )

    def get_next_low_latency_combine_buffer(self, handle: HandleParts) -> torch.Tensor:
        """`[El, n, H]` bfloat16 to put rows into for `low_latency_combine(zero_copy=True)`. Local.

        One per handle, contiguous, and the same every time.
        """
        return low_latency.next_combine_buffer(require_low_latency(handle))

    def _low_latency_buffer(self, num_experts: Any, num_max_tokens: Any) -> EpBuffer:
        try:
            check_ints(1, num_experts=num_experts)
            check_ints(0, num_max_dispatch_tokens_per_rank=num_max_tokens)
        except (TypeError, ValueError) as error:
            self._owner.low_latency_buffer_for(None, str(error)).reject("dispatch", error)
        return self._owner.low_latency_buffer_for((num_experts, num_max_tokens))

    def _known_handle(self, handle: Any, buffer: EpBuffer) -> RankMajorHandle:
        """Return the handle, or the one that its parts give where it was taken apart."""
        if are_parts(handle):
            return from_parts(handle, buffer, self.rank)
        return require_rank_major(handle)

    def _buffer_of(self, handle: object, num_tokens_per_expert: object) -> EpBuffer:
        if are_parts(handle):
            self._owner.shared()
            return self._owner.any_buffer()
        if isinstance(handle, RankMajorHandle) and hasattr(handle, "native"):
            self._owner.shared()
            return handle.buffer
        if isinstance(num_tokens_per_expert, torch.Tensor) and num_tokens_per_expert.dim() == 1:
            return self._owner.buffer_for(max(num_tokens_per_expert.numel(), 1))
        return self._owner.buffer_for(
            None,
            "num_tokens_per_expert must be an int32 tensor with one dimension (or a handle be given), "
            f"got {type(num_tokens_per_expert).__name__} and {type(handle).__name__}",
        )
