"""Plans between layouts, executed by several ranks over the copy services."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from moe_comm import Communicator
from moe_comm.cli.reshard import model_shapes
from moe_comm.cli.reshard.model_shapes import MoEShape, ShapedModel
from moe_comm.resharding import clear_all_caches
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.gloo_copy_service import GlooCopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.hold.heap_parameters import place_in_heap
from moe_comm.resharding.hold.verification import verify_refit
from moe_comm.resharding.move import stale
from moe_comm.resharding.move.execution import execute_reshard_plan
from moe_comm.resharding.plan.planner import build_local_reshard_plan
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.resharding.plan.transform_protocol import ReshardTransform
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import HANG_S, die, die_after, error_of

SHAPE = MoEShape(
    num_layers=3,
    hidden=16,
    num_heads=4,
    num_query_groups=4,
    num_experts=8,
    expert_ffn=8,
    ffn=24,
    num_dense_layers=1,
    shared_expert_ffn=8,
    vocab=32,
    has_qk_norm=True,
)
FUSED = dataclasses.replace(SHAPE, has_fused_experts=True)

NUM_RANKS = 4
TIMEOUT_S = 5 * HANG_S


@dataclasses.dataclass
class Refit:
    """Source and target of one rank."""

    context: RankContext
    service: CopyService
    source: ShapedModel | None
    target: ShapedModel | None
    plan: ReshardPlan

    def run(self, seed: int, **options: object) -> None:
        if self.source is not None:
            model_shapes.fill(self.source, seed)
        execute_reshard_plan(
            self.plan, self.source, self.target, self.service, self.context.group, **options
        )

    def check(self, seed: int) -> None:
        """The target is what its own layout says, element by element; and so say checksums."""
        if self.target is not None:
            assert model_shapes.find_differences(self.target, seed) == []
            assert not stale.is_stale(self.target)
        proof = verify_refit(self.plan, self.source, self.target, self.context.group)
        assert proof.unproven == ()
        assert proof.num_pieces == len(self.plan.recv_ops)


def make(
    context: RankContext,
    layouts: tuple[str, str],
    transport: str = "symmetric",
    shape: MoEShape = SHAPE,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.bfloat16, torch.bfloat16),
    num_src_ranks: int = 0,
    communicator: Communicator | None = None,
) -> Refit:
    """A refit whose target holds other numbers.

    Args:
        transport: "gloo", "symmetric" or "heap": the latter with the target in the heap.
        num_src_ranks: The first ranks hold the source and the others the target; 0: all hold both.
    """
    rank, num_ranks = context.rank_idx, context.num_ranks
    num_dst_ranks = num_ranks - num_src_ranks
    has_source = num_src_ranks == 0 or rank < num_src_ranks
    has_target = rank >= num_src_ranks
    source = target = None
    if has_source:
        parallelism = Parallelism.parse(layouts[0], num_src_ranks or num_ranks)
        source = model_shapes.build_module(shape, parallelism, rank, dtype=dtypes[0])
    if has_target:
        target = model_shapes.build_module(
            shape,
            Parallelism.parse(layouts[1], num_dst_ranks),
            rank - num_src_ranks,
            dtype=dtypes[1],
            rank_offset=num_src_ranks,
        )
        model_shapes.fill(target, 1000)
    plan = build_local_reshard_plan(source, target, shape.num_experts, context.group)
    if transport == "gloo":
        service = GlooCopyService()
    else:
        communicator = communicator or Communicator(context.group, backend="host")
        if transport == "heap" and target is not None:
            assert place_in_heap(target, communicator) > 0
        service = SymmetricCopyService(communicator=communicator, slot_bytes=4096, num_slots=2)
    return Refit(context, service, source, target, plan)


def run(script: Callable[..., object], *args: object, mode: str = "threads") -> list[object]:
    return run_ranks(script, NUM_RANKS, *args, mode=mode, timeout_s=TIMEOUT_S)


# ---------------------------------------------------------------------------------------------
# Between layouts.


def _between_layouts(context: RankContext, *args: object) -> None:
    refit = make(context, *args)
    for seed in range(3):
        refit.run(seed, strict=True)
        refit.check(seed)
    refit.service.close()


LAYOUTS = [
    ("tp2.ep2", "tp4.ep1"),
    ("ep4", "ep2.etp2.tp2"),
    ("pp2.tp2.ep2.etp1", "single"),
    ("single", "tp2.pp2.ep2.etp1"),
    ("tp4.ep2.etp2", "pp2.tp2"),
    ("ep4", "tp2.ep2"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("transport", "shape"),
    [("symmetric", SHAPE), ("heap", FUSED)],
    ids=["experts", "fused_in_heap"],
)
@pytest.mark.parametrize("layouts", LAYOUTS, ids="-".join)
def test_between_layouts(layouts: tuple[str, str], transport: str, shape: MoEShape) -> None:
    run(_between_layouts, layouts, transport, shape)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("transport", ["symmetric", "heap"])
@pytest.mark.parametrize(
    "dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
def test_between_dtypes(dtypes: tuple[torch.dtype, torch.dtype], transport: str) -> None:
    """Values of bfloat16 in float32 go there and back unchanged."""

    def script(context: RankContext) -> None:
        refit = make(context, ("tp2.ep2", "ep4"), transport, dtypes=dtypes)
        assert refit.source is not None
        model_shapes.fill(refit.source, 5)
        execute_reshard_plan(refit.plan, refit.source, refit.target, refit.service, context.group)
        expected = model_shapes.build_module(
            SHAPE, refit.target.parallelism, context.rank_idx, dtype=dtypes[0]
        )
        model_shapes.fill(expected, 5)
        for name, tensor in expected.state_dict().items():
            found = refit.target.state_dict()[name]
            assert torch.equal(found, tensor.to(found.dtype)), name
        verify_refit(refit.plan, refit.source, refit.target, context.group)
        refit.service.close()

    run(script)


@pytest.mark.parametrize("transport", ["symmetric", "heap"])
def test_between_disjoint_ranks(transport: str) -> None:
    def script(context: RankContext) -> None:
        refit = make(context, ("tp3.ep1", "single"), transport, THREE_HEADS, num_src_ranks=3)
        for seed in range(2):
            refit.run(seed, strict=True)
            refit.check(seed)
        refit.service.close()

    run(script)


THREE_HEADS = dataclasses.replace(
    SHAPE,
    hidden=12,
    num_heads=3,
    num_query_groups=3,
    vocab=33,
    expert_ffn=9,
    shared_expert_ffn=9,
)


# ---------------------------------------------------------------------------------------------
# Experts as Megatron's modules hold them.


class GroupedExperts(nn.Module):
    """8 experts as `GroupedMLP` holds them: 2-D, read as one matrix per expert.

    `first` and `second` are what all ranks hold together, `[experts, hidden, inner]` and
    `[experts, inner, hidden]`.
    """

    def __init__(self, layout: str, rank: int, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        parallelism = Parallelism.parse(layout, NUM_RANKS)
        self.pg_collection = parallelism.groups(rank)
        self.num_local_experts = 8 // parallelism.ep
        ep_idx, tp_idx = self.pg_collection.ep.rank(), self.pg_collection.expt_tp.rank()
        experts = slice(ep_idx * self.num_local_experts, (ep_idx + 1) * self.num_local_experts)
        first = first[experts].chunk(parallelism.etp, 2)[tp_idx]
        second = second[experts].chunk(parallelism.etp, 1)[tp_idx]
        hidden = first.shape[1]
        self.weight1 = nn.Parameter(first.clone().view(hidden, -1))
        self.weight2 = nn.Parameter(second.clone().view(-1, hidden))
        for weight, dim in ((self.weight1, 1), (self.weight2, 0)):
            weight.tensor_model_parallel = True
            weight.partition_dim = dim
            weight.allreduce = parallelism.ep == 1


class SequentialExperts(nn.Module):
    """The same, one module per expert, numbered from 0 on every rank."""

    def __init__(self, layout: str, rank: int, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        parallelism = Parallelism.parse(layout, NUM_RANKS)
        self.pg_collection = parallelism.groups(rank)
        num_local = 8 // parallelism.ep
        self.local_experts = nn.ModuleList()
        for i in range(num_local):
            whole = first[self.pg_collection.ep.rank() * num_local + i]
            part = whole.chunk(parallelism.etp, 1)[self.pg_collection.expt_tp.rank()]
            expert = nn.Module()
            expert.weight = nn.Parameter(part.clone())
            expert.weight.tensor_model_parallel = True
            expert.weight.partition_dim = 1
            expert.weight.allreduce = parallelism.ep == 1
            self.local_experts.append(expert)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [GroupedExperts, SequentialExperts])
@pytest.mark.parametrize(
    "layouts",
    [("single", "ep4"), *itertools.permutations(("ep4", "ep2.etp2", "etp4"), 2)],
    ids="-".join,
)
def test_experts_of_megatron(layouts: tuple[str, str], kind: type[nn.Module]) -> None:
    first = torch.arange(8 * 6 * 4, dtype=torch.float32).view(8, 6, 4)
    second = -torch.arange(8 * 4 * 6, dtype=torch.float32).view(8, 4, 6)

    def script(context: RankContext) -> None:
        source = kind(layouts[0], context.rank_idx, first, second)
        target = kind(layouts[1], context.rank_idx, first * 0, second * 0)
        expected = kind(layouts[1], context.rank_idx, first, second)
        model = [nn.Module() for _ in range(3)]
        for module, experts in zip(model, (source, target, expected), strict=True):
            module.experts = experts
            module.pg_collection = experts.pg_collection
        plan = build_local_reshard_plan(model[0], model[1], 8, context.group)
        service = SymmetricCopyService(context.group)
        execute_reshard_plan(plan, model[0], model[1], service, context.group, strict=True)
        for name, parameter in model[1].named_parameters():
            assert torch.equal(parameter, model[2].get_parameter(name)), name
        service.close()

    run(script)


# ---------------------------------------------------------------------------------------------
# Refits that are run again.


@pytest.mark.full
def test_one_rank_prepares_anew_while_others_repeat() -> None:
    def script(context: RankContext) -> None:
        refit = make(context, ("tp2.ep2", "tp4"))
        for seed in range(6):
            if seed % 2 and context.rank_idx == seed % 4:
                for parameter in refit.target.parameters():
                    parameter.data = torch.zeros_like(parameter)
            if seed == 4 and context.rank_idx == 2:
                place_in_heap(refit.target, refit.service.communicator)
            refit.run(seed)
            refit.check(seed)
        refit.service.close()

    run(script)


# ---------------------------------------------------------------------------------------------
# DTensors.


def _distribute(whole: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Cut without torch's own help; of pending sums rank 0 of the dimension holds all."""
    local = whole
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for dim, placement in enumerate(placements):
        if isinstance(placement, Shard):
            local = local.tensor_split(mesh.size(dim), placement.dim)[coordinate[dim]]
        elif isinstance(placement, Partial):
            local = local - 3 if coordinate[dim] == 0 else torch.full_like(local, 3.0)
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


