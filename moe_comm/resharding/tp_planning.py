"""Planning one tensor parallel parameter by itself: the functions that Megatron's planner names.

`build_local_reshard_plan` sees all ranks' shapes and does not need them.
"""

from __future__ import annotations

import math

from moe_comm.resharding import intervals
from moe_comm.resharding.metadata import ParameterMetadata, ShardingDescriptor
from moe_comm.resharding.ops import Slices
from moe_comm.resharding.utils import _get_rank_in_group

__all__ = [
    "_build_descriptors_for_param",
    "_determine_source_ranks_for_dst_param",
    "_emit_lcm_block_ops",
    "_finalize_dp_transfers",
    "_plan_tp",
    "_tp_block_layout",
]

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


def _tp_block_layout(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    descriptor: ShardingDescriptor,
    src_shape: tuple[int, ...],
    dst_shape: tuple[int, ...],
) -> list[tuple[int, int, int, int, int, str]]:
    """The components that are sharded each by itself.

    Returns:
        `(offset in the source shard, in the destination shard, full length, source stride,
        destination stride, label)` of each.

    Raises:
        RuntimeError: The two sides have different sizes.
    """
    dim = descriptor.dim
    num_src, num_dst = len(descriptor.src_dim_ranks), len(descriptor.dst_dim_ranks)
    src_sizes, dst_sizes = src_metadata.partition_sizes, dst_metadata.partition_sizes
    if src_sizes is None and dst_sizes is None:
        src_size, dst_size = src_shape[dim], dst_shape[dim]
        if num_src * src_size != num_dst * dst_size:
            raise RuntimeError(
                f"{param_name}: size mismatch on TP dim{dim}: {num_src} source ranks hold "
                f"{src_size} each, {num_dst} destination ranks {dst_size} each"
            )
        strides = descriptor.src_stride, descriptor.dst_stride
        return [(0, 0, num_dst * dst_size, *strides, f"TP dim{dim}")]
    if src_sizes is None:
        assert dst_sizes is not None
        src_sizes = [size * num_dst // num_src for size in dst_sizes]
    if dst_sizes is None:
        dst_sizes = [size * num_src // num_dst for size in src_sizes]
    if len(src_sizes) != len(dst_sizes):
        raise RuntimeError(
            f"{param_name}: size mismatch on TP dim{dim}: components {src_sizes} and {dst_sizes}"
        )
    blocks = []
    src_offset = dst_offset = 0
    for i, (src_size, dst_size) in enumerate(zip(src_sizes, dst_sizes, strict=True)):
        if src_size * num_src != dst_size * num_dst:
            raise RuntimeError(
                f"{param_name}: block {i} size mismatch: {num_src} source ranks hold {src_size} "
                f"each, {num_dst} destination ranks {dst_size} each"
            )
        blocks.append((src_offset, dst_offset, src_size * num_src, 1, 1, f"block {i}"))
        src_offset += src_size
        dst_offset += dst_size
    return blocks


def _emit_lcm_block_ops(
    *,
    param_name: str,
    src_shape: tuple[int, ...],
    dst_shape: tuple[int, ...],
    dim: int,
    src_world: int,
    dst_world: int,
    src_stride: int,
    dst_stride: int,
    full_block_len: int,
    dst_local_rank: int,
    src_dim_ranks: list[int],
    src_block_offset: int,
    dst_block_offset: int,
    block_label: str,
    ops: list[Transfer],
) -> None:
    """Append what one destination rank receives of one component; neighbours are one piece.

    Raises:
        RuntimeError: The component does not divide into the segments of both sides.
    """
    src_stride, dst_stride = max(1, src_stride), max(1, dst_stride)
    num_segments = math.lcm(src_world * src_stride, dst_world * dst_stride)
    if full_block_len % num_segments:
        raise RuntimeError(
            f"{param_name}: {block_label} of length {full_block_len} not divisible by LCM "
            f"{num_segments} of {src_world} x {src_stride} and {dst_world} x {dst_stride} segments"
        )

    def held(world: int, stride: int, member_idx: int) -> intervals.Intervals:
        segment = full_block_len // (world * stride)
        return intervals.component_intervals([[segment] * stride] * world, member_idx)

    destination = held(dst_world, dst_stride, dst_local_rank)
    for member_idx, src_rank in enumerate(src_dim_ranks):
        for run in intervals.intersect(held(src_world, src_stride, member_idx), destination):
            src_start = src_block_offset + run.src_start
            dst_start = dst_block_offset + run.dst_start
            src_slice = [slice(None)] * len(src_shape)
            dst_slice = [slice(None)] * len(dst_shape)
            src_slice[dim] = slice(src_start, src_start + run.length)
            dst_slice[dim] = slice(dst_start, dst_start + run.length)
            ops.append((src_rank, tuple(src_slice), tuple(dst_slice)))


def _plan_tp(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    descriptors: list[ShardingDescriptor],
    my_global_rank: int,
) -> list[Transfer]:
    """What a destination rank receives of a sharded parameter, by destination offset.

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
    if my_global_rank not in descriptor.dst_dim_ranks:
        return []
    src_shape, dst_shape = tuple(src_metadata.shape), tuple(dst_metadata.shape)
    ops: list[Transfer] = []
    for src_offset, dst_offset, length, src_stride, dst_stride, label in _tp_block_layout(
        param_name, src_metadata, dst_metadata, descriptor, src_shape, dst_shape
    ):
        _emit_lcm_block_ops(
            param_name=param_name,
            src_shape=src_shape,
            dst_shape=dst_shape,
            dim=descriptor.dim,
            src_world=len(descriptor.src_dim_ranks),
            dst_world=len(descriptor.dst_dim_ranks),
            src_stride=src_stride,
            dst_stride=dst_stride,
            full_block_len=length,
            dst_local_rank=_get_rank_in_group(my_global_rank, descriptor.dst_dim_ranks),
            src_dim_ranks=descriptor.src_dim_ranks,
            src_block_offset=src_offset,
            dst_block_offset=dst_offset,
            block_label=label,
            ops=ops,
        )
    return sorted(ops, key=lambda op: op[2][descriptor.dim].start)


def _finalize_dp_transfers(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    my_global_rank: int,
) -> list[Transfer]:
    """What a destination rank receives of a parameter that is not sharded: all of it."""
    del param_name
    src_ranks = src_metadata.data_parallel_group_ranks or []
    dst_ranks = dst_metadata.data_parallel_group_ranks or []
    if my_global_rank not in dst_ranks:
        return []
    src_rank = my_global_rank if src_ranks == dst_ranks else src_metadata.owner_rank
    everything = (slice(None),) * len(dst_metadata.shape)
    return [(src_rank, everything, everything)]


def _determine_source_ranks_for_dst_param(
    param_name: str,
    src_metadata: ParameterMetadata,
    dst_metadata: ParameterMetadata,
    my_global_rank: int,
) -> list[Transfer]:
    """What a destination rank receives of a parameter, given one of its sources.

    Raises:
        RuntimeError: The two sides have different sizes.
    """
    descriptors = _build_descriptors_for_param(src_metadata, dst_metadata)
    if descriptors:
        return _plan_tp(param_name, src_metadata, dst_metadata, descriptors, my_global_rank)
    return _finalize_dp_transfers(param_name, src_metadata, dst_metadata, my_global_rank)
