"""Handles: tuples whose places are DeepEP's, which carry the handle of this package.

One of `Buffer.dispatch` may be passed back in parts, as a tuple of its tensors or of copies of them: a
plan is made of what they say. The others are passed back as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from moe_comm.compat.deep_ep.arguments import check_tensor
from moe_comm.compat.deep_ep.handle_counts import rows_on_ranks
from moe_comm.ep.backends.base import PlanTensors
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import Layout
from moe_comm.ep.handles import DispatchHandle, DispatchResult
from moe_comm.ep.routing_map import topk_of_routing_map

if TYPE_CHECKING:
    from typing_extensions import Self

_NUM_RANK_MAJOR = 6
_SLOT_RANK_SHIFT = 48  # of `PlanTensors.slots`


class _Handle(tuple[Any, ...]):
    """Places, and what they do not say."""

    @classmethod
    def of(cls, places: Iterable[object], **carried: Any) -> Self:
        """Put places and what is carried together, which is all that the class says."""
        handle = cls(places)
        vars(handle).update(carried)
        return handle


class RankMajorHandle(_Handle):
    """Handle of `Buffer.dispatch`.

    Places: rank_prefix_matrix int32 `[R, R]`, channel_prefix_matrix int32 `[R, C]`,
    recv_channel_prefix_matrix int32 `[R, C]`, recv_src_idx int32 `[M]`, is_token_in_rank bool
    `[N, R]`, send_head int32 `[N, R]`; C is `num_sms / 2`.

    Attributes:
        buffer: Buffer that made the dispatch.
        native: Native handle, which combine needs.
        has_topk: Whether choices travelled.
        num_rows: M, which may be more than the rows of `native` where the handle was made of its parts.
        num_topk: K of received rows; None where the handle was made of its parts, which do not say.
    """

    buffer: EpBuffer
    native: DispatchHandle
    has_topk: bool
    num_rows: int
    num_topk: int | None

    def __reduce__(self) -> tuple[Any, ...]:
        """Its parts: what it carries belongs to this process."""
        return tuple, (tuple(self),)


class LowLatencyHandle(_Handle):
    """Handle of `Buffer.low_latency_dispatch`.

    Places: src_info int32 `[El, n]`, layout_range int64 `[El, R]`, num_max_dispatch_tokens_per_rank,
    hidden, num_experts.

    Attributes:
        buffer: Buffer that made the dispatch.
        pending: Result of the dispatch until its end was waited for; then None, so that a handle
            does not keep the received rows.
        topk_idx: int64 `[N, K]`, a copy of the choices.
        combine_buffer: Tensor that `get_next_low_latency_combine_buffer` returned, or None.
    """

    buffer: EpBuffer
    pending: DispatchResult | None
    topk_idx: torch.Tensor
    combine_buffer: torch.Tensor | None = None
    _native: DispatchHandle | None = None

    @property
    def native(self) -> DispatchHandle:
        """Handle that combine needs; waits for the end of the dispatch."""
        if self._native is None:
            assert self.pending is not None
            self._native = self.pending.handle
            self.pending = None
        return self._native


class HybridHandle(_Handle):
    """Handle of `HybridEPBuffer.dispatch` (7 places) and `dispatch_with_permute` (11 places).

    Attributes:
        buffer: Buffer that made the dispatch.
        native: Native handle, which combine needs.
        topk_idx: int64 `[N, K]`, the experts of every token, -1 where there are fewer.
        num_experts: Experts over all ranks.
        pad_multiple: Rows per expert are padded to a multiple of this.
    """

    buffer: EpBuffer
    native: DispatchHandle
    topk_idx: torch.Tensor
    num_experts: int
    pad_multiple: int = 1


def are_parts(handle: object) -> bool:
    """Return whether this has the form of a handle of `Buffer.dispatch` that was taken apart."""
    return (
        isinstance(handle, tuple | list)
        and not hasattr(handle, "native")
        and len(handle) == _NUM_RANK_MAJOR
        and all(isinstance(part, torch.Tensor) for part in handle)
    )


def from_parts(
    parts: tuple[torch.Tensor, ...] | list[torch.Tensor], buffer: EpBuffer, rank_idx: int
) -> RankMajorHandle:
    """A handle made of the places of one, or of copies of them. Local.

    Rows lie in order of (source rank, token), so that the first, the fourth and the fifth place say
    where every row went and came from. The others are not looked at.

    Args:
        parts: The places of `RankMajorHandle`.
        buffer: Any buffer of the group: to it, a token chose the first expert of each of its ranks.
        rank_idx: This rank.

    Raises:
        ValueError: A shape is wrong, or places contradict each other.
        TypeError: A dtype is wrong.
    """
    num_ranks = buffer.communicator.num_ranks
    prefix = check_tensor("handle[0]", parts[0], (num_ranks, num_ranks), torch.int32)
    recv_src_idx = check_tensor("handle[3]", parts[3], (None,), torch.int32)
    in_rank = check_tensor("handle[4]", parts[4], (None, num_ranks), torch.bool)
    sent = prefix.diff(dim=0, prepend=torch.zeros_like(prefix[:1]))
    counted = in_rank.sum(0, dtype=torch.int32)
    if not torch.equal(counted, sent[rank_idx]):
        raise ValueError(
            f"handle[0] says that this rank sends {sent[rank_idx].tolist()} tokens to the ranks, "
            f"handle[4] has {counted.tolist()}"
        )
    num_filled = int(prefix[-1, rank_idx])
    if recv_src_idx.numel() < num_filled:
        raise ValueError(
            f"handle[0] says that {num_filled} rows arrive, handle[3] has {recv_src_idx.numel()}"
        )
    ranks, _ = topk_of_routing_map(in_rank)
    ranks = torch.nn.functional.pad(ranks, (0, num_ranks - ranks.shape[1]), value=-1)
    rows = rows_on_ranks(in_rank, sent, rank_idx)
    slots = ranks << _SLOT_RANK_SHIFT | rows.gather(1, ranks.clamp_min(0))
    first_experts = [(buffer.expert_rank == rank).nonzero()[:1, 0] for rank in range(num_ranks)]
    if any(not len(first) and int(sent[:, rank].sum()) for rank, first in enumerate(first_experts)):
        raise ValueError("handle[0] sends tokens to a rank that has no experts in this buffer")
    experts = torch.tensor([int(first[0]) if len(first) else 0 for first in first_experts])
    sent_choices = torch.zeros(num_ranks, buffer.config.num_experts, dtype=torch.int32)
    sent_choices.index_add_(1, experts, sent)
    received = sent_choices[:, buffer.expert_rank == rank_idx].sum(0)
    ends = torch.tensor([-1, num_ranks], dtype=torch.int32).expand(num_ranks, 2)
    plan = PlanTensors(
        counts=torch.cat([sent_choices, sent, ends], dim=1),
        slots=slots.masked_fill(ranks < 0, -1),
        topk_idx=experts[ranks].masked_fill(ranks < 0, -1),
        layout=Layout.RANK_MAJOR,
        expert_alignment=1,
        num_recv_tokens=num_filled,
        asked=torch.cat([received.sum()[None], received]),
    )
    return RankMajorHandle.of(
        parts,
        buffer=buffer,
        native=buffer.import_handle(plan),
        has_topk=True,
        num_rows=recv_src_idx.numel(),
        num_topk=None,
    )


def require_rank_major(handle: object) -> RankMajorHandle:
    """The handle; TypeError where it is none of `Buffer.dispatch`."""
    if not isinstance(handle, RankMajorHandle) or not hasattr(handle, "native"):
        raise TypeError(
            "handle must be what dispatch returned, or a tuple of its "
            f"{_NUM_RANK_MAJOR} tensors, got {type(handle).__name__}"
        )
    return handle


def require_low_latency(handle: object) -> LowLatencyHandle:
    """The handle; TypeError where it is none of `Buffer.low_latency_dispatch`."""
    if not isinstance(handle, LowLatencyHandle):
        raise TypeError(
            f"handle must be what low_latency_dispatch returned, got {type(handle).__name__}"
        )
    return handle