PLACEMENTS: list[tuple[list[Placement], list[Placement]]] = [
    ([Partial("sum"), Shard(0)], [Shard(1), Replicate()]),
    ([Partial("sum"), Partial("sum")], [Shard(0), Shard(1)]),
    ([Shard(1), Partial("sum")], [Replicate(), Shard(0)]),
    ([Shard(0), Shard(0)], [Shard(1), Shard(1)]),
]


def _dtensors(context: RankContext) -> None:
    mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2))
    whole = torch.arange(60, dtype=torch.float32).view(10, 6)
    source, target = nn.Module(), nn.Module()
    expected = {}
    for i, (src, dst) in enumerate(PLACEMENTS):
        source.register_parameter(f"w{i}", nn.Parameter(_distribute(whole, mesh, src)))
        expected[f"w{i}"] = _distribute(whole, mesh, dst)
        target.register_parameter(f"w{i}", nn.Parameter(torch.zeros_like(expected[f"w{i}"])))
    before = {name: p.to_local().clone() for name, p in source.named_parameters()}
    plan = build_local_reshard_plan(source, target)
    service = GlooCopyService()
    for _ in range(2):
        execute_reshard_plan(plan, source, target, service, strict=True)
        for name, parameter in target.named_parameters():
            assert torch.equal(parameter.to_local(), expected[name].to_local()), name
        for name, parameter in source.named_parameters():
            assert torch.equal(parameter.to_local(), before[name]), f"source {name} was changed"
    verify_refit(plan, source, target)
    with torch.no_grad():
        if context.rank_idx == 3:
            target.w2.to_local()[0, 0] += 1
    assert "rank 3: w2" in str(error_of(lambda: verify_refit(plan, source, target)))

    # One rank cannot take part in a reduction: nobody waits for it in vain.
    if context.rank_idx == 2:
        del source.w0
    error = error_of(lambda: execute_reshard_plan(plan, source, target, service, strict=True))
    assert isinstance(error, ValueError), error
    if context.rank_idx == 2:
        assert "the plan moves w0, which the source module does not have" in str(error)
    service.close()


