"""Refits between ranks that are threads, and what every test of them needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.resharding import is_stale, refit
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


def refuse_offloaded(context: RankContext, method: Any, side: str) -> str:
    """Error of a refit while a parameter of rank 1 at an offset is offloaded; it works before and after."""
    src, dst = nets(context, "tp2", "single")
    up = (src if side == "source" else dst).up
    flat = torch.zeros(16 + up.numel(), dtype=up.dtype)
    up.data = flat[16:].view(up.shape)
    held = refit.Refit(src, dst, method, context.group)
    text = ""
    for seed in range(3):
        src.fill(seed)
        if seed == 1 and context.rank_idx == 1:
            flat.untyped_storage().resize_(0)
        if seed == 1:
            text = error_of(held.run)
            assert not is_stale(dst)
        if seed == 1 and context.rank_idx == 1:
            flat.untyped_storage().resize_(flat.nbytes)
        src.fill(seed)
        held.run()
        assert dst.wrong(seed) == []
    return text


def spoil_what_was_saved(context: RankContext, method: Any) -> None:
    """A backward through weights that a refit has overwritten says so, in the first run and later."""
    src, dst = nets(context, "tp2", "single")
    held = refit.Refit(src, dst, method, context.group)
    for seed in range(3):
        loss = (dst.up * dst.up).sum()
        src.fill(seed)
        held.run()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


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
