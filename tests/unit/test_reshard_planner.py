"""Plans of any layouts, executed with plain tensors and held against the whole tensor."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_comm.cli.reshard.model_shapes import MoEShape, roster
from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.metadata import MeshLayout, MeshPlacement, ParameterMetadata
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.plan import plan_check
from moe_comm.resharding.plan.planner import (
    _iter_global_transfer_ops,
    build_plan_from_rosters,
    index_metadata_rosters,
)
from moe_comm.resharding.plan.rank_metadata import (
    decode_rank_metadata,
    encode_rank_metadata,
)
from moe_comm.resharding.plan.reshard_plan import PartialReduction, ReshardPlan
from moe_comm.resharding.plan.transfer_op import pack_task_id
from tests.helpers.cut_tensors import Part, Side, cut, execute, numbered, part, plans_of

SLOW_DATA = settings(
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def by_rank(*held: dict[int, Part]) -> Side:
    side: Side = {}
    for parts in held:
        for rank, one in parts.items():
            side.setdefault(rank, {})[one.meta.resolved_name or ""] = one
    return side


def check(num_ranks: int, sources: Side, destinations: Side) -> dict[int, ReshardPlan]:
    """Plan, verify, execute; every destination element must be the right one."""
    plans = plans_of(num_ranks, sources, destinations)
    plan_check.verify_plans(plans)
    result = execute(plans, sources, destinations)
    for rank, parts in destinations.items():
        for one in parts.values():
            assert torch.equal(result[rank, one.meta.name], one.tensor), (rank, one.meta)
    return plans


shapes = st.tuples(st.integers(2, 9), st.integers(1, 8), st.integers(2, 6))


@SLOW_DATA
@given(st.data())
def test_any_layout_becomes_any_other(data: st.DataObject) -> None:
    num_src = data.draw(st.sampled_from([1, 2, 4, 6]))
    num_dst = data.draw(st.sampled_from([1, 2, 4, 6]))
    first_dst = data.draw(st.sampled_from([0, num_src]))
    held = []
    for number in range(data.draw(st.integers(1, 2))):
        whole = numbered(data.draw(shapes))
        kinds = data.draw(st.sampled_from([["tp", "mesh"], ["experts", "mesh"]]))
        src = cut(data, whole, f"w{number}", range(num_src), kinds)
        dst_ranks = range(first_dst, first_dst + num_dst)
        held.append((src, cut(data, whole, f"w{number}", dst_ranks, kinds)))
    sources = by_rank(*(src for src, _ in held))
    destinations = by_rank(*(dst for _, dst in held))
    plans = check(max(num_src, first_dst + num_dst), sources, destinations)
    # The same from metadata that was not encoded.
    pairs = [
        (
            [one.meta for one in sources.get(rank, {}).values()],
            [one.meta for one in destinations.get(rank, {}).values()],
        )
        for rank in plans
    ]
    for rank, plan in plans.items():
        assert build_plan_from_rosters(*index_metadata_rosters(pairs), rank) == plan


def tp_side(whole: torch.Tensor, name: str, ranks: list[int], dim: int = 0) -> dict[int, Part]:
    """One tensor parallel group."""
    return {
        rank: part(
            some,
            name,
            rank,
            is_tp=len(ranks) > 1,
            partition_dim=dim,
            tensor_parallel_group_ranks=ranks,
        )
        for rank, some in zip(ranks, whole.chunk(len(ranks), dim), strict=True)
    }


def replicas(whole: torch.Tensor, name: str, ranks: list[int]) -> dict[int, Part]:
    return {rank: part(whole, name, rank, tensor_parallel_group_ranks=[rank]) for rank in ranks}


# ---------------------------------------------------------------------------------------------
# Who serves whom.


def test_a_rank_copies_from_itself_what_it_holds() -> None:
    whole = numbered((8, 3))
    plans = check(
        4, by_rank(replicas(whole, "w", [0, 2])), by_rank(replicas(whole, "w", [0, 1, 2, 3]))
    )
    assert [op.peer_rank for rank in (0, 2) for op in plans[rank].recv_ops] == [0, 2]
    # The other two take one replica each.
    assert {op.peer_rank for rank in (1, 3) for op in plans[rank].recv_ops} == {0, 2}


@pytest.mark.parametrize("num_parameters", [1, 64])
def test_replicas_take_their_turns(num_parameters: int) -> None:
    whole = numbered((4, 2))
    names = [f"w{i}" for i in range(num_parameters)]
    sources = by_rank(*(replicas(whole, name, [0, 1, 2]) for name in names))
    destinations = by_rank(*(replicas(whole, name, list(range(3, 9))) for name in names))
    plans = check(9, sources, destinations)
    assert [len(plans[rank].send_ops) for rank in range(3)] == [2 * num_parameters] * 3


def test_one_destination_reads_from_all_replicas() -> None:
    whole = numbered((4, 2))
    names = [f"w{i}" for i in range(60)]
    sources = by_rank(*(replicas(whole, name, [0, 1, 2]) for name in names))
    plans = check(4, sources, by_rank(*(replicas(whole, name, [3]) for name in names)))
    counts = [len(plans[rank].send_ops) for rank in range(3)]
    assert min(counts) >= 10, counts


def test_overlapping_sources_write_every_element_once() -> None:
    """A DTensor over two ranks, and a third rank that holds all of it: nobody's replica."""
    whole = numbered((7, 3))
    mesh = MeshLayout((2,), (0, 1), (MeshPlacement("shard", 0),), (7, 3))
    sources = by_rank(
        {rank: part(some, "w", rank, mesh=mesh) for rank, some in enumerate(whole.chunk(2))},
        replicas(whole, "w", [2]),
    )
    plans = check(4, sources, by_rank(replicas(whole, "w", [0, 2, 3])))
    # Elements that a rank holds come first: rank 0 its half, rank 2 everything.
    assert {op.peer_rank for op in plans[0].recv_ops} == {0, 1}
    assert {op.peer_rank for op in plans[2].recv_ops} == {2}


