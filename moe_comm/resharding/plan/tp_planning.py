"""Planning one parameter by itself: functions of Megatron's planner that its own tests call.

`build_local_reshard_plan` sees all ranks' shapes and does not need them.
"""

from __future__ import annotations

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.metadata import ParameterMetadata, ShardingDescriptor
from moe_comm.resharding.describe.metadata_extraction import _get_rank_in_group
from moe_comm.resharding.plan.transfer_op import Slices

# (source rank, elements of the source, elements of the destination)
Transfer = tuple[int, Slices, Slices]


def _build_descriptors_for_param(
    src_metadata: ParameterMetadata, dst_metadata: ParameterMetadata
) -> list[ShardingDescriptor]:
    """The sharded dimension of a parameter; empty where neither side is sharded.

    Raises:
        RuntimeError: The two sides have different sizes along it.
    """
    src_ranks = src_metadata.tensor_parallel_group_ranks
    dst_ranks = dst_metadata.tensor_parallel_group_ranks
    if not (src_metadata.is_tp or dst_metadata.is_tp) or src_ranks is None or dst_ranks is None:
        return []
    dim = dst_metadata.partition_dim if dst_metadata.is_tp else src_metadata.partition_dim
    src_size, dst_size = src_metadata.shape[dim], dst_metadata.shape[dim]
    if len(src_ranks) * src_size != len(dst_ranks) * dst_size:
        raise RuntimeError(
            f"Cannot build TP descriptor for {dst_metadata.name}: along dimension {dim}, "
            f"{len(src_ranks)} source ranks hold {src_size} each and {len(dst_ranks)} destination "
            f"ranks {dst_size} each"
        )
    return [
        ShardingDescriptor(
            name="tp",
            dim=dim,
            src_stride=src_metadata.partition_stride if src_metadata.is_tp else 1,
            dst_stride=dst_metadata.partition_stride if dst_metadata.is_tp else 1,
            src_dim_ranks=src_ranks,
            dst_dim_ranks=dst_ranks,
        )
    ]


def _components(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    descriptor: ShardingDescriptor,
) -> tuple[list[int], list[int]]:
    """Return the lengths of the parts that are sharded by themselves, on a source and a destination rank.

    Raises:
        RuntimeError: The two sides have different sizes, or segments that are not whole.
    """
    dim = descriptor.dim
    num_src, num_dst = len(descriptor.src_dim_ranks), len(descriptor.dst_dim_ranks)
    src_sizes, dst_sizes = src_metadata.partition_sizes, dst_metadata.partition_sizes
    if src_sizes is None and dst_sizes is None:
        src_size, dst_size = src_metadata.shape[dim], dst_metadata.shape[dim]
        if num_src * src_size != num_dst * dst_size:
            raise RuntimeError(
                f"{param_name}: size mismatch on TP dim{dim}: {num_src} source ranks hold "
                f"{src_size} each, {num_dst} destination ranks {dst_size} each"
            )
        strides = max(1, descriptor.src_stride), max(1, descriptor.dst_stride)
        if src_size % strides[0] or dst_size % strides[1]:
            raise RuntimeError(
                f"{param_name}: TP dim{dim} of length {num_src * src_size} does not divide into "
                f"{num_src} x {strides[0]} and {num_dst} x {strides[1]} segments"
            )
        return [src_size // strides[0]] * strides[0], [dst_size // strides[1]] * strides[1]
    if src_sizes is None:
        assert dst_sizes is not None
        src_sizes = [size * num_dst // num_src for size in dst_sizes]
    if dst_sizes is None:
        dst_sizes = [size * num_src // num_dst for size in src_sizes]
    if len(src_sizes) != len(dst_sizes):
        raise RuntimeError(
            f"{param_name}: size mismatch on TP dim{dim}: components {src_sizes} and {dst_sizes}"
        )
    for i, (src_size, dst_size) in enumerate(zip(src_sizes, dst_sizes, strict=True)):
        if src_size * num_src != dst_size * num_dst:
            raise RuntimeError(
                f"{param_name}: block {i} size mismatch: {num_src} source ranks hold {src_size} "
                f"each, {num_dst} destination ranks {dst_size} each"
            )
    return src_sizes, dst_sizes


def _plan_tp(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    descriptors: list[ShardingDescriptor],
    my_global_rank: int,
) -> list[Transfer]:
    """Return the transfers of a sharded parameter to a destination rank, by destination offset.

    Raises:
        NotImplementedError: More than one dimension is sharded.
        RuntimeError: The two sides have different sizes.
    """
    if not descriptors:
        return []
    if len(descriptors) > 1 or descriptors[0].name != "tp":
        names = [descriptor.name for descriptor in descriptors]
        raise NotImplementedError(f"{param_name}: _plan_tp takes one 'tp' descriptor, got {names}")
    descriptor = descriptors[0]
    dim, src_ranks, dst_ranks = descriptor.dim, descriptor.src_dim_ranks, descriptor.dst_dim_ranks
    if my_global_rank not in dst_ranks:
        return []
    src_parts, dst_parts = _components(param_name, src_metadata, dst_metadata, descriptor)

    def held(parts: list[int], ranks: list[int], member_idx: int) -> intervals.Intervals:
        return intervals.component_intervals([parts] * len(ranks), member_idx)

    destination = held(dst_parts, dst_ranks, dst_ranks.index(my_global_rank))
    ops: list[Transfer] = []
    for member_idx, src_rank in enumerate(src_ranks):
        for run in intervals.intersect(held(src_parts, src_ranks, member_idx), destination):
            src_slice = [slice(None)] * len(src_metadata.shape)
            dst_slice = [slice(None)] * len(dst_metadata.shape)
            src_slice[dim] = slice(run.src_start, run.src_start + run.length)
            dst_slice[dim] = slice(run.dst_start, run.dst_start + run.length)
            ops.append((src_rank, tuple(src_slice), tuple(dst_slice)))
    return sorted(ops, key=lambda op: op[2][dim].start)


def _finalize_dp_transfers(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    my_global_rank: int,
) -> list[Transfer]:
    """Return the transfers of a parameter that is not sharded to a destination rank: all of it."""
    src_ranks = src_metadata.data_parallel_group_ranks or []
    dst_ranks = dst_metadata.data_parallel_group_ranks or []
    if my_global_rank not in dst_ranks:
        return []
    src_rank = my_global_rank if src_ranks == dst_ranks else src_metadata.owner_rank
    everything = (slice(None),) * len(dst_metadata.shape)
    return [(src_rank, everything, everything)]


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
        dst_rank: Rank in the plan's group.

    Raises:
        ValueError: There is no source, or none with the destination's experts.
    """
    if not src_meta_list:
        raise ValueError(f"src_meta_list must be non-empty: nobody has {dst_metadata.name}")
    candidates = _filter_by_ep_local_rank(src_meta_list, dst_metadata, dst_rank)
    own = [meta for meta in candidates if meta.owner_rank == dst_rank]
    return own[0] if own else _round_robin_dp(candidates, dst_rank)
