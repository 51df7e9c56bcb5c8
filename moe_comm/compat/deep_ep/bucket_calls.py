"""Exchanges of the collectives of a `BucketBuffer`, for one of its groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from moe_comm.compat.deep_ep.group import GroupOwner
from moe_comm.compat.deep_ep.streams import on_device
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap
from moe_comm.compat.deep_ep.utils.math import align
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.gradient_sum import MOST_ROW_BYTES
from moe_comm.ep.handles import CombineResult, CommEvent, DispatchHandle
from moe_comm.ep.limits import ROW_BYTES_MULTIPLE

Tensors = Sequence[torch.Tensor]
Returned = torch.Tensor | list[torch.Tensor]
Sums = Callable[[], torch.Tensor]


class BucketCalls:
    """All-gather, reduce-scatter and all-reduce as exchanges of rows, one expert a rank.

    Tensors are contiguous, of one device, and of equal sizes on all ranks. What is written is written in
    the first wait for the event that a call returns.

    Args:
        owner: Owner of the buffers of the group.
    """

    def __init__(self, owner: GroupOwner) -> None:
        self._owner = owner
        self._handles: dict[tuple[int, bool], DispatchHandle] = {}

    @on_device
    @torch.no_grad()
    def all_gather(
        self, srcs: Tensors, outs: Tensors, returned: Returned, *, async_finish: bool
    ) -> EventOverlap:
        """Bytes of every `srcs[i]` of all ranks into `outs[i]`, in rank order. Collective."""
        buffer = self._buffer()
        parts = [src.view(-1).view(torch.uint8)[None] for src in srcs]
        num_rows, width = _cut(sum(part.shape[1] for part in parts))
        handle = self._handle(buffer, num_rows, to_all=True)
        rows = _packed(parts, width, torch.uint8, lambda: torch.empty(1, width, dtype=torch.uint8))
        result = buffer.dispatch(rows.view(num_rows, -1), None, handle=handle, async_op=True)

        def finish() -> None:
            num_ranks = self._owner.num_ranks
            places = [out.view(-1).view(torch.uint8).view(num_ranks, -1) for out in outs]
            _unpack(result.x.view(num_ranks, width), places)

        return _finishing(result.event, (*srcs, *outs), finish, returned)

    @on_device
    @torch.no_grad()
    def reduce_scatter(
        self,
        srcs: Tensors,
        outs: Tensors,
        returned: Returned,
        *,
        scale: float,
        dtype: torch.dtype,
        async_finish: bool,
    ) -> EventOverlap:
        """Sums over ranks of this rank's part of every `srcs[i]`, times `scale`, into `outs[i]`. Collective.

        Args:
            srcs: float32, of as many equal parts as there are ranks.
            outs: float32.
            returned: Value that the wait returns.
            scale: Factor of the sums.
            dtype: Dtype in which parts travel; sums are float32, in rank order.
            async_finish: True.
        """
        buffer, num_ranks = self._buffer(), self._owner.num_ranks
        parts = [src.view(num_ranks, -1) for src in srcs]
        num_rows, num_bytes = _cut(dtype.itemsize * sum(part.shape[1] for part in parts))
        width = num_bytes // dtype.itemsize
        is_exact = dtype is torch.float32
        handle = self._handle(buffer, num_rows, to_all=is_exact)

        def room() -> torch.Tensor:
            if is_exact:
                return self._room(buffer, handle, width // num_rows).view(num_ranks, width)
            return torch.empty(num_ranks, width, dtype=dtype)

        rows = _packed(parts, width, dtype, room).view(num_ranks * num_rows, -1)
        event, sums = (
            self._sums(buffer, rows, handle)
            if is_exact
            else self._sums_of_parts(buffer, rows, handle)
        )

        def finish() -> None:
            _unpack(sums().view(1, width), [out.view(1, -1) for out in outs], scale)

        return _finishing(event, (*srcs, *outs), finish, returned)

    @on_device
    @torch.no_grad()
    def all_reduce(
        self,
        srcs: Tensors,
        outs: Tensors,
        returned: Returned,
        *,
        scale: float,
        async_finish: bool,
    ) -> EventOverlap:
        """Sums over ranks of every float32 `srcs[i]`, times `scale`, into `outs[i]`. Collective."""
        buffer, num_ranks = self._buffer(), self._owner.num_ranks
        parts = [src.view(1, -1) for src in srcs]
        slice_elements = -(-sum(part.shape[1] for part in parts) // num_ranks)
        num_rows, num_bytes = _cut(torch.float32.itemsize * slice_elements)
        hidden = num_bytes // torch.float32.itemsize // num_rows
        handle = self._handle(buffer, num_rows, to_all=True)
        rows = _packed(
            parts,
            num_ranks * num_rows * hidden,
            torch.float32,
            lambda: self._room(buffer, handle, hidden).view(1, -1),
        )
        sums = buffer.combine(rows.view(-1, hidden), handle)
        del rows
        result = buffer.dispatch(sums.mul_(scale), None, handle=handle, async_op=True)

        def finish() -> None:
            _unpack(result.x.view(1, -1), [out.view(1, -1) for out in outs])

        return _finishing(result.event, (*srcs, *outs), finish, returned)

    @staticmethod
    def _sums(
        buffer: EpBuffer, rows: torch.Tensor, handle: DispatchHandle
    ) -> tuple[CommEvent, Sums]:
        """Start the sums of every rank's part, added on the way."""
        combined = buffer.combine(rows, handle, async_op=True)
        assert isinstance(combined, CombineResult)
        return combined.event, lambda: combined.x

    def _sums_of_parts(
        self, buffer: EpBuffer, rows: torch.Tensor, handle: DispatchHandle
    ) -> tuple[CommEvent, Sums]:
        """Start sums like `_sums`, float32 whatever the dtype of the rows, added where they arrive."""
        arrived = buffer.dispatch(rows, None, handle=handle, async_op=True)

        def added() -> torch.Tensor:
            parts = arrived.x.view(self._owner.num_ranks, -1)
            total = torch.zeros(parts.shape[1], dtype=torch.float32)
            for part in parts:
                total += part
            return total

        return arrived.event, added

    def _buffer(self) -> EpBuffer:
        return self._owner.buffer_for(self._owner.num_ranks)

    def _room(self, buffer: EpBuffer, handle: DispatchHandle, hidden: int) -> torch.Tensor:
        """Float32 rows that a combine reads in place."""
        return buffer.empty_expert_output(handle, hidden=hidden, dtype=torch.float32)

    def _handle(self, buffer: EpBuffer, num_rows: int, *, to_all: bool) -> DispatchHandle:
        """Return the handle of so many rows from every rank to all, or to each. Collective if it is new."""
        if (num_rows, to_all) not in self._handles:
            ranks = torch.arange(self._owner.num_ranks)
            topk_idx = (
                ranks.repeat(num_rows, 1)
                if to_all
                else ranks.repeat_interleave(num_rows).unsqueeze(1)
            )
            rows = torch.zeros(len(topk_idx), ROW_BYTES_MULTIPLE, dtype=torch.uint8)
            self._handles[num_rows, to_all] = buffer.dispatch(rows, topk_idx).handle
        return self._handles[num_rows, to_all]