def test_neighbouring_pieces_are_one() -> None:
    """Three ways to two: five sixths are cut where either side is, not into sixths."""
    whole = numbered((12, 5))
    plans = check(5, by_rank(tp_side(whole, "w", [0, 1, 2])), by_rank(tp_side(whole, "w", [3, 4])))
    assert [len(plan.send_ops) for plan in plans.values()] == [1, 2, 1, 0, 0]


def test_layers_of_other_stages_and_experts_of_other_ranks_are_found_by_name() -> None:
    shape = MoEShape(
        num_layers=3,
        hidden=8,
        num_heads=4,
        num_query_groups=4,
        num_experts=4,
        expert_ffn=4,
        ffn=8,
        num_dense_layers=1,
        vocab=16,
    )
    layouts = Parallelism.parse("tp2.pp3.ep2.etp1", 6), Parallelism.parse("tp2.pp1.ep2.etp2", 4)
    pairs: list[tuple[list[ParameterMetadata], list[ParameterMetadata]]] = [
        (roster(shape, layouts[0], rank) if rank < 6 else [], []) for rank in range(10)
    ]
    for rank in range(4):
        pairs[6 + rank] = ([], roster(shape, layouts[1], rank, 6))
    rosters = index_metadata_rosters(pairs)
    plans = {rank: build_plan_from_rosters(*rosters, rank) for rank in range(10)}
    plan_check.verify_plans(plans)
    received = [op for rank in range(6, 10) for op in plans[rank].recv_ops]
    assert {op.peer_rank for op in received} == set(range(6))
    numbers = [task_id for task_id, *_ in _iter_global_transfer_ops(*rosters)]
    assert numbers == [op.task_id for op in received]


def test_an_output_layer_reads_the_embedding_that_it_is_tied_to() -> None:
    whole = numbered((12, 4))
    sources = by_rank(tp_side(whole, "embedding.word_embeddings.weight", [0, 1]))
    destinations = by_rank(
        tp_side(whole, "embedding.word_embeddings.weight", [0, 1]),
        tp_side(whole, "output_layer.weight", [2, 3]),
    )
    check(4, sources, destinations)
    # A source that has both is read as it is.
    other = tp_side(whole + 1000, "output_layer.weight", [0, 1])
    destinations = by_rank(tp_side(whole + 1000, "output_layer.weight", [2, 3]))
    check(4, by_rank(tp_side(whole, "word_embeddings.weight", [2, 3]), other), destinations)


