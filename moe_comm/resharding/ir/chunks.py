"""From a map to chunks: what one rank does to move one tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from moe_comm.resharding.describe.conversions import cannot_become, cannot_reduce
from moe_comm.resharding.ir import groups
from moe_comm.resharding.ir.routes import Endpoint, M2MMap, Route, Side
from moe_comm.resharding.ir.transfer import TransferType, type_of
from moe_comm.resharding.ir.units import Chunk, choose_transfer_dtype

PartialGroups = list[tuple[dist.ProcessGroup, str]]


def m2m_to_chunks(
    m2m: M2MMap,
    rank: int,
    source_tensor: torch.Tensor | None = None,
    target_tensor: torch.Tensor | None = None,
    transfer_dtype: torch.dtype | None = None,
    source_partial_groups: PartialGroups | None = None,
) -> list[Chunk]:
    """Return the chunks by which a rank moves one tensor, in the order of the map's routes.

    Where `m2m.group` has all processes, makes the process groups that broadcasts of the map need and
    that were not made before, which is collective: every rank calls this, those of neither mesh too,
    for the same maps in the same order. In smaller groups broadcasts are sent to one after the other.

    Args:
        m2m: Map from `get_m2m_map`, equal on all ranks.
        rank: This rank, numbered in the map's group.
        source_tensor: This rank's part, or the DTensor; read on ranks of the source mesh only.
        target_tensor: This rank's part, or the DTensor; written on ranks of the target mesh only.
        transfer_dtype: Dtype that travels, equal on all ranks. None: `choose_transfer_dtype` of the two
            tensors where this rank has both, else the dtype of the one it has; give it where dtypes of source
            and target differ and some rank has only one of them.
        source_partial_groups: This rank's groups to reduce a `Partial` source over and the operations, in the
            order of the map; None: those of the map's device mesh.

    Returns:
        Empty on ranks of neither mesh.

    Raises:
        ValueError: A tensor is missing, or has another shape than the map says; its dtype does not
            become what travels; or a `Partial` source cannot be reduced in its dtype, or its groups do
            not fit or are not known.
    """
    # First of all, since a rank that raises must not keep others from making them.
    groups.create_subgroups(m2m.group, m2m.broadcast_ranks)
    source = _local_part(m2m, m2m.source, "source_tensor", source_tensor, rank)
    target = _local_part(m2m, m2m.target, "target_tensor", target_tensor, rank)
    if transfer_dtype is None and source is not None and target is not None:
        transfer_dtype = choose_transfer_dtype(source.dtype, target.dtype)
    _check_conversions(rank, source, target, transfer_dtype)
    partial_groups = None
    if source is not None and m2m.source_partial_reductions:
        partial_groups = _partial_groups(m2m, rank, source, source_partial_groups)
    part = _Part(m2m, rank, source, target, transfer_dtype, partial_groups)
    return [chunk for route in m2m.routes_by_rank.get(rank, []) for chunk in part.chunks(route)]


@dataclasses.dataclass(frozen=True)
class _Part:
    """One rank's part in moving one tensor."""

    m2m: M2MMap
    rank: int
    source: torch.Tensor | None
    target: torch.Tensor | None
    transfer_dtype: torch.dtype | None
    partial_groups: PartialGroups | None

    def chunks(self, route: Route) -> Iterator[Chunk]:
        """Yield the chunks of a route on this rank."""
        src_rank = route.src.rank
        dst_ranks = tuple(end.rank for end in route.dsts if end.rank != src_rank)
        here = next((end for end in route.dsts if end.rank == self.rank), None)
        if src_rank != self.rank:
            if here is not None:
                yield self._received(route, dst_ranks, here)
            return
        is_partial = bool(self.m2m.source_partial_reductions)
        if dst_ranks or (is_partial and here is None):
            # A rank reduces a cell once, as the others of the reduction do: what it sends and also
            # keeps is one chunk.
            yield self._sent(route, dst_ranks, here if is_partial else None)
        if here is not None and not (is_partial and dst_ranks):
            yield self._copied(route, here)

    def _received(self, route: Route, dst_ranks: tuple[int, ...], here: Endpoint) -> Chunk:
        place = _slices(self.m2m, self.m2m.target, self.target, here)
        return Chunk(
            transfer_type=type_of(len(dst_ranks)),
            is_source=False,
            src_rank=route.src.rank,
            dst_ranks=dst_ranks,
            group=self.m2m.group,
            chunk_shape=_shape(self.target, place),
            tensor=self.target,
            slice_tuples=place,
            transfer_dtype=self.transfer_dtype,
            src_idx=route.src.cell,
            dst_idx=here.cell,
            no_coalesce=bool(self.m2m.source_partial_reductions),
        )

    def _sent(self, route: Route, dst_ranks: tuple[int, ...], kept: Endpoint | None) -> Chunk:
        cell = _slices(self.m2m, self.m2m.source, self.source, route.src)
        return Chunk(
            transfer_type=type_of(len(dst_ranks)),
            is_source=True,
            src_rank=self.rank,
            dst_ranks=dst_ranks,
            group=self.m2m.group,
            chunk_shape=_shape(self.source, cell),
            tensor=self.source,
            slice_tuples=cell,
            transfer_dtype=self.transfer_dtype,
            src_idx=route.src.cell,
            source_partial_groups=self.partial_groups,
            local_tensor=None if kept is None else self.target,
            local_slice_tuples=(
                () if kept is None else _slices(self.m2m, self.m2m.target, self.target, kept)
            ),
            no_coalesce=self.partial_groups is not None,
        )

    def _copied(self, route: Route, here: Endpoint) -> Chunk:
        place = _slices(self.m2m, self.m2m.target, self.target, here)
        return Chunk(
            transfer_type=TransferType.SELF_COPY,
            is_source=True,
            src_rank=self.rank,
            dst_ranks=(self.rank,),
            group=self.m2m.group,
            chunk_shape=_shape(self.target, place),
            tensor=self.target,
            slice_tuples=place,
            transfer_dtype=self.transfer_dtype,
            src_idx=route.src.cell,
            dst_idx=here.cell,
            src_slice_tuples=_slices(self.m2m, self.m2m.source, self.source, route.src),
            source_tensor=self.source,
            source_partial_groups=self.partial_groups,
            no_coalesce=self.partial_groups is not None,
        )


