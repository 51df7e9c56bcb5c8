"""Places of ranks' tensors, against tensors that are cut by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import _utils as dtensor_utils
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.layouts import resolve_layouts
from moe_comm.resharding.describe.mesh_layouts import mesh_intervals
from moe_comm.resharding.describe.metadata import MeshLayout, MeshPlacement, ParameterMetadata
from moe_comm.resharding.describe.tensor_layout import Holder, Layout


def meta(shape: tuple[int, ...], rank: int = 0, **fields: Any) -> ParameterMetadata:
    return ParameterMetadata(
        name="w", shape=shape, dtype=torch.float32, element_size=4, owner_rank=rank, **fields
    )


def tp_holders(shapes: list[tuple[int, ...]], dim: int = 0, **fields: Any) -> list[Holder]:
    """One tensor parallel group whose members hold these shapes."""
    ranks = list(range(len(shapes)))
    return [
        Holder(
            rank,
            meta(
                shape,
                rank,
                is_tp=True,
                partition_dim=dim,
                tensor_parallel_group_ranks=ranks,
                **fields,
            ),
        )
        for rank, shape in enumerate(shapes)
    ]


def whole(shape: tuple[int, ...], rank: int = 99, **fields: Any) -> Holder:
    return Holder(rank, meta(shape, rank, tensor_parallel_group_ranks=[rank], **fields))


def places(layout: Layout | None) -> torch.Tensor:
    """Global number of every element of the local tensor, `[*view]`."""
    numbers = torch.arange(torch.Size(layout.global_shape).numel()).reshape(layout.global_shape)
    for dim, held in enumerate(layout.dims):
        index = [part.global_start + k for part in held for k in range(part.length)]
        numbers = numbers.index_select(dim, torch.tensor(index, dtype=torch.int64))
    assert tuple(numbers.shape) == layout.view
    return numbers


# ---------------------------------------------------------------------------------------------
# DTensor.


def torch_placement(placement: MeshPlacement) -> Placement:
    if placement.kind == "shard":
        return Shard(placement.dim)
    if placement.kind == "strided_shard":
        return _StridedShard(placement.dim, split_factor=placement.split_factor)
    return Replicate()


placements = st.one_of(
    st.just(MeshPlacement("replicate")),
    st.builds(lambda dim: MeshPlacement("shard", dim), st.integers(0, 1)),
    st.builds(
        lambda dim, split: MeshPlacement("strided_shard", dim, split),
        st.integers(0, 1),
        st.integers(1, 4),
    ),
)


@given(
    st.tuples(st.integers(1, 13), st.integers(1, 7)),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.data(),
)
def test_meshes_are_cut_as_torch_cuts(
    shape: tuple[int, int], mesh_shape: list[int], data: st.DataObject
) -> None:
    chosen = tuple(data.draw(placements) for _ in mesh_shape)
    num_ranks = torch.Size(mesh_shape).numel()
    mesh = MeshLayout(tuple(mesh_shape), tuple(range(num_ranks)), chosen, shape)
    for rank, coordinate in enumerate(itertools.product(*map(range, mesh_shape))):
        held = mesh_intervals(mesh, rank)
        assert held is not None
        expected_shape, expected_offset = dtensor_utils._compute_local_shape_and_global_offset(
            shape, tuple(mesh_shape), list(coordinate), [torch_placement(p) for p in chosen]
        )
        lengths = tuple(sum(part.length for part in dim) for dim in held)
        assert lengths == tuple(expected_shape)
        if all(lengths):
            assert tuple(dim[0].global_start for dim in held) == tuple(expected_offset)
        # The offset tells only where the first element lies; the rest is cut here by hand.
        for dim, size in enumerate(shape):
            index = torch.arange(size)
            for place, num_chunks, number in zip(chosen, mesh_shape, coordinate, strict=True):
                if place.dim == dim:
                    index = cut_by_hand(index, place, num_chunks, number)
            found = [p.global_start + k for p in held[dim] for k in range(p.length)]
            assert found == index.tolist()


def cut_by_hand(
    index: torch.Tensor, place: MeshPlacement, num_chunks: int, number: int
) -> torch.Tensor:
    splits = index.chunk(place.split_factor) if place.kind == "strided_shard" else [index]
    parts = [split.chunk(num_chunks) for split in splits if split.numel()]
    return torch.cat([index[:0], *(part[number] for part in parts if number < len(part))])


def test_a_rank_outside_the_mesh_holds_nothing() -> None:
    mesh = MeshLayout((2,), (4, 5), (MeshPlacement("shard", 0),), (6,))
    assert mesh_intervals(mesh, 0) is None
    holder = Holder(0, meta((0,), mesh=mesh))
    assert resolve_layouts("w", [holder], []) == ([None], [])


def test_a_local_shape_that_is_not_its_part_of_the_dtensor() -> None:
    mesh = MeshLayout((2,), (0, 1), (MeshPlacement("shard", 0),), (5, 2))
    with pytest.raises(PlanError, match=r"w: rank 1 holds shape \(3, 2\).*has shape \(2, 2\)"):
        resolve_layouts("w", [Holder(1, meta((3, 2), 1, mesh=mesh))], [])


def test_a_destination_cannot_be_a_pending_sum() -> None:
    mesh = MeshLayout((2,), (0, 1), (MeshPlacement("partial", op="sum"),), (4,))
    holders = [Holder(rank, meta((4,), rank, mesh=mesh)) for rank in range(2)]
    assert None not in resolve_layouts("w", holders, [])[0]
    with pytest.raises(PlanError, match="w: rank 0 would receive a DTensor with Partial"):
        resolve_layouts("w", [], holders)


@pytest.mark.parametrize("kind", ["replicate", None])
def test_all_ranks_of_a_pending_sum_must_know_of_it(kind: Any) -> None:
    mesh = MeshLayout((2,), (0, 1), (MeshPlacement("partial", op="sum"),), (4,))
    holders = [Holder(0, meta((4,), mesh=mesh))]
    if kind is not None:
        other = dataclasses.replace(mesh, placements=(MeshPlacement(kind),))
        holders.append(Holder(1, meta((4,), 1, mesh=other)))
    text = r"w: rank 0 holds a pending sum over ranks \[0, 1\], of which rank 1 does not hold"
    with pytest.raises(PlanError, match=text):
        resolve_layouts("w", holders, [])


# ---------------------------------------------------------------------------------------------
# Attributes.


def test_uneven_shards_lie_one_after_the_other() -> None:
    sources, destinations = resolve_layouts(
        "w", tp_holders([(3, 2), (5, 2), (1, 2)]), [whole((9, 2))]
    )
    full = torch.arange(18).reshape(9, 2)
    assert places(destinations[0]).equal(full)
    for layout, part in zip(sources, full.split([3, 5, 1]), strict=True):
        assert places(layout).equal(part)


def test_segments_go_round_the_ranks() -> None:
    sources, _ = resolve_layouts("w", tp_holders([(6,), (6,)], partition_stride=3), [whole((12,))])
    segments = torch.arange(12).chunk(6)
    for rank in range(2):
        assert places(sources[rank]).equal(torch.cat(segments[rank::2]))


def test_packed_components_are_sharded_each_by_itself() -> None:
    holders = tp_holders([(5,), (7,)])
    for holder, sizes in zip(holders, ([2, 2, 1], [4, 2, 1]), strict=True):
        holder.meta.partition_sizes = sizes
    sources, _ = resolve_layouts("w", holders, [whole((12,))])
    assert places(sources[0]).tolist() == [0, 1, 6, 7, 10]
    assert places(sources[1]).tolist() == [2, 3, 4, 5, 8, 9, 11]


def test_a_side_without_component_sizes_is_packed_like_the_other() -> None:
    packed = tp_holders([(6,), (6,)], partition_sizes=[4, 2])
    plain = tp_holders([(3,)] * 4)
    _, destinations = resolve_layouts("w", packed, plain)
    assert places(destinations[1]).tolist() == [2, 3, 9]


def test_a_shard_that_does_not_say_so() -> None:
    unmarked = [
        Holder(h.rank, dataclasses.replace(h.meta, is_tp=False))
        for h in tp_holders([(4, 6), (4, 6)])
    ]
    marked_destination = whole((4, 12), is_tp=True, partition_dim=1)
    sources, _ = resolve_layouts("w", unmarked, [marked_destination])
    assert places(sources[1]).equal(torch.arange(48).reshape(4, 12)[:, 6:])
    # A whole tensor on every member of the group is a replica.
    sources, _ = resolve_layouts("w", unmarked, [whole((4, 6), is_tp=True, partition_dim=1)])
    assert places(sources[1]).equal(torch.arange(24).reshape(4, 6))
    # Nobody says that anything is sharded: sizes must agree.
    with pytest.raises(PlanError, match=r"w: shapes do not add up.*\(4, 6\).*\(4, 12\)"):
        resolve_layouts("w", unmarked, [whole((4, 12))])


@pytest.mark.parametrize(
    ("holders", "message"),
    [
        ([*tp_holders([(4,), (4,)]), whole((9,))], r"rank 0 holds \(4,\) \(sharded 2 ways"),
        (tp_holders([(5,), (5,)], partition_stride=2), "partition_stride 2, which does not divide"),
        (tp_holders([(4,), (4,)], partition_sizes=[3, 2]), r"partition_sizes \[3, 2\].*size 4"),
        (tp_holders([(4,), (4,)], dim=1), r"partition_dim 1 for shape \(4,\)"),
        ([Holder(7, tp_holders([(4,), (4,)])[0].meta)], "rank 7 is not in its own tensor"),
        ([whole((4, 3), local_view=(5, 2))], r"shape \(4, 3\), which cannot be viewed as \(5, 2\)"),
    ],
)
def test_metadata_that_contradicts_itself(holders: list[Holder], message: str) -> None:
    with pytest.raises(PlanError, match=f"^w: .*{message}"):
        resolve_layouts("w", holders, [])


def test_members_with_different_numbers_of_components() -> None:
    holders = tp_holders([(4,), (4,)])
    holders[0].meta.partition_sizes, holders[1].meta.partition_sizes = [2, 2], [2, 1, 1]
    with pytest.raises(PlanError, match=r"^w: .*different numbers of components"):
        resolve_layouts("w", holders, [whole((8,))])


# ---------------------------------------------------------------------------------------------
# Experts.


def expert_holders(
    shape: tuple[int, ...], ep: int, tp: int = 1, first: int = 0, **fields: Any
) -> list[Holder]:
    """`ep * tp` ranks, tensor parallel fastest, that share a tensor of several experts."""
    holders = []
    for rank in range(first, first + ep * tp):
        ep_ranks = [first + (rank - first) % tp + tp * i for i in range(ep)]
        tp_first = rank - (rank - first) % tp
        holders.append(
            Holder(
                rank,
                meta(
                    shape,
                    rank,
                    is_ep=True,
                    expert_parallel_group_ranks=ep_ranks,
                    tensor_parallel_group_ranks=list(range(tp_first, tp_first + tp)),
                    is_tp=tp > 1,
                    **fields,
                ),
            )
        )
    return holders


def test_fused_experts_over_two_dimensions() -> None:
    sources, destinations = resolve_layouts(
        "w",
        expert_holders((4, 3, 10), ep=2, expert_dim=0),
        expert_holders((2, 3, 5), ep=4, tp=2, first=2, expert_dim=0, partition_dim=2),
    )
    full = torch.arange(240).reshape(8, 3, 10)
    assert places(sources[1]).equal(full[4:])
    for number, layout in enumerate(destinations):
        ep_idx, tp_idx = divmod(number, 2)
        expected = full[2 * ep_idx : 2 * ep_idx + 2, :, 5 * tp_idx : 5 * tp_idx + 5]
        assert places(layout).equal(expected)


def test_experts_that_lie_in_memory_before_all_other_dimensions() -> None:
    """`[hidden, experts x inner]` that is read as `[experts, hidden, inner]`."""
    sources, destinations = resolve_layouts(
        "w",
        expert_holders((3, 8), ep=2, expert_dim=0, local_view=(2, 3, 4)),
        [whole((3, 16), expert_dim=0, local_view=(4, 3, 4))],
    )
    assert places(sources[1]).equal(torch.arange(48).reshape(4, 3, 4)[2:])
    assert places(destinations[0]).shape == (4, 3, 4)


def test_the_dimension_of_experts_is_found_where_sizes_leave_one() -> None:
    sources, destinations = resolve_layouts(
        "w",
        expert_holders((2, 4, 6), ep=4, num_experts=8),
        expert_holders((4, 4, 6), ep=2, first=4, num_experts=8),
    )
    full = torch.arange(8 * 24).reshape(8, 4, 6)
    assert places(sources[2]).equal(full[4:6])
    assert places(destinations[1]).equal(full[4:])
    # One side without expert parallelism holds them all.
    sources, _ = resolve_layouts(
        "w", expert_holders((6, 2), ep=4, num_experts=8), [whole((6, 8), num_experts=8)]
    )
    assert places(sources[3]).equal(torch.arange(48).reshape(6, 8)[:, 6:])


def test_experts_that_lie_one_after_the_other_in_a_longer_dimension() -> None:
    sources, _ = resolve_layouts(
        "w",
        expert_holders((6, 2), ep=4, num_experts=8),
        expert_holders((12, 2), ep=2, first=4, num_experts=8),
    )
    assert places(sources[1]).equal(torch.arange(48).reshape(24, 2)[6:12])
    # Three rows on each of four ranks are no eight experts.
    with pytest.raises(PlanError, match=r"^w: shapes \[\(3, 2\), \(6, 2\)\] fit no way"):
        resolve_layouts(
            "w",
            expert_holders((3, 2), ep=4, num_experts=8),
            expert_holders((6, 2), ep=2, first=4, num_experts=8),
        )


def test_sizes_that_do_not_tell_where_experts_lie() -> None:
    with pytest.raises(PlanError, match=r"^w: shapes \[\(2, 4\), \(4, 2\)\] fit no way"):
        resolve_layouts(
            "w",
            expert_holders((2, 4), ep=4, num_experts=None),
            expert_holders((4, 2), ep=2, first=4, num_experts=None),
        )
    with pytest.raises(PlanError, match=r"^w: shapes .* state expert_dim"):
        # Sources of an empty tensor: every dimension fits.
        resolve_layouts("w", expert_holders((0, 0), ep=4), expert_holders((0, 0), ep=2, first=4))


def test_equal_groups_need_no_dimension_of_experts() -> None:
    sources, destinations = resolve_layouts(
        "w",
        expert_holders((5, 6), ep=2),
        expert_holders((5, 3), ep=2, tp=2, first=2, partition_dim=1),
    )
    full = torch.arange(60).reshape(2, 5, 6)
    assert places(sources[1]).equal(full[1:])
    assert places(destinations[3]).equal(full[1:, :, 3:])


def test_uneven_experts() -> None:
    holders = expert_holders((3, 2), ep=2, expert_dim=0)
    holders[1] = Holder(1, dataclasses.replace(holders[1].meta, shape=(2, 2)))
    sources, _ = resolve_layouts("w", holders, [whole((5, 2))])
    assert places(sources[1]).equal(torch.arange(10).reshape(5, 2)[3:])


def test_experts_that_state_the_default_dimension_only() -> None:
    """Row-parallel weights of grouped linear layers state dimension 0, but are cut along 1."""
    sources = [
        Holder(h.rank, dataclasses.replace(h.meta, global_expert_index=3, is_ep=True))
        for h in tp_holders([(4, 3), (4, 3)])
    ]
    found, _ = resolve_layouts("w", sources, [whole((4, 6), global_expert_index=3, is_ep=True)])
    assert places(found[1]).equal(torch.arange(24).reshape(4, 6)[:, 3:])


def test_one_dimension_over_both_kinds_of_ranks() -> None:
    with pytest.raises(PlanError, match=r"^w: dimension 0 of shape .* both tensor and expert"):
        resolve_layouts(
            "w",
            expert_holders((4,), ep=2, tp=2, expert_dim=0),
            expert_holders((8,), ep=2, first=4, expert_dim=0),
        )


def test_fused_experts_that_state_the_default_dimension_only() -> None:
    """`partition_dim` 0 is where the experts lie: the sizes tell what is sharded."""
    full = torch.arange(4 * 30).reshape(4, 6, 5)
    sources, _ = resolve_layouts(
        "w",
        expert_holders((2, 3, 5), ep=2, tp=2, expert_dim=0),
        [whole((4, 6, 5), expert_dim=0)],
    )
    assert places(sources[3]).equal(full[2:, 3:])
    # Groups of equal sizes: each member takes what its like holds.
    sources, destinations = resolve_layouts(
        "w",
        expert_holders((2, 3, 5), ep=2, tp=2, expert_dim=0),
        expert_holders((1, 3, 5), ep=4, tp=2, first=4, expert_dim=0),
    )
    assert destinations[0] != destinations[1]
    for idx, layout in enumerate(destinations):
        half = places(sources[idx // 4 * 2 + idx % 2])
        assert places(layout).equal(half[idx // 2 % 2 :][:1])


def test_members_of_a_group_with_other_dimensions() -> None:
    holders = tp_holders([(4, 6), (4,)], dim=1)
    with pytest.raises(PlanError, match=r"^w: source rank 0 holds .*\(4, 6\), rank 1 .* \(4,\)"):
        resolve_layouts("w", holders, [])


# ---------------------------------------------------------------------------------------------
# Both sides described differently.


def mesh_holders(
    shape: tuple[int, ...], global_shape: tuple[int, ...], num_ranks: int, dim: int
) -> list[Holder]:
    mesh = MeshLayout(
        (num_ranks,), tuple(range(num_ranks)), (MeshPlacement("shard", dim),), global_shape
    )
    return [Holder(rank, meta(shape, rank, mesh=mesh)) for rank in range(num_ranks)]


def test_a_flat_dtensor_of_experts() -> None:
    flat = mesh_holders((12, 5), (24, 5), 2, 0)
    stacked = expert_holders((2, 6, 5), ep=2, first=2, expert_dim=0)
    sources, destinations = resolve_layouts("w", flat, stacked)
    full = torch.arange(120).reshape(4, 6, 5)
    for side in (sources, destinations):
        for rank, layout in enumerate(side):
            assert places(layout).equal(full[2 * rank : 2 * rank + 2])


def test_a_cut_inside_of_one_expert() -> None:
    flat = mesh_holders((2, 5), (8, 5), 4, 0)
    sources, _ = resolve_layouts("w", flat, [whole((2, 4, 5))])
    assert places(sources[3]).equal(torch.arange(40).reshape(2, 4, 5)[1:, 2:])
    with pytest.raises(PlanError, match=r"^w: rank 0 holds \(6, 1\).*no view of the other side's"):
        resolve_layouts("w", mesh_holders((6, 1), (12, 1), 2, 0), [whole((3, 4, 1))])


def test_sizes_of_one_do_not_matter() -> None:
    sources, destinations = resolve_layouts("w", [whole((6, 1))], [whole((1, 6), rank=3)])
    assert places(sources[0]).equal(places(destinations[0]))
    sources, destinations = resolve_layouts("w", [whole(())], [whole((1,), rank=3)])
    assert sources[0] == Layout((), (), ())


def test_equal_numbers_of_elements_are_not_equal_shapes() -> None:
    with pytest.raises(PlanError, match=r"do not add up.*\(4, 6\).*\(6, 4\)"):
        resolve_layouts("w", [whole((4, 6))], [whole((6, 4), rank=3)])
    with pytest.raises(PlanError, match=r"do not add up.*\(8, 3\).*\(4, 6\)"):
        resolve_layouts("w", tp_holders([(4, 3), (4, 3)]), [whole((4, 6))])


def _sharded(shapes: list[tuple[int, ...]], first_rank: int = 0) -> list[Holder]:
    return [
        Holder(
            first_rank + holder.rank,
            dataclasses.replace(
                holder.meta, tensor_parallel_group_ranks=[first_rank, first_rank + 1]
            ),
        )
        for holder in tp_holders(shapes)
    ]


@pytest.mark.parametrize(
    ("sources", "destinations", "message"),
    [
        # Both ends of one rank.
        (
            [whole((4, 3), 0), whole((4, 3), 1)],
            [whole((5, 3), 0), whole((5, 3), 1)],
            "source rank 0 holds (4, 3) (not sharded) of (4, 3); target rank 0 holds (5, 3)",
        ),
        # One replica is not like the others.
        (
            [whole((4, 3), 0), whole((4, 3), 1)],
            [whole((4, 3), 0), whole((5, 3), 1)],
            "target rank 0 holds (4, 3) (not sharded) of (4, 3); target rank 1 holds (5, 3)",
        ),
        (
            [whole((5, 3), 0), whole((4, 3), 1)],
            [whole((4, 3), 0)],
            "source rank 1 holds (4, 3) (not sharded) of (4, 3); source rank 0 holds (5, 3)",
        ),
        # One of two shards is too small.
        (
            _sharded([(4, 3), (3, 3)]),
            [whole((8, 3), 0)] * 3,
            "of (7, 3), of its tensor parallel group rank 1 (3, 3); target rank 0 holds (8, 3)",
        ),
    ],
)
def test_the_ranks_that_disagree_are_named(
    sources: list[Holder], destinations: list[Holder], message: str
) -> None:
    with pytest.raises(PlanError) as info:
        resolve_layouts("w", sources, destinations)
    assert message in str(info.value)
