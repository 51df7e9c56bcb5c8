"""Tensors between device meshes over Gloo, with one process per rank."""

from __future__ import annotations

import dataclasses
import datetime as dt
import inspect
import os
import re
import textwrap
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement

from moe_comm.errors import CommunicationError
from moe_comm.resharding import ir
from moe_comm.resharding.copy_services.process_group import timeout_of
from moe_comm.resharding.ir import groups
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import HANG_S

NUM_RANKS = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """A tensor from one mesh to another."""

    name: str
    source_mesh: Any
    source_placements: Sequence[Placement]
    target_mesh: Any
    target_placements: Sequence[Placement]
    shape: tuple[int, ...] = (8, 6)
    source_dtype: torch.dtype = torch.float32
    target_dtype: torch.dtype = torch.float32
    is_even: bool = False


ALL = [0, 1, 2, 3]
SQUARE = [[0, 1], [2, 3]]
BF16 = torch.bfloat16
FP32 = torch.float32

CASES = [
    Case("shard to shard", ALL, [Shard(0)], ALL, [Shard(1)], is_even=True, shape=(8, 4)),
    Case("uneven", ALL, [Shard(0)], ALL, [Shard(1)], shape=(7, 5)),
    Case("some hold nothing", ALL, [Shard(0)], [3, 1], [Shard(1)], shape=(5, 3)),
    Case("no elements", ALL, [Shard(0)], ALL, [Shard(1)], shape=(0, 3)),
    Case("no elements, even", ALL, [Shard(0)], ALL, [Shard(1)], shape=(0, 4), is_even=True),
    Case("no dimensions", [0], [Replicate()], ALL, [Replicate()], shape=()),
    Case("replicas to shards", ALL, [Replicate()], ALL, [Shard(0)]),
    Case("shards to replicas", ALL, [Shard(0)], ALL, [Replicate()]),
    Case("squares", SQUARE, [Shard(0), Shard(1)], [[2, 0], [3, 1]], [Shard(1), Shard(1)]),
    Case("squares, even", SQUARE, [Shard(0), Replicate()], SQUARE, [Replicate(), Shard(1)]),
    Case("disjoint", [0, 1], [Shard(0)], [3, 2], [Shard(1)], shape=(5, 5)),
    Case("one to three", [2], [Replicate()], [0, 1, 3], [Replicate()]),
    Case("three to one", [0, 1, 3], [Shard(1)], [2], [Replicate()]),
    Case("overlapping", [0, 1, 2], [Shard(0)], [2, 3], [Shard(0)], shape=(11,)),
    Case("narrower", [0, 1], [Shard(0)], [1, 2], [Shard(1)], target_dtype=BF16),
    Case("wider", [0, 1], [Shard(0)], [1, 2], [Replicate()], source_dtype=BF16),
    Case("bytes", ALL, [Shard(0)], ALL, [Shard(1)], (7, 5), torch.uint8, torch.uint8),
]

PARTIAL_CASES = [
    Case("sum, narrower", [0, 1], [Partial()], [2, 3], [Replicate()], (8, 6), FP32, BF16),
    Case("sum, wider", [0, 1], [Partial()], [2, 3], [Shard(0)], (8, 6), BF16, FP32),
    Case("sum, to itself", [0, 1], [Partial()], [0, 1], [Shard(0)], (7, 3), FP32, BF16),
    Case("sum, kept and sent", [1, 0], [Partial()], ALL, [Replicate()], (7, 3), FP32, BF16),
    Case(
        "sum and shard",
        SQUARE,
        [Shard(0), Partial()],
        ALL,
        [Shard(1)],
        (6, 8),
        BF16,
        FP32,
        is_even=True,
    ),
    Case("avg", [0, 1], [Partial("avg")], [2, 3], [Replicate()], (8, 6), BF16, FP32),
    Case("max twice", SQUARE, [Partial("max"), Partial("max")], [3, 0], [Shard(0)], (5, 2)),
    Case("product", [3, 1], [Partial("product")], [0], [Replicate()], (5, 2)),
]


