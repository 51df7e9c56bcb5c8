"""Bytes an operation cannot avoid moving, over all ranks: the formulas behind GB/s."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.cli.bench.case import BenchCase, make_places, make_topk_idx
from moe_comm.ep.config import Layout

__all__ = [
    "RankTraffic",
    "combine_bytes",
    "copy_in_bytes",
    "dispatch_bytes",
    "num_rows_per_rank",
    "rank_traffic",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTraffic:
    """Rows of one rank; routing metadata is not counted, it is a thousandth of a row.

    Args:
        row_bytes: Bytes of a row of the input, of an expert output and of the sums.
        dispatched_row_bytes: Bytes of a row as it is dispatched: quantized, with its scale factors.
        num_tokens: Tokens it sends.
        num_read_tokens: Tokens with at least one choice.
        num_sent_rows: Rows it writes to receivers; K a token unless a choice is -1 (EXPERT_MAJOR), one
            per distinct rank (RANK_MAJOR).
        num_recv_rows: Rows written to it, without padding.
        num_padding_rows: Zero rows it writes to reach the alignment.
        num_window_rows: Rows of its window, filled or not.
    """

    row_bytes: int
    dispatched_row_bytes: int
    num_tokens: int
    num_read_tokens: int
    num_sent_rows: int
    num_recv_rows: int
    num_padding_rows: int
    num_window_rows: int

    @property
    def dispatch_read_bytes(self) -> int:
        """Every token that has a choice, once."""
        return self.num_read_tokens * self.row_bytes

    @property
    def dispatch_written_bytes(self) -> int:
        """Every row and every padding row, once."""
        return (self.num_sent_rows + self.num_padding_rows) * self.dispatched_row_bytes


def dispatch_bytes(traffic: RankTraffic) -> int:
    """Read every token once, write every row and every padding row once.

    Example:
        T tokens with K choices, no padding: `T * (1 + K) * row_bytes`. Quantized from bfloat16 with a
        float32 scale factor per 128 channels: `T * hidden * (2 + K * (1 + 4 / 128))`.
    """
    return traffic.dispatch_read_bytes + traffic.dispatch_written_bytes


def combine_bytes(traffic: RankTraffic) -> int:
    """Read every row in place, write one sum per token.

    Example:
        T tokens with K choices: `T * (K + 1) * row_bytes`.
    """
    return (traffic.num_sent_rows + traffic.num_tokens) * traffic.row_bytes


def copy_in_bytes(traffic: RankTraffic) -> int:
    """Read and write every received row once: an expert output that lies outside the heap.

    Example:
        Balanced: `2 * T * K * row_bytes`, which makes a combine of an ordinary tensor
        `T * (3 K + 1) * row_bytes`.
    """
    return 2 * traffic.num_recv_rows * traffic.row_bytes


def rank_traffic(case: BenchCase, rank_idx: int) -> RankTraffic:
    """Count the rows and bytes that the case makes one rank move."""
    own = make_topk_idx(case, rank_idx)
    num_recv_rows = 0
    for src_rank_idx in range(case.num_ranks):
        num_recv_rows += int(num_rows_per_rank(case, src_rank_idx)[rank_idx])
    num_padding_rows = _num_padding_rows(case, rank_idx)
    num_window_rows = num_recv_rows + num_padding_rows
    if case.layout is Layout.LOW_LATENCY:
        num_window_rows = (
            int((case.place_rank == rank_idx).sum()) * case.num_ranks * case.num_tokens
        )
    return RankTraffic(
        row_bytes=case.row_bytes,
        dispatched_row_bytes=case.dispatched_row_bytes,
        num_tokens=case.num_tokens,
        num_read_tokens=int((own >= 0).any(dim=1).sum()),
        num_sent_rows=int(num_rows_per_rank(case, rank_idx).sum()),
        num_recv_rows=num_recv_rows,
        num_padding_rows=num_padding_rows,
        num_window_rows=num_window_rows,
    )


def num_rows_per_rank(case: BenchCase, src_rank_idx: int) -> torch.Tensor:
    """Rows that one rank sends to every rank.

    Returns:
        int64 `[num_ranks]`.
    """
    places = make_places(case, src_rank_idx)
    dst_rank = torch.where(places >= 0, case.place_rank[places.clamp(min=0)], -1)
    if case.layout != Layout.RANK_MAJOR:
        return torch.bincount(dst_rank[dst_rank >= 0], minlength=case.num_ranks)
    goes_to = dst_rank[:, :, None] == torch.arange(case.num_ranks)
    return goes_to.any(dim=1).sum(dim=0)


def _num_padding_rows(case: BenchCase, rank_idx: int) -> int:
    if case.layout != Layout.EXPERT_MAJOR:
        return 0
    counts = torch.zeros(len(case.place_rank), dtype=torch.int64)
    for src_rank_idx in range(case.num_ranks):
        places = make_places(case, src_rank_idx)
        counts += torch.bincount(places[places >= 0], minlength=len(counts))
    own = counts[case.place_rank == rank_idx]
    return int((-own % case.expert_alignment).sum())
