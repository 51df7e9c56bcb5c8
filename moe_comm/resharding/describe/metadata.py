"""Metadata of one rank's part of one parameter, which ranks exchange before they plan."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from moe_comm.peers.plain_data import travels


@travels
@dataclasses.dataclass(frozen=True)
class MeshPlacement:
    """A placement of a DTensor over one dimension of its device mesh.

    Args:
        kind: "shard", "strided_shard", "replicate" or "partial".
        dim: Tensor dimension that is sharded; -1 otherwise.
        split_factor: Parts that inner mesh dimensions have cut before, for "strided_shard".
        op: Pending reduction, for "partial".
    """

    kind: Literal["shard", "strided_shard", "replicate", "partial"]
    dim: int = -1
    split_factor: int = 1
    op: str = ""


@travels
@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """Layout of a DTensor on its mesh.

    Args:
        mesh_shape: Shape of the device mesh.
        mesh_ranks: Ranks of the mesh, row-major, numbered in the group that plans are made over.
        placements: Placement of each mesh dimension.
        global_shape: Shape of the whole tensor.
    """

    mesh_shape: tuple[int, ...]
    mesh_ranks: tuple[int, ...]
    placements: tuple[MeshPlacement, ...]
    global_shape: tuple[int, ...]


@travels
@dataclasses.dataclass(frozen=True)
class ViewLayout:
    """Layout of a view of a rank's storage, as its describer has said.

    Args:
        global_shape: Shape of the whole tensor.
        dims: Indices that are held, as `(global_start, local_start, length)`, per dimension.
        strides: Strides of the view, in elements.
        disk_shape: Shape of the whole tensor as its checkpoint has it, where `global_shape` cuts that more
            finely and its describer has said so.
    """

    global_shape: tuple[int, ...]
    dims: tuple[tuple[tuple[int, int, int], ...], ...]
    strides: tuple[int, ...]
    disk_shape: tuple[int, ...] | None = None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of the whole tensor, as its checkpoint has it as far as the describer has said so."""
        return self.disk_shape or self.global_shape


@dataclasses.dataclass
class ParameterMetadata:
    """One parameter or persistent buffer as one rank holds it. Ranks are those of the plan's group.

    Args:
        name: Name in the rank's own module.
        shape: Shape of the local tensor.
        dtype: Dtype of the local tensor.
        element_size: Bytes per element.
        is_tp: Whether it is sharded over its tensor parallel group.
        partition_dim: Dimension that is sharded, of `local_view` where there is one.
        partition_stride: Segments of `partition_dim` per rank; segment `i + k * size` is rank i's.
        partition_sizes: Sizes along `partition_dim`, on one rank, of components that are packed one
            after the other and each sharded by itself.
        is_ep: Whether it belongs to experts.
        num_experts: Experts of the whole model.
        owner_rank: The rank that holds this.
        tensor_parallel_group_ranks: Ranks of the tensor parallel group, filled in wherever there is one.
        expert_parallel_group_ranks: Ranks of the expert parallel group, for what belongs to experts.
        data_parallel_group_ranks: Ranks that hold the same.
        pipeline_parallel_group_ranks: Ranks of all stages.
        resolved_name: Name in the whole model, with global layer and expert numbers.
        global_expert_index: Expert of a per-expert tensor; None for others and for fused ones.
        expert_dim: Dimension, of `local_view`, along which experts lie, for a tensor of several experts.
        local_view: Shape that the local tensor is viewed as before it is cut; None for its own.
        mesh: Layout of a DTensor on its mesh; the fields about groups then mean nothing.
        is_buffer: A persistent buffer, whose dtype follows the source.
        pipeline_stage: This rank's place among the members of `pipeline_parallel_group_ranks`; None
            where the model has one stage, or says nothing of stages.
        is_shared_by_stages: Stages that hold this name hold the same.
        is_transformed: A transform makes or writes what travels, whatever the dtypes are.
        view: Layout of a `CheckpointView`; the fields about groups and the mesh then mean nothing.
        place: Number of the rank's storage, and the offset there in elements, for a `CheckpointView`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    element_size: int
    is_tp: bool = False
    partition_dim: int = 0
    partition_stride: int = 1
    partition_sizes: list[int] | None = None
    is_ep: bool = False
    num_experts: int | None = None
    owner_rank: int = -1
    tensor_parallel_group_ranks: list[int] | None = None
    expert_parallel_group_ranks: list[int] | None = None
    data_parallel_group_ranks: list[int] | None = None
    pipeline_parallel_group_ranks: list[int] | None = None
    resolved_name: str | None = None
    global_expert_index: int | None = None
    expert_dim: int | None = None
    local_view: tuple[int, ...] | None = None
    mesh: MeshLayout | None = None
    is_buffer: bool = False
    pipeline_stage: int | None = None
    is_shared_by_stages: bool = False
    is_transformed: bool = False
    view: ViewLayout | None = None
    place: tuple[int, int] | None = None


@dataclasses.dataclass
class ShardingDescriptor:
    """One sharded dimension of a parameter, on both sides.

    Args:
        name: "tp".
        dim: Sharded dimension.
        src_stride: `partition_stride` of the source.
        dst_stride: `partition_stride` of the destination.
        src_dim_ranks: Ranks that the source is sharded over, in order.
        dst_dim_ranks: Ranks that the destination is sharded over, in order.
    """

    name: str
    dim: int
    src_stride: int
    dst_stride: int
    src_dim_ranks: list[int]
    dst_dim_ranks: list[int]
