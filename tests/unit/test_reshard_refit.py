from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import moe_comm
from moe_comm.resharding import refit
from moe_comm.resharding.copy_services.nvshmem_copy_service import NVSHMEMCopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.hold import plan_cache, refit_pass, refit_services
from moe_comm.resharding.hold.plan_cache import PlanCacheKey
from moe_comm.resharding.hold.refit_models import unwrap_models
from moe_comm.resharding.move import stale
from moe_comm.resharding.plan import planner
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.testing import RankContext
from tests.helpers.sharded_nets import SHAPES, ShardedNet
from tests.helpers.threaded_refits import error_of, nets, swap, threads

pytestmark = pytest.mark.usefixtures("no_refit_caches")


# ---------------------------------------------------------------------------------------------
# What is kept.


def test_plan_cache_keys_tell_every_refit_apart() -> None:
    first = PlanCacheKey(rank=0, src_config=(1, 1, 1, 1, 1), dst_config=None, num_experts=None)
    assert refit._PlanCacheKey is PlanCacheKey
    assert first == dataclasses.replace(first)
    assert hash(first) == hash(dataclasses.replace(first))
    for changes in (
        {"rank": 1},
        {"src_config": None},
        {"dst_config": (1, 1, 1, 1, 1)},
        {"num_experts": 8},
        {"world_size": 2},
        {"src_rank_offset": 4},
        {"dst_rank_offset": 4},
        {"pool_index": 1},
        {"src_model": 1},
        {"dst_model": 1},
        {"group": 1},
    ):
        assert dataclasses.replace(first, **changes) != first


def test_a_second_refit_changes_nothing_but_values(plans_made: list[int]) -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        addresses = None
        for seed in range(3):
            src.fill(seed)
            swap(context, src, dst)
            assert dst.wrong(seed) == []
            assert src.wrong(seed) == []
            if addresses is not None:
                assert addresses == [tensor.data_ptr() for tensor in dst.state_dict().values()]
            addresses = [tensor.data_ptr() for tensor in dst.state_dict().values()]

    threads(rank, 2)
    assert sorted(plans_made) == [0, 1]


def test_a_second_model_of_equal_sizes_has_a_plan_of_its_own(plans_made: list[int]) -> None:
    """Same parallel sizes, other parameters: nothing may be left as it was."""
    more = {**SHAPES, "head": ((6, 8), 0)}

    def rank(context: RankContext) -> None:
        pairs = [nets(context, "tp2", "single"), nets(context, "tp2", "single", shapes=more)]
        for seed in range(3):
            for src, dst in pairs:
                src.fill(seed)
                swap(context, src, dst)
                assert dst.wrong(seed) == []

    threads(rank, 2)
    assert sorted(plans_made) == [0, 0, 1, 1]


def test_models_of_equal_shapes_are_told_apart(plans_made: list[int]) -> None:
    """Shapes do not say how parameters are cut."""

    def rank(context: RankContext) -> None:
        (a, b), (c, d) = nets(context, "tp2", "single"), nets(context, "tp2", "single")
        for seed, (src, dst) in enumerate([(a, b), (a, d), (c, b), (a, b), (a, d), (c, b)]):
            swap(context, src.fill(seed), dst)
            assert dst.wrong(seed) == []

    threads(rank, 2)
    assert sorted(plans_made) == [0, 0, 0, 1, 1, 1]


