"""Bytes that cross nodes in an operation, counted and by formula."""

from __future__ import annotations

import torch

from moe_comm import Communicator, EpBuffer, EpConfig, Layout


def rows_of(x: torch.Tensor, rank_idx: int) -> torch.Tensor:
    """Outputs of the experts of a rank: other bits on every rank."""
    return (x.double() * (1.0 + 0.125 * rank_idx) + 0.25).to(x.dtype)


def agreement_bytes(num_experts: int, num_ranks: int) -> int:
    """The message that opens an operation: 144 bytes and the counts (or 320 bytes of text), to a multiple of 64."""
    return -(-(144 + max(320, 4 * (num_experts + num_ranks + 2))) // 64) * 64


def counted_combines(
    comm: Communicator,
    config: EpConfig,
    batch: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    layout: Layout,
) -> list[tuple[int, int]]:
    """Bytes between nodes, out of this rank and into it, of combines of one dispatch.

    One of rows; but in `LOW_LATENCY`, one of rows and the weights pulled with them, and one of weights
    alone.
    """
    x, topk_idx, weights = batch
    has_weights = layout is not Layout.LOW_LATENCY
    found = []
    with EpBuffer(comm, config) as buffer:
        result = buffer.dispatch(x, topk_idx, weights if has_weights else None, layout=layout)
        rows = rows_of(result.x, comm.rank_idx)
        calls = [
            lambda: buffer.combine(rows, result.handle),
            lambda: buffer.combine(rows, result.handle, row_weights=result.topk_weights),
            lambda: buffer.combine(None, result.handle, row_weights=result.topk_weights),
        ]
        for call in calls if has_weights else calls[:1]:
            before = buffer.internode_bytes()
            call()
            after = buffer.internode_bytes()
            found.append((after[0] - before[0], after[1] - before[1]))
    return found