def test_tensors_without_dimensions_or_elements() -> None:
    scalar, nothing = torch.tensor(7), torch.empty(0, 4, dtype=torch.int64)
    sources = by_rank(replicas(scalar, "s", [0]), replicas(nothing, "n", [0]))
    plans = check(2, sources, by_rank(replicas(scalar, "s", [1]), replicas(nothing, "n", [1])))
    assert [op.my_slice for op in plans[1].recv_ops] == [()]
    assert set(plans[1].destinations) == {"module.s", "module.n"}


# ---------------------------------------------------------------------------------------------
# Task ids, dtypes, reductions.


def test_task_ids_are_of_the_destination_alone() -> None:
    whole = numbered((8, 3))
    sources = by_rank(tp_side(whole, "a", [0, 1]), tp_side(whole, "b", [0, 1]))

    def destinations(ranks: list[int]) -> Side:
        return by_rank(replicas(whole, "b", ranks), replicas(whole, "a", ranks))

    before = plans_of(4, sources, destinations([2, 3]))
    after = plans_of(6, sources, destinations([2, 3, 4, 5]))
    assert [op.task_id for op in before[2].recv_ops] == [
        pack_task_id(2, parameter_idx, piece) for parameter_idx in (0, 1) for piece in (0, 1)
    ]
    for rank in (2, 3):
        assert [(op.task_id, op.my_slice) for op in before[rank].recv_ops] == [
            (op.task_id, op.my_slice) for op in after[rank].recv_ops
        ]
    for plan in after.values():
        ids = [op.task_id for op in plan.send_ops]
        assert ids == sorted(ids)  # type: ignore[type-var]


def test_pieces_are_numbered_by_destination_offset() -> None:
    whole = numbered((9, 3))
    sources = by_rank(tp_side(whole, "w", [2, 0, 1]))
    plans = check(4, sources, by_rank(replicas(whole, "w", [3])))
    assert [(op.peer_rank, op.my_slice[0].start) for op in plans[3].recv_ops] == [
        (2, 0),
        (0, 3),
        (1, 6),
    ]


def test_plans_are_equal_however_they_travelled() -> None:
    whole = numbered((8, 3))
    sources = by_rank(tp_side(whole, "w", [0, 1]))
    first = plans_of(3, sources, by_rank(replicas(whole, "w", [2])))
    second = plans_of(3, sources, by_rank(replicas(whole, "w", [2])))
    assert pickle.loads(pickle.dumps(first)) == second


@pytest.mark.parametrize(
    ("source", "destination", "wire"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16, torch.bfloat16),
    ],
)
def test_the_smaller_dtype_travels(
    source: torch.dtype, destination: torch.dtype, wire: torch.dtype
) -> None:
    sources = by_rank(replicas(torch.zeros(4, 2, dtype=source), "w", [0]))
    destinations = by_rank(replicas(torch.zeros(4, 2, dtype=destination), "w", [1]))
    plans = plans_of(2, sources, destinations)
    plan_check.verify_plans(plans)
    op = plans[1].recv_ops[0]
    assert (op.my_dtype, op.peer_dtype, op.wire_dtype) == (destination, source, wire)


def test_a_buffer_takes_over_the_dtype_of_its_source() -> None:
    sources = by_rank(replicas(torch.zeros(4), "bias", [0]))
    destinations = by_rank(replicas(torch.zeros(4, dtype=torch.bfloat16), "bias", [1]))
    for side in (sources, destinations):
        for parts in side.values():
            parts["bias"].meta.is_buffer = True
    plans = plans_of(2, sources, destinations)
    plan_check.verify_plans(plans)
    assert plans[1].buffer_dtypes == {"module.bias": torch.float32}
    assert plans[0].buffer_dtypes == {}
    assert plans[1].recv_ops[0].wire_dtype == torch.float32


def test_dtypes_that_do_not_become_each_other() -> None:
    sources = by_rank(replicas(torch.zeros(4, dtype=torch.uint8), "w", [0]))
    with pytest.raises(PlanError, match=r"w: rank 0 holds torch.uint8.*torch.float32 of rank 1"):
        plans_of(2, sources, by_rank(replicas(torch.zeros(4), "w", [1])))


SCALED = [
    torch.float8_e8m0fnu,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float4_e2m1fn_x2,
]


