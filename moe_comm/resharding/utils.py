"""Names that planning and execution share, and the choice among replicas of a source."""

from __future__ import annotations

from moe_comm.resharding.metadata import ParameterMetadata, ShardingDescriptor
from moe_comm.resharding.metadata_extraction import (
    _build_layer_module_prefix_map,
    _detect_expert_index_from_param_name,
    _get_rank_in_group,
    _resolve_global_layer_number_in_name,
    assign_ep_resolved_name_inplace,
    assign_resolved_name_inplace,
    extract_module_metadata,
    extract_param_metadata,
)
from moe_comm.resharding.module_tensors import (
    get_refit_tensor_dict,
    invalidate_refit_tensor_cache,
    local_tensor,
    named_persistent_buffers,
    named_refit_tensors,
)
from moe_comm.resharding.ops import TransferOp
from moe_comm.resharding.plan import ReshardPlan

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


def _filter_by_ep_local_rank(
    src_meta_list: list[ParameterMetadata], dst_metadata: ParameterMetadata, dst_rank: int
) -> list[ParameterMetadata]:
    """Sources with the destination's place in the expert parallel group, where sizes are equal.

    With other sizes nothing is left out: resolved names say which expert is which.

    Raises:
        ValueError: Sizes are equal and no source has that place.
    """
    dst_group = dst_metadata.expert_parallel_group_ranks
    first_group = src_meta_list[0].expert_parallel_group_ranks
    if dst_group is None or not first_group or len(first_group) != len(dst_group):
        return src_meta_list
    dst_place = _get_rank_in_group(dst_rank, dst_group)
    places = [
        _get_rank_in_group(meta.owner_rank, meta.expert_parallel_group_ranks)
        if meta.expert_parallel_group_ranks
        else -1
        for meta in src_meta_list
    ]
    matching = [
        meta for meta, place in zip(src_meta_list, places, strict=True) if place == dst_place
    ]
    if not matching:
        raise ValueError(
            f"No source metadata with EP local rank {dst_place} for destination rank {dst_rank} and "
            f"{dst_metadata.name}; sources are ranks {[meta.owner_rank for meta in src_meta_list]} "
            f"with EP local ranks {places}"
        )
    return matching


def _round_robin_dp(src_meta_list: list[ParameterMetadata], dst_rank: int) -> ParameterMetadata:
    """A source such that destination ranks spread over data parallel groups, then their members."""
    by_group: dict[tuple[int, ...], list[ParameterMetadata]] = {}
    for meta in src_meta_list:
        by_group.setdefault(tuple(meta.data_parallel_group_ranks or ()), []).append(meta)
    if len(by_group) == 1:
        return src_meta_list[0]
    round_idx, group_idx = divmod(dst_rank, len(by_group))
    members = by_group[sorted(by_group)[group_idx]]
    return members[round_idx % len(members)]


def select_src_metadata_balanced(
    src_meta_list: list[ParameterMetadata], dst_metadata: ParameterMetadata, dst_rank: int
) -> ParameterMetadata:
    """The source that `dst_rank` reads a parameter from: itself if it can, else by round robin.

    Args:
        src_meta_list: Every rank's metadata of that parameter.
        dst_metadata: The destination's.
        dst_rank: In the plan's group.

    Raises:
        ValueError: There is no source, or none with the destination's experts.
    """
    if not src_meta_list:
        raise ValueError(f"src_meta_list must be non-empty: nobody has {dst_metadata.name}")
    candidates = _filter_by_ep_local_rank(src_meta_list, dst_metadata, dst_rank)
    own = [meta for meta in candidates if meta.owner_rank == dst_rank]
    return own[0] if own else _round_robin_dp(candidates, dst_rank)
