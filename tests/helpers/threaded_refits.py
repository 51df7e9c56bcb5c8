"""Refits between ranks that are threads, and what every test of them needs."""

from __future__ import annotations

from typing import Any

import pytest

from moe_comm.resharding import refit
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.hold import refit_pass
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.sharded_nets import ShardedNet


def threads(fn: Any, num_ranks: int, *args: Any) -> list[Any]:
    return run_ranks(fn, num_ranks, *args, mode="threads")


def nets(context: RankContext, src: str, dst: str, **options: Any) -> tuple[ShardedNet, ShardedNet]:
    """Source and target over all ranks."""
    made = (
        ShardedNet(Parallelism.parse(text, context.num_ranks), context.rank_idx, **options)
        for text in (src, dst)
    )
    return next(made), next(made)


def swap(context: RankContext, src: Any, dst: Any, **options: Any) -> None:
    refit.swap_model_weights(src, dst, "symmetric", group=context.group, **options)


def error_of(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""


def count_plans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Ranks that made a plan from here on, once per plan."""
    made: list[int] = []
    build = refit_pass.build_local_reshard_plan

    def counted(*args: Any, **options: Any) -> ReshardPlan:
        plan = build(*args, **options)
        made.append(plan.rank)
        return plan

    monkeypatch.setattr(refit_pass, "build_local_reshard_plan", counted)
    return made
