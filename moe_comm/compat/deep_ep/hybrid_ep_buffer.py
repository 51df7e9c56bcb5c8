"""`HybridEPBuffer`: dispatch and combine with or without a permutation by expert."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_comm.compat.deep_ep import hybrid_rows as rows
from moe_comm.compat.deep_ep.arguments import (
    check_bools,
    check_ints,
    check_tensor,
    ints_as_bools,
)
from moe_comm.compat.deep_ep.combining import announcement, sum_columns
from moe_comm.compat.deep_ep.group import GroupOwner, rejects_unbound_of
from moe_comm.compat.deep_ep.handles import HybridHandle
from moe_comm.compat.deep_ep.hybrid_config import (
    Configurer,
    HybridEpConfigInstance,
    rounded_max_tokens,
)
from moe_comm.compat.deep_ep.hybrid_rows import Routing, indices_to_map
from moe_comm.compat.deep_ep.streams import on_call_device, on_device
from moe_comm.dispatcher.permuted import padded_tokens_per_expert
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import Capacity, Layout
from moe_comm.ep.handles import CombineResult
from moe_comm.ep.routing_map import dense_of_topk
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.missed_calls import Telling, keeps_unbound
from moe_comm.tensors import arithmetic

__all__ = ["HybridEPBuffer", "HybridEpConfigInstance", "indices_to_map"]

HandleParts = tuple[Any, ...]


class HybridEPBuffer:
    """HybridEP's interface, on the device of the first tensors.

    Any number of ranks, experts and tokens per rank; rows of a multiple of 16 bytes. N tokens of this
    rank, H hidden, K choices, E experts of which El are on every rank, M received rows, P permuted
    rows. All ranks are one NVLink domain. Collective: every rank makes it and calls it in the same
    order. What one rank gets wrong is raised on every rank, as ValueError or TypeError.

    Args:
        group: Process group, bootstrap, or None for the default process group.
        hidden_dim: Elements of a row, for `configurer`; calls bring their own.
        max_num_of_tokens_per_rank: Most tokens of a rank, for `configurer`; not a limit.
        num_local_experts: El.
        use_fp8: Whether rows are FP8, for `configurer`; calls are told by the dtype of their rows.
        num_sms_dispatch_api: No effect; like all that follow.
        num_sms_combine_api: See above.
        num_sms_preprocessing_api: See above.
        num_blocks_permute: See above.
        num_blocks_unpermute: See above.
        load_cached_kernels: See above.
        use_shared_buffer: See above.
        enable_custom_allgather: See above.
        num_of_hybrid_ep_ranks_per_nvlink_domain: Deprecated; None or a divisor of the ranks.
        use_mnnvl: Deprecated.

    Raises:
        ValueError: A size is wrong.
        TypeError: An argument has another type.
    """

    @ints_as_bools
    @keeps_unbound
    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        load_cached_kernels: bool = False,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = False,
        num_of_hybrid_ep_ranks_per_nvlink_domain: int | None = None,
        use_mnnvl: bool | None = None,
    ) -> None:
        launch = {
            "num_of_blocks_dispatch_api": num_sms_dispatch_api,
            "num_of_blocks_combine_api": num_sms_combine_api,
            "num_of_blocks_preprocessing_api": num_sms_preprocessing_api,
            "num_of_blocks_permute": num_blocks_permute,
            "num_of_blocks_unpermute": num_blocks_unpermute,
        }
        self.group = group
        self._owner = GroupOwner(group)
        self.runtime: GroupOwner | None = self._owner
        self.rank = self.local_rank = self._owner.rank_idx
        self.group_size = self._owner.num_ranks
        config = HybridEpConfigInstance()

        def check() -> str:
            check_ints(1, hidden_dim=hidden_dim, num_local_experts=num_local_experts)
            check_ints(0, max_num_of_tokens_per_rank=max_num_of_tokens_per_rank)
            check_bools(
                use_fp8=use_fp8,
                load_cached_kernels=load_cached_kernels,
                use_shared_buffer=use_shared_buffer,
                enable_custom_allgather=enable_custom_allgather,
            )
            if use_mnnvl is not None:
                check_bools(use_mnnvl=use_mnnvl)
            domain = num_of_hybrid_ep_ranks_per_nvlink_domain
            if domain is not None:
                check_ints(1, num_of_hybrid_ep_ranks_per_nvlink_domain=domain)
                if self.group_size % domain:
                    raise ValueError(
                        "num_of_hybrid_ep_ranks_per_nvlink_domain must divide the number of ranks "
                        f"{self.group_size}, got {domain}"
                    )
            config.update(
                hidden_dim=hidden_dim,
                max_num_of_tokens_per_rank=rounded_max_tokens(max_num_of_tokens_per_rank),
                num_of_experts_per_rank=num_local_experts,
                num_of_ranks_per_node=self.group_size,
                token_data_type="UINT8" if use_fp8 else "UINT16",
                **{name: value for name, value in launch.items() if value is not None},
            )
            return f"a HybridEPBuffer of {num_local_experts} local experts"

        self._owner.shared().check_together(check)
        self.num_of_hybrid_ep_ranks_per_nvlink_domain = self.group_size
        self.node_rank = 0
        self.num_of_nodes = 1
        self.configurer = Configurer(config)
        self._set_num_local_experts(num_local_experts)

    def empty_jit_cache(self) -> None:
        """Nothing to do: nothing is compiled."""

    @ints_as_bools
    def update_template_config(
        self,
        hidden_dim: int | None = None,
        num_of_tokens_per_rank: int | None = None,
        num_local_experts: int | None = None,
        pad_multiple: int | None = None,
        use_fp8: bool | None = None,
        fuse_permute_dispatch: bool = False,
        **kwargs: Any,
    ) -> HybridEpConfigInstance:
        """A configuration for later calls; another number of experts holds from here on.

        Args:
            hidden_dim: Elements of a row, for `configurer`.
            num_of_tokens_per_rank: Most tokens of a rank, for `configurer`.
            num_local_experts: El of later calls.
            pad_multiple: Kept in the result.
            use_fp8: Kept in the result.
            fuse_permute_dispatch: No effect.
            kwargs: Other fields of `HybridEpConfigInstance`, kept in the result.

        Raises:
            TypeError: There is no such field, or a value has another type.
            ValueError: A value is too small.
        """
        check_bools(fuse_permute_dispatch=fuse_permute_dispatch)
        if use_fp8 is not None:
            check_bools(use_fp8=use_fp8)
            kwargs["token_data_type"] = "UINT8" if use_fp8 else "UINT16"
        if num_of_tokens_per_rank is not None:
            check_ints(0, num_of_tokens_per_rank=num_of_tokens_per_rank)
            kwargs["max_num_of_tokens_per_rank"] = rounded_max_tokens(num_of_tokens_per_rank)
        named = {
            "hidden_dim": hidden_dim,
            "num_of_experts_per_rank": num_local_experts,
            "pad_multiple": pad_multiple,
        }
        kwargs |= {name: value for name, value in named.items() if value is not None}
        config = self.configurer.instance(**kwargs)
        if num_local_experts is not None and num_local_experts != self._num_local_experts:
            check_ints(1, num_local_experts=num_local_experts)
            self._set_num_local_experts(num_local_experts)
        return config

    @on_device
    @rejects_unbound_of("dispatch")
    def dispatch(
        self,
        hidden: torch.Tensor,
        scaling_factor: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts: int | None = None,
        probs: torch.Tensor | None = None,
        routing_map: torch.Tensor | None = None,
        num_dispatched_tokens_tensor: torch.Tensor | None = None,
        num_dispatched_tokens: int | None = None,
        handle: HandleParts | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, HandleParts]:
        """Send every token once to every rank that has one of its experts. Collective.

        Args:
            hidden: `[N, H]`, contiguous, of two-byte elements (or wider), or of one-byte elements
                with `scaling_factor`.
            scaling_factor: float32 `[N, S]`; ignored where elements are wider than a byte.
            topk_idx: `[N, K]` integers, -1 marks an unused choice; in place of `routing_map`, beside which
                it and `topk_weights` are not looked at.
            topk_weights: float32 `[N, K]`, in place of `probs`.
            num_of_experts: E; None for that of the buffer.
            probs: float32 `[N, E]`, contiguous, or None.
            routing_map: bool `[N, E]`, contiguous.
            num_dispatched_tokens_tensor: Ignored but for its type: the number of rows is known.
            num_dispatched_tokens: The same.
            handle: Handle of an earlier `dispatch`: send to its places; the routing is not looked at.

        Returns:
            token `[M, H]` in order of (source rank, token); probs float32 `[M, E]` or None, whole
            rows; scaling_factor `[M, S]` or None; handle: sparse_to_dense_map int32 `[N, R]`,
            rdma_to_attn_map bool `[N, 1]`, attn_to_rdma_map bool `[N, 0]`,
            num_dispatched_tokens_tensor int32 `[1]`, local_expert_routing_map bool `[rows >= M, El]`,
            N, configuration.

        Raises:
            ValueError: A rule above is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
        """
        buffer = self._buffer_of(handle)
        with Telling(buffer.reject, "dispatch"):
            if num_dispatched_tokens_tensor is not None:
                check_tensor("num_dispatched_tokens_tensor", num_dispatched_tokens_tensor, (1,))
            if num_dispatched_tokens is not None:
                check_ints(0, num_dispatched_tokens=num_dispatched_tokens)
            self._check_experts(buffer, num_of_experts, None)
            known = _known(handle, is_permuted=False)
            routing = Routing.of(
                hidden, buffer.config.num_experts, routing_map, probs, topk_idx, topk_weights, known
            )
            wire = rows.Wire.of(hidden, scaling_factor, routing.probs)
        if isinstance(handle, HybridHandle):
            result = buffer.dispatch(wire.payload, None, handle=handle.native)
            made: HandleParts = handle
        else:
            result = buffer.dispatch(wire.payload, routing.topk_idx, layout=Layout.RANK_MAJOR)
            config = self._instance(hidden)
            places = rows.rank_major_places(self._owner, buffer, result, routing, config)
            made = HybridHandle.of(
                places,
                buffer=buffer,
                native=result.handle,
                topk_idx=routing.topk_idx,
                num_experts=buffer.config.num_experts,
            )
        token, received_probs, received_scales = wire.unpack(result)
        return token, received_probs, received_scales, made

    @on_device
    @rejects_unbound_of("combine")
    def combine(
        self,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: HandleParts | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum rows, and rows of probs, back to their tokens in rank order. Collective.

        Args:
            hidden: `[M, H]`, contiguous: bfloat16, float16, float32 or float64.
            probs: float32 `[M, E]`, or None; all ranks give some or none does.
            handle: Handle from `dispatch`.

        Returns:
            `[N, H]` of hidden's dtype, added in float32 and rounded once; float32 `[N, E]` or None.

        Raises:
            ValueError: A rule above is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
        """
        buffer = self._buffer_of(handle)
        with Telling(buffer.reject, "combine"):
            known = _required(handle, is_permuted=False)
            num_rows = known.native.num_recv_tokens
            check_tensor("hidden", hidden, (num_rows, None), *arithmetic.ADDABLE_DTYPES)
            if probs is not None:
                check_tensor("probs", probs, (num_rows, known.num_experts), torch.float32)
        if probs is None:
            return buffer.combine(hidden.detach(), known.native), None
        combined = buffer.combine(
            hidden.detach(), known.native, row_weights=announcement(known.native)
        )
        assert isinstance(combined, CombineResult)
        return combined.x, sum_columns(buffer, known.native, probs)[0]

    @ints_as_bools
    @on_device
    @rejects_unbound_of("dispatch")
    def dispatch_with_permute(
        self,
        *,
        hidden: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        num_of_experts: int | None = None,
        use_fp8: bool | None = None,
        routing_map: torch.Tensor | None = None,
        probs: torch.Tensor | None = None,
        scaling_factor: torch.Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        handle: HandleParts | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
        num_dispatched_tokens: int | None = None,
        use_host_meta: bool | None = None,
    ) -> tuple[
        torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, HandleParts
    ]:
        """Send every token to every expert it goes to, grouped by expert. Collective.

        Args:
            hidden: As in `dispatch`, like the arguments not named here.
            topk_idx: See above.
            topk_weights: See above.
            num_of_experts_per_rank: El; None for that of the buffer.
            num_of_experts: See above.
            use_fp8: None, or whether hidden has one-byte elements.
            routing_map: See above.
            probs: See above.
            scaling_factor: See above.
            num_permuted_tokens: P, a multiple of `pad_multiple`: rows beyond it are dropped and the
                overflow flag is set; rows that are not filled are zero. None: as many as arrive.
            pad_multiple: Rows of an expert are padded with zeros to a multiple; None or 0 for none.
            handle: Handle of an earlier call: send to its places. P and `pad_multiple` hold.
            non_blocking: Needs `num_permuted_tokens`; no other effect.
            fuse_permute_dispatch: No effect: it is one pass anyway.
            num_dispatched_tokens: Deprecated, ignored but for its type.
            use_host_meta: Deprecated: `non_blocking` is its opposite.

        Returns:
            token `[P, H]`, within an expert in order of (source rank, token); probs float32 `[P]` or
            None; scaling_factor `[P, S]` or None; padded_tokens_per_expert int64 `[El]`, None with
            `handle`; handle: the first five places of `dispatch`, dense_chunk_layout,
            dense_to_expert_map, tokens_per_expert int32 `[El]` without padding, N, configuration,
            overflow_flag int32 `[1]`. What describes dense rows, of which there are none, is empty:
            sparse_to_dense_map, local_expert_routing_map and the two after it.

        Raises:
            ValueError: A rule above is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
        """
        is_number = type(num_of_experts_per_rank) is int and num_of_experts_per_rank > 0
        if is_number and handle is None:  # what is no number is refused below, on every rank
            self.update_template_config(num_local_experts=num_of_experts_per_rank)
        buffer = self._buffer_of(handle)
        with Telling(buffer.reject, "dispatch"):
            check_bools(non_blocking=non_blocking, fuse_permute_dispatch=fuse_permute_dispatch)
            for name, value in (("use_fp8", use_fp8), ("use_host_meta", use_host_meta)):
                if value is not None:
                    check_bools(**{name: value})
            if num_dispatched_tokens is not None:
                check_ints(0, num_dispatched_tokens=num_dispatched_tokens)
            known = _known(handle, is_permuted=True)
            self._check_experts(buffer, num_of_experts, num_of_experts_per_rank)
            if use_fp8 is not None and use_fp8 != (hidden.dtype.itemsize == 1):
                raise ValueError(f"use_fp8 is {use_fp8}, hidden is {hidden.dtype}")
            is_blocking = not non_blocking if use_host_meta is None else use_host_meta
            capacity = _capacity(num_permuted_tokens, pad_multiple, known, is_blocking)
            routing = Routing.of(
                hidden, buffer.config.num_experts, routing_map, probs, topk_idx, topk_weights, known
            )
            wire = rows.Wire.of(hidden, scaling_factor, None)
        if isinstance(handle, HybridHandle):
            result = buffer.dispatch(wire.payload, None, routing.topk_weights, handle=handle.native)
            token, _, scales = wire.unpack(result)
            return token, result.topk_weights, scales, None, handle
        alignment = pad_multiple or 1
        result = buffer.dispatch(
            wire.payload,
            routing.topk_idx,
            routing.topk_weights,
            expert_alignment=alignment,
            capacity=capacity,
        )
        config = self._instance(hidden, pad_multiple=pad_multiple or 0)
        made = HybridHandle.of(
            rows.permuted_places(
                self._owner, buffer, result, routing, config, has_budget=capacity is not None
            ),
            buffer=buffer,
            native=result.handle,
            topk_idx=routing.topk_idx,
            num_experts=buffer.config.num_experts,
            pad_multiple=alignment,
        )
        token, _, scales = wire.unpack(result)
        padded = on_call_device(padded_tokens_per_expert(result))
        return token, result.topk_weights, scales, padded, made

    @ints_as_bools
    @on_device
    @rejects_unbound_of("combine")
    def combine_with_unpermute(
        self,
        *,
        hidden: torch.Tensor,
        probs: torch.Tensor | None = None,
        handle: HandleParts | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
        num_dispatched_tokens: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Sum permuted rows back to their tokens, and bring probs back. Collective.

        Args:
            hidden: `[P, H]`, contiguous: bfloat16, float16, float32 or float64. Padding is not read.
            probs: float32 `[P]`, or None; all ranks give some or none does.
            handle: Handle from `dispatch_with_permute`.
            pad_multiple: None or that of the dispatch.
            fuse_unpermute_combine: No effect: it is one pass anyway.
            num_dispatched_tokens: Deprecated, ignored but for its type.

        Returns:
            `[N, H]` of hidden's dtype, added in float32 in order of a token's experts and rounded
            once; float32 `[N, E]`, 0 where a token did not go, or None.

        Raises:
            ValueError: A rule above is broken on some rank.
            TypeError: A dtype or type is wrong on some rank.
        """
        buffer = self._buffer_of(handle)
        with Telling(buffer.reject, "combine"):
            check_bools(fuse_unpermute_combine=fuse_unpermute_combine)
            if num_dispatched_tokens is not None:
                check_ints(0, num_dispatched_tokens=num_dispatched_tokens)
            known = _required(handle, is_permuted=True)
            _check_pad_multiple(pad_multiple, known)
            num_rows = known.native.num_recv_tokens
            check_tensor("hidden", hidden, (num_rows, None), *arithmetic.ADDABLE_DTYPES)
            if probs is not None:
                check_tensor("probs", probs, (num_rows,), torch.float32)
        if probs is None:
            return buffer.combine(hidden.detach(), known.native), None
        combined = buffer.combine(hidden.detach(), known.native, row_weights=probs.detach())
        assert isinstance(combined, CombineResult)
        assert combined.topk_weights is not None
        dense = dense_of_topk(combined.topk_weights, known.topk_idx, known.num_experts)
        return combined.x, dense

    def _instance(self, hidden: torch.Tensor, **values: Any) -> HybridEpConfigInstance:
        return self.configurer.instance(
            hidden_dim=hidden.shape[1],
            max_num_of_tokens_per_rank=rounded_max_tokens(hidden.shape[0]),
            num_of_experts_per_rank=self._num_local_experts,
            token_data_type="UINT8" if hidden.dtype.itemsize == 1 else "UINT16",
            **values,
        )

    def _set_num_local_experts(self, num_local_experts: int) -> None:
        self._num_local_experts = num_local_experts
        self._owner.num_experts = num_local_experts * self.group_size

    def _buffer_of(self, handle: object) -> EpBuffer:
        self._owner.shared()
        if isinstance(handle, HybridHandle):
            return handle.buffer
        return self._owner.buffer_for(self._owner.num_experts)

    def _check_experts(
        self, buffer: EpBuffer, num_of_experts: int | None, per_rank: int | None
    ) -> None:
        num_experts = buffer.config.num_experts
        for name, value, expected in (
            ("num_of_experts", num_of_experts, num_experts),
            ("num_of_experts_per_rank", per_rank, num_experts // self.group_size),
        ):
            if value is not None and value != expected:
                raise ValueError(f"{name} must be {expected} as in the buffer, got {value}")


def _known(handle: object, *, is_permuted: bool) -> HybridHandle | None:
    return None if handle is None else _required(handle, is_permuted=is_permuted)


def _required(handle: object, *, is_permuted: bool) -> HybridHandle:
    wanted = "dispatch_with_permute" if is_permuted else "dispatch"
    if not isinstance(handle, HybridHandle):
        raise TypeError(f"handle must be what {wanted} returned, got {type(handle).__name__}")
    if (handle.native.layout is Layout.EXPERT_MAJOR) != is_permuted:
        raise ValueError(f"handle must be what {wanted} returned, got one of the other kind")
    return handle


def _check_pad_multiple(pad_multiple: int | None, known: HybridHandle) -> None:
    if pad_multiple is not None:
        check_ints(0, pad_multiple=pad_multiple)
        if max(pad_multiple, 1) != known.pad_multiple:
            raise ValueError(
                f"pad_multiple must be the dispatch's {known.pad_multiple}, got {pad_multiple}"
            )


def _capacity(
    num_permuted_tokens: Any, pad_multiple: Any, known: HybridHandle | None, is_blocking: bool
) -> Capacity | None:
    """The limit that a call asks for."""
    num_rows = num_permuted_tokens
    if isinstance(num_rows, torch.Tensor) and num_rows.numel() == 1:
        num_rows = int(num_rows)  # Megatron sums a tensor
    if num_rows is not None:
        check_ints(0, num_permuted_tokens=num_rows)
    elif not is_blocking and known is None:
        raise ValueError("non_blocking=True needs num_permuted_tokens, got None")
    if known is not None:
        _check_pad_multiple(pad_multiple, known)
        if num_rows not in (None, known.native.num_recv_tokens):
            raise ValueError(
                f"num_permuted_tokens must be the handle's {known.native.num_recv_tokens}, got "
                f"{num_rows}"
            )
        return None
    if pad_multiple is not None:
        check_ints(0, pad_multiple=pad_multiple)
    if num_rows is None:
        return None
    if num_rows % (pad_multiple or 1):
        raise ValueError(
            f"num_permuted_tokens must be a multiple of pad_multiple = {pad_multiple}, got {num_rows}"
        )
    return Capacity(num_rows=num_rows, on_overflow="drop")
