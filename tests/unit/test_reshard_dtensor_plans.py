"""Plans of DTensors that torch itself has distributed, over groups that do not communicate."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from moe_comm.resharding.describe.disagreement import PlanError
from moe_comm.resharding.describe.metadata import ParameterMetadata
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.hold.refit_models import unwrap_models
from moe_comm.resharding.plan import plan_check
from moe_comm.resharding.plan.planner import build_plan_from_rosters, index_metadata_rosters
from moe_comm.resharding.utils import extract_module_metadata, local_tensor
from tests.helpers.cut_tensors import numbered, run_plans

WHOLE = numbered((13, 6)).float()


@dataclasses.dataclass(frozen=True)
class Placed:
    """A mesh and how `WHOLE` lies over it."""

    mesh_shape: tuple[int, ...]
    placements: tuple[Placement, ...]

    def __str__(self) -> str:
        return f"{self.mesh_shape}-{','.join(map(str, self.placements))}"


@contextmanager
def fake_world(rank: int, num_ranks: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed(placed: Placed, rank: int) -> DTensor:
    mesh = init_device_mesh("cpu", placed.mesh_shape)
    if not any(isinstance(placement, Partial) for placement in placed.placements):
        # Every rank cuts its own part of the whole: nothing is sent.
        return distribute_tensor(WHOLE, mesh, placed.placements, src_data_rank=None)
    addends = [WHOLE - 100, torch.full_like(WHOLE, 70), torch.full_like(WHOLE, 30)]
    zeros = [torch.zeros_like(WHOLE)] * mesh.size()
    return DTensor.from_local((addends + zeros)[rank], mesh, placed.placements)


def held(
    placed: Placed | None, rank: int, num_ranks: int
) -> tuple[ParameterMetadata, torch.Tensor]:
    """Metadata of a rank for one parameter, and its local tensor; a plain one where not `placed`."""
    with fake_world(rank, num_ranks):
        module = torch.nn.Module()
        tensor = WHOLE.clone() if placed is None else distributed(placed, rank)
        module.weight = torch.nn.Parameter(tensor, requires_grad=False)
        if placed is None:
            module.pg_collection = Parallelism(num_ranks).groups(rank)  # type: ignore[assignment]
        (meta,) = extract_module_metadata(module, rank)
        return meta, local_tensor(module.weight).clone()


def check(source: Placed | None, destination: Placed | None, num_ranks: int = 4) -> None:
    sources = [held(source, rank, num_ranks) for rank in range(num_ranks)]
    destinations = [held(destination, rank, num_ranks) for rank in range(num_ranks)]
    rosters = index_metadata_rosters(
        [([src], [dst]) for (src, _), (dst, _) in zip(sources, destinations, strict=True)]
    )
    plans = {rank: build_plan_from_rosters(*rosters, rank) for rank in range(num_ranks)}
    plan_check.verify_plans(plans)
    tensors = reduced(
        [tensor for _, tensor in sources], [plan.reductions for plan in plans.values()]
    )
    written = {rank: {"weight": torch.full_like(t, -1)} for rank, (_, t) in enumerate(destinations)}
    run_plans(plans, {rank: {"weight": t} for rank, t in enumerate(tensors)}, written)
    for rank, (_, expected) in enumerate(destinations):
        assert torch.equal(written[rank]["weight"], expected), rank


def reduced(tensors: list[torch.Tensor], reductions: Sequence[object]) -> list[torch.Tensor]:
    """Source tensors after the reductions of their plans; all of them over the whole mesh."""
    assert all(some == reductions[0] for some in reductions)
    if not reductions[0]:
        return tensors
    return [torch.stack(tensors).sum(0)] * len(tensors)


PLACED = [
    Placed((4,), (Shard(0),)),
    Placed((4,), (Shard(1),)),
    Placed((2, 2), (Shard(0), Shard(0))),
    Placed((2, 2), (Replicate(), Shard(1))),
    Placed((2, 2), (Shard(1), Shard(0))),
    Placed((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    Placed((2, 2), (_StridedShard(1, split_factor=2), Shard(1))),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("destination", PLACED, ids=str)
@pytest.mark.parametrize("source", PLACED, ids=str)
def test_placements_become_each_other(source: Placed, destination: Placed) -> None:
    check(source, destination)


@pytest.mark.parametrize("placed", PLACED, ids=str)
def test_plain_tensors_on_one_side(placed: Placed) -> None:
    check(placed, None)
    check(None, placed)


def test_more_ranks_than_rows() -> None:
    """Thirteen rows over twelve ranks: two each for the first six, one for the seventh."""
    check(Placed((12,), (Shard(0),)), Placed((3, 2, 2), (Shard(1), Shard(0), Shard(0))), 12)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_pending_sums(op: str) -> None:
    source = Placed((4,), (Partial(op),))
    meta, _ = held(source, 0, 4)
    assert meta.mesh.placements[0].op == op
    if op == "sum":
        check(source, Placed((2, 2), (Shard(0), Shard(1))))
        check(Placed((2, 2), (Partial(), Partial())), PLACED[0])


def test_a_pending_sum_cannot_be_received() -> None:
    with pytest.raises(PlanError, match="weight: rank 0 would receive a DTensor with Par"):
        check(PLACED[0], Placed((4,), (Partial(),)))


def beside_a_dtensor(rank: int, **attributes: object) -> torch.nn.Module:
    """A module of a DTensor, a plain parameter and a plain buffer, without groups."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(distributed(PLACED[0], rank), requires_grad=False)
    module.ignored = torch.nn.Parameter(numbered((5,)).float())
    module.register_buffer("count", torch.arange(3))
    for name, value in attributes.items():
        setattr(module.ignored, name, value)
    return module


def test_plain_tensors_beside_dtensors_are_replicated() -> None:
    """As wrappers that shard parameters leave buffers and the parameters that they ignore."""
    pairs = []
    for rank in range(4):
        with fake_world(rank, 4):
            module = beside_a_dtensor(rank)
            assert unwrap_models(module, None).source is module
            sources = extract_module_metadata(module, rank)
            tp2 = torch.nn.Module()
            tp2.ignored = torch.nn.Parameter(torch.zeros(3 - rank % 2))
            tp2.ignored.tensor_model_parallel = True
            tp2.register_buffer("count", torch.zeros(3, dtype=torch.int64))
            tp2.pg_collection = Parallelism(4, tp=2).groups(rank)  # type: ignore[assignment]
            pairs.append((sources, extract_module_metadata(tp2, rank)))
    rosters = index_metadata_rosters(pairs)
    plans = {rank: build_plan_from_rosters(*rosters, rank) for rank in range(4)}
    plan_check.verify_plans(plans)
    for rank, plan in plans.items():
        # Each rank holds the whole, and copies its part from itself.
        assert {op.peer_rank for op in plan.recv_ops} == {rank}
        slices = {op.param_name: op.peer_slice for op in plan.recv_ops}
        assert slices == {
            "ignored": (slice(3, 5) if rank % 2 else slice(0, 3),),
            "count": (slice(0, 3),),
        }


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"tensor_model_parallel": True}, "tensor_model_parallel=True"),
        ({"allreduce": False}, "allr"),
    ],
)
def test_plain_tensors_beside_dtensors_cannot_be_divided(
    attributes: dict[str, object], text: str
) -> None:
    with fake_world(0, 4), pytest.raises(ValueError, match=f"ignored states {text}.*nothing says"):
        extract_module_metadata(beside_a_dtensor(0, **attributes), 0)
