"""Plans that are kept between refits, for as long as models and ranks are what they were made for."""

from __future__ import annotations

import dataclasses

from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.module_tensors import ModuleState, RefitSide
from moe_comm.resharding.hold.deltas import Deltas
from moe_comm.resharding.hold.refit_group import MAX_PLANS, RefitGroup, identity_of
from moe_comm.resharding.hold.refit_models import Models
from moe_comm.resharding.hold.refit_options import RefitOptions
from moe_comm.resharding.move.weak_cache import WeakCache
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transform_protocol import ReshardTransform

Sizes = tuple[int, int, int, int, int]
"""Sizes of the TP, PP, EP, DP and expert TP groups of a model."""


@dataclasses.dataclass(frozen=True)
class PlanCacheKey:
    """Key of the refit that a plan is for.

    Args:
        rank: This rank in the group.
        src_config: Sizes of the source's groups; None where this rank has no source.
        dst_config: Sizes of the target's groups; None where this rank has no target.
        num_experts: Experts of the whole model.
        world_size: Ranks of the group.
        src_rank_offset: Added to the ranks of the source's groups.
        dst_rank_offset: Added to the ranks of the target's groups.
        pool_index: Index of the pool, of several pools of targets.
        src_model: Number of the source, see `identity_of`; 0 for none.
        dst_model: Number of the target; 0 for none.
        group: Number of the group.
    """

    rank: int
    src_config: Sizes | None
    dst_config: Sizes | None
    num_experts: int | None
    world_size: int = 0
    src_rank_offset: int = 0
    dst_rank_offset: int = 0
    pool_index: int = 0
    src_model: int = 0
    dst_model: int = 0
    group: int = 0


def _sizes_of(core: RefitSide | None) -> Sizes | None:
    """Sizes of the groups of a model; None where it has no groups."""
    groups = getattr(core, "pg_collection", None)
    if core is None or groups is None:
        return None
    tp, pp, ep, dp, expt_tp = (
        1 if (group := getattr(groups, name, None)) is None else group.size()
        for name in ("tp", "pp", "ep", "dp", "expt_tp")
    )
    return tp, pp, ep, dp, expt_tp


def build_plan_cache_key(
    models: Models, group: RefitGroup, options: RefitOptions, pool_index: int
) -> PlanCacheKey:
    """The key of a refit between these models."""
    return PlanCacheKey(
        rank=group.rank_idx,
        src_config=_sizes_of(models.source),
        dst_config=_sizes_of(models.target),
        num_experts=models.num_experts,
        world_size=group.num_ranks,
        src_rank_offset=options.src_rank_offset,
        dst_rank_offset=options.dst_rank_offset,
        pool_index=pool_index,
        src_model=identity_of(models.source),
        dst_model=identity_of(models.target),
        group=identity_of(group.key),
    )


@dataclasses.dataclass
class CachedPlan:
    """A plan, and what it was made for.

    Args:
        plan: This rank's.
        plan_id: Id that is equal on all ranks that made it together, and different for any other plan.
        states: States of the source and the target when it was made.
        destinations: Metadata by name that the target was planned from; a parameter that a transform has
            taken out of the model is planned again from this.
        is_strict: Whether it was planned with `strict` (see `swap_model_weights`).
        execution_batch_bytes: Bytes that this rank asked for.
        transformed: Names, in both modules, that a transform handled when it was made: the dtypes of
            these need not become each other by themselves.
        deltas: State of refits that move only what changed.
    """

    plan: ReshardPlan
    plan_id: int
    states: tuple[ModuleState, ModuleState]
    destinations: dict[str, ParameterMetadata]
    is_strict: bool
    execution_batch_bytes: int | None = None
    transformed: frozenset[str] = frozenset()
    deltas: Deltas = dataclasses.field(default_factory=Deltas)

    def serves(
        self, states: tuple[ModuleState, ModuleState], transform: ReshardTransform | None
    ) -> bool:
        """Return whether it is a plan for models in these states, and for a transform."""
        handles = getattr(transform or self.plan.transform, "should_transform", None)
        if self.transformed and (handles is None or not all(map(handles, self.transformed))):
            return False
        source, target = states
        return self.states[0].is_alike(source) and self.states[1].is_alike(target, handles)


class CachedPlans:
    """Plans of one rank between two models, the last used first.

    There may be several plans: a rank that only sends does not see whom it sends to.
    """

    def __init__(self) -> None:
        self._plans: list[CachedPlan] = []

    @property
    def last(self) -> CachedPlan | None:
        """The plan that was used last, whether or not it still fits."""
        return self._plans[0] if self._plans else None

    def fitting(
        self,
        states: tuple[ModuleState, ModuleState],
        transform: ReshardTransform | None,
        *,
        is_strict: bool,
        execution_batch_bytes: int | None,
    ) -> list[int]:
        """Ids of the plans that serve models in these states."""
        return [
            cached.plan_id
            for cached in self._plans
            if cached.is_strict >= is_strict
            and cached.execution_batch_bytes == execution_batch_bytes
            and cached.serves(states, transform)
        ]

    def find(self, plan_id: int) -> CachedPlan | None:
        """The plan of this id, which becomes the last used."""
        for cached in self._plans:
            if cached.plan_id == plan_id:
                self.put(cached)
                return cached
        return None

    def put(self, cached: CachedPlan) -> None:
        """Keep a plan, as the last used."""
        others = [each for each in self._plans if each is not cached]
        self._plans = [cached, *others][:MAX_PLANS]


plan_cache: WeakCache[PlanCacheKey, CachedPlans] = WeakCache()
"""The plans of all refits of this process."""
