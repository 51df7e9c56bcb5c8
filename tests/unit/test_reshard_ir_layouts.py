"""Tensors between any two layouts, over ranks as threads, against what DTensor's placements do."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from moe_comm.resharding import ir
from moe_comm.resharding.ir import units
from tests.helpers.thread_transport import use_thread_transport


@dataclasses.dataclass(frozen=True)
class Layout:
    mesh: torch.Tensor
    placements: tuple[Placement, ...]

    def coordinates(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*map(range, self.mesh.shape)))

    def rank(self, coordinate: tuple[int, ...]) -> int:
        return int(self.mesh[coordinate])

    def part(self, whole: torch.Tensor, coordinate: tuple[int, ...]) -> torch.Tensor:
        """Part of `whole` that DTensor's own placements leave."""
        for size, place, placement in zip(
            self.mesh.shape, coordinate, self.placements, strict=True
        ):
            if isinstance(placement, (Shard, _StridedShard)):
                parts, _ = placement._split_tensor(whole, size, with_padding=False)
                whole = parts[place]
        return whole


@dataclasses.dataclass(frozen=True)
class Move:
    shape: tuple[int, ...]
    source: Layout
    target: Layout
    is_even: bool
    dtypes: tuple[torch.dtype, torch.dtype]
    wire: torch.dtype
    is_transposed: tuple[bool, bool]


def in_memory(tensor: torch.Tensor, is_transposed: bool) -> torch.Tensor:
    """The same values, with the first dimension the fastest to change where asked for."""
    if not is_transposed or tensor.dim() < 2:
        return tensor.contiguous()
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)


@st.composite
def layouts(draw: st.DrawFn, num_ranks: int, num_dims: int, is_target: bool) -> Layout:
    shape = draw(
        st.sampled_from(
            [
                shape
                for ndim in (1, 2, 3)
                for shape in itertools.product((1, 2, 3), repeat=ndim)
                if math.prod(shape) <= num_ranks
            ]
        )
    )
    ranks = draw(st.permutations(range(num_ranks)))[: math.prod(shape)]
    kinds = ["replicate", *(["shard", "shard", "strided"] if num_dims else [])]
    ops = draw(st.sampled_from(["sum", "avg", "min", "max", "product"]))
    placements: list[Placement] = []
    for _ in shape:
        kind = draw(st.sampled_from([*kinds, *([] if is_target else ["partial"])]))
        dim = draw(st.integers(0, max(0, num_dims - 1)))
        placements.append(
            {
                "replicate": Replicate(),
                "shard": Shard(dim),
                "strided": _StridedShard(dim, split_factor=draw(st.integers(1, 3))),
                "partial": Partial(ops),
            }[kind]
        )
    return Layout(torch.tensor(ranks).reshape(shape), tuple(placements))


@st.composite
def moves(draw: st.DrawFn, num_ranks: int) -> Move:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    source, target = (
        draw(layouts(num_ranks, len(shape), is_target)) for is_target in (False, True)
    )
    is_even = draw(st.booleans())
    if is_even:
        m2m = ir.get_m2m_map(source, source.placements, target, target.placements, None)
        cells = m2m.source.layout.global_shape
        shape = (*shape, *[0] * (len(cells) - len(shape)))
        shape = tuple(
            size % 3 * cells[dim] if dim < len(cells) else size for dim, size in enumerate(shape)
        )
    dtypes = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    wire = draw(st.sampled_from([ir.choose_transfer_dtype(*dtypes), torch.bfloat16]))
    is_transposed = draw(st.booleans()), draw(st.booleans())
    return Move(shape, source, target, is_even, dtypes, wire, is_transposed)


