"""Layout of a rank's part of a DTensor in the whole one."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.intervals import Intervals
from moe_comm.resharding.describe.metadata import MeshLayout, MeshPlacement
from moe_comm.resharding.describe.tensor_layout import Holder, Layout

REDUCTIONS = ("sum", "avg", "min", "max", "product")
"""Pending reductions of a DTensor that can be run."""


_meshes: weakref.WeakKeyDictionary[DeviceMesh, tuple[tuple[int, ...], tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)
"""Shape and ranks: newer releases of torch work a mesh's tensor out whenever they are asked for it."""


def ranks_of_mesh(mesh: DeviceMesh) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of a mesh, and its ranks, row-major."""
    known = _meshes.get(mesh)
    if known is None:
        ranks = mesh.mesh
        known = _meshes[mesh] = tuple(ranks.shape), tuple(ranks.flatten().tolist())
    return known


def plain_placement(placement: Placement) -> MeshPlacement | None:
    """Return a placement of a DTensor as plain data; None for one that cannot be moved."""
    # Some releases derive _StridedShard from Shard.
    if isinstance(placement, _StridedShard):
        return MeshPlacement(
            "strided_shard", dim=int(placement.dim), split_factor=int(placement.split_factor)
        )
    if isinstance(placement, Shard):
        return MeshPlacement("shard", dim=int(placement.dim))
    if isinstance(placement, Replicate):
        return MeshPlacement("replicate")
    # Subclasses are pending operations that a reduction alone does not finish.
    if type(placement) is Partial and placement.reduce_op in REDUCTIONS:
        return MeshPlacement("partial", op=str(placement.reduce_op))
    return None


def read_mesh(tensor: DTensor, name: str, ranks: Sequence[int]) -> MeshLayout:
    """Return where a DTensor lies.

    Args:
        tensor: DTensor whose part this rank holds.
        name: Name of the tensor.
        ranks: Ranks of its mesh, row-major, as the layout shall number them.

    Raises:
        PlanError: A placement is not known.
    """
    placements = []
    for placement in tensor.placements:
        plain = plain_placement(placement)
        if plain is None:
            raise PlanError(f"{name} has placement {placement}, which cannot be moved")
        placements.append(plain)
    shape, _ = ranks_of_mesh(tensor.device_mesh)
    return MeshLayout(shape, tuple(ranks), tuple(placements), tuple(tensor.shape))


def mesh_intervals(
    mesh: MeshLayout, rank: int, what: str = "a DTensor"
) -> tuple[Intervals, ...] | None:
    """Per tensor dimension, what a rank of a device mesh holds; None for a rank outside it.

    Placements cut from the first mesh dimension to the last, as `torch.distributed.tensor` does. Along a
    dimension, parts lie in the order of its process group, which torch sorts by rank, whatever the
    order in the mesh: so `full_tensor()` puts them together.

    Raises:
        PlanError: Ranks of a dimension do not ascend, and parts are of unequal size or the dimension's
            groups are not all in one order: torch sizes parts by the mesh and puts them together by
            the group, so that they do not fit each other.
    """
    if rank not in mesh.mesh_ranks:
        return None
    if _is_out_of_order(mesh):
        raise PlanError(
            f"{what}: the ranks of mesh {_nested(mesh)} do not ascend, and the parts of shape "
            f"{mesh.global_shape}, which torch sizes by their place in the mesh, do not fit each other "
            "where it puts them together by rank. Use a mesh with ascending ranks"
        )
    return _cut(mesh, _positions(mesh, mesh.mesh_ranks.index(rank)))


def coordinate_intervals(mesh: MeshLayout, rank: int) -> tuple[Intervals, ...]:
    """Return intervals like `mesh_intervals`, with parts in the order of the mesh. Of a rank of the mesh."""
    return _cut(mesh, coordinates_of(mesh, mesh.mesh_ranks.index(rank)))


def _cut(mesh: MeshLayout, positions: Sequence[int]) -> tuple[Intervals, ...]:
    """Return the intervals at a position of every mesh dimension."""
    dims = [intervals.whole(size) for size in mesh.global_shape]
    for placement, size, position in zip(mesh.placements, mesh.mesh_shape, positions, strict=True):
        dim = placement.dim
        if placement.kind == "shard":
            dims[dim] = intervals.chunk(dims[dim], size, position)
        elif placement.kind == "strided_shard":
            dims[dim] = intervals.strided_chunk(dims[dim], placement.split_factor, size, position)
    return tuple(dims)


def coordinates_of(mesh: MeshLayout, number: int) -> list[int]:
    """Return the place of the mesh's rank of a number, row-major."""
    steps = [intervals.num_elements(mesh.mesh_shape[dim + 1 :]) for dim in range(_ndim(mesh))]
    return [number // step % size for size, step in zip(mesh.mesh_shape, steps, strict=True)]


def _positions(mesh: MeshLayout, number: int) -> list[int]:
    """Place of the mesh's rank of a number in the process group of every dimension."""
    positions = []
    for dim, coordinate in enumerate(coordinates_of(mesh, number)):
        step = intervals.num_elements(mesh.mesh_shape[dim + 1 :])
        first = number - coordinate * step
        group = mesh.mesh_ranks[first : first + mesh.mesh_shape[dim] * step : step]
        positions.append(sorted(group).index(mesh.mesh_ranks[number]))
    return positions


@functools.lru_cache(maxsize=1024)
def _is_out_of_order(mesh: MeshLayout) -> bool:
    """Return whether parts that torch has sized by the mesh do not fit where it puts them."""
    is_cut = [placement.kind in ("shard", "strided_shard") for placement in mesh.placements]
    position_at: dict[tuple[int, ...], int] = {}
    for number in range(len(mesh.mesh_ranks)):
        coordinates, positions = coordinates_of(mesh, number), _positions(mesh, number)
        for dim, position in enumerate(positions):
            # Later dimensions are put together first: all that hold their parts then need one order.
            line = [-1 if k > dim and is_cut[k] else at for k, at in enumerate(coordinates)]
            if is_cut[dim] and position_at.setdefault((dim, *line), position) != position:
                return True
        if coordinates != positions and _shape(_cut(mesh, coordinates)) != _shape(
            _cut(mesh, positions)
        ):
            return True
    return False


def _shape(dims: Sequence[Intervals]) -> tuple[int, ...]:
    return tuple(intervals.total_length(held) for held in dims)


def _nested(mesh: MeshLayout) -> list[Any]:
    nested: list[Any] = torch.tensor(mesh.mesh_ranks).reshape(mesh.mesh_shape).tolist()
    return nested


def _ndim(mesh: MeshLayout) -> int:
    return len(mesh.mesh_shape)


def mesh_layout(name: str, holder: Holder, mesh: MeshLayout) -> Layout | None:
    """The same as a layout, checked against what the rank holds; None for a rank outside the mesh."""
    dims = mesh_intervals(mesh, holder.rank, name)
    if dims is None:
        return None
    shape = _shape(dims)
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
