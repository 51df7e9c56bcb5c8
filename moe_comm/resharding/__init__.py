"""Resharding: the weights of a model from one parallel layout to another.

`Refit` and `swap_model_weights` are what most users need; docs/resharding.md shows them at work. Each
folder says what it has and which others it knows:

- `describe`: what every rank holds, and where that lies in the whole tensors.
- `plan`: which rank sends which piece to whom.
- `formats`: numbers that change on the way.
- `move`: a plan is run, over one of `copy_services`, of which one stands on `nvshmem_copy_service`.
- `hold`: what users hold and call, and what lasts from one refit to the next.
- `clients`: full tensors by name, for frameworks that take these.

`execution`, `planner`, `refit`, `transforms` and `utils` have names of these for programs written for
Megatron, which calls them so; `ir` is Etha's. Knows `moe_comm.peers` and formats of numbers, and nothing
of dispatch and combine.
"""

from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.describe.checkpoint_views import CheckpointView, CheckpointViews
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.metadata import MeshLayout, MeshPlacement
from moe_comm.resharding.describe.parallelism import Parallelism, ProcessGroups, RankGroup
from moe_comm.resharding.describe.transformers_views import transformers_views
from moe_comm.resharding.execution import execute_reshard_plan
from moe_comm.resharding.hold.deltas import DeltaReport
from moe_comm.resharding.hold.heap_parameters import (
    SharedWeights,
    place_in_heap,
    share_in_place,
)
from moe_comm.resharding.hold.held_versions import RefitTarget
from moe_comm.resharding.hold.refit_world import RefitHost, RefitWorld
from moe_comm.resharding.hold.verification import RefitProof, verify_refit
from moe_comm.resharding.move.stale import clear_stale, is_stale, mark_stale, stale_reason
from moe_comm.resharding.plan.plan_check import format_plan, verify_plan, verify_plans
from moe_comm.resharding.planner import (
    build_centralized_reshard_plan,
    build_local_reshard_plan,
    build_plan_from_rosters,
    index_metadata_rosters,
)
from moe_comm.resharding.refit import (
    Refit,
    clear_all_caches,
    clear_plan_cache,
    clear_service_cache,
    get_or_create_service,
    prepare_swap_model_weights,
    reshard_model_weights,
    swap_model_weights,
)
from moe_comm.resharding.transforms import (
    FP8BlockReshardTransform,
    MXFP8ReshardTransform,
    ReshardTransform,
)
from moe_comm.resharding.utils import (
    ParameterMetadata,
    ReshardPlan,
    ShardingDescriptor,
    TransferOp,
)

__all__ = [
    "CheckpointView",
    "CheckpointViews",
    "CopyService",
    "DeltaReport",
    "FP8BlockReshardTransform",
    "MXFP8ReshardTransform",
    "MeshLayout",
    "MeshPlacement",
    "Parallelism",
    "ParameterMetadata",
    "PlanError",
    "ProcessGroups",
    "RankGroup",
    "Refit",
    "RefitHost",
    "RefitProof",
    "RefitTarget",
    "RefitWorld",
    "ReshardPlan",
    "ReshardTransform",
    "ShardingDescriptor",
    "SharedWeights",
    "SymmetricCopyService",
    "TransferOp",
    "build_centralized_reshard_plan",
    "build_local_reshard_plan",
    "build_plan_from_rosters",
    "clear_all_caches",
    "clear_plan_cache",
    "clear_service_cache",
    "clear_stale",
    "execute_reshard_plan",
    "format_plan",
    "get_or_create_service",
    "index_metadata_rosters",
    "is_stale",
    "mark_stale",
    "place_in_heap",
    "prepare_swap_model_weights",
    "reshard_model_weights",
    "share_in_place",
    "stale_reason",
    "swap_model_weights",
    "transformers_views",
    "verify_plan",
    "verify_plans",
    "verify_refit",
]
