"""Resharding: the weights of a model from one parallel layout to another.

`swap_model_weights` is the call that most users need; docs/resharding.md shows it at work. It describes,
plans and moves:

- describe: `metadata`, `metadata_extraction`, `parallelism` and `rosters` say what every rank holds;
  `intervals`, `tensor_layout`, `layouts` and `mesh_layouts` where that lies in the whole tensor.
- plan: `planner`, `assignment` and `tp_planning` say who sends which piece to whom, `plan` and `ops` what a
  plan consists of, `plan_check` whether it is sound.
- move: `execution` reads, hands pieces to one of `copy_services` and writes; `sources`, `transforms`,
  `number_formats`, `scaled_buffers` and `mxfp8_weights` change numbers on the way; `batched_copy` and
  `heap_parameters` use memory that peers share; `verification` and `stale` say what came of it.
- again: `refit` holds the two models, `refit_pass` is one run, and `plan_cache`, `refit_group`,
  `refit_models`, `refit_services`, `tensor_table` and `kept` are what a run need not do anew.

Knows `moe_comm.peers` and formats of numbers, and nothing of dispatch and combine. Modules that Megatron has
too, `ir` and `nvshmem_copy_service` have the names of others.
"""

from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.execution import execute_reshard_plan
from moe_comm.resharding.heap_parameters import place_in_heap
from moe_comm.resharding.metadata import (
    MeshLayout,
    MeshPlacement,
    ParameterMetadata,
    ShardingDescriptor,
)
from moe_comm.resharding.ops import TransferOp
from moe_comm.resharding.parallelism import Parallelism, ProcessGroups, RankGroup
from moe_comm.resharding.plan import ReshardPlan
from moe_comm.resharding.plan_check import PlanError, format_plan, verify_plan, verify_plans
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
from moe_comm.resharding.stale import clear_stale, is_stale, mark_stale, stale_reason
from moe_comm.resharding.transforms import (
    FP8BlockReshardTransform,
    MXFP8ReshardTransform,
    ReshardTransform,
)
from moe_comm.resharding.verification import RefitProof, verify_refit

__all__ = [
    "CopyService",
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
    "RefitProof",
    "ReshardPlan",
    "ReshardTransform",
    "ShardingDescriptor",
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
    "stale_reason",
    "swap_model_weights",
    "verify_plan",
    "verify_plans",
    "verify_refit",
]