def test_dtensors_and_pending_sums() -> None:
    run(_dtensors, mode="processes")


# Even along every mesh dimension.
UNORDERED: list[tuple[Any, list[Placement], list[Placement]]] = [
    ([3, 1, 2, 0], [Shard(0)], [Shard(1)]),
    ([[3, 1], [2, 0]], [Shard(0), Shard(1)], [Replicate(), Shard(0)]),
    ([[3, 1], [2, 0]], [Shard(1), Shard(1)], [Shard(0), Replicate()]),
    ([[3, 1], [2, 0]], [_StridedShard(0, split_factor=2), Shard(0)], [Shard(0), Shard(0)]),
    ([[1, 0], [2, 3]], [Replicate(), Shard(0)], [Shard(1), Shard(0)]),
]


def _unordered_meshes(context: RankContext) -> None:
    ascending = DeviceMesh("cpu", torch.arange(4)), DeviceMesh("cpu", torch.arange(4).view(2, 2))
    service = GlooCopyService()
    for ranks, *placements in UNORDERED:
        unordered = DeviceMesh("cpu", ranks)
        meshes = unordered, ascending[unordered.ndim - 1]
        for src_mesh, dst_mesh in (meshes, meshes[::-1], (unordered, unordered)):
            source, target = nn.Module(), nn.Module()
            made = []
            for mesh, chosen in zip((src_mesh, dst_mesh), placements, strict=True):
                # Replicas hold the same.
                shards = [k for k, each in enumerate(chosen) if not isinstance(each, Replicate)]
                shape = [16, 8]
                for k in shards:
                    shape[chosen[k].dim] //= mesh.size(k)
                own = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
                groups = [dist.get_process_group_ranks(mesh.get_group(k)) for k in shards]
                place = sum(10 ** (3 + k) * g.index(context.rank_idx) for k, g in enumerate(groups))
                made.append(DTensor.from_local(own + place, mesh, chosen, run_check=False))
            source.register_parameter("w", nn.Parameter(made[0]))
            target.register_parameter("w", nn.Parameter(torch.zeros_like(made[1])))
            plan = build_local_reshard_plan(source, target)
            execute_reshard_plan(plan, source, target, service, strict=True)
            verify_refit(plan, source, target)
            want = source.w.full_tensor()
            assert torch.equal(target.w.full_tensor(), want), f"{ranks} {placements}"
            assert len(want.unique()) == want.numel()
    mesh = DeviceMesh("cpu", [[3, 1], [2, 0]])
    whole = torch.arange(60, dtype=torch.float32).view(10, 6)
    source, target = nn.Module(), nn.Module()
    source.w = nn.Parameter(_distribute(whole, ascending[1], [Replicate(), Replicate()]))
    target.w = nn.Parameter(_distribute(whole, mesh, [Replicate(), Shard(0)]))
    build_local_reshard_plan(source, target)  # two equal parts
    crossed = DeviceMesh("cpu", [[0, 2], [3, 1]])
    target.w = nn.Parameter(_distribute(whole, crossed, [Shard(0), Shard(1)]))
    error = error_of(lambda: build_local_reshard_plan(source, target))
    assert "w: the ranks of mesh [[0, 2], [3, 1]] do not ascend" in str(error)
    target.w = nn.Parameter(_distribute(whole[:9], mesh, [Replicate(), Shard(0)]))
    source.w = nn.Parameter(_distribute(whole[:9], ascending[1], [Replicate(), Replicate()]))
    error = error_of(lambda: build_local_reshard_plan(source, target))
    assert "w: the ranks of mesh [[3, 1], [2, 0]] do not ascend" in str(error)
    assert "(9, 6)" in str(error)
    service.close()