def plans_of_dtypes(
    sources: Sequence[torch.dtype], target: torch.dtype, **fields: Any
) -> dict[int, ReshardPlan]:
    """Plans from replicas of these dtypes to one rank more; `fields` are what all of them say."""
    dtypes = [*sources, target]
    metas = [
        dataclasses.replace(
            part(torch.zeros(4), "w", rank).meta,
            dtype=dtype,
            element_size=dtype.itemsize,
            **fields,
        )
        for rank, dtype in enumerate(dtypes)
    ]
    pairs: list[Any] = [([meta], []) for meta in metas[:-1]]
    return plans_of_metas([*pairs, ([], metas[-1:])])


@pytest.mark.parametrize("is_buffer", [False, True], ids=["parameter", "buffer"])
@pytest.mark.parametrize("scaled", SCALED, ids=str)
def test_values_that_need_scale_factors_are_not_converted(
    scaled: torch.dtype, is_buffer: bool
) -> None:
    others = {torch.float32, torch.bfloat16, torch.uint8, *SCALED} - {scaled}
    for other in others:
        for source, target in ((scaled, other), (other, scaled)):
            text = rf"w: rank 0 holds {source}.*{target} of rank 1: .*scale factors"
            with pytest.raises(PlanError, match=text):
                plans_of_dtypes([source], target, is_buffer=is_buffer)
            plans = plans_of_dtypes([source], target, is_buffer=is_buffer, is_transformed=True)
            plan_check.verify_plans(plans)
    plans = plans_of_dtypes([scaled], scaled, is_buffer=is_buffer)
    assert [op.wire_dtype for op in plans[1].recv_ops] == [scaled]


def test_a_buffer_takes_over_one_dtype_of_all_its_sources() -> None:
    plans = plans_of_dtypes([torch.int64] * 2, torch.float32, is_buffer=True)
    assert plans[2].buffer_dtypes == {"module.w": torch.int64}
    text = r"w: source rank 1 holds torch.int64.*torch.float32 of source rank 0"
    with pytest.raises(PlanError, match=text):
        plans_of_dtypes([torch.float32, torch.int64], torch.float32, is_buffer=True)


def partial_meta(rank: int, *ops: str, dtype: torch.dtype = torch.float32) -> ParameterMetadata:
    placements = tuple(MeshPlacement("partial", op=op) for op in ops)
    mesh = MeshLayout((2,) * len(ops), tuple(range(2 ** len(ops))), placements, (4,))
    return dataclasses.replace(part(torch.zeros(4), "w", rank).meta, mesh=mesh, dtype=dtype)


def plans_of_metas(pairs: list[Any]) -> dict[int, ReshardPlan]:
    rosters = index_metadata_rosters(pairs)
    return {rank: build_plan_from_rosters(*rosters, rank) for rank in range(len(pairs))}


def test_pending_sums_are_reduced_before_they_are_read() -> None:
    destination = part(torch.zeros(4), "w", 4).meta
    pairs: list[Any] = [([partial_meta(rank, "sum", "avg")], []) for rank in range(4)]
    plans = plans_of_metas([*pairs, ([], [destination])])
    plan_check.verify_plans(plans)
    for rank in range(4):
        # Also by ranks from which nobody reads: the others wait for them.
        assert plans[rank].reductions == [
            PartialReduction("module.w", (1,), "avg"),
            PartialReduction("module.w", (0,), "sum"),
        ]
        assert "module.w" in plans[rank].sources
    assert sum(len(plan.send_ops) for plan in plans.values()) == 1
    with pytest.raises(PlanError, match=r"w: pending reductions \['max', 'sum'\]"):
        plans_of_metas(
            [([partial_meta(r, "sum", "max")], []) for r in range(4)] + [([], [destination])]
        )


