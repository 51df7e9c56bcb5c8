"""Dispatch and combine of `Buffer` in its normal mode: one row per token and rank."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.compat.deep_ep import handle_counts
from moe_comm.compat.deep_ep.arguments import check_ints, check_tensor
from moe_comm.compat.deep_ep.combining import (
    Bias,
    Combined,
    announcement,
    check_biases,
    combine_rows,
    sum_columns,
)
from moe_comm.compat.deep_ep.config import topk_idx_t
from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.handles import RankMajorHandle
from moe_comm.compat.deep_ep.rows import Rows, check_rows, packed, unpacked
from moe_comm.compat.deep_ep.streams import plan_on_call_device
from moe_comm.compat.deep_ep.utils.event import EventHandle
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import Capacity, Layout
from moe_comm.ep.handles import DispatchResult
from moe_comm.ep.routing_map import topk_of_routing_map
from moe_comm.peers.missed_calls import Telling
from moe_comm.tensors import arithmetic

__all__ = [
    "Combined",
    "Received",
    "Rows",
    "Sending",
    "combine",
    "dispatch",
    "dispatch_cached",
]


_NUM_SOURCE_COLUMNS = 2  # token index and number of tokens, sent along with every row


@dataclasses.dataclass(frozen=True)
class Sending:
    """Arguments of a rank to a dispatch, as they were passed.

    Args:
        x: `[N, H]` of any dtype whose rows are a multiple of 16 bytes, or a pair or triple as `check_rows`
            says.
        num_tokens_per_rank: int32 `[R]`.
        is_token_in_rank: bool `[N, R]`.
        num_tokens_per_expert: int32 `[E]`.
        topk_idx: int64 `[N, K]`, or None.
        topk_weights: float32 `[N, K]`, None with `topk_idx`.
        expert_alignment: Rounds the returned counts.
        num_worst_tokens: Rows of the result, or 0 for as many as arrive.
        num_channels: Number of channels in the handle.
    """

    x: Rows
    num_tokens_per_rank: torch.Tensor | None
    is_token_in_rank: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    expert_alignment: int
    num_worst_tokens: int
    num_channels: int


@dataclasses.dataclass(frozen=True)
class Received:
    """Result of a dispatch, as `Buffer.dispatch` hands it out, without the event."""

    x: Rows
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_tokens_per_expert: list[int]
    handle: RankMajorHandle


def dispatch(owner: GroupOwner, buffer: EpBuffer, sending: Sending) -> Received:
    """Send every token once to every rank it goes to. Collective.

    Every row takes along its index and the number of its source's tokens, in two columns beside the
    scales; handles have them.
    """
    with Telling(buffer.reject, "dispatch"):
        check_sending(owner, buffer, sending)
        source = _source_columns(len(check_rows(sending.x, is_triple_allowed=True)))
        capacity = None
        if sending.num_worst_tokens:
            capacity = Capacity(num_rows=sending.num_worst_tokens, on_overflow="raise")
        data, wire_scales = packed(sending.x, source)
        choices = _choices(buffer, sending)
    result = buffer.dispatch(
        (data, wire_scales),
        choices,
        None if sending.topk_weights is None else sending.topk_weights.detach(),
        layout=Layout.RANK_MAJOR,
        capacity=capacity,
    )
    assert result.x_sf is not None
    counts = _expert_counts(owner, buffer, sending, result)
    source = result.x_sf[:, -_NUM_SOURCE_COLUMNS:]
    return Received(
        x=unpacked(sending.x, result.x, result.x_sf[:, :-_NUM_SOURCE_COLUMNS]),
        topk_idx=None if sending.topk_idx is None else result.topk_idx,
        topk_weights=result.topk_weights,
        num_tokens_per_expert=counts,
        handle=_make_handle(owner, buffer, sending, result, source),
    )


def check_sending(owner: GroupOwner, buffer: EpBuffer, sending: Sending) -> None:
    """Check what was passed, and that the layout is that of the choices.

    Raises:
        ValueError: A shape or size is wrong, or the layout is another one.
        TypeError: A dtype or type is wrong.
    """
    data = check_rows(sending.x, is_triple_allowed=True)
    num_tokens, num_ranks = data.shape[0], owner.num_ranks
    check_ints(1, expert_alignment=sending.expert_alignment)
    check_ints(0, num_worst_tokens=sending.num_worst_tokens)
    per_rank = check_tensor(
        "num_tokens_per_rank", sending.num_tokens_per_rank, (num_ranks,), torch.int32
    )
    in_rank = check_tensor(
        "is_token_in_rank", sending.is_token_in_rank, (num_tokens, num_ranks), torch.bool
    )
    per_expert = check_tensor(
        "num_tokens_per_expert",
        sending.num_tokens_per_expert,
        (buffer.config.num_experts,),
        torch.int32,
    )
    if (sending.topk_idx is None) != (sending.topk_weights is None):
        missing = "topk_idx" if sending.topk_idx is None else "topk_weights"
        raise ValueError(f"topk_idx and topk_weights go together, {missing} is None")
    if sending.topk_idx is None:
        if not torch.equal(per_rank, in_rank.sum(0, dtype=torch.int32)):
            raise ValueError(
                f"num_tokens_per_rank is {per_rank.tolist()}, is_token_in_rank has "
                f"{in_rank.sum(0).tolist()}"
            )
        return
    topk_idx = check_tensor("topk_idx", sending.topk_idx, (num_tokens, None), topk_idx_t)
    check_tensor("topk_weights", sending.topk_weights, tuple(topk_idx.shape), torch.float32)
    expected = handle_counts.dispatch_layout(topk_idx, buffer.expert_rank, num_ranks)
    for name, given, wanted in (
        ("num_tokens_per_rank", per_rank, expected.num_tokens_per_rank),
        ("num_tokens_per_expert", per_expert, expected.num_tokens_per_expert),
    ):
        if not torch.equal(given, wanted):
            raise ValueError(f"{name} is {given.tolist()}, topk_idx has {wanted.tolist()}")
    if not torch.equal(in_rank, expected.is_token_in_rank):
        token_idx, rank_idx = (in_rank != expected.is_token_in_rank).nonzero()[0].tolist()
        raise ValueError(
            f"is_token_in_rank[{token_idx}, {rank_idx}] is {bool(in_rank[token_idx, rank_idx])}, "
            f"topk_idx[{token_idx}] is {topk_idx[token_idx].tolist()}"
        )


def dispatch_cached(handle: RankMajorHandle, x: Rows) -> Rows:
    """Send to the places of an earlier dispatch. Collective."""
    buffer = handle.buffer
    with Telling(buffer.reject, "dispatch"):
        check_rows(x, is_triple_allowed=True)
    rows = packed(x) if isinstance(x, tuple) else x.detach()
    result = buffer.dispatch(rows, None, handle=handle.native)
    received = result.x if result.x_sf is None else unpacked(x, result.x, result.x_sf)
    num_unfilled = handle.num_rows - handle.native.num_recv_tokens
    if not num_unfilled:
        return received
    if isinstance(received, tuple):
        return tuple(_with_zeros(each, num_unfilled) for each in received)
    return _with_zeros(received, num_unfilled)


def _with_zeros(rows: torch.Tensor, num_more: int) -> torch.Tensor:
    """Rows of any dtype and so many of zeros behind them."""
    return torch.cat([rows, torch.zeros(num_more, *rows.shape[1:], dtype=rows.dtype)])


def combine(
    owner: GroupOwner,
    handle: RankMajorHandle,
    x: torch.Tensor,
    topk_weights: torch.Tensor | None,
    bias: Bias,
    *,
    async_op: bool,
) -> Combined:
    """Sum rows back to their tokens. Collective.

    Args:
        owner: Owner of the buffers.
        handle: Handle of the dispatch.
        x: `[M, H]`.
        topk_weights: float32 `[M, K]`, added over ranks, or None.
        bias: `[N, H]` of x's dtype, one or two, added first; all ranks give some or none does.
        async_op: Return before the end.
    """
    buffer, native = handle.buffer, handle.native
    with Telling(buffer.reject, "combine"):
        rows = check_tensor("x", x, (handle.num_rows, None), *arithmetic.ADDABLE_DTYPES)
        if topk_weights is not None and not handle.has_topk:
            raise ValueError("topk_weights are given, the handle's dispatch had no topk_idx")
        if topk_weights is not None:
            shape_of_weights = (handle.num_rows, handle.num_topk)
            check_tensor("topk_weights", topk_weights, shape_of_weights, torch.float32)
        shape = (native.num_tokens, rows.shape[1])
        biases = check_biases(bias, shape, rows.dtype)
        rows = rows.detach()[: native.num_recv_tokens]
    if topk_weights is None:
        return combine_rows(owner, buffer, native, rows, None, biases, async_op=async_op)
    combined = combine_rows(
        owner, buffer, native, rows, announcement(native), biases, async_op=async_op
    )
    columns = topk_weights[: native.num_recv_tokens]
    weights, end = sum_columns(buffer, native, columns, async_op=async_op)
    return Combined(combined.x, weights, EventHandle.after(combined.event, end))


def _source_columns(num_tokens: int) -> torch.Tensor:
    """int32 `[N, 2]`: token index, number of tokens."""
    source = torch.empty(num_tokens, _NUM_SOURCE_COLUMNS, dtype=torch.int32)
    source[:, 0] = torch.arange(num_tokens, dtype=torch.int32)
    source[:, 1] = num_tokens
    return source


def _choices(buffer: EpBuffer, sending: Sending) -> torch.Tensor:
    """Choices that lead to the ranks; the first expert of each where no choices are given."""
    if sending.topk_idx is not None:
        return sending.topk_idx
    assert sending.is_token_in_rank is not None
    ranks, _ = topk_of_routing_map(sending.is_token_in_rank)
    first_expert = torch.full((sending.is_token_in_rank.shape[1] + 1,), -1, dtype=torch.int64)
    for expert_idx in range(buffer.config.num_experts - 1, -1, -1):
        first_expert[int(buffer.expert_rank[expert_idx])] = expert_idx
    choices = first_expert[ranks]  # a rank of -1 reads the last element
    if bool(((choices < 0) & (ranks >= 0)).any()):
        raise ValueError(
            f"is_token_in_rank sends tokens to a rank without experts, there are "
            f"{buffer.config.num_experts} experts on {sending.is_token_in_rank.shape[1]} ranks"
        )
    return choices


def _expert_counts(
    owner: GroupOwner, buffer: EpBuffer, sending: Sending, result: DispatchResult
) -> list[int]:
    """Tokens of every local expert, rounded up; empty where the shape was fixed."""
    if sending.num_worst_tokens:
        return []
    counts = result.num_tokens_per_expert
    if sending.topk_idx is None:
        # The choices made up from ranks say nothing of experts.
        assert sending.num_tokens_per_expert is not None
        gathered = owner.shared().communicator.all_gather(
            sending.num_tokens_per_expert.cpu().numpy().tobytes()
        )
        per_rank = [torch.frombuffer(bytearray(part), dtype=torch.int32) for part in gathered]
        counts = torch.stack(per_rank).sum(0)[buffer.expert_rank == owner.rank_idx]
    unit = sending.expert_alignment
    return [-(-count // unit) * unit for count in counts.tolist()]


def _make_handle(
    owner: GroupOwner,
    buffer: EpBuffer,
    sending: Sending,
    result: DispatchResult,
    source: torch.Tensor,
) -> RankMajorHandle:
    assert sending.is_token_in_rank is not None
    plan = plan_on_call_device(result.handle.plan)
    rank_prefix = plan.sent_tokens.cumsum(0, dtype=torch.int32)
    num_filled = int(rank_prefix[-1, owner.rank_idx])
    sources = handle_counts.row_sources(plan, buffer.expert_rank, owner.rank_idx)
    recv_src_idx = source[:, 0].contiguous()
    channel_prefix, send_head = handle_counts.send_channels(
        sending.is_token_in_rank, sending.num_channels
    )
    recv_channel_prefix = handle_counts.recv_channel_prefix_matrix(
        sources[:num_filled],
        recv_src_idx[:num_filled],
        source[:num_filled, 1],
        owner.num_ranks,
        sending.num_channels,
    )
    places = (
        rank_prefix,
        channel_prefix,
        recv_channel_prefix,
        recv_src_idx,
        sending.is_token_in_rank,
        send_head,
    )
    return RankMajorHandle.of(
        places,
        buffer=buffer,
        native=result.handle,
        has_topk=sending.topk_idx is not None,
        num_rows=result.handle.num_recv_tokens,
        num_topk=result.handle.num_recv_topk,
    )
