"""Rows that a dispatch keeps: from the requests of every rank, its limits and its masks.

Computed by csrc/layout, equal on every rank. All tensors are on the CPU. R ranks, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from moe_comm import _host
from moe_comm.ep.backends.expert_ranks import Placement
from moe_comm.ep.config import Capacity, Layout, numbers_of


@dataclasses.dataclass(frozen=True, eq=False)
class CapacityDecision:
    """Rows that are kept of those that the ranks of a dispatch ask for.

    Args:
        counts: int32 `[R, E + R + 2]`, see `PlanTensors`.
        asked: See `PlanTensors`.
    """

    counts: torch.Tensor
    asked: torch.Tensor


def ask(
    topk_idx: torch.Tensor,
    placement: Placement,
    capacity: Capacity | None,
    masked_ranks: Sequence[int] = (),
    replicas: _host.layout.Replicas | None = None,
) -> torch.Tensor:
    """Count the rows that a rank asks for: its row of a count matrix, int32 `[E + R + 2]`.

    As in `PlanTensors.counts`, of what is asked for rather than kept; -1 for tokens bound for a rank
    that it masks; the last but one has the rows that its capacity allows, else -1.

    Args:
        topk_idx: int64 `[T, K]`, contiguous.
        placement: Placement of the experts.
        capacity: Capacity of the call on this rank.
        masked_ranks: LOW_LATENCY: ranks that it leaves out.
        replicas: Replicas of the experts, if choices are of logical experts.

    Raises:
        ValueError: An id is outside `[-1, E)`.

    Example:
        2 ranks, 4 experts, `topk_idx = [[0, 1], [3, -1]]`: `[1, 1, 0, 1, 1, 1, -1, 2]`.
    """
    num_experts, num_ranks = placement.num_experts, placement.num_ranks
    row = torch.empty(_host.layout.num_counts(num_ranks, num_experts), dtype=torch.int32)
    _host.layout.count_choices(placement.native, topk_idx, row, replicas)
    for rank_idx in masked_ranks:
        row[num_experts + rank_idx] = -1
    row[-2], row[-1] = numbers_of(capacity)[0], topk_idx.shape[1]
    return row


def decide(
    asked: torch.Tensor,
    rank_idx: int,
    placement: Placement,
    layout: Layout,
    arrangement: _host.layout.Arrangement,
    capacity: Capacity | None,
    *,
    row_bytes: int = 0,
) -> CapacityDecision:
    """Decide what is kept.

    Args:
        asked: int32 `[R, E + R + 2]`: what every rank has asked for.
        rank_idx: This rank.
        placement: Placement of the experts.
        layout: Layout of the rows.
        arrangement: Arrangement of the rows.
        capacity: Capacity of this rank; only what is equal on every rank is read.
        row_bytes: Bytes of a row on arrival, for a CapacityError.

    Raises:
        CapacityError: Something is beyond a limit that raises; on every rank.
        ValueError: LOW_LATENCY: an expert has no place for all rows that are bound for it.
    """
    experts = placement.native
    _, expert_capacity, on_overflow = numbers_of(capacity)
    kept = _host.layout.keep_rows(asked, experts, arrangement, expert_capacity, on_overflow)
    # Choices of a masked rank take no place of an expert.
    limited = kept if layout is Layout.LOW_LATENCY else asked
    _host.layout.check_overflow(
        limited, experts, arrangement, expert_capacity, on_overflow, row_bytes
    )
    num_choices = _host.layout.received_rows(asked, experts, arrangement, rank_idx)[0]
    num_rows = _host.layout.num_required_rows(asked, experts, arrangement, rank_idx)
    return CapacityDecision(kept, torch.cat([torch.tensor([num_rows]), num_choices]))