def test_meshes_whose_ranks_do_not_ascend_are_read_as_torch_reads_them() -> None:
    run(_unordered_meshes, mode="processes")


# ---------------------------------------------------------------------------------------------
# Failure.


class _Broken(ReshardTransform):
    """Cannot make what is to be sent on one rank."""

    def __init__(self, is_broken: bool) -> None:
        self.is_broken = is_broken

    def should_transform(self, param_name: str) -> bool:
        if self.is_broken and param_name == "decoder.layers.1.mlp.router.weight":
            raise LookupError("no table for the router")
        return False


@pytest.mark.parametrize(
    ("mode", "transport"),
    [("threads", "heap"), pytest.param("processes", "gloo", marks=pytest.mark.full)],
)
def test_an_error_before_the_copies_is_told_on_every_rank(mode: str, transport: str) -> None:
    run(_error_before_the_copies, transport, mode=mode)


def _error_before_the_copies(context: RankContext, transport: str) -> None:
    refit = make(context, ("tp2.ep2", "tp4"), transport)
    refit.run(1)
    broken = _Broken(context.rank_idx == 1)
    error = error_of(lambda: refit.run(2, transform=broken))
    assert "no table for the router" in str(error)
    assert isinstance(error, LookupError if context.rank_idx == 1 else ValueError)
    assert refit.target is not None
    assert not stale.is_stale(refit.target)
    assert model_shapes.find_differences(refit.target, 1) == []
    refit.run(3)
    refit.check(3)
    # The others only repeat what they have prepared.
    if context.rank_idx == 1:
        assert refit.source is not None
        del refit.source.get_submodule("decoder.layers.0").input_layernorm.weight
    error = error_of(
        lambda: execute_reshard_plan(
            refit.plan, refit.source, refit.target, refit.service, context.group, strict=True
        )
    )
    assert isinstance(error, ValueError)
    assert "the plan moves decoder.layers.0.input_layernorm.weight" in str(error)
    assert not stale.is_stale(refit.target)
    assert model_shapes.find_differences(refit.target, 3) == []
    refit.service.close()


