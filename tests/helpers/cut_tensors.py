"""Whole tensors cut into ranks' parts by plain torch operations, and what ranks say about them.

Nothing here uses `moe_comm.resharding.describe.intervals`: plans are held against these cuts.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from hypothesis import strategies as st

from moe_comm.resharding.describe.metadata import MeshLayout, MeshPlacement, ParameterMetadata
from moe_comm.resharding.plan.planner import build_plan_from_rank_metadata
from moe_comm.resharding.plan.rank_metadata import (
    decode_rank_metadata,
    encode_rank_metadata,
)
from moe_comm.resharding.plan.reshard_plan import ReshardPlan


@dataclasses.dataclass
class Part:
    """Part of one tensor on one rank."""

    tensor: torch.Tensor
    meta: ParameterMetadata


# By rank, then by name.
Side = dict[int, dict[str, Part]]


def numbered(shape: Sequence[int]) -> torch.Tensor:
    """A tensor whose elements are all different."""
    return torch.arange(torch.Size(shape).numel()).reshape(tuple(shape))


def part(tensor: torch.Tensor, name: str, rank: int, **fields: Any) -> Part:
    meta = ParameterMetadata(
        name=f"module.{name}",
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        element_size=tensor.element_size(),
        owner_rank=rank,
        resolved_name=name,
        **fields,
    )
    return Part(tensor.contiguous(), meta)


def cut_sizes(data: st.DataObject, size: int, num_parts: int) -> list[int]:
    """Any sizes, 0 among them, that add up to `size`."""
    cuts = sorted(data.draw(st.integers(0, size)) for _ in range(num_parts - 1))
    return [after - before for before, after in itertools.pairwise([0, *cuts, size])]


def cut_by_tensor_parallel(
    data: st.DataObject, whole: torch.Tensor, name: str, ranks: Sequence[int]
) -> dict[int, Part]:
    """Groups of tensor parallel ranks, each of which holds the whole."""
    tp = data.draw(st.sampled_from([n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]))
    dim = data.draw(st.integers(0, whole.dim() - 1))
    kind = data.draw(st.sampled_from(["whole", "uneven", "stride", "packed"]))
    fields: dict[str, Any] = {"is_tp": tp > 1, "partition_dim": dim}
    sizes_of: list[list[int] | None] = [None] * tp
    if kind == "stride":
        stride = data.draw(st.integers(1, 3))
        # Every segment of a rank has one size; those of different ranks may differ.
        unit = whole.shape[dim] // stride
        kind = "uneven" if whole.shape[dim] % stride else kind
    if kind == "whole":
        fields["is_tp"] = False
        parts = [whole] * tp
    elif kind == "uneven":
        parts = list(whole.split(cut_sizes(data, whole.shape[dim], tp), dim))
    elif kind == "stride":
        fields["partition_stride"] = stride
        sizes = cut_sizes(data, unit, tp)
        segments = whole.split(sizes * stride, dim)
        parts = [torch.cat(segments[member::tp], dim) for member in range(tp)]
    else:
        components = whole.split(cut_sizes(data, whole.shape[dim], 3), dim)
        pieces = [c.split(cut_sizes(data, c.shape[dim], tp), dim) for c in components]
        parts = [torch.cat([piece[member] for piece in pieces], dim) for member in range(tp)]
        sizes_of = [[piece[member].shape[dim] for piece in pieces] for member in range(tp)]
    held = {}
    for number, rank in enumerate(ranks):
        group = list(ranks[number // tp * tp :][:tp])
        held[rank] = part(
            parts[number % tp],
            name,
            rank,
            tensor_parallel_group_ranks=group,
            partition_sizes=sizes_of[number % tp],
            **fields,
        )
    return held


def cut_by_experts(
    data: st.DataObject, whole: torch.Tensor, name: str, ranks: Sequence[int]
) -> dict[int, Part]:
    """Experts along dimension 0, and a second sharded dimension."""
    divisors = [n for n in range(1, len(ranks) + 1) if len(ranks) % n == 0]
    ep = data.draw(st.sampled_from(divisors))
    tp = data.draw(st.sampled_from([n for n in divisors if len(ranks) % (n * ep) == 0]))
    dim = data.draw(st.integers(1, whole.dim() - 1))
    experts = whole.split(cut_sizes(data, whole.shape[0], ep))
    sizes = cut_sizes(data, whole.shape[dim], tp)
    shards = [some.split(sizes, dim) for some in experts]
    held = {}
    for number, rank in enumerate(ranks):
        replica, place = divmod(number, ep * tp)
        members = ranks[replica * ep * tp :][: ep * tp]
        held[rank] = part(
            shards[place // tp][place % tp],
            name,
            rank,
            is_ep=True,
            expert_dim=0,
            expert_parallel_group_ranks=list(members[place % tp :: tp]),
            is_tp=tp > 1,
            partition_dim=dim,
            tensor_parallel_group_ranks=list(members[place // tp * tp :][:tp]),
        )
    return held


def cut_by_mesh(
    data: st.DataObject, whole: torch.Tensor, name: str, ranks: Sequence[int]
) -> dict[int, Part]:
    """A DTensor over a mesh of up to three dimensions."""
    mesh_shape: list[int] = []
    rest = len(ranks)
    for _ in range(2):
        mesh_shape.append(
            data.draw(st.sampled_from([n for n in range(1, rest + 1) if rest % n == 0]))
        )
        rest //= mesh_shape[-1]
    mesh_shape.append(rest)
    mesh_ranks = data.draw(st.permutations(ranks))
    placements = []
    for _ in mesh_shape:
        kind = data.draw(st.sampled_from(["replicate", "shard", "strided_shard"]))
        dim = -1 if kind == "replicate" else data.draw(st.integers(0, whole.dim() - 1))
        split = data.draw(st.integers(1, 3)) if kind == "strided_shard" else 1
        placements.append(MeshPlacement(kind, dim, split))  # type: ignore[arg-type]
    coordinates = [*itertools.product(*map(range, mesh_shape))]

    def cut_at(numbers: Sequence[int]) -> torch.Tensor:
        tensor = whole
        for place, size, number in zip(placements, mesh_shape, numbers, strict=True):
            if place.kind == "replicate":
                continue
            splits = tensor.chunk(place.split_factor, place.dim)
            nothing = tensor.narrow(place.dim, 0, 0)
            chunks = [some.chunk(size, place.dim) for some in splits if some.shape[place.dim]]
            tensor = torch.cat(
                [nothing, *(some[number] for some in chunks if number < len(some))], place.dim
            )
        return tensor

    def by_rank(coordinate: tuple[int, ...]) -> list[int]:
        """Place in the process group of every dimension, which torch sorts."""
        grid = torch.tensor(mesh_ranks).view(mesh_shape)
        lines = [
            grid[(*coordinate[:dim], slice(None), *coordinate[dim + 1 :])]
            for dim in range(grid.dim())
        ]
        return [
            line.tolist().index(grid[coordinate]) for line in (each.sort()[0] for each in lines)
        ]

    is_cut = [place.kind != "replicate" for place in placements]
    lines: dict[tuple[int, tuple[int, ...]], set[int]] = {}
    for each in coordinates:
        for dim, number in enumerate(by_rank(each)):
            # Parts of later dimensions are put together first.
            line = tuple(-1 if k > dim and is_cut[k] else at for k, at in enumerate(each))
            lines.setdefault((dim, line), set()).add(number)
    is_one_order = all(len(found) == 1 for (dim, _), found in lines.items() if is_cut[dim])
    if not is_one_order or any(
        cut_at(each).shape != cut_at(by_rank(each)).shape for each in coordinates
    ):
        mesh_ranks = sorted(ranks)  # what torch itself cannot put together is refused
    layout = MeshLayout(tuple(mesh_shape), tuple(mesh_ranks), tuple(placements), tuple(whole.shape))
    return {
        rank: part(cut_at(by_rank(coordinate)), name, rank, mesh=layout)
        for rank, coordinate in zip(mesh_ranks, coordinates, strict=True)
    }


def cut(
    data: st.DataObject, whole: torch.Tensor, name: str, ranks: Sequence[int], kinds: Sequence[str]
) -> dict[int, Part]:
    """A tensor over all of `ranks`, or over those of one pipeline stage."""
    num_stages = data.draw(st.sampled_from([n for n in (1, 2) if len(ranks) % n == 0]))
    stage = data.draw(st.integers(0, num_stages - 1))
    per_stage = len(ranks) // num_stages
    some = ranks[stage * per_stage :][:per_stage]
    how = {"tp": cut_by_tensor_parallel, "experts": cut_by_experts, "mesh": cut_by_mesh}
    return how[data.draw(st.sampled_from(kinds))](data, whole, name, some)


def plans_of(num_ranks: int, sources: Side, destinations: Side) -> dict[int, ReshardPlan]:
    """Every rank's plan, from what ranks hold, encoded."""
    by_rank = [
        (
            decode_rank_metadata(
                encode_rank_metadata([p.meta for p in sources.get(rank, {}).values()])
            ),
            decode_rank_metadata(
                encode_rank_metadata([p.meta for p in destinations.get(rank, {}).values()])
            ),
        )
        for rank in range(num_ranks)
    ]
    return {rank: build_plan_from_rank_metadata(by_rank, rank) for rank in range(num_ranks)}


