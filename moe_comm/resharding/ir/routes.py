"""Routes of the cells of a tensor from ranks to ranks, between two device meshes.

Every rank computes the same routes from the two meshes, their placements and the shape: nothing is
communicated, and all arithmetic is in integers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from moe_comm.resharding.describe.intervals import Intervals, cells_at
from moe_comm.resharding.describe.mesh_layouts import (
    REDUCTIONS,
    coordinate_intervals,
    coordinates_of,
    plain_placement,
)
from moe_comm.resharding.describe.metadata import MeshLayout, MeshPlacement
from moe_comm.resharding.ir import groups
from moe_comm.resharding.ir.transfer import TransferType, type_of

Slices = tuple[slice, ...]


class Mesh(Protocol):
    """Interface of a `DeviceMesh` that is read: its global ranks, as a tensor with the mesh's shape."""

    @property
    def mesh(self) -> torch.Tensor:
        """Global ranks."""


@dataclasses.dataclass(frozen=True)
class Endpoint:
    """A cell on a rank.

    Args:
        rank: Rank in the map's group.
        cell: Number of the cell along each dimension among the cells that the rank holds.
    """

    rank: int
    cell: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Route:
    """Route of one cell from one source rank.

    Args:
        src: Holder of the cell.
        dsts: Endpoints that receive it, by rank; `src.rank` may be among them and then copies.
        kind: SHADOW without `dsts`, P2P with one, BROADCAST with several.
    """

    src: Endpoint
    dsts: tuple[Endpoint, ...]
    kind: TransferType


@dataclasses.dataclass(frozen=True)
class Side:
    """A tensor over one of the two meshes.

    Args:
        layout: Mesh, placements and whole shape; of an even map, in cells instead of elements.
        cells: Cells of each rank's local tensor along each dimension, by rank. Those of an even map are of
            one element each.
        shapes: Shape of each rank's local tensor, by rank.
    """

    layout: MeshLayout
    cells: dict[int, tuple[tuple[slice, ...], ...]]
    shapes: dict[int, tuple[int, ...]]

    def slices(self, endpoint: Endpoint) -> Slices:
        """The cell in the rank's local tensor."""
        cells = self.cells[endpoint.rank]
        return tuple(cells[dim][number] for dim, number in enumerate(endpoint.cell))


@dataclasses.dataclass(frozen=True, kw_only=True)
class M2MMap:
    """The way of a tensor from one mesh to another, equal on all ranks.

    Unpacks to its first four fields.

    Args:
        routes: Cell by cell, by source rank within a cell: one order for all ranks.
        source_num_slicers: Along each dimension, into how many cells a source rank cuts its local
            tensor; the most of any rank where they differ.
        target_num_slicers: The same of target ranks.
        source_partial_reductions: (mesh dimension, operation) per `Partial` source placement.
        global_shape: Shape of the tensors that the map is for; None: an even map, for tensors of any shape
            that the cells divide.
        source: The source side.
        target: The target side.
        group: The group that ranks are numbered in; None for the default group.
        source_partial_groups: This rank's process groups of the source mesh, with the operations of
            `source_partial_reductions`; None outside the mesh, and of a mesh that has no groups.
    """

    routes: list[Route]
    source_num_slicers: list[int]
    target_num_slicers: list[int]
    source_partial_reductions: list[tuple[int, str]]
    global_shape: tuple[int, ...] | None
    source: Side
    target: Side
    group: dist.ProcessGroup | None = dataclasses.field(default=None, repr=False, compare=False)
    source_partial_groups: list[tuple[dist.ProcessGroup, str]] | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @functools.cached_property
    def routes_by_rank(self) -> dict[int, list[Route]]:
        """By rank, in order, the routes that it has a part in."""
        by_rank: dict[int, list[Route]] = {}
        for route in self.routes:
            for rank in {route.src.rank, *(end.rank for end in route.dsts)}:
                by_rank.setdefault(rank, []).append(route)
        return by_rank

    @functools.cached_property
    def broadcast_ranks(self) -> set[tuple[int, ...]]:
        """Source and destinations, ascending, of every route to several other ranks."""
        rank_sets = {
            tuple(sorted({route.src.rank, *(end.rank for end in route.dsts)}))
            for route in self.routes
        }
        return {ranks for ranks in rank_sets if len(ranks) > 2}

    def __iter__(self) -> Iterator[object]:
        return iter(
            (
                self.routes,
                self.source_num_slicers,
                self.target_num_slicers,
                self.source_partial_reductions,
            )
        )


