"""Handles: tuples whose places are DeepEP's, which carry the handle of this package.

A handle is passed back to the buffer as it is; a tuple made of its elements is not one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.handles import DispatchHandle, DispatchResult

__all__ = [
    "HybridHandle",
    "LowLatencyHandle",
    "RankMajorHandle",
    "require_low_latency",
    "require_rank_major",
]


class RankMajorHandle(tuple[torch.Tensor, ...]):
    """Of `Buffer.dispatch`.

    Places: rank_prefix_matrix int32 `[R, R]`, channel_prefix_matrix int32 `[R, C]`,
    recv_channel_prefix_matrix int32 `[R, C]`, recv_src_idx int32 `[M]`, is_token_in_rank bool
    `[N, R]`, send_head int32 `[N, R]`; C is `num_sms / 2`.

    Attributes:
        buffer: That made the dispatch.
        native: What combine needs.
        has_topk: Whether choices travelled.
    """

    buffer: EpBuffer
    native: DispatchHandle
    has_topk: bool

    @classmethod
    def of(
        cls,
        places: Iterable[torch.Tensor],
        *,
        buffer: EpBuffer,
        native: DispatchHandle,
        has_topk: bool,
    ) -> RankMajorHandle:
        """Put places and what is carried together."""
        handle = cls(places)
        handle.buffer = buffer
        handle.native = native
        handle.has_topk = has_topk
        return handle


class LowLatencyHandle(tuple[Any, ...]):
    """Of `Buffer.low_latency_dispatch`.

    Places: src_info int32 `[El, n]`, layout_range int64 `[El, R]`, num_max_dispatch_tokens_per_rank,
    hidden, num_experts.

    Attributes:
        buffer: That made the dispatch.
        pending: Result of the dispatch until its end was waited for; then None, so that a handle
            does not keep the received rows.
        topk_idx: int64 `[N, K]`, a copy of the choices.
        combine_buffer: What `get_next_low_latency_combine_buffer` gave, or None.
    """

    buffer: EpBuffer
    pending: DispatchResult | None
    topk_idx: torch.Tensor
    combine_buffer: torch.Tensor | None
    _native: DispatchHandle | None

    @property
    def native(self) -> DispatchHandle:
        """What combine needs; waits for the end of the dispatch."""
        if self._native is None:
            assert self.pending is not None
            self._native = self.pending.handle
            self.pending = None
        return self._native

    @classmethod
    def of(
        cls,
        places: Iterable[object],
        *,
        buffer: EpBuffer,
        result: DispatchResult,
        topk_idx: torch.Tensor,
    ) -> LowLatencyHandle:
        """Put places and what is carried together."""
        handle = cls(places)
        handle.buffer = buffer
        handle.pending = result
        handle._native = None
        handle.topk_idx = topk_idx
        handle.combine_buffer = None
        return handle


class HybridHandle(tuple[Any, ...]):
    """Of `HybridEPBuffer.dispatch` (7 places) and `dispatch_with_permute` (11 places).

    Attributes:
        buffer: That made the dispatch.
        native: What combine needs.
        topk_idx: int64 `[N, K]`, the experts of every token, -1 where there are fewer.
        num_experts: Over all ranks.
        pad_multiple: Rows per expert are padded to a multiple of this.
    """

    buffer: EpBuffer
    native: DispatchHandle
    topk_idx: torch.Tensor
    num_experts: int
    pad_multiple: int

    @classmethod
    def of(
        cls,
        places: Iterable[object],
        *,
        buffer: EpBuffer,
        native: DispatchHandle,
        topk_idx: torch.Tensor,
        num_experts: int,
        pad_multiple: int = 1,
    ) -> HybridHandle:
        """Put places and what is carried together."""
        handle = cls(places)
        handle.buffer = buffer
        handle.native = native
        handle.topk_idx = topk_idx
        handle.num_experts = num_experts
        handle.pad_multiple = pad_multiple
        return handle


def require_rank_major(handle: object) -> RankMajorHandle:
    """The handle; TypeError where it is none of `Buffer.dispatch`."""
    if not isinstance(handle, RankMajorHandle):
        raise TypeError(f"handle must be what dispatch returned, got {type(handle).__name__}")
    return handle


def require_low_latency(handle: object) -> LowLatencyHandle:
    """The handle; TypeError where it is none of `Buffer.low_latency_dispatch`."""
    if not isinstance(handle, LowLatencyHandle):
        raise TypeError(
            f"handle must be what low_latency_dispatch returned, got {type(handle).__name__}"
        )
    return handle