def _values(case: Case, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if not case.source_dtype.is_floating_point:
        return torch.randint(0, 255, case.shape, generator=generator).to(case.source_dtype)
    return torch.randn(case.shape, generator=generator).to(case.source_dtype)


def _map_of(case: Case, meshes: tuple[DeviceMesh, DeviceMesh], group: Any = None) -> ir.M2MMap:
    return ir.get_m2m_map(
        meshes[0],
        case.source_placements,
        meshes[1],
        case.target_placements,
        group,
        global_shape=None if case.is_even else case.shape,
    )


def _source_of(case: Case, mesh: DeviceMesh, seed: int) -> DTensor:
    """Every rank's summand of a pending reduction is its own."""
    if not any(isinstance(placement, Partial) for placement in case.source_placements):
        return distribute_tensor(_values(case, seed), mesh, case.source_placements)
    summand = _values(case, 100 * seed + dist.get_rank())
    settled = [Replicate() if isinstance(p, Partial) else p for p in case.source_placements]
    local = distribute_tensor(summand, mesh, settled, src_data_rank=None).to_local()
    return DTensor.from_local(local, mesh, case.source_placements, run_check=False)


def _move(context: RankContext, cases: list[Case], bucket_size: int, max_in_flight: int) -> None:
    """All cases in common buckets, twice."""
    rank = context.rank_idx
    chunks, checks = [], []
    for seed, case in enumerate(cases):
        meshes = DeviceMesh("cpu", case.source_mesh), DeviceMesh("cpu", case.target_mesh)
        source = target = want = None
        value = torch.empty(case.shape, dtype=case.source_dtype)
        if meshes[0].get_coordinate() is not None:
            source = _source_of(case, meshes[0], seed)
            # DTensor reduces Partial dimensions in the source's dtype as well.
            value = source.full_tensor()
        dist.broadcast(value.view(-1).view(torch.uint8), src=int(meshes[0].mesh.flatten()[0]))
        if meshes[1].get_coordinate() is not None:
            want = distribute_tensor(
                value.to(case.target_dtype), meshes[1], case.target_placements, src_data_rank=None
            )
            target = distribute_tensor(
                torch.zeros(case.shape, dtype=case.target_dtype),
                meshes[1],
                case.target_placements,
                src_data_rank=None,
            )
            checks.append((case.name, target.to_local(), want.to_local()))
        wire = ir.choose_transfer_dtype(case.source_dtype, case.target_dtype)
        chunks += ir.m2m_to_chunks(_map_of(case, meshes), rank, source, target, wire)
    buckets = ir.chunk_to_bucket_ops(chunks, bucket_size)
    ir.check_buckets(buckets)
    for bucket in buckets:
        if bucket.transfer_type is ir.TransferType.BROADCAST:
            ranks = tuple(sorted((bucket.src_rank, *bucket.dst_ranks)))
            assert groups.find_subgroup(None, ranks) is not None
    for _ in range(2):
        for _, target_part, _ in checks:
            target_part.fill_(77)
        ir.bucket_comm(buckets, max_in_flight)
        wrong = [name for name, got, want_part in checks if not torch.equal(got, want_part)]
        assert wrong == []


@pytest.mark.parametrize(("bucket_size", "max_in_flight"), [(1, 1), (100, 2), (1 << 20, 3)])
def test_dtensors_arrive(bucket_size: int, max_in_flight: int) -> None:
    run_ranks(_move, NUM_RANKS, CASES, bucket_size, max_in_flight)


@pytest.mark.parametrize("max_in_flight", [1, 4])
def test_pending_reductions_arrive_reduced(max_in_flight: int) -> None:
    run_ranks(_move, NUM_RANKS, [*PARTIAL_CASES, CASES[1]], 1 << 20, max_in_flight)


def _move_sharded_module(context: RankContext) -> None:
    """FSDP over tensor parallelism places weights as `_StridedShard`."""
    mesh = DeviceMesh("cpu", SQUARE, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    module = torch.nn.Linear(6, 12, bias=False)
    whole = module.weight.detach().clone()
    parallelize_module(module, mesh["tp"], ColwiseParallel())
    fully_shard(module, mesh=mesh["dp"])
    weight = module.weight
    assert isinstance(weight, DTensor)
    assert type(weight.placements[0]).__name__ == "_StridedShard"
    server = DeviceMesh("cpu", [1, 2])
    target = torch.zeros(12, 3)
    m2m = ir.get_m2m_map(
        weight.device_mesh, weight.placements, server, [Shard(1)], global_shape=weight.shape
    )
    chunks = ir.m2m_to_chunks(m2m, context.rank_idx, weight, target)
    ir.bucket_comm(ir.chunk_to_bucket_ops(chunks, 1 << 20))
    if context.rank_idx in (1, 2):
        assert torch.equal(target, whole[:, 3 * context.rank_idx - 3 :][:, :3])
    else:
        assert (target == 0).all()


def test_a_weight_of_two_dimensional_parallelism_arrives() -> None:
    run_ranks(_move_sharded_module, NUM_RANKS)


def _move_many(context: RankContext) -> tuple[int, int]:
    """Tiny tensors of several dtypes."""
    rank = context.rank_idx
    mesh = DeviceMesh("cpu", ALL)
    m2m = ir.get_m2m_map(mesh, [Shard(0)], mesh, [Replicate()], dist.group.WORLD)
    chunks, checks = [], []
    for i in range(300):
        dtype = (torch.bfloat16, torch.float32, torch.int8, torch.float64)[i % 4]
        whole = (torch.arange(4 * (1 + i % 3)) + i % 50).to(dtype)
        target = torch.zeros_like(whole)
        chunks += ir.m2m_to_chunks(m2m, rank, whole.chunk(4)[rank].clone(), target)
        checks.append((target, whole))
    buckets = ir.chunk_to_bucket_ops(chunks, 1 << 12)
    ir.bucket_comm(buckets, 3)
    assert all(torch.equal(target, whole) for target, whole in checks)
    return len(chunks), len(buckets)


def test_many_tiny_tensors_share_buckets() -> None:
    for num_chunks, num_buckets in run_ranks(_move_many, NUM_RANKS):
        assert num_chunks == 5 * 300
        assert num_buckets <= 25


def _move_in_a_subgroup(context: RankContext) -> None:
    """Rank 0 is not in the group and calls nothing; the others are numbered 0, 1 and 2."""
    group = dist.new_group([1, 2, 3])
    meshes = DeviceMesh("cpu", [3]), DeviceMesh("cpu", [1, 2])
    if context.rank_idx == 0:
        return
    case = Case("", [3], [Replicate()], [1, 2], [Replicate()])
    m2m = _map_of(case, meshes, group)
    assert [(r.src.rank, [end.rank for end in r.dsts]) for r in m2m.routes] == [(2, [0, 1])]
    tensor = torch.full(case.shape, float(context.rank_idx))
    chunks = ir.m2m_to_chunks(m2m, dist.get_rank(group), tensor, tensor)
    buckets = ir.chunk_to_bucket_ops(chunks, 1 << 20)
    ir.check_buckets(buckets, group)
    ir.bucket_comm(buckets)
    assert (tensor == 3).all()
    with pytest.raises(ValueError, match=r"target_mesh has global ranks \[0\].*\[1, 2, 3\]"):
        ir.get_m2m_map(meshes[0], [Replicate()], _Mesh([0]), [Replicate()], group)


class _Mesh:
    def __init__(self, ranks: list[int]) -> None:
        self.mesh = torch.tensor(ranks)


def test_ranks_are_those_of_the_group() -> None:
    run_ranks(_move_in_a_subgroup, NUM_RANKS)


def _make_groups(context: RankContext) -> None:
    parent = dist.new_group(timeout=dt.timedelta(seconds=77))
    groups.create_subgroups(parent, [(1, 3), (0, 1, 3), (0, 1, 2, 3), (1, 3)])
    made = groups.find_subgroup(parent, (0, 1, 3))
    assert groups.find_subgroup(parent, (0, 1, 2, 3)) is parent
    assert groups.find_subgroup(parent, (0, 2)) is None
    groups.create_subgroups(parent, [(0, 1, 3)])
    assert groups.find_subgroup(parent, (0, 1, 3)) is made
    if context.rank_idx != 2:
        assert made is not None
        assert dist.get_process_group_ranks(made) == [0, 1, 3]
        assert timeout_of(made) == dt.timedelta(seconds=77)
    # A group that lacks a process makes none, which needs nobody else.
    fewer = dist.new_group([0, 1, 2])
    if context.rank_idx != 3:
        groups.create_subgroups(fewer, [(0, 1)])
        assert groups.find_subgroup(fewer, (0, 1)) is None


def test_groups_for_broadcasts_are_made_once() -> None:
    run_ranks(_make_groups, NUM_RANKS)


def _disagree(context: RankContext, what: str) -> str:
    rank = context.rank_idx
    meshes = _Mesh([0]), _Mesh([1, 2])
    m2m = ir.get_m2m_map(meshes[0], [Replicate()], meshes[1], [Shard(0)], global_shape=(4,))
    tensor = torch.zeros(4 if rank == 0 else 2)
    if what == "shape" and rank == 2:
        tensor = torch.zeros(3)
    if what == "memory" and rank == 2:
        tensor = torch.zeros(6)[4:]
        tensor.untyped_storage().resize_(0)
    wire = torch.bfloat16 if what == "dtype" and rank == 2 else None
    error, buckets = None, []
    try:
        buckets = ir.chunk_to_bucket_ops(ir.m2m_to_chunks(m2m, rank, tensor, tensor, wire), 100)
    except ValueError as raised:
        error = raised
    with pytest.raises(ValueError, match="rank") as told:
        ir.check_buckets(buckets, error=error)
    return str(told.value)


def test_ranks_that_disagree_are_told_before_anything_is_sent() -> None:
    for text in run_ranks(_disagree, NUM_RANKS, "dtype"):
        assert re.search(
            r"rank 0 to rank 2: sends 8 bytes of torch.float32 \(2,\) at 0.*, receives 4 bytes of .*16",
            text,
        )
    for text in run_ranks(_disagree, NUM_RANKS, "shape"):
        assert text.startswith("rank 2: no buckets: ")
        assert "must have shape (2,), got (3,)" in text
    for text in run_ranks(_disagree, NUM_RANKS, "memory"):
        assert text.startswith("rank 2: no buckets: a tensor of Chunk(")
        assert "has elements in bytes [16, 24) of a storage of 0 bytes, which was freed" in text


def _lose_a_peer(context: RankContext, kind: str, dies: bool) -> str:
    """Rank 1 does not come to the transfer of a cell, or to its reduction."""
    # A rank that makes a group waits as long for the others, too: they have just met, and do little else.
    limit = dt.timedelta(seconds=2 * HANG_S if dies else 5)
    group = dist.new_group(timeout=limit)
    placements = [Partial()] if kind == "reduction" else [Shard(0)]
    target_mesh, target_placement = {
        "pair": ([2], Replicate()),
        "broadcast": ([0, 2], Replicate()),
        "reduction": ([2], Replicate()),
    }[kind]
    m2m = ir.get_m2m_map(
        _Mesh([0, 1]), placements, _Mesh(target_mesh), [target_placement], group, global_shape=(4,)
    )
    source = torch.ones(4 if kind == "reduction" else 2)
    dist.barrier()
    reducers = dist.new_group([0, 1], timeout=limit)
    partial_groups = [(reducers, "sum")] if kind == "reduction" else None
    chunks = ir.m2m_to_chunks(
        m2m, context.rank_idx, source, torch.zeros(4), source_partial_groups=partial_groups
    )
    buckets = ir.chunk_to_bucket_ops(chunks, 100)
    ir.check_buckets(buckets)
    if context.rank_idx == 1:
        if dies:
            os._exit(0)
        return ""
    try:
        ir.bucket_comm(buckets)
    except CommunicationError as error:
        return f"{type(error).__name__}: {error}"
    return "arrived"


@pytest.mark.parametrize(
    ("kind", "dies", "errors"),
    [
        ("pair", True, {2: r"PeerFailedError: .*from rank 1 to ranks \(2,\).*8 bytes"}),
        pytest.param(
            "pair",
            False,
            {2: r"PeerTimeoutError: .*from rank 1 to ranks \(2,\).*8 bytes"},
            marks=pytest.mark.full,  # waits as the others do
        ),
        (
            "broadcast",
            False,
            {
                0: r"Peer\w+Error: .*from rank 1 to ranks \(0, 2\).*8 bytes",
                2: r"Peer\w+Error: .*from rank 1 to ranks \(0, 2\).*8 bytes",
            },
        ),
        pytest.param(
            "reduction",
            False,
            {
                0: r"PeerTimeoutError: .*from rank 0 to ranks \(2,\).*did not reduce",
                2: r"Peer\w+Error: .*from rank 0 to ranks \(2,\).*16 bytes.*did not end",
            },
            marks=pytest.mark.full,  # waits as a broadcast does
        ),
    ],
)
def test_a_lost_peer_is_named(kind: str, dies: bool, errors: dict[int, str]) -> None:
    results = run_ranks(_lose_a_peer, 3, kind, dies, fresh=True, expect_dead=[1] if dies else [])
    for rank, pattern in errors.items():
        assert re.search(pattern, results[rank]), results


def _run_the_documented_example(context: RankContext) -> int:
    _, _, example = (inspect.getdoc(ir) or "").partition("Example:\n")
    names: dict[str, Any] = {"__name__": "example"}
    end = "dist.destroy_process_group()"
    assert end in example
    exec(textwrap.dedent(example).replace(end, ""), names)
    return len(names["buckets"])


def test_the_documented_example_runs() -> None:
    # Rank 1 holds a summand and receives; rank 0 and 1 reduce and take turns as senders.
    assert run_ranks(_run_the_documented_example, NUM_RANKS) == [3, 3, 1, 1]