def get_m2m_map(
    source_mesh: Mesh,
    source_placements: Sequence[Placement],
    target_mesh: Mesh,
    target_placements: Sequence[Placement],
    group: dist.ProcessGroup | None = None,
    device: str | torch.device = "cpu",
    global_shape: Sequence[int] | None = None,
) -> M2MMap:
    """Find out who sends what to whom. Local: every rank gets the same result.

    A target rank that holds a cell itself copies it; of several other holders, target `i` of the
    target mesh receives from holder `i % num_holders`. Of a `Partial` source, every rank that shares
    a reduction with a sender gets a route without destinations: it only reduces.

    Args:
        source_mesh: A `DeviceMesh`, or anything with a `mesh` tensor of global ranks.
        source_placements: Placement for each dimension of `source_mesh`.
        target_mesh: Mesh like `source_mesh`, which may share ranks with it, or be it.
        target_placements: Placement for each dimension of `target_mesh`; none may be `Partial`.
        group: Group that has all ranks of both meshes; routes number ranks in it. None for the default group.
        device: Device of the tensors. Planning needs none, so that it changes nothing; it must be a device.
        global_shape: Shape of the tensors. None: a map that serves every tensor which its cells divide.

    Raises:
        NotImplementedError: A target placement is `Partial`, or a placement is of an unknown kind.
        ValueError: Placements do not fit the mesh or the shape, a mesh names a rank twice or one
            outside `group`.

    Example:
        From `Shard(0)` to `Shard(1)` over ranks 0 and 1, global shape (4, 6): rank 0 copies rows 0..1
        of columns 0..2, and sends rows 0..1 of columns 3..5 to rank 1, which sends it rows 2..3 of
        columns 0..2.
    """
    torch.device(device)
    group = groups.resolve_group(group)
    for placement in target_placements:
        if isinstance(placement, Partial):
            raise NotImplementedError(
                f"target_placements must not be Partial, got {tuple(target_placements)}: how a "
                "value splits into summands is not defined"
            )
    shape = None if global_shape is None else tuple(int(size) for size in global_shape)
    sides = []
    for name, mesh, placements in (
        ("source", source_mesh, source_placements),
        ("target", target_mesh, target_placements),
    ):
        ranks = _group_ranks(name, mesh, group)
        mesh_shape = tuple(torch.as_tensor(mesh.mesh).shape)
        plain = _plain_placements(name, placements, mesh_shape, shape)
        sides.append(MeshLayout(mesh_shape, ranks, plain, shape or ()))
    if shape is None:
        even_shape = _even_shape(sides)
        sides = [dataclasses.replace(side, global_shape=even_shape) for side in sides]
    held = [[coordinate_intervals(side, rank) for rank in side.mesh_ranks] for side in sides]
    cuts = [
        _cuts(size, [dims[dim] for of_side in held for dims in of_side], is_even=shape is None)
        for dim, size in enumerate(sides[0].global_shape)
    ]
    source, target = (_Cells(side, dims, cuts) for side, dims in zip(sides, held, strict=True))
    reductions = [
        (mesh_dim, placement.op)
        for mesh_dim, placement in enumerate(source.layout.placements)
        if placement.kind == "partial"
    ]
    return M2MMap(
        routes=_routes(source, target, cuts, [mesh_dim for mesh_dim, _ in reductions]),
        source_num_slicers=source.num_slicers(),
        target_num_slicers=target.num_slicers(),
        source_partial_reductions=reductions,
        global_shape=shape,
        source=source.side(),
        target=target.side(),
        group=group,
        source_partial_groups=_mesh_groups(source_mesh, reductions),
    )


