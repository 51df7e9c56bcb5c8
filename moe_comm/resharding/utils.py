"""Megatron's `core.resharding.utils`: its names, of `moe_comm.resharding.describe` and `plan`."""

from moe_comm.resharding.describe.metadata import ParameterMetadata, ShardingDescriptor
from moe_comm.resharding.describe.metadata_extraction import (
    _build_layer_module_prefix_map,
    _detect_expert_index_from_param_name,
    _get_rank_in_group,
    _resolve_global_layer_number_in_name,
    assign_ep_resolved_name_inplace,
    assign_resolved_name_inplace,
    extract_module_metadata,
    extract_param_metadata,
)
from moe_comm.resharding.describe.module_tensors import (
    get_refit_tensor_dict,
    invalidate_refit_tensor_cache,
    local_tensor,
    named_persistent_buffers,
    named_refit_tensors,
)
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.tp_planning import (
    _filter_by_ep_local_rank,
    _round_robin_dp,
    select_src_metadata_balanced,
)
from moe_comm.resharding.plan.transfer_op import TransferOp

__all__ = [
    "ParameterMetadata",
    "ReshardPlan",
    "ShardingDescriptor",
    "TransferOp",
    "_build_layer_module_prefix_map",
    "_detect_expert_index_from_param_name",
    "_filter_by_ep_local_rank",
    "_get_rank_in_group",
    "_resolve_global_layer_number_in_name",
    "_round_robin_dp",
    "assign_ep_resolved_name_inplace",
    "assign_resolved_name_inplace",
    "extract_module_metadata",
    "extract_param_metadata",
    "get_refit_tensor_dict",
    "invalidate_refit_tensor_cache",
    "local_tensor",
    "named_persistent_buffers",
    "named_refit_tensors",
    "select_src_metadata_balanced",
]
