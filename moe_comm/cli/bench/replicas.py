"""Replicas of experts: placed from earlier batches, and how many rows that leaves to every rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from moe_comm.cli.bench.case import BenchCase, make_topk_idx
from moe_comm.ep.placement import Placement, ReplicaRule
from moe_comm.ep.routing_trace import load_routing_trace

NUM_EARLIER_BATCHES = 8


def place_replicas(
    case: BenchCase,
    num_replicas: int,
    *,
    replica_rule: ReplicaRule = "balanced",
    versus_given: bool = False,
) -> BenchCase:
    """The case of a later batch, with a placement planned from up to `NUM_EARLIER_BATCHES` before it.

    Args:
        case: Case of the first batch, without a placement.
        num_replicas: Slots of every rank beyond those that experts without replicas take.
        replica_rule: Rule, as in `BenchCase`.
        versus_given: Whether to compare as in `BenchCase`.

    Raises:
        ValueError: A trace has no two batches.
    """
    num_batches = NUM_EARLIER_BATCHES
    if case.routing is not None:
        num_tokens = load_routing_trace(case.routing).topk_idx[..., 0].numel()
        batch_tokens = max(1, case.num_ranks * case.num_tokens)
        num_batches = min(num_batches, num_tokens // batch_tokens - 1)
        if num_batches < 1:
            raise ValueError(
                f"replicas are placed by batches before the one that is measured: {case.routing} has "
                f"{num_tokens} tokens, fewer than two batches of {case.num_ranks} ranks x "
                f"{case.num_tokens} tokens"
            )
    loads = torch.zeros(case.num_experts, dtype=torch.int64)
    for batch_idx in range(num_batches):
        loads += _counts(dataclasses.replace(case, batch_idx=batch_idx)).sum(0)
    placement = placement_by_loads(loads, case.num_ranks, num_replicas)
    return dataclasses.replace(
        case,
        batch_idx=num_batches,
        placement=placement,
        replica_rule=replica_rule,
        versus_given=versus_given,
    )


def placement_by_loads(loads: torch.Tensor, num_ranks: int, num_replicas: int) -> Placement:
    """A placement with so many slots a rank beyond those that experts without replicas take.

    Args:
        loads: `[E]`, of every expert.
        num_ranks: R.
        num_replicas: Further slots of every rank.
    """
    num_slots = -(-len(loads) // num_ranks) + num_replicas
    # Here, because the other commands work without the native module.
    from moe_comm.ep.planner import plan_placement

    (placement,) = plan_placement(loads[None], num_ranks, num_slots)
    return placement


def slots_of_rank(case: BenchCase, rank_idx: int) -> list[int]:
    """The expert in every slot of one rank, -1 for an empty one."""
    experts: list[int] = case.place_expert[case.place_rank == rank_idx].tolist()
    return experts


def summarize_rows(case: BenchCase, found: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Rows of every rank, of the case and of its baseline, and the best that its placement allows.

    Args:
        case: The case.
        found: Rows that a dispatch brought every rank, of every side.
    """
    sides = [_summary(rows) for rows in found]
    summary: dict[str, Any] = dict(sides[0])
    if case.placement is not None:
        # Here, because the other commands work without the native module.
        from moe_comm.ep.planner import fullest_rank

        loads = _counts(case).sum(0)
        optimum = fullest_rank(loads, case.placement)
        summary["optimum_rows"] = optimum
        summary["optimum_over_mean"] = optimum * case.num_ranks / max(1, int(loads.sum()))
        summary["largest_over_optimum"] = sides[0]["largest_rows"] / max(1, optimum)
    if case.baseline is not None:
        summary["baseline"] = {"name": case.baseline[0], **sides[1]}
    return summary


def _counts(case: BenchCase) -> torch.Tensor:
    """Rows of every rank for every expert: int64 `[R, E]`."""
    choices = (make_topk_idx(case, rank_idx) for rank_idx in range(case.num_ranks))
    return torch.stack(
        [torch.bincount(ids[ids >= 0], minlength=case.num_experts) for ids in choices]
    )


def _summary(rows: Sequence[int]) -> dict[str, Any]:
    return {
        "rows_per_rank": list(rows),
        "largest_rows": max(rows),
        "largest_over_mean": max(rows) * len(rows) / max(1, sum(rows)),
    }