class _Cells:
    """Cells that every position of a mesh holds."""

    def __init__(
        self, layout: MeshLayout, held: Sequence[Sequence[Intervals]], cuts: Sequence[Sequence[int]]
    ) -> None:
        self.layout = layout
        # By position, by dimension: global number of a cell -> its slice here, in local order.
        self.slices = [
            [cells_at(intervals, at) for intervals, at in zip(dims, cuts, strict=True)]
            for dims in held
        ]
        # The same -> its number here.
        self.numbers = [
            [{cell: number for number, cell in enumerate(cells)} for cells in dims]
            for dims in self.slices
        ]
        # By dimension, by global number: the positions that hold it, as bits.
        self.holders = [[0] * (len(at) - 1) for at in cuts]
        for position, dims in enumerate(self.slices):
            for holders, cells in zip(self.holders, dims, strict=True):
                for cell in cells:
                    holders[cell] |= 1 << position

    def positions(self, cell: tuple[int, ...]) -> list[int]:
        """Return who holds a cell, by its global number along each dimension; ascending."""
        bits = (1 << len(self.slices)) - 1
        for dim, number in enumerate(cell):
            bits &= self.holders[dim][number]
        return [position for position in range(bits.bit_length()) if bits >> position & 1]

    def endpoint(self, position: int, cell: tuple[int, ...]) -> Endpoint:
        numbers = zip(self.numbers[position], cell, strict=True)
        return Endpoint(
            self.layout.mesh_ranks[position], tuple(number_of[each] for number_of, each in numbers)
        )

    def num_slicers(self) -> list[int]:
        return [max(map(len, of_dim)) for of_dim in zip(*self.slices, strict=True)]

    def side(self) -> Side:
        cells = [tuple(tuple(dim.values()) for dim in dims) for dims in self.slices]
        shapes = [tuple(sum(s.stop - s.start for s in dim) for dim in dims) for dims in cells]
        ranks = self.layout.mesh_ranks
        return Side(
            self.layout,
            dict(zip(ranks, cells, strict=True)),
            dict(zip(ranks, shapes, strict=True)),
        )


def _routes(
    source: _Cells, target: _Cells, cuts: list[list[int]], partial_dims: list[int]
) -> list[Route]:
    """Cell by cell: senders and reducers of a cell are neighbors, on every rank in one order."""
    routes: list[Route] = []
    position_of = {rank: position for position, rank in enumerate(source.layout.mesh_ranks)}
    for cell in itertools.product(*(range(len(dim_cuts) - 1) for dim_cuts in cuts)):
        holders = source.positions(cell)
        is_holder = set(holders)
        dsts: dict[int, list[int]] = {}
        for position in target.positions(cell):
            own = position_of.get(target.layout.mesh_ranks[position], -1)
            holder = own if own in is_holder else holders[position % len(holders)]
            dsts.setdefault(holder, []).append(position)
        if partial_dims:
            components = {_component(source.layout, holder, partial_dims) for holder in dsts}
            for holder in holders:
                if _component(source.layout, holder, partial_dims) in components:
                    dsts.setdefault(holder, [])
        of_cell = []
        for holder, positions in dsts.items():
            ends = sorted(
                (target.endpoint(position, cell) for position in positions),
                key=lambda end: end.rank,
            )
            src = source.endpoint(holder, cell)
            of_cell.append(Route(src, tuple(ends), type_of(len(ends))))
        routes.extend(sorted(of_cell, key=lambda route: route.src.rank))
    return routes


