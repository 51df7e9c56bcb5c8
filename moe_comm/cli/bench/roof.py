"""Speed that the machine can reach with the bytes of an operation at this moment."""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_comm.cli.bench.traffic import (
    RankTraffic,
    combine_bytes,
    copy_in_bytes,
    dispatch_bytes,
)

LINE_BYTES = 64


class Roof:
    """Plain loops that move one rank's bytes of dispatch, combine and copy-in.

    They use the operation's own memory: rows of x as source, windows of the heap as destination, so
    page size and data are the operation's. Contents of the windows change; rows stay as random.

    Args:
        kernels: `moe_comm._host.kernels`.
        traffic: Traffic of this rank.
        x: `[num_tokens, hidden]`.
        rows: `[M, hidden]` in the heap, scratch.
        sums: `[num_tokens, hidden]` in the heap, scratch.
        ordinary: `[M, hidden]` outside the heap, read only.
    """

    def __init__(
        self,
        kernels: Any,
        traffic: RankTraffic,
        x: torch.Tensor,
        rows: torch.Tensor,
        sums: torch.Tensor,
        ordinary: torch.Tensor,
    ) -> None:
        self._kernels = kernels
        x_bytes, row_bytes, sum_bytes, ordinary_bytes = (
            tensor.view(torch.uint8).view(-1).numpy() for tensor in (x, rows, sums, ordinary)
        )
        # So many bytes are written for every byte read: some of x goes to one copy more than the rest.
        num_written = traffic.dispatch_written_bytes / max(1, traffic.dispatch_read_bytes)
        few = max(1, math.floor(num_written))
        more_bytes = _whole_lines(round(max(0.0, num_written - few) * x_bytes.size))
        self._fan_outs = [
            *_fan_outs(x_bytes[:more_bytes], row_bytes, few + 1),
            *_fan_outs(x_bytes[more_bytes:], row_bytes, few),
        ]
        num_sources = max(1, round(traffic.num_sent_rows / max(1, traffic.num_tokens)))
        stream_bytes = _whole_lines(min(row_bytes.size // num_sources, sum_bytes.size))
        sources = _streams(row_bytes, stream_bytes, num_sources)
        self._sums = [
            ([stream[: part.size] for stream in sources], part)
            for part in _turns(sum_bytes, stream_bytes)
        ]
        num_copied = _whole_lines(min(row_bytes.size, ordinary_bytes.size))
        self._copy_src = ordinary_bytes[:num_copied]
        self._copy_dst = row_bytes[:num_copied]
        self.dispatch_bytes = sum(part.size * (1 + len(to)) for part, to in self._fan_outs)
        self.combine_bytes = sum(part.size for _, part in self._sums) * (1 + num_sources)
        self.copy_in_bytes = 2 * num_copied

    def dispatch(self, **how: Any) -> None:
        """Read every row of x once, write as many bytes as its copies have.

        Args:
            how: `streaming` and `num_passes` of the kernels; both also of `combine`.
        """
        for part, copies in self._fan_outs:
            # Reads are in address order here, so the length of a row changes nothing.
            self._kernels.roof_fan_out(part, LINE_BYTES, copies, **how)

    def combine(self, **how: Any) -> None:
        """Read K rows and write one sum, for every token."""
        for streams, part in self._sums:
            self._kernels.roof_sum(streams, part, **how)

    def dispatch_and_combine(self, **how: Any) -> None:
        """Both by ranks that meet before rows move and when they have moved, as the operations do.

        What ranks that share cores cannot go below: whoever waits has to let another run.

        Args:
            how: `words` and `rank_idx`, where they meet; `streaming` and `num_passes`.
        """
        self._kernels.roof_of_meeting_ranks(self._fan_outs, self._sums, LINE_BYTES, **how)

    def copy_in(self) -> None:
        """Copy the ordinary rows into the window."""
        self._kernels.roof_copy(self._copy_src, self._copy_dst)


class DeviceRoof:
    """The GPU's own copy moving as many bytes as an operation reads and writes, half of them each way.

    Args:
        traffic: Traffic of this rank.
        source: `[M, hidden]` on the GPU, read only.
        target: `[M, hidden]` in its heap, scratch.
    """

    def __init__(self, traffic: RankTraffic, source: torch.Tensor, target: torch.Tensor) -> None:
        self._source = source.view(torch.uint8).view(-1)
        self._target = target.view(torch.uint8).view(-1)
        self.dispatch_bytes = _even(dispatch_bytes(traffic))
        self.combine_bytes = _even(combine_bytes(traffic))
        self.copy_in_bytes = _even(copy_in_bytes(traffic))

    def dispatch(self) -> None:
        """Copy as many bytes as a dispatch."""
        self._copy(self.dispatch_bytes)

    def combine(self) -> None:
        """Copy as many bytes as a combine in place."""
        self._copy(self.combine_bytes)

    def copy_in(self) -> None:
        """Copy as many bytes as copying the rows into the window."""
        self._copy(self.copy_in_bytes)

    def _copy(self, num_bytes: int) -> None:
        left = num_bytes // 2
        while left > 0:
            part = min(left, self._source.numel(), self._target.numel())
            self._target[:part].copy_(self._source[:part], non_blocking=True)
            left -= part


def _even(num_bytes: int) -> int:
    return num_bytes - num_bytes % 2


def _fan_outs(src: Any, rows: Any, num_copies: int) -> list[tuple[Any, list[Any]]]:
    """Parts of `src` and the copies of each; a window that is too small for all is written in turns."""
    stream_bytes = _whole_lines(min(rows.size // num_copies, src.size))
    copies = _streams(rows, stream_bytes, num_copies)
    return [(part, [copy[: part.size] for copy in copies]) for part in _turns(src, stream_bytes)]


def _streams(array: Any, stream_bytes: int, num_streams: int) -> list[Any]:
    return [array[i * stream_bytes : (i + 1) * stream_bytes] for i in range(num_streams)]


def _whole_lines(num_bytes: int) -> int:
    return num_bytes - num_bytes % LINE_BYTES


def _turns(array: Any, turn_bytes: int) -> list[Any]:
    if turn_bytes == 0:
        return []
    usable = _whole_lines(array.size)
    return [array[at : min(at + turn_bytes, usable)] for at in range(0, usable, turn_bytes)]


def make_roof(
    traffic: RankTraffic,
    x: torch.Tensor,
    rows: torch.Tensor,
    sums: torch.Tensor,
    ordinary: torch.Tensor,
) -> Roof | DeviceRoof | None:
    """The roof, or None where there is nothing to time it with (no native module, no rows)."""
    if rows.shape[0] == 0 or sums.shape[0] == 0 or traffic.num_sent_rows == 0:
        return None
    if x.device.type == "cuda":
        return DeviceRoof(traffic, ordinary, rows)
    try:
        from moe_comm import _host
    except ImportError:
        return None
    roof = Roof(_host.kernels, traffic, x, rows, sums, ordinary)
    return roof if roof.dispatch_bytes and roof.combine_bytes else None