@pytest.mark.parametrize(("mode", "transport"), [("threads", "heap"), ("processes", "gloo")])
def test_a_parameter_that_only_one_end_skips(mode: str, transport: str) -> None:
    run(_one_sided_skip, transport, mode=mode)


def _one_sided_skip(context: RankContext, transport: str) -> None:
    refit = make(context, ("tp2.ep2", "tp4"), transport)
    refit.run(1)
    if context.rank_idx == 0:
        assert refit.source is not None
        del refit.source.decoder.final_layernorm.weight
    if refit.source is not None and context.rank_idx != 0:
        model_shapes.fill(refit.source, 2)
    error = error_of(
        lambda: execute_reshard_plan(
            refit.plan, refit.source, refit.target, refit.service, context.group
        )
    )
    assert isinstance(error, ValueError), error
    assert refit.target is not None
    assert not stale.is_stale(refit.target)
    assert model_shapes.find_differences(refit.target, 1) == []
    refit.service.close()


def _peer_dies(context: RankContext, transport: str, is_staged: bool, is_in_time: bool) -> str:
    communicator = Communicator(None, stall_timeout_s=20.0, arrival_timeout_s=40.0)
    dst_dtype = torch.float32 if is_staged else torch.bfloat16
    shape = dataclasses.replace(SHAPE, vocab=1 << 14, has_expert_bias=False)
    refit = make(
        context,
        ("tp2.ep2", "tp4"),
        transport,
        shape,
        (torch.bfloat16, dst_dtype),
        communicator=communicator,
    )
    source, target = refit.source, refit.target
    assert source is not None
    assert target is not None
    model_shapes.fill(source, 1)
    execute_reshard_plan(refit.plan, source, target, refit.service)
    dist.barrier()  # a rank still in it would hear what others meet in the next
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    if context.rank_idx == 1:
        if not is_in_time:
            die()
        die_after(0.3)
    try:
        while True:
            # The same numbers again: a torn target cannot be told from a whole one, so the mark must.
            execute_reshard_plan(refit.plan, source, target, refit.service)
            assert not stale.is_stale(target)
    except RuntimeError as error:
        kind = type(error).__name__
    if is_staged:
        assert not stale.is_stale(target)
        for name, tensor in target.state_dict().items():
            assert torch.equal(tensor, before[name]), name
    else:
        reason = stale.stale_reason(target)
        assert reason is not None
        assert "PeerFailedError" in reason
    return kind


@pytest.mark.parametrize(
    ("is_staged", "is_in_time"),
    [pytest.param(False, False, marks=pytest.mark.full), (False, True), (True, True)],
    ids=["in_place-before", "in_place-during", "staged-during"],
)
def test_a_peer_that_dies_leaves_the_target_stale_or_untouched(
    is_staged: bool, is_in_time: bool
) -> None:
    results = run_ranks(
        _peer_dies,
        NUM_RANKS,
        "heap",
        is_staged,
        is_in_time,
        fresh=True,
        expect_dead=[1],
        timeout_s=TIMEOUT_S,
    )
    assert [kind for rank, kind in enumerate(results) if rank != 1] == ["PeerFailedError"] * 3


# ---------------------------------------------------------------------------------------------
# The manual.


def _run_example(context: RankContext, code: str) -> None:
    exec(compile(code, "docs/resharding.md", "exec"), {"__name__": "example"})
    clear_all_caches()


def test_the_example_of_the_manual() -> None:
    page = (Path(__file__).parents[2] / "docs/resharding.md").read_text()
    # The second block goes on where the first ends.
    blocks = [part.partition("```\n")[0] for part in page.split("```python\n")[1:3]]
    for edge in ('dist.init_process_group("gloo")\n', "dist.destroy_process_group()\n"):
        assert edge in blocks[0]
        blocks[0] = blocks[0].replace(edge, "")
    assert "rank - 2, num_ranks=2, first=2" in blocks[1]
    run(_run_example, "\n".join(blocks), mode="processes")
