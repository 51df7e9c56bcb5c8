"""Which rows of a dispatch are kept: from what every rank asks for, its limits and its masks.

Pure functions, equal on every rank. All tensors are on the CPU. R ranks, E experts.
"""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.backends import messages, routing
from moe_comm.backends.routing import Placement, RowOrder
from moe_comm.config import Capacity, Layout
from moe_comm.errors import Overflow

__all__ = ["CapacityDecision", "CapacityRequest", "admit", "ask"]


@dataclasses.dataclass(frozen=True, eq=False)
class CapacityRequest:
    """What the ranks of a dispatch ask for.

    Args:
        counts: int32 `[R, E + R + 2]`: as `PlanTensors.counts`, of what is asked for rather than
            kept; the last column but one has the rows a capacity allows, else -1.
        is_masked: bool `[R]`, masked by any rank.
    """

    counts: torch.Tensor
    is_masked: torch.Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class CapacityDecision:
    """What is kept of it.

    Args:
        counts: int32 `[R, E + R + 2]`, see `PlanTensors`.
        num_dropped_per_expert: int64 `[E]`.
        num_required_rows: int64 `[R]`, rows of every rank's result if nothing were dropped.
    """

    counts: torch.Tensor
    num_dropped_per_expert: torch.Tensor
    num_required_rows: torch.Tensor


def ask(topk_idx: torch.Tensor, placement: Placement, capacity: Capacity | None) -> torch.Tensor:
    """A rank's row of `CapacityRequest.counts`, int32 `[E + R + 2]`.

    Args:
        topk_idx: int64 `[T, K]`, valid expert ids.
        placement: Of the experts.
        capacity: Of the call on this rank.
    """
    most_rows = None if capacity is None else capacity.num_rows
    more = torch.tensor([-1 if most_rows is None else most_rows, topk_idx.shape[1]])
    return torch.cat([routing.count_choices(topk_idx, placement), more.to(torch.int32)])


def admit(
    asked: CapacityRequest,
    placement: Placement,
    order: RowOrder,
    capacity: Capacity | None,
    *,
    row_bytes: int = 0,
) -> CapacityDecision:
    """Decide what is kept.

    Args:
        asked: Of all ranks.
        placement: Of the experts.
        order: Of the rows.
        capacity: Of this rank; only what is equal on every rank is read.
        row_bytes: Of a row on arrival, for a CapacityError.

    Raises:
        CapacityError: Something is beyond a limit that raises; on every rank.
        ValueError: LOW_LATENCY: an expert has no place for all rows that are bound for it.
    """
    num_experts, num_ranks = placement.num_experts, placement.num_ranks
    counts = asked.counts.to(torch.int64)
    kept = counts[:, :num_experts].clone()
    kept[asked.is_masked] = 0
    kept[:, asked.is_masked[placement.expert_rank]] = 0
    to_rank = counts[:, num_experts : num_experts + num_ranks].clone()
    num_asked_rows = counts[:, -2]
    if order.layout is Layout.LOW_LATENCY:
        _check_places(kept, placement, order)
        required = _rows_of_ranks(kept, to_rank, placement, order)
    else:
        required = _rows_of_ranks(counts[:, :num_experts], to_rank, placement, order)
    num_rows = torch.where(num_asked_rows < 0, -1, torch.maximum(num_asked_rows, required))
    if capacity is not None and capacity.on_overflow != "grow":
        num_rows = num_asked_rows
        most_per_expert = capacity.num_rows_per_expert
        if capacity.on_overflow == "raise":
            overflows = _overflows(kept, required, num_asked_rows, placement, most_per_expert)
            if overflows:
                rows = kept.sum(dim=0)[placement.experts_of(overflows[0].rank_idx)]
                raise messages.beyond_limits(overflows, rows.tolist(), row_bytes)
        else:
            if most_per_expert is not None:
                kept = _first_rows(kept, torch.full((num_experts,), most_per_expert))
            kept = _within_windows(kept, num_asked_rows, placement, order)
    if order.layout is not Layout.RANK_MAJOR:
        to_rank[_rows_between_ranks(kept, placement) == 0] = 0
    return CapacityDecision(
        counts=torch.cat([kept, to_rank, num_rows.unsqueeze(1), counts[:, -1:]], dim=1).to(
            torch.int32
        ),
        num_dropped_per_expert=(counts[:, :num_experts] - kept).sum(dim=0),
        num_required_rows=required,
    )


def _rows_between_ranks(kept: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Choices that every rank sends to every rank: int64 `[R, R]`."""
    rows = torch.zeros(kept.shape[0], placement.num_ranks, dtype=torch.int64)
    return rows.index_add_(1, placement.expert_rank, kept)


def _rows_of_ranks(
    choices: torch.Tensor, to_rank: torch.Tensor, placement: Placement, order: RowOrder
) -> torch.Tensor:
    """Rows of every rank's result, int64 `[R]`."""
    if order.layout is Layout.RANK_MAJOR:
        return to_rank.sum(dim=0)
    _, padded = routing.expert_starts(choices, placement, order)
    rows = torch.zeros(placement.num_ranks, dtype=torch.int64)
    return rows.index_add_(0, placement.expert_rank, padded)


def _first_rows(choices: torch.Tensor, most: torch.Tensor) -> torch.Tensor:
    """The first `most[e]` choices of every expert in order of the sending rank: int64 `[R, E]`.

    Example:
        Two ranks ask 3 and 5 times for an expert of at most 4 rows: `[[3], [1]]`.
    """
    before = choices.cumsum(dim=0) - choices
    return torch.minimum((most - before).clamp(min=0), choices)


def _within_windows(
    choices: torch.Tensor, num_rows: torch.Tensor, placement: Placement, order: RowOrder
) -> torch.Tensor:
    """What has its padded place among the first `num_rows[r]` rows of rank r's window."""
    starts, _ = routing.expert_starts(choices, placement, order)
    most = num_rows[placement.expert_rank] - starts
    unlimited = torch.iinfo(torch.int64).max
    return _first_rows(choices, torch.where(num_rows[placement.expert_rank] < 0, unlimited, most))


def _overflows(
    choices: torch.Tensor,
    required: torch.Tensor,
    num_rows: torch.Tensor,
    placement: Placement,
    most_per_expert: int | None,
) -> list[Overflow]:
    """Every limit that is exceeded: experts ascending, then ranks ascending."""
    found = []
    owners = placement.expert_rank.tolist()
    for expert_idx, total in enumerate(choices.sum(dim=0).tolist()):
        if most_per_expert is not None and total > most_per_expert:
            found.append(Overflow(owners[expert_idx], expert_idx, total, most_per_expert))
    for rank_idx, (needed, available) in enumerate(
        zip(required.tolist(), num_rows.tolist(), strict=True)
    ):
        if 0 <= available < needed:
            found.append(Overflow(rank_idx, None, needed, available))
    return found


def _check_places(choices: torch.Tensor, placement: Placement, order: RowOrder) -> None:
    nothing = torch.zeros(placement.num_ranks, dtype=torch.int64)
    overflows = _overflows(choices, nothing, nothing, placement, order.num_places_per_expert)
    if overflows:
        raise messages.no_places(overflows)