def summands(move: Move, seed: int) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """By rank what the source holds, and the value. Numbers that every dtype holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    partial_dims = [d for d, p in enumerate(move.source.placements) if isinstance(p, Partial)]
    # Multiples of 12: averages over 2 x 3 ranks are whole; few, so that products stay small.
    whole: dict[tuple[int, ...], torch.Tensor] = {}
    for coordinate in move.source.coordinates():
        key = tuple(coordinate[dim] for dim in partial_dims)
        if key not in whole:
            op = next((p.reduce_op for p in move.source.placements if isinstance(p, Partial)), "")
            low, high, step = (1, 3, 1) if op == "product" else (-2, 3, 12)
            drawn = torch.randint(low, high, move.shape, generator=generator) * step
            whole[key] = drawn.to(move.dtypes[0])
    local = {
        move.source.rank(c): in_memory(
            move.source.part(whole[tuple(c[d] for d in partial_dims)], c), move.is_transposed[0]
        )
        for c in move.source.coordinates()
    }
    value = _reduced(move, whole, partial_dims)
    return local, value


def _reduced(
    move: Move, whole: dict[tuple[int, ...], torch.Tensor], partial_dims: list[int]
) -> torch.Tensor:
    stacked = torch.stack([whole[key].double() for key in sorted(whole)])
    op = next((p.reduce_op for p in move.source.placements if isinstance(p, Partial)), "sum")
    return {
        "sum": lambda: stacked.sum(0),
        "avg": lambda: stacked.mean(0),
        "min": lambda: stacked.amin(0),
        "max": lambda: stacked.amax(0),
        "product": lambda: stacked.prod(0),
    }[op]()


def _move_all(
    moves: list[Move], num_ranks: int, bucket_size: int, max_in_flight: int, has_subgroups: bool
) -> None:
    sources, values = zip(*(summands(move, seed) for seed, move in enumerate(moves)), strict=True)
    before = [{rank: part.clone() for rank, part in local.items()} for local in sources]
    targets: list[dict[int, torch.Tensor]] = []
    for move in moves:
        parts = {
            move.target.rank(c): move.target.part(torch.zeros(move.shape), c)
            for c in move.target.coordinates()
        }
        poisoned = {r: torch.full_like(p, -77, dtype=move.dtypes[1]) for r, p in parts.items()}
        targets.append({r: in_memory(p, move.is_transposed[1]) for r, p in poisoned.items()})

    def run(rank: int) -> None:
        chunks = []
        for move, source, target in zip(moves, sources, targets, strict=True):
            m2m = ir.get_m2m_map(
                move.source,
                move.source.placements,
                move.target,
                move.target.placements,
                None,
                global_shape=None if move.is_even else move.shape,
            )
            groups = transport.partial_groups(move.source.mesh, m2m.source_partial_reductions)
            chunks += ir.m2m_to_chunks(
                m2m, rank, source.get(rank), target.get(rank), move.wire, groups
            )
        buckets = ir.chunk_to_bucket_ops(chunks, bucket_size)
        for bucket in buckets:
            for entry in bucket.entries:
                assert entry.offset % units.ENTRY_ALIGNMENT == 0
                assert entry.offset + entry.nbytes <= bucket.total_bytes
        ir.bucket_comm(buckets, max_in_flight)

    with pytest.MonkeyPatch.context() as monkeypatch:
        transport = use_thread_transport(monkeypatch, has_subgroups)
        transport.run(num_ranks, run)
    for move, value, target in zip(moves, values, targets, strict=True):
        for coordinate in move.target.coordinates():
            got = target[move.target.rank(coordinate)]
            assert torch.equal(got.double(), move.target.part(value, coordinate)), move
    for local, kept in zip(sources, before, strict=True):
        assert all(torch.equal(local[rank], kept[rank]) for rank in local)


def _check_a_drawn_case(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 6))
    drawn = data.draw(st.lists(moves(num_ranks), min_size=1, max_size=4))
    _move_all(
        drawn,
        num_ranks,
        data.draw(st.sampled_from([1, 40, 200, 1 << 20])),
        data.draw(st.integers(1, 3)),
        data.draw(st.booleans()),
    )


@settings(max_examples=50)
@given(data=st.data())
def test_any_layout_becomes_any_other(data: st.DataObject) -> None:
    _check_a_drawn_case(data)


@pytest.mark.full
@settings(max_examples=200)
@given(data=st.data())
def test_any_layout_becomes_any_other_in_many_cases(data: st.DataObject) -> None:
    _check_a_drawn_case(data)
