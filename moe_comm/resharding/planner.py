"""Megatron's `core.resharding.planner`: its names, of `moe_comm.resharding.plan`."""

from moe_comm.resharding.plan.planner import (
    _iter_global_transfer_ops,
    build_centralized_reshard_plan,
    build_local_reshard_plan,
    build_plan_from_rosters,
    index_metadata_rosters,
)
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