def test_a_parameter_that_changed_is_planned_anew_by_all(plans_made: list[int]) -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        for seed, rows in enumerate((16, 32, 32)):
            for net, tp in ((src, 2), (dst, 1)):
                net.shapes["up"] = ((rows, 8), 0)
                if net.up.shape[0] != rows // tp:
                    # The object stays, what it holds does not.
                    net.up.data = torch.zeros(rows // tp, 8, dtype=torch.bfloat16)
            src.fill(seed)
            swap(context, src, dst)
            assert dst.wrong(seed) == []

    threads(rank, 2)
    assert sorted(plans_made) == [0, 0, 1, 1]


def test_one_rank_that_forgot_makes_all_plan_anew(plans_made: list[int]) -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        for seed in range(3):
            if seed == 1 and context.rank_idx == 1:
                dst = ShardedNet(Parallelism(2), 1)
            src.fill(seed)
            swap(context, src, dst)
            assert dst.wrong(seed) == []

    threads(rank, 2)
    assert sorted(plans_made) == [0, 0, 1, 1]


def test_a_sender_serves_two_targets_in_turn(plans_made: list[int]) -> None:
    """Rank 0 sees the same refit twice, its peers see two: plans are told apart by all."""

    def rank(context: RankContext) -> None:
        one = Parallelism(1)
        src = ShardedNet(one, 0) if context.rank_idx == 0 else None
        targets = [
            ShardedNet(Parallelism(1), 0, rank_offset=peer) if context.rank_idx == peer else None
            for peer in (1, 2)
        ]
        for seed in range(6):
            if src is not None:
                src.fill(seed)
            target = targets[seed % 2]
            swap(context, src, target)
            assert target is None or target.wrong(seed) == []

    threads(rank, 3)
    assert sorted(plans_made) == [0, 0, 1, 1, 2, 2]


def test_plans_go_with_their_models() -> None:
    def rank(context: RankContext) -> weakref.ref[Any]:
        src, dst = nets(context, "tp2", "single")
        # A submodule, as modules of FSDP do, refers to its root.
        for net in (src, dst):
            net.inner = torch.nn.Module()
            vars(net.inner)["root"] = net
        swap(context, src.fill(0), dst)
        return weakref.ref(dst)

    targets = threads(rank, 2)
    gc.collect()
    assert [target() for target in targets] == [None, None]
    assert len(plan_cache.plan_cache) == 0


def test_a_refit_leaves_nothing_on_its_models() -> None:
    def rank(context: RankContext) -> None:
        pair = nets(context, "tp2", "single")
        before = [set(vars(module)) for net in pair for module in net.modules()]
        for seed in range(2):
            swap(context, pair[0].fill(seed), pair[1], verify="checksum")
        assert [set(vars(module)) for net in pair for module in net.modules()] == before

    threads(rank, 2)


def test_services_by_backend_and_group() -> None:
    ranks, others = moe_comm.RankThreads(1), moe_comm.RankThreads(1)
    first = refit.get_or_create_service("symmetric", ranks[0])
    assert refit.get_or_create_service("symmetric", ranks[0]) is first
    assert refit.get_or_create_service("symmetric", others[0]) is not first
    assert refit.get_or_create_service("nvshmem", ranks[0]) is not first
    refit.clear_service_cache()
    again = refit.get_or_create_service("symmetric", ranks[0])
    assert again is not first
    with pytest.raises(Exception, match=r"destroyed|closed"):
        first.run()


@pytest.mark.parametrize(
    ("backend", "text"),
    [
        ("mpi", "Unknown backend 'mpi'; there are gloo, nccl, nvshmem, symmetric"),
        ("nixl", "'nixl' needs a library that this package does not drive; there are gloo"),
        ("gloo", "gloo needs a torch.distributed process group"),
        ("nccl", "nccl needs a torch.distributed process group"),
    ],
)
def test_backends_that_are_not_there(backend: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        refit.get_or_create_service(backend, moe_comm.RankThreads(1)[0])


def test_over_a_service_of_the_callers() -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        with moe_comm.Communicator(context.group) as communicator:
            service = SymmetricCopyService(communicator=communicator)
            refit.swap_model_weights(src.fill(1), dst, service)
            assert dst.wrong(1) == []
            refit.reshard_model_weights(src.fill(2), dst, service, pool_index=3)
            assert dst.wrong(2) == []
            service.close()
        # One that says who its ranks are by a bootstrap.
        pipeline = NVSHMEMCopyService(context.group)
        refit.swap_model_weights(src.fill(3), dst, pipeline, verify="checksum")
        assert dst.wrong(3) == []
        pipeline.close()
        assert not refit_services.service_cache

    threads(rank, 2)


# ---------------------------------------------------------------------------------------------
# Who takes part.


def test_sources_and_targets_on_ranks_of_their_own() -> None:
    """Ranks 0-1 train, ranks 2-4 serve (one of them idle)."""

    def rank(context: RankContext) -> None:
        rank_idx = context.rank_idx
        src = ShardedNet(Parallelism(2, tp=2), rank_idx) if rank_idx < 2 else None
        dst = (
            ShardedNet(Parallelism(2, tp=1), rank_idx - 2, rank_offset=2)
            if rank_idx in (2, 3)
            else None
        )
        for seed in range(2):
            swap(context, None if src is None else src.fill(seed), dst, verify="checksum")
            assert dst is None or dst.wrong(seed) == []

    threads(rank, 5)


@pytest.mark.parametrize("way", ["swapped", "prepared", "held"])
def test_pools_are_written_one_after_the_other(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 trains; ranks 1 and 2-3 are pools with a whole target each."""

    def rank(context: RankContext) -> None:
        rank_idx = context.rank_idx
        src = ShardedNet(Parallelism(1), 0) if rank_idx == 0 else None
        dst, pool = None, 0
        if rank_idx == 1:
            dst = ShardedNet(Parallelism(1), 0, rank_offset=1)
        elif rank_idx > 1:
            dst, pool = ShardedNet(Parallelism(2, tp=2), rank_idx - 2, rank_offset=2), 1
        pools = {"num_dst_pools": 2, "dst_pool_index": pool}
        move: Any = functools.partial(swap, context, src, dst, **pools)
        if way == "prepared":
            refit.prepare_swap_model_weights(src, dst, group=context.group, **pools)
        elif way == "held":
            move = refit.Refit(src, dst, "symmetric", context.group, **pools).run
        for seed in range(2):
            if src is not None:
                src.fill(seed)
            move()
            assert dst is None or dst.wrong(seed) == []

    plans: list[ReshardPlan] = []
    build = refit_pass.build_local_reshard_plan

    def kept(*args: Any, **options: Any) -> ReshardPlan:
        plan = build(*args, **options)
        plans.append(plan)
        return plan

    monkeypatch.setattr(refit_pass, "build_local_reshard_plan", kept)
    threads(rank, 4)
    receivers = sorted(plan.rank for plan in plans if plan.recv_ops)
    assert len(plans) == 8
    assert receivers == [1, 2, 3]


def test_nobody_has_anything() -> None:
    threads(lambda context: swap(context, None, None), 2)


def test_what_torch_wraps_is_seen() -> None:
    """A listed source in wrappers and of wrapped layers, into a target of others."""

    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    def net(context: RankContext, value: float) -> torch.nn.Sequential:
        layers = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
        layers.pg_collection = Parallelism(2).groups(context.rank_idx)
        for tensor in layers.state_dict().values():
            tensor.fill_(value)
        return layers

    def rank(context: RankContext) -> None:
        trained, served = net(context, 2.0), net(context, 0.0)
        trained[0], trained[1] = checkpoint_wrapper(trained[0]), torch.compile(trained[1])
        served[0] = torch.compile(checkpoint_wrapper(served[0]))
        source = torch.compile(Wrapper(Wrapper(torch.optim.swa_utils.AveragedModel(trained))))
        swap(context, [source], (torch.compile(served),), verify="checksum")
        assert all((tensor == 2.0).all() for tensor in served.state_dict().values())

    threads(rank, 2)


@pytest.mark.parametrize("is_source", [False, True])
def test_a_parametrization_of_one_side_is_named(is_source: bool) -> None:
    def rank(context: RankContext) -> str:
        pair = [torch.nn.Sequential(torch.nn.Linear(3, 3)) for _ in range(2)]
        torch.nn.utils.parametrizations.weight_norm(pair[0 if is_source else 1][0])
        for model in pair:
            model.pg_collection = Parallelism(2).groups(context.rank_idx)
        return error_of(lambda: swap(context, *pair))

    for text in threads(rank, 2):
        assert text.startswith("PlanError: Destination parameter '0.")
        has = "0.parametrizations.weight.original0" if is_source else "0.weight"
        assert f"The source has '{has}'" in text
        assert "remove_parametrizations(module, 'weight')" in text


def test_what_is_no_model() -> None:
    net = ShardedNet(Parallelism(1), 0)
    with pytest.raises(ValueError, match="got a list of 2"):
        unwrap_models([net, net], None)
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module or CheckpointViews, got str"):
        unwrap_models(None, "net")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="Source model missing pg_collection required"):
        unwrap_models(torch.nn.Linear(2, 2), None)
    text = (
        r"^target model: weight is a plain tensor, .* nothing says how it is divided over ranks.*"
        r"write model\.pg_collection = Parallelism\(n\)\.groups\(rank\).*Target model missing "
    )
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))
    for plain in (torch.nn.Linear(2, 2), torch.compile(torch.nn.Linear(2, 2)), averaged):
        with pytest.raises(RuntimeError, match=text):
            unwrap_models(None, plain)
    published = torch.nn.Linear(2, 2)
    vars(published)["save_pretrained"] = lambda: None
    with pytest.raises(RuntimeError, match=r"give transformers_views\(model\) .*weight is a plain"):
        unwrap_models(None, published)


# ---------------------------------------------------------------------------------------------
# Bad input: named on every rank, nothing has moved, and the next refit works.


def _without_groups(src: ShardedNet, dst: ShardedNet) -> None:
    del src.pg_collection


def _extra(src: ShardedNet, dst: ShardedNet) -> None:
    src.extra = torch.nn.Parameter(torch.zeros(3))


def _missing(src: ShardedNet, dst: ShardedNet) -> None:
    dst.extra = torch.nn.Parameter(torch.zeros(3))


def _odd_shape(src: ShardedNet, dst: ShardedNet) -> None:
    dst.norm = torch.nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))


def _stale(src: ShardedNet, dst: ShardedNet) -> None:
    stale.mark_stale(src, "a refit failed: cable")


@pytest.mark.parametrize(
    ("spoil", "texts"),
    [
        (_without_groups, ["RuntimeError", "Source model missing pg_collection"]),
        (_extra, ["PlanError", "source parameter 'extra' on rank 1 has no destination"]),
        (_missing, ["PlanError", "'extra' on rank 1 not found in source"]),
        (_odd_shape, ["PlanError", "norm"]),
        (_stale, ["ValueError", "source model is stale", "cable"]),
    ],
)
def test_one_rank_with_a_bad_model(spoil: Any, texts: list[str]) -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        good = nets(context, "tp2", "single")
        if context.rank_idx == 1:
            spoil(src, dst)
        text = error_of(lambda: swap(context, src, dst, strict=spoil is _extra))
        assert all(
            (param == -1).all()
            for name, param in dst.named_parameters()
            if name in SHAPES and name != "norm"
        )
        assert not stale.is_stale(dst)
        swap(context, good[0].fill(1), good[1])
        assert good[1].wrong(1) == []
        return text

    for text in threads(rank, 2):
        for expected in texts:
            assert expected in text


def test_parameters_that_only_the_source_has() -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        src.fill(1)
        _extra(src, dst)
        swap(context, src, dst)
        assert dst.wrong(1) == []
        # The plan that is kept is none for who refuses them.
        assert "'extra' on rank 0 has no destination" in error_of(
            lambda: swap(context, src, dst, strict=True)
        )
        assert dst.wrong(1) == []

    threads(rank, 2)


class _TiedStage(torch.nn.Module):
    """A pipeline stage: the first holds the embedding, the last holds it again as output layer."""

    def __init__(self, names: list[str], rank: int) -> None:
        super().__init__()
        self.pg_collection = Parallelism(2, pp=2).groups(rank)
        for name in names:
            path, _, last = name.rpartition(".")
            owner = self
            for part in path.split("."):
                if not hasattr(owner, part):
                    owner.add_module(part, torch.nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, torch.nn.Parameter(torch.full((24, 8), 3.0)))


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_output_layer_that_repeats_the_embedding_needs_no_destination(is_tied: bool) -> None:
    embedding, output = "embedding.word_embeddings.weight", "output_layer.weight"

    def rank(context: RankContext) -> str:
        first = [embedding] if is_tied else [embedding, output]
        src = _TiedStage(first if context.rank_idx == 0 else [output], context.rank_idx)
        dst = _TiedStage([embedding], context.rank_idx) if context.rank_idx == 0 else None
        if dst is not None:
            torch.nn.init.zeros_(dst.get_parameter(embedding))
        text = error_of(lambda: swap(context, src, dst, strict=True))
        if dst is not None and not text:
            assert (dst.get_parameter(embedding) == 3.0).all()
        return text

    for text in threads(rank, 2):
        assert ("" if is_tied else "output_layer.weight") in text
        assert bool(text) != is_tied


@pytest.mark.parametrize(("verify", "num_checks"), [(None, 0), ("plan", 2), ("checksum", 2)])
def test_plans_are_verified_once_when_they_are_made(
    verify: Any, num_checks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[ReshardPlan] = []
    monkeypatch.setattr(planner, "verify_plan", checked.append)

    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        for seed in range(2):
            swap(context, src.fill(seed), dst, verify=verify)
            assert dst.wrong(seed) == []

    threads(rank, 2)
    assert len(checked) == num_checks


class _Failing(torch.nn.Module):
    """A module whose cache cannot be derived from its weights."""

    def refresh_cache(self) -> None:
        raise RuntimeError("no room for the cache")


@pytest.mark.parametrize("verify", ["plan", "checksum"])
def test_a_rank_that_fails_when_all_has_arrived(verify: str) -> None:
    """With checksums to compare, the others wait for nobody who has none."""

    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        if context.rank_idx == 1:
            dst.failing = _Failing()
        text = error_of(lambda: swap(context, src.fill(1), dst, verify=verify))
        assert stale.is_stale(dst) == (context.rank_idx == 1)
        return text

    first, second = threads(rank, 2)
    assert second == "RuntimeError: no room for the cache"
    assert first == ("" if verify == "plan" else "RuntimeError: rank 1: no room for the cache")
