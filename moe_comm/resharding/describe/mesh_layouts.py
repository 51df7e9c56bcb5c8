"""How a rank's part of a DTensor lies in the whole one."""

from __future__ import annotations

from collections.abc import Sequence

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.intervals import Intervals
from moe_comm.resharding.describe.metadata import MeshLayout
from moe_comm.resharding.describe.tensor_layout import Holder, Layout

__all__ = ["check_pending_sums", "mesh_intervals", "mesh_layout"]


def mesh_intervals(mesh: MeshLayout, rank: int) -> tuple[Intervals, ...] | None:
    """Per tensor dimension, what a rank of a device mesh holds; None for a rank outside it.

    Placements cut from the first mesh dimension to the last, as `torch.distributed.tensor` does.
    """
    if rank not in mesh.mesh_ranks:
        return None
    dims = [intervals.whole(size) for size in mesh.global_shape]
    number = mesh.mesh_ranks.index(rank)
    steps = [intervals.num_elements(mesh.mesh_shape[dim + 1 :]) for dim in range(_ndim(mesh))]
    for placement, size, step in zip(mesh.placements, mesh.mesh_shape, steps, strict=True):
        coordinate = number // step % size
        dim = placement.dim
        if placement.kind == "shard":
            dims[dim] = intervals.chunk(dims[dim], size, coordinate)
        elif placement.kind == "strided_shard":
            dims[dim] = intervals.strided_chunk(dims[dim], placement.split_factor, size, coordinate)
    return tuple(dims)


def _ndim(mesh: MeshLayout) -> int:
    return len(mesh.mesh_shape)


def mesh_layout(name: str, holder: Holder, mesh: MeshLayout) -> Layout | None:
    """The same as a layout, checked against what the rank holds; None for a rank outside the mesh."""
    dims = mesh_intervals(mesh, holder.rank)
    if dims is None:
        return None
    shape = tuple(intervals.total_length(held) for held in dims)
    if shape != holder.meta.shape:
        raise PlanError(
            f"{name}: rank {holder.rank} holds shape {holder.meta.shape}, but its part of the "
            f"DTensor of shape {mesh.global_shape} over mesh {mesh.mesh_shape} has shape {shape}"
        )
    return Layout(shape, mesh.global_shape, dims)


def check_pending_sums(name: str, sources: Sequence[Holder]) -> None:
    """All ranks of a sum take part in it: one that knows of none would let the others wait."""
    by_rank = dict(sources)
    checked: set[MeshLayout] = set()
    for rank, meta in sources:
        mesh = meta.mesh
        if mesh is None or mesh in checked:
            continue
        checked.add(mesh)
        if all(placement.kind != "partial" for placement in mesh.placements):
            continue
        for member in mesh.mesh_ranks:
            if member not in by_rank or by_rank[member].mesh != mesh:
                raise PlanError(
                    f"{name}: rank {rank} holds a pending sum over ranks {list(mesh.mesh_ranks)}, "
                    f"of which rank {member} does not hold the same DTensor"
                )
