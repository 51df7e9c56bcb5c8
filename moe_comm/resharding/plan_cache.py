"""Plans that are kept between refits, for as long as models and ranks are what they were made for."""

from __future__ import annotations

import dataclasses
import operator
import threading
import weakref
from itertools import chain, islice
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from moe_comm.resharding.metadata import ParameterMetadata
from moe_comm.resharding.module_tensors import ModuleState
from moe_comm.resharding.plan import ReshardPlan
from moe_comm.resharding.refit_group import MAX_PLANS, RefitGroup, identity_of
from moe_comm.resharding.transform_protocol import ReshardTransform
from moe_comm.resharding.utils import get_refit_tensor_dict

__all__ = ["CachedPlan", "Contents", "PlanCache", "PlanCacheKey", "build_plan_cache_key"]

Sizes = tuple[int, int, int, int, int]
"""Of the TP, PP, EP, DP and expert TP groups of a model."""

_MEMO = "_refit_config_tuple"
_DTYPE = operator.attrgetter("dtype")
_CUT_ATTRIBUTES = (
    "tensor_model_parallel",
    "partition_dim",
    "partition_stride",
    "partition_sizes",
    "allreduce",
    "expert_dim",
    "expert_view",
)


@dataclasses.dataclass(frozen=True)
class PlanCacheKey:
    """Which refit a plan is for.

    Args:
        rank: In the group.
        src_config: Sizes of the source's groups; None where this rank has no source.
        dst_config: Sizes of the target's groups; None where this rank has no target.
        num_experts: Of the whole model.
        world_size: Ranks of the group.
        src_rank_offset: Added to the ranks of the source's groups.
        dst_rank_offset: Added to the ranks of the target's groups.
        pool_index: Of several pools of targets.
        src_model: Which source, see `identity_of`; 0 for none.
        dst_model: Which target; 0 for none.
        group: Which group.
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


def config_of(core: torch.nn.Module | None) -> Sizes | None:
    """Sizes of the groups of a model, kept on it; None where it has no groups."""
    groups = getattr(core, "pg_collection", None)
    if core is None or groups is None:
        return None
    known = core.__dict__.get(_MEMO)
    if known is None:
        tp, pp, ep, dp, expt_tp = (
            1 if (group := getattr(groups, name, None)) is None else group.size()
            for name in ("tp", "pp", "ep", "dp", "expt_tp")
        )
        known = core.__dict__[_MEMO] = (tp, pp, ep, dp, expt_tp)
    sizes: Sizes = known
    return sizes


def build_plan_cache_key(
    src_core: torch.nn.Module | None,
    tgt_core: torch.nn.Module | None,
    num_experts: int | None,
    group: RefitGroup,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
    pool_index: int = 0,
) -> PlanCacheKey:
    """The key of a refit between these models."""
    return PlanCacheKey(
        rank=group.rank_idx,
        src_config=config_of(src_core),
        dst_config=config_of(tgt_core),
        num_experts=num_experts,
        world_size=group.num_ranks,
        src_rank_offset=src_rank_offset,
        dst_rank_offset=dst_rank_offset,
        pool_index=pool_index,
        src_model=identity_of(src_core),
        dst_model=identity_of(tgt_core),
        group=identity_of(group.key),
    )


def _cut_of(tensor: torch.Tensor) -> Any:
    """What a tensor says of how it is cut; None where it says nothing."""
    if isinstance(tensor, DTensor):
        return tensor._spec
    attributes = vars(tensor)
    return tuple(map(str, map(attributes.get, _CUT_ATTRIBUTES))) if attributes else None


class Contents:
    """What a model held when a plan was made, and how it was cut. Keeps no tensor alive.

    Args:
        core: The model; None for none.
    """

    def __init__(self, core: torch.nn.Module | None) -> None:
        tensors = {} if core is None else get_refit_tensor_dict(core)
        self.names = list(tensors)
        # Sizes of all tensors in one list of numbers: ten thousand `torch.Size` that live on would
        # set off a full collection of garbage every few refits.
        self.dims = list(map(torch.Tensor.dim, tensors.values()))
        self.sizes = list(chain.from_iterable(map(torch.Tensor.size, tensors.values())))
        self.dtypes = list(map(_DTYPE, tensors.values()))
        # How a tensor is cut is not in its shape.
        self.specs = list(map(_cut_of, tensors.values()))
        self.groups: object = getattr(core, "pg_collection", None)

    @staticmethod
    def of(core: torch.nn.Module | None, state: ModuleState) -> Contents:
        """What a model in this state holds: the same object as the last time if it is the same state."""
        if core is None:
            return Contents(None)
        known = _known_contents.get(core)
        groups: object = getattr(core, "pg_collection", None)
        if known is None or known[0] is not state or known[1].groups != groups:
            known = _known_contents[core] = state, Contents(core)
        return known[1]

    def is_same(self, other: Contents, transform: ReshardTransform | None) -> bool:
        """Whether a plan made for one serves the other.

        Args:
            other: What the model holds now.
            transform: Writes parameters whatever the model calls them; those do not count.
        """
        if self is other:
            return True
        if self.groups != other.groups:
            return False
        mine = self.names, self.dims, self.sizes, self.dtypes, self.specs
        theirs = other.names, other.dims, other.sizes, other.dtypes, other.specs
        if mine == theirs:
            return True
        if transform is None:
            return False
        return self._without(transform) == other._without(transform)

    def _without(self, transform: ReshardTransform) -> list[tuple[Any, ...]]:
        sizes = iter(self.sizes)
        shapes = [tuple(islice(sizes, dim)) for dim in self.dims]
        return [
            item
            for item in zip(self.names, shapes, self.dtypes, self.specs, strict=True)
            if not transform.should_transform(item[0])
        ]


_known_contents: weakref.WeakKeyDictionary[torch.nn.Module, tuple[ModuleState, Contents]] = (
    weakref.WeakKeyDictionary()
)


@dataclasses.dataclass
class CachedPlan:
    """A plan, and what it was made for.

    Args:
        plan: This rank's.
        plan_id: Equal on all ranks that made it together, different for any other plan.
        source: What the source held.
        target: What the target held.
        destinations: By name, how the target was planned; a parameter that a transform has taken
            out of the model is planned again from this.
        is_strict: It was planned so (see `swap_model_weights`).
    """

    plan: ReshardPlan
    plan_id: int
    source: Contents
    target: Contents
    destinations: dict[str, ParameterMetadata]
    is_strict: bool


class PlanCache:
    """Plans of this process by key, the last used first.

    A rank may have several under one key: one that only sends does not see whom it sends to. They are
    dropped with the models and the group that they are for.
    """

    def __init__(self) -> None:
        self._plans: dict[PlanCacheKey, list[CachedPlan]] = {}
        self._ends: dict[PlanCacheKey, list[weakref.finalize[..., Any]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._plans.values()))

    def get(self, key: PlanCacheKey) -> list[CachedPlan]:
        """The plans under `key`, whether or not they still fit."""
        return self._plans.get(key, [])

    def put(self, key: PlanCacheKey, plan: CachedPlan, owners: tuple[Any, ...] = ()) -> None:
        """Keep a plan, as the last used, until one of `owners` is gone."""
        with self._lock:
            is_new = key not in self._plans
            others = [each for each in self.get(key) if each is not plan]
            self._plans[key] = [plan, *others][:MAX_PLANS]
        if not is_new:
            return
        ends = [weakref.finalize(owner, self._drop, key) for owner in owners if owner is not None]
        for end in ends:
            end.atexit = False
        self._ends[key] = ends

    def _drop(self, key: PlanCacheKey) -> None:
        self._plans.pop(key, None)
        # A group outlives models: it must not remember all that there were.
        for end in self._ends.pop(key, ()):
            end.detach()

    def clear(self) -> None:
        """Forget all plans."""
        for key in list(self._plans):
            self._drop(key)
