"""Megatron's `core.resharding.planner`: its names, of `moe_comm.resharding.plan`, and a deprecated one."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.resharding.plan.planner import (
    _iter_global_transfer_ops,
    build_local_reshard_plan,
    build_plan_from_rosters,
    index_metadata_rosters,
)
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.tp_planning import (
    _build_descriptors_for_param,
    _finalize_dp_transfers,
    _plan_tp,
)

__all__ = [
    "_build_descriptors_for_param",
    "_finalize_dp_transfers",
    "_iter_global_transfer_ops",
    "_plan_tp",
    "build_centralized_reshard_plan",
    "build_local_reshard_plan",
    "build_plan_from_rosters",
    "index_metadata_rosters",
]


def build_centralized_reshard_plan(
    src_module: torch.nn.Module | None,
    dst_module: torch.nn.Module | None,
    num_experts: int | None = None,
    group: dist.ProcessGroup | Bootstrap | None = None,
    src_rank_offset: int = 0,
    dst_rank_offset: int = 0,
) -> ReshardPlan:
    """Deprecated name of `build_local_reshard_plan`."""
    warnings.warn(
        "build_centralized_reshard_plan is deprecated, call build_local_reshard_plan",
        DeprecationWarning,
        stacklevel=2,
    )
    return build_local_reshard_plan(
        src_module,
        dst_module,
        num_experts=num_experts,
        group=group,
        src_rank_offset=src_rank_offset,
        dst_rank_offset=dst_rank_offset,
    )