def _cuts(size: int, held: Iterable[Intervals], *, is_even: bool) -> list[int]:
    """Return where the cells of a dimension begin, and its size: as few as leave every cell whole."""
    starts = set(range(size)) if is_even else {0}
    for start, _, length in itertools.chain.from_iterable(held):
        starts |= {start, start + length}
    return [*sorted(start for start in starts if start < size), size] if size else [0]


def _component(layout: MeshLayout, position: int, partial_dims: list[int]) -> tuple[int, ...]:
    """Equal for positions that take part in each other's reductions, directly or not."""
    return tuple(
        -1 if mesh_dim in partial_dims else coordinate
        for mesh_dim, coordinate in enumerate(coordinates_of(layout, position))
    )


def _even_shape(sides: list[MeshLayout]) -> tuple[int, ...]:
    """The smallest shape, one dimension past the last sharded one, that both sides cut evenly."""
    dims = [p.dim for side in sides for p in side.placements if "shard" in p.kind]
    shape = [1] * (max(dims, default=0) + 1)
    for side in sides:
        num_parts = [1] * len(shape)
        for size, placement in zip(side.mesh_shape, side.placements, strict=True):
            if "shard" in placement.kind:
                # A strided placement cuts every part in `split_factor` before it cuts in `size`.
                parts = num_parts[placement.dim] * size
                shape[placement.dim] = math.lcm(
                    shape[placement.dim], parts * placement.split_factor
                )
                num_parts[placement.dim] = parts
    return tuple(shape)


def _group_ranks(name: str, mesh: Mesh, group: dist.ProcessGroup | None) -> tuple[int, ...]:
    """Ranks of a mesh, row-major, numbered in `group`."""
    global_ranks = [int(rank) for rank in torch.as_tensor(mesh.mesh).flatten().tolist()]
    if len(set(global_ranks)) != len(global_ranks):
        raise ValueError(f"{name}_mesh names a rank twice: {global_ranks}")
    if not global_ranks:
        raise ValueError(f"{name}_mesh has no ranks")
    if group is None or not isinstance(group, dist.ProcessGroup):
        return tuple(global_ranks)
    number_of = {rank: number for number, rank in enumerate(dist.get_process_group_ranks(group))}
    missing = [rank for rank in global_ranks if rank not in number_of]
    if missing:
        raise ValueError(
            f"{name}_mesh has global ranks {missing}, which group {sorted(number_of)} does not have"
        )
    return tuple(number_of[rank] for rank in global_ranks)


def _mesh_groups(
    mesh: Mesh, reductions: list[tuple[int, str]]
) -> list[tuple[dist.ProcessGroup, str]] | None:
    if not isinstance(mesh, DeviceMesh) or mesh.get_coordinate() is None:
        return None
    return [(mesh.get_group(mesh_dim), op) for mesh_dim, op in reductions]


def _plain_placements(
    name: str,
    placements: Sequence[Placement],
    mesh_shape: tuple[int, ...],
    shape: tuple[int, ...] | None,
) -> tuple[MeshPlacement, ...]:
    if len(placements) != len(mesh_shape):
        raise ValueError(
            f"{name}_placements must have one entry per dimension of a mesh of shape {mesh_shape}, "
            f"got {tuple(placements)}"
        )
    plain = []
    for placement in placements:
        made = plain_placement(placement)
        if made is None:
            raise NotImplementedError(
                f"{name}_placements has {placement!r}, which cannot be moved; reductions are "
                f"{sorted(REDUCTIONS)}"
            )
        if "shard" in made.kind:
            dim = made.dim + (len(shape) if shape is not None and made.dim < 0 else 0)
            if dim < 0 or (shape is not None and dim >= len(shape)):
                raise ValueError(
                    f"{name}_placements has {placement!r}, and global_shape is {shape}"
                )
            made = dataclasses.replace(made, dim=dim)
        plain.append(made)
    return tuple(plain)
