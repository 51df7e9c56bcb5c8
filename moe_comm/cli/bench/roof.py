"""What the machine can do with the bytes of an operation at this moment."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.cli.bench.traffic import RankTraffic

__all__ = ["Roof", "make_roof"]

LINE_BYTES = 64


class Roof:
    """Plain loops that move one rank's bytes of dispatch, combine and copy-in.

    They use the operation's own memory: rows of x as source, windows of the heap as destination, so
    page size and data are the operation's. Contents of the windows change; rows stay as random.

    Args:
        kernels: `moe_comm._host.kernels`.
        traffic: Of this rank.
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
        num_copies = max(1, round(traffic.num_sent_rows / max(1, traffic.num_tokens)))
        # The window may be smaller than what this rank sends to all: then it is written in turns.
        stream_bytes = min(row_bytes.size // num_copies, x_bytes.size, sum_bytes.size)
        stream_bytes -= stream_bytes % LINE_BYTES
        self._streams = [
            row_bytes[i * stream_bytes : (i + 1) * stream_bytes] for i in range(num_copies)
        ]
        self._fan_out_turns = _turns(x_bytes, stream_bytes)
        self._sum_turns = _turns(sum_bytes, stream_bytes)
        num_copied = min(row_bytes.size, ordinary_bytes.size)
        num_copied -= num_copied % LINE_BYTES
        self._copy_src = ordinary_bytes[:num_copied]
        self._copy_dst = row_bytes[:num_copied]
        self.dispatch_bytes = sum(part.size for part in self._fan_out_turns) * (1 + num_copies)
        self.combine_bytes = sum(part.size for part in self._sum_turns) * (1 + num_copies)
        self.copy_in_bytes = 2 * num_copied

    def dispatch(self) -> None:
        """Read every row of x once, write K copies."""
        for part in self._fan_out_turns:
            # Reads are in address order here, so the length of a row changes nothing.
            streams = [stream[: part.size] for stream in self._streams]
            self._kernels.roof_fan_out(part, LINE_BYTES, streams)

    def combine(self) -> None:
        """Read K rows and write one sum, for every token."""
        for part in self._sum_turns:
            self._kernels.roof_sum([stream[: part.size] for stream in self._streams], part)

    def copy_in(self) -> None:
        """Copy the ordinary rows into the window."""
        self._kernels.roof_copy(self._copy_src, self._copy_dst)


def _turns(array: Any, turn_bytes: int) -> list[Any]:
    usable = array.size - array.size % LINE_BYTES
    return [array[at : min(at + turn_bytes, usable)] for at in range(0, usable, max(1, turn_bytes))]


def make_roof(
    traffic: RankTraffic,
    x: torch.Tensor,
    rows: torch.Tensor,
    sums: torch.Tensor,
    ordinary: torch.Tensor,
) -> Roof | None:
    """The roof, or None where there is nothing to time it with (no native module, no rows)."""
    if rows.shape[0] == 0 or sums.shape[0] == 0 or traffic.num_sent_rows == 0:
        return None
    try:
        from moe_comm import _host
    except ImportError:
        return None
    return Roof(_host.kernels, traffic, x, rows, sums, ordinary)