def _cut(num_bytes: int) -> tuple[int, int]:
    """The rows in which so many bytes travel, and the bytes of all of them.

    Their numbers are powers of two: few handles do for all sizes.
    """
    num_rows = 1 << (-(-num_bytes // MOST_ROW_BYTES) - 1).bit_length()
    return num_rows, num_rows * align(-(-num_bytes // num_rows), ROW_BYTES_MULTIPLE)


def _packed(
    parts: Tensors, width: int, dtype: torch.dtype, room: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """`[n, width]`, of `room` or the one part that fills it: the columns of all parts `[n, *]`."""
    sizes = [part.shape[1] for part in parts]
    if sizes == [width] and parts[0].dtype is dtype:
        return parts[0]
    packed = room()
    for place, part in zip(_columns(packed, sizes), parts, strict=True):
        place.copy_(part)
    return packed


def _unpack(packed: torch.Tensor, places: Tensors, scale: float | None = None) -> None:
    """The columns of `packed`, times `scale`, into places `[n, *]`."""
    sizes = [place.shape[1] for place in places]
    for part, place in zip(_columns(packed, sizes), places, strict=True):
        if scale is None:
            place.copy_(part)
        else:
            torch.mul(part, scale, out=place)


def _columns(packed: torch.Tensor, sizes: list[int]) -> tuple[torch.Tensor, ...]:
    """`packed` cut into so many columns; what is left over is padding."""
    return torch.split(packed, [*sizes, packed.shape[1] - sum(sizes)], dim=1)[: len(sizes)]


def _finishing(
    event: CommEvent, kept: Tensors, finish: Callable[[], None], returned: Returned
) -> EventOverlap:
    """An event whose first wait does the rest, and returns what is promised; `kept` live until then."""

    def ended(_kept: Tensors = kept) -> None:
        with torch.no_grad():
            finish()

    overlap = EventOverlap(EventHandle.of(event, ended))
    overlap.register_hook_after_wait(lambda: returned)
    return overlap
