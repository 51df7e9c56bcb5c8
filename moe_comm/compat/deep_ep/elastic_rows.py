"""Rows that travel for `ElasticBuffer`, and the handle with everything its callers read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from moe_comm.compat.deep_ep.arguments import check_ints, check_tensor
from moe_comm.compat.deep_ep.config import topk_idx_t
from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.handle_counts import last_choices, received_choices, row_sources
from moe_comm.compat.deep_ep.rows import Rows, check_rows, packed, unpacked
from moe_comm.compat.deep_ep.streams import on_call_device, plan_on_call_device
from moe_comm.compat.deep_ep.utils.event import EventHandle
from moe_comm.compat.deep_ep.utils.math import align
from moe_comm.ep.backends.base import PlanTensors
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import Capacity, Layout
from moe_comm.ep.handles import DispatchHandle, DispatchResult
from moe_comm.tensors import quantized


@dataclasses.dataclass(eq=False, kw_only=True)
class EPHandle:
    """State that a dispatch leaves for combine and cached dispatch.

    Args:
        do_expand: Rows are one per token and local expert.
        num_experts: E.
        expert_alignment: Rows or counts per expert are rounded to a multiple.
        num_max_tokens_per_rank: As the dispatch had it.
        num_sms: As the dispatch had it.
        choices: Tensor that `topk_idx` gives.
        topk_idx_version: Version of that tensor at the dispatch, or None for a copy or where
            changes are not looked for.
        num_recv_tokens: Tokens received, each once.
        num_expanded_tokens: Rows with padding, with `do_expand`; else 0.
        num_recv_tokens_per_expert_list: Rounded counts of local experts; empty without `do_cpu_sync`, by
            which callers know that rows have a worst-case shape.
        psum_num_recv_tokens_per_scaleup_rank: int32 `[R]`, inclusive.
        psum_num_recv_tokens_per_expert: int32 `[El]`: inclusive sums of the rounded counts; with
            `do_expand` the end of each expert's rows without its padding.
        num_unaligned_recv_tokens_per_expert: int32 `[El]`.
        recv_src_metadata: int32 `[num_recv_tokens, 2 + K]`: source rank * num_max + token; this rank
            * K + first of the choices that are here; then, with `do_expand`, the row of every choice
            or -1 (else -1).
        dst_buffer_slot_idx: int32 `[N, K]`, at the last of a token's choices that lead to a rank: this
            rank * num_max + its place among the tokens that go there; -1 at others.
        token_metadata_at_forward: None, like the next: of ranks in several domains.
        channel_linked_list: None.
        recv_topk_idx: Choices that the dispatch returned, which a cached one returns too.
        buffer: Buffer that made the dispatch.
        native: Native handle, which combine needs.
    """

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    num_sms: int
    choices: torch.Tensor
    topk_idx_version: int | None = None
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: torch.Tensor
    psum_num_recv_tokens_per_expert: torch.Tensor
    num_unaligned_recv_tokens_per_expert: torch.Tensor
    recv_src_metadata: torch.Tensor
    dst_buffer_slot_idx: torch.Tensor
    token_metadata_at_forward: None = None
    channel_linked_list: None = None
    recv_topk_idx: torch.Tensor | None
    buffer: EpBuffer
    native: DispatchHandle

    @property
    def topk_idx(self) -> torch.Tensor:
        """int64 `[N, K]`: the choices of the dispatch.

        Raises:
            ValueError: They are the caller's own tensor, which was written since (`EPBuffer`).
        """
        return _unchanged(self.choices, self.topk_idx_version)


def version_of(topk_idx: object) -> int | None:
    """Return how often a tensor was written; None for one of inference mode, which does not count."""
    if not isinstance(topk_idx, torch.Tensor) or topk_idx.is_inference():
        return None
    return topk_idx._version


def _unchanged(topk_idx: torch.Tensor, version: int | None) -> torch.Tensor:
    if version is not None and topk_idx._version != version:
        raise ValueError(
            "topk_idx must stay as it is while a handle lives, which holds the tensor itself: it had "
            f"version {version} at the dispatch and has {topk_idx._version}"
        )
    return topk_idx


@dataclasses.dataclass(frozen=True)
class Sending:
    """Arguments of a rank to a dispatch; see `ElasticBuffer.dispatch`."""

    x: Rows
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_max_tokens: int
    expert_alignment: int
    is_exact: bool
    is_expanded: bool
    is_column_major: bool
    copies_topk_idx: bool
    num_sms: int
    topk_idx_version: int | None = None

    def check(self, buffer: EpBuffer, handle: object) -> None:
        """Shapes and dtypes.

        Raises:
            ValueError: A shape or size is wrong.
            TypeError: A dtype or type is wrong.
        """
        num_tokens = check_rows(self.x).shape[0]
        check_ints(1, expert_alignment=self.expert_alignment)
        if num_tokens > self.num_max_tokens:
            raise ValueError(
                f"x has {num_tokens} tokens, more than num_max_tokens_per_rank = {self.num_max_tokens}"
            )
        if handle is not None:
            if not isinstance(handle, EPHandle):
                raise TypeError(f"handle must be an EPHandle, got {type(handle).__name__}")
            if self.topk_idx is not None:
                raise ValueError("topk_idx must be None with a handle, which holds the choices")
            if self.is_expanded and not handle.do_expand:
                raise ValueError("do_expand is True, the handle's dispatch had False")
            if self.expert_alignment not in (1, handle.expert_alignment):
                raise ValueError(
                    f"expert_alignment is {self.expert_alignment}, the handle's is "
                    f"{handle.expert_alignment}"
                )
            choices = handle.topk_idx
        else:
            choices = check_tensor("topk_idx", self.topk_idx, (num_tokens, None), topk_idx_t)
        if self.topk_weights is not None:
            shape = (num_tokens, choices.shape[1])
            check_tensor("topk_weights", self.topk_weights, shape, torch.float32)

    def capacity(self, buffer: EpBuffer, num_ranks: int) -> Capacity | None:
        """The worst case of rows, where the result is not to depend on data."""
        if self.is_exact:
            return None
        num_rows = num_ranks * self.num_max_tokens
        if self.is_expanded:
            assert self.topk_idx is not None
            num_local = buffer.num_local_experts
            num_rows *= min(self.topk_idx.shape[1], num_local)
            num_rows += (self.expert_alignment - 1) * num_local
            num_rows = align(num_rows, self.expert_alignment)
        return Capacity(num_rows=num_rows, on_overflow="raise")

    def arrange(self, rows: Rows) -> Rows:
        """Scales in the order that was asked for."""
        if isinstance(rows, tuple) and self.is_column_major:
            return rows[0], quantized.column_major(rows[1])
        return rows


@dataclasses.dataclass(frozen=True)
class Received:
    """Tensors that `ElasticBuffer.dispatch` hands out, without the event."""

    x: Rows
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: EPHandle


@dataclasses.dataclass(frozen=True)
class Started:
    """A dispatch that has begun.

    Args:
        event: Event after which `finish` may be called.
        finish: Makes of what arrived what is handed out. Local.
    """

    event: EventHandle
    finish: Callable[[], Received]


def start(
    owner: GroupOwner,
    buffer: EpBuffer,
    sending: Sending,
    handle: EPHandle | None,
    *,
    async_op: bool = False,
) -> Started:
    """Send rows with their choices, weights and index beside them. Collective.

    Args:
        owner: Owner of the buffers.
        buffer: Buffer to use if there is no handle.
        sending: Arguments of this rank.
        handle: Handle of an earlier dispatch: send to its places, with weights alone beside.
        async_op: Return before the end.
    """
    if handle is None:
        result, finish = _dispatch(owner, buffer, sending, async_op)
    else:
        result, finish = _dispatch_cached(handle, sending, async_op)
    return Started(EventHandle.of(result.event) if async_op else EventHandle(), finish)


def _dispatch(
    owner: GroupOwner, buffer: EpBuffer, sending: Sending, async_op: bool
) -> tuple[DispatchResult, Callable[[], Received]]:
    topk_idx = sending.topk_idx
    assert topk_idx is not None
    num_tokens, num_topk = topk_idx.shape
    columns = [topk_idx.to(torch.int32), torch.arange(num_tokens, dtype=torch.int32)[:, None]]
    # Expanded rows bring the weight of their choice in its own place.
    weights = None if sending.topk_weights is None else sending.topk_weights.detach()
    if weights is not None and not sending.is_expanded:
        columns.append(weights.contiguous().view(torch.int32))
    num_columns = sum(each.shape[1] for each in columns)
    has_weights = weights is not None
    result = buffer.dispatch(
        packed(sending.x, *columns),
        topk_idx,
        weights if sending.is_expanded else None,
        layout=Layout.EXPERT_MAJOR if sending.is_expanded else Layout.RANK_MAJOR,
        expert_alignment=sending.expert_alignment if sending.is_expanded else 1,
        capacity=sending.capacity(buffer, owner.num_ranks),
        async_op=async_op,
    )

    def finish() -> Received:
        assert result.x_sf is not None
        own_columns = result.x_sf[:, result.x_sf.shape[1] - num_columns :]
        scale_bits = result.x_sf[:, : result.x_sf.shape[1] - num_columns]
        recv_weights = result.topk_weights
        if has_weights and not sending.is_expanded:
            recv_weights = own_columns[:, num_topk + 1 :].contiguous().view(torch.float32)
        return Received(
            x=sending.arrange(unpacked(sending.x, result.x, scale_bits)),
            topk_idx=result.topk_idx,
            topk_weights=recv_weights,
            handle=_make_handle(owner, buffer, sending, result, own_columns[:, : num_topk + 1]),
        )

    return result, finish


def _dispatch_cached(
    handle: EPHandle, sending: Sending, async_op: bool
) -> tuple[DispatchResult, Callable[[], Received]]:
    x = sending.x
    weights = None if sending.topk_weights is None else sending.topk_weights.detach()
    beside = [] if weights is None or handle.do_expand else [weights.contiguous().view(torch.int32)]
    result = handle.buffer.dispatch(
        packed(x, *beside) if beside or isinstance(x, tuple) else x.detach(),
        None,
        weights if handle.do_expand else None,
        handle=handle.native,
        async_op=async_op,
    )

    def finish() -> Received:
        recv_weights, bits = result.topk_weights, result.x_sf
        if bits is not None and beside:
            split = bits.shape[1] - beside[0].shape[1]
            recv_weights = bits[:, split:].contiguous().view(torch.float32)
            bits = bits[:, :split]
        received = result.x if bits is None else unpacked(x, result.x, bits)
        return Received(sending.arrange(received), handle.recv_topk_idx, recv_weights, handle)

    return result, finish


def _make_handle(
    owner: GroupOwner,
    buffer: EpBuffer,
    sending: Sending,
    result: DispatchResult,
    columns: torch.Tensor,
) -> EPHandle:
    """The handle of a dispatch; `columns` are the choices and the index of every received row."""
    assert sending.topk_idx is not None
    _unchanged(sending.topk_idx, sending.topk_idx_version)
    plan = plan_on_call_device(result.handle.plan)
    from_rank = plan.sent_tokens[:, owner.rank_idx].to(torch.int64)
    raw = on_call_device(result.num_tokens_per_expert)
    unit = sending.expert_alignment
    rounded = (raw + unit - 1) // unit * unit
    ends = rounded.cumsum(0)
    filled = _filled_rows(buffer, owner, plan)
    return EPHandle(
        do_expand=sending.is_expanded,
        num_experts=buffer.config.num_experts,
        expert_alignment=unit,
        num_max_tokens_per_rank=sending.num_max_tokens,
        num_sms=sending.num_sms,
        choices=sending.topk_idx.clone() if sending.copies_topk_idx else sending.topk_idx,
        topk_idx_version=sending.topk_idx_version,
        num_recv_tokens=int(from_rank.sum()),
        num_expanded_tokens=result.handle.num_recv_tokens if sending.is_expanded else 0,
        num_recv_tokens_per_expert_list=rounded.tolist() if sending.is_exact else [],
        psum_num_recv_tokens_per_scaleup_rank=from_rank.cumsum(0).to(torch.int32),
        psum_num_recv_tokens_per_expert=(ends - rounded + raw if sending.is_expanded else ends).to(
            torch.int32
        ),
        num_unaligned_recv_tokens_per_expert=raw.to(torch.int32),
        dst_buffer_slot_idx=_slots(owner, buffer, sending),
        recv_src_metadata=_metadata(owner, buffer, sending, columns[filled.rows], filled),
        recv_topk_idx=result.topk_idx,
        buffer=buffer,
        native=result.handle,
    )


def _slots(owner: GroupOwner, buffer: EpBuffer, sending: Sending) -> torch.Tensor:
    """int32 `[N, K]`; see `EPHandle.dst_buffer_slot_idx`."""
    assert sending.topk_idx is not None
    _, place = last_choices(sending.topk_idx, buffer.expert_rank, owner.num_ranks)
    first = owner.rank_idx * sending.num_max_tokens
    return torch.where(place < 0, -1, place + first).to(torch.int32)


@dataclasses.dataclass(frozen=True)
class _Filled:
    """Received rows that are no padding, ascending.

    Args:
        rows: int64 `[n]`.
        sources: int64 `[n]`, the ranks they came from.
        experts: int64 `[n]`, the experts they are for, with `do_expand`.
    """

    rows: torch.Tensor
    sources: torch.Tensor
    experts: torch.Tensor | None


def _filled_rows(buffer: EpBuffer, owner: GroupOwner, plan: PlanTensors) -> _Filled:
    sources = row_sources(plan, buffer.expert_rank, owner.rank_idx)
    rows = (sources >= 0).nonzero().flatten()
    experts = None
    if plan.layout is Layout.EXPERT_MAJOR:
        mine, counts = received_choices(plan, buffer.expert_rank, owner.rank_idx)
        experts = torch.repeat_interleave(on_call_device(mine), counts.sum(1))
    return _Filled(rows, sources[rows], experts)


def _metadata(
    owner: GroupOwner,
    buffer: EpBuffer,
    sending: Sending,
    columns: torch.Tensor,
    filled: _Filled,
) -> torch.Tensor:
    """int32 `[num_recv_tokens, 2 + K]`; see `EPHandle.recv_src_metadata`.

    Args:
        owner: Owner of the buffers.
        buffer: Buffer of the dispatch.
        sending: Arguments of the dispatch.
        columns: int32 `[n, K + 1]`, choices and token index of the filled rows.
        filled: Numbers of these rows and their sources.
    """
    num_topk = columns.shape[1] - 1
    topk_idx = columns[:, :num_topk].to(torch.int64)
    tokens = filled.sources * sending.num_max_tokens + columns[:, num_topk]
    unique, place = torch.unique(tokens, sorted=True, return_inverse=True)
    rank_of_bin = torch.cat([buffer.expert_rank.to(topk_idx), torch.tensor([-1])])
    first_here = (rank_of_bin[topk_idx] == owner.rank_idx).to(torch.int32).argmax(1)  # -1 is last
    metadata = torch.full((len(unique), 2 + num_topk), -1, dtype=torch.int32)
    metadata[:, 0] = unique.to(torch.int32)
    metadata[place, 1] = (owner.rank_idx * num_topk + first_here).to(torch.int32)
    if filled.experts is not None:
        topk_pos = (topk_idx == filled.experts[:, None]).to(torch.int32).argmax(1)
        metadata[place, 2 + topk_pos] = filled.rows.to(torch.int32)
    return metadata