def _local_part(
    m2m: M2MMap, side: Side, name: str, tensor: torch.Tensor | None, rank: int
) -> torch.Tensor | None:
    """This rank's part; None on ranks outside the mesh."""
    if rank not in side.shapes:
        return None
    if tensor is None:
        raise ValueError(f"rank {rank} is in the mesh of {name}, which must be given, got None")
    if isinstance(tensor, DTensor):
        whole = tuple(tensor.shape)
        if m2m.global_shape not in (None, whole):
            raise ValueError(f"{name} must have shape {m2m.global_shape}, got {whole}")
        if m2m.global_shape is None:
            _check_divides(name, whole, side.layout.global_shape)
        tensor = tensor.to_local()
    shape = tuple(tensor.shape)
    if m2m.global_shape is None:
        _check_divides(f"{name} of rank {rank}", shape, side.shapes[rank])
    elif shape != side.shapes[rank]:
        raise ValueError(f"{name} of rank {rank} must have shape {side.shapes[rank]}, got {shape}")
    return tensor


def _check_divides(name: str, shape: tuple[int, ...], num_cells: tuple[int, ...]) -> None:
    for dim, num in enumerate(num_cells):
        size = shape[dim] if dim < len(shape) else 1
        if size % num:
            raise ValueError(
                f"{name} has shape {shape}, whose dimension {dim} must divide by the {num} cells of "
                "a map that was made without global_shape; give get_m2m_map the tensor's"
            )


def _partial_groups(
    m2m: M2MMap, rank: int, source: torch.Tensor, given: PartialGroups | None
) -> PartialGroups:
    groups = m2m.source_partial_groups if given is None else given
    reductions = m2m.source_partial_reductions
    if groups is None:
        raise ValueError(
            f"rank {rank} holds a Partial source to reduce over mesh dimensions {reductions}, and the "
            "source mesh has no process groups; source_partial_groups must be given, got None"
        )
    ops = [op for _, op in reductions]
    if [op for _, op in groups] != ops:
        raise ValueError(
            f"source_partial_groups must have the operations {ops} of the map, "
            f"got {[op for _, op in groups]}"
        )
    for op in ops:
        reason = cannot_reduce(op, source.dtype)
        if reason:
            raise ValueError(f"source_tensor of rank {rank}: {reason}")
    return groups


def _check_conversions(
    rank: int,
    source: torch.Tensor | None,
    target: torch.Tensor | None,
    transfer_dtype: torch.dtype | None,
) -> None:
    """Values travel as what they are."""
    for name, tensor in (("source_tensor", source), ("target_tensor", target)):
        if tensor is None or transfer_dtype is None:
            continue
        reason = cannot_become(tensor.dtype, transfer_dtype)
        if reason:
            raise ValueError(
                f"{name} of rank {rank} is {tensor.dtype}, and what travels is {transfer_dtype}: "
                f"{reason}"
            )


def _slices(
    m2m: M2MMap, side: Side, tensor: torch.Tensor | None, endpoint: Endpoint
) -> tuple[slice, ...]:
    """A cell in this rank's part; an even map's cells are scaled to it."""
    slices = side.slices(endpoint)
    if m2m.global_shape is not None or tensor is None:
        return slices
    lengths = [
        size // num for size, num in zip(tensor.shape, side.shapes[endpoint.rank], strict=False)
    ]
    return tuple(
        slice(cell.start * length, cell.stop * length)
        for cell, length in zip(slices, lengths, strict=False)
    )


def _shape(tensor: torch.Tensor | None, slices: tuple[slice, ...]) -> tuple[int, ...]:
    rest = () if tensor is None else tuple(tensor.shape[len(slices) :])
    return (*(cell.stop - cell.start for cell in slices), *rest)