# By rank, then by name in the rank's module.
Tensors = Mapping[int, Mapping[str, torch.Tensor]]


@torch.no_grad()
def run_plans(plans: Mapping[int, ReshardPlan], sources: Tensors, destinations: Tensors) -> None:
    """Copy every piece of all ranks' plans; each is sent once and received once."""
    wire = {}
    for rank, plan in plans.items():
        for op in plan.send_ops:
            tensor = sources[rank][op.param_name]
            viewed = tensor if op.my_view is None else tensor.view(op.my_view)
            assert (op.peer_rank, op.task_id) not in wire
            wire[op.peer_rank, op.task_id] = viewed[op.my_slice].clone()
    for rank, plan in plans.items():
        for op in plan.recv_ops:
            tensor = destinations[rank][op.param_name]
            viewed = tensor if op.my_view is None else tensor.view(op.my_view)
            target, payload = viewed[op.my_slice], wire.pop((rank, op.task_id))
            assert payload.shape == target.shape
            target.copy_(payload)
    assert wire == {}


def execute(
    plans: Mapping[int, ReshardPlan], sources: Side, destinations: Side
) -> dict[tuple[int, str], torch.Tensor]:
    """Content of destinations after all plans ran; -1 where nothing was written."""

    def tensors(side: Side) -> dict[int, dict[str, torch.Tensor]]:
        return {
            rank: {one.meta.name: one.tensor for one in parts.values()}
            for rank, parts in side.items()
        }

    written = {
        rank: {name: torch.full_like(tensor, -1) for name, tensor in parts.items()}
        for rank, parts in tensors(destinations).items()
    }
    run_plans(plans, tensors(sources), written)
    return {(rank, name): t for rank, parts in written.items() for name, t in parts.items()}