@pytest.mark.parametrize(
    ("op", "dtype", "is_able"),
    [
        ("avg", torch.int64, False),
        ("avg", torch.bool, False),
        ("sum", torch.float8_e4m3fn, False),
        ("sum", torch.float8_e8m0fnu, False),
        ("sum", torch.int16, False),
        ("max", torch.complex64, False),
        ("sum", torch.int64, True),
        ("avg", torch.complex64, True),
        ("min", torch.bfloat16, True),
    ],
)
def test_a_plan_reduces_only_what_backends_reduce(
    op: str, dtype: torch.dtype, is_able: bool
) -> None:
    destination = dataclasses.replace(part(torch.zeros(4), "w", 2).meta, dtype=dtype)
    sources: list[Any] = [([partial_meta(rank, op, dtype=dtype)], []) for rank in range(2)]
    pairs = [*sources, ([], [destination])]
    if is_able:
        plan = plans_of_metas(pairs)[0]
        assert plan.reductions == [PartialReduction("module.w", (0,), op)]
        return
    with pytest.raises(PlanError, match=rf'w: rank 0: a pending "{op}" of {dtype} cannot'):
        plans_of_metas(pairs)


def test_nobody_reduces_what_nobody_reads() -> None:
    pairs: list[Any] = [([partial_meta(rank, "sum")], []) for rank in range(2)]
    assert plans_of_metas(pairs)[0].reductions == []


# ---------------------------------------------------------------------------------------------
# What cannot be planned.


def test_a_hole_is_named_with_its_first_elements() -> None:
    whole = numbered((9, 4))
    sources = tp_side(whole, "w", [0, 1, 2])
    del sources[1]
    with pytest.raises(
        PlanError,
        match=r"^w: no source rank holds elements \[\[3, 6\], \[0, 4\]\] of the whole tensor of "
        r"shape \(9, 4\), which rank 3 needs",
    ):
        plans_of(4, by_rank(sources), by_rank(replicas(whole, "w", [3])))


def test_a_destination_without_a_source() -> None:
    whole = numbered((4,))
    with pytest.raises(PlanError, match=r"Destination parameter 'b' on rank 1 not found in source"):
        plans_of(2, by_rank(replicas(whole, "a", [0])), by_rank(replicas(whole, "b", [1])))
    with pytest.raises(RuntimeError, match="not found in source model"):
        plans_of_metas([([], []), ([], [part(whole, "output_layer.weight", 1).meta])])
    tied = [part(whole, "embed.weight", 0).meta]
    stacked, alone = "a.experts.down_proj", "a.experts.0.down_proj.weight"
    hint = rf"The source has '{stacked}', all experts in one: .* transformers_views\(model\)"
    with pytest.raises(PlanError, match=rf"'{alone}' on rank 1 not found.*{hint}"):
        plans_of_metas([([part(whole, stacked, 0).meta], []), ([], [part(whole, alone, 1).meta])])
    with pytest.raises(PlanError) as raised:
        others = [part(whole, "a.experts.1.down_proj.weight", 0).meta]
        plans_of_metas([(others, []), ([], [part(whole, alone, 1).meta])])
    assert "transformers_views" not in str(raised.value)
    rule = r"only a parameter named output_layer\.weight is read .* from embedding\.word_embeddings.*; untie"
    with pytest.raises(PlanError, match=rf"'lm_head\.weight' on rank 1 not found.*{rule}"):
        plans_of_metas([(tied, []), ([], [part(whole, "lm_head.weight", 1).meta])])


def test_two_parameters_of_one_name() -> None:
    metas = [part(numbered((4,)), "w", 0).meta for _ in range(2)]
    metas[1].name = "other.w"
    with pytest.raises(PlanError, match=r"rank 0 has two destination .* w: module\.w and other\.w"):
        index_metadata_rosters([([], metas)])
    with pytest.raises(PlanError, match="rank 0 has two source parameters of the name w"):
        index_metadata_rosters([(metas, [])])


# ---------------------------------------------------------------------------------------------
# What ranks hold, encoded.


def test_what_is_decoded_is_what_was_encoded() -> None:
    shape = MoEShape(
        num_layers=2,
        hidden=8,
        num_heads=4,
        num_query_groups=4,
        num_experts=4,
        expert_ffn=4,
        vocab=16,
    )
    metas = roster(shape, Parallelism.parse("tp2.ep2", 4), 1)
    metas.append(dataclasses.replace(partial_meta(1, "sum"), resolved_name=None))
    decoded = decode_rank_metadata(encode_rank_metadata(metas))
    assert decoded.metadata() == metas
    assert len(decoded.kinds) < len(decoded) == len(metas)
    assert decode_rank_metadata(encode_rank_metadata([])).metadata() == []
