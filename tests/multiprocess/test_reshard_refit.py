"""Refits between processes: the same ones and disjoint ones, over every transport that runs here."""

from __future__ import annotations

import functools
import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from moe_comm import CommunicationError, Communicator, PeerFailedError
from moe_comm.cli.reshard.model_shapes import MoEShape, build_module, fill, find_differences
from moe_comm.resharding import refit
from moe_comm.resharding.copy_services.gloo_copy_service import GlooCopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.hold import deltas, plan_cache, refit_group, refit_services
from moe_comm.resharding.hold.heap_parameters import place_in_heap
from moe_comm.resharding.move import stale
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.copy_services import unregistered_group
from tests.helpers.failing_ranks import (
    HANG_S,
    SHORT_S,
)
from tests.helpers.sharded_nets import SHAPES, ShardedNet
from tests.helpers.threaded_refits import (
    error_of,
    nets,
    refuse_offloaded,
    spoil_what_was_saved,
    swap,
    threads,
)

METHODS = ("symmetric", "gloo", "nvshmem")
SHAPE = MoEShape(
    num_layers=4,
    hidden=32,
    num_heads=4,
    num_query_groups=4,
    num_experts=4,
    expert_ffn=16,
    ffn=48,
    num_dense_layers=1,
    vocab=64,
)


def _same_processes(context: RankContext, pairs: list[tuple[str, str]]) -> list[str]:
    """Every rank has a part of both models, and every transport moves every pair."""
    gc.collect()  # errors of earlier tests of this process hold models
    wrong: list[str] = []
    for src_text, dst_text in pairs:
        src, dst = (
            build_module(
                SHAPE,
                Parallelism.parse(text, context.num_ranks),
                context.rank_idx,
                dtype=torch.bfloat16,
            )
            for text in (src_text, dst_text)
        )
        for seed, method in enumerate((*METHODS, "symmetric")):
            fill(src, seed)
            verify: Any = "checksum" if seed == 2 else "plan"
            refit.swap_model_weights(src, dst, method, verify=verify)
            wrong += find_differences(dst, seed)
    plans = len(plan_cache.plan_cache)
    assert plans == 1, plans  # the others went with their models
    refit.clear_all_caches()
    return wrong


@pytest.mark.parametrize(
    "pairs",
    [
        [("tp2.ep2", "tp4.ep1"), ("pp2.tp2", "ep2.tp2")],
        pytest.param([("ep4", "tp2.ep2"), ("tp4.ep1", "tp2.ep2")], marks=pytest.mark.full),
    ],
)
def test_over_the_same_processes(pairs: list[tuple[str, str]]) -> None:
    assert run_ranks(_same_processes, 4, pairs) == [[], [], [], []]


def _disjoint_processes(context: RankContext) -> list[str]:
    """Ranks 0-1 train, ranks 2-3 serve."""
    rank_idx = context.rank_idx
    src = dst = None
    if rank_idx < 2:
        src = build_module(SHAPE, Parallelism(2, ep=2), rank_idx, dtype=torch.float32)
    else:
        dst = build_module(
            SHAPE, Parallelism(2, tp=2), rank_idx - 2, dtype=torch.bfloat16, rank_offset=2
        )
    wrong: list[str] = []
    for seed, method in enumerate((*METHODS, "symmetric")):
        if src is not None:
            fill(src, seed)
        refit.swap_model_weights(src, dst, method, verify="checksum")
        if dst is not None:
            wrong += find_differences(dst, seed)
    refit.clear_all_caches()
    return wrong


def test_over_disjoint_processes_to_another_dtype() -> None:
    assert run_ranks(_disjoint_processes, 4) == [[], [], [], []]


def _fully_sharded(context: RankContext) -> None:
    """Buffers and ignored parameters stay plain when a module is sharded."""
    made = [torch.nn.BatchNorm1d(7) for _ in range(2)]
    for number, net in enumerate(made):
        net.extra = torch.nn.Parameter(torch.full((3,), number + 1.0))
        with torch.no_grad():
            net.weight += torch.arange(7) * number
            net.running_mean += number
    target, source = made
    mesh = init_device_mesh("cpu", (context.num_ranks,))
    fully_shard(source, mesh=mesh, ignored_params={source.extra})
    assert isinstance(source.weight, DTensor)
    assert not isinstance(source.extra, DTensor)
    target.pg_collection = Parallelism(context.num_ranks).groups(context.rank_idx)
    refit.swap_model_weights(source, target, "gloo", verify="checksum")
    assert torch.equal(target.weight, torch.arange(1.0, 8.0))
    assert target.extra.eq(2).all()
    assert target.running_mean.eq(1).all()
    refit.swap_model_weights(target, source, "gloo", verify="checksum")
    refit.clear_all_caches()


def test_sharded_modules_with_plain_tensors() -> None:
    run_ranks(_fully_sharded, 3)


def _whole_after_a_forward(context: RankContext) -> None:
    """Models of which FSDP keeps whole copies, of another dtype, as it does after a forward alone."""
    mesh = init_device_mesh("cpu", (context.num_ranks,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    x = torch.eye(4)
    made = [torch.nn.Linear(4, 5, bias=False) for _ in range(2)]
    for net in made:
        torch.nn.init.zeros_(net.weight)
        fully_shard(net, mesh=mesh, mp_policy=policy)
    target, source = made
    for method, value in (("gloo", 1 + 2**-10), ("symmetric", 2 + 2**-10)):
        if method == "symmetric":
            service = refit.get_or_create_service(method)
            assert isinstance(service, SymmetricCopyService)
            place_in_heap(target, service.communicator)
        torch.nn.init.constant_(source.weight, value)
        for net in made:
            with torch.no_grad():
                net(x)
            assert not isinstance(net.weight, DTensor)
        refit.swap_model_weights(source, target, method, verify="checksum")
        assert isinstance(target.weight, DTensor)
        assert target.weight.to_local().eq(value).all()
        assert target(x).eq(round(value)).all()
        source.reshard()
        target.reshard()
    refit.clear_all_caches()


def test_what_fsdp_shards_is_moved_and_not_its_whole_copies() -> None:
    run_ranks(_whole_after_a_forward, 2)


def _flat_shards(context: RankContext) -> str:
    """A model of `FullyShardedDataParallel`: refused as shards, moved where it is whole."""
    made = [torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)) for _ in range(2)]
    for value, net in enumerate(made):
        net.pg_collection = Parallelism(context.num_ranks).groups(context.rank_idx)
        for param in net.parameters():
            torch.nn.init.constant_(param, float(value))
    target, inner = made
    inner[1] = FullyShardedDataParallel(
        inner[1], device_id=torch.device("cpu"), use_orig_params=True
    )
    source = FullyShardedDataParallel(inner, device_id=torch.device("cpu"), use_orig_params=True)
    with pytest.raises(RuntimeError, match="FullyShardedDataParallel") as info:
        refit.swap_model_weights(source, target, "gloo")
    assert all(param.eq(0).all() for param in target.parameters())
    with FullyShardedDataParallel.summon_full_params(source):
        refit.swap_model_weights(source, target, "gloo", verify="checksum")
    assert all(param.eq(1).all() for param in target.parameters())
    refit.clear_all_caches()
    return str(info.value)


def test_flat_shards_are_refused_and_whole_parameters_moved() -> None:
    for text in run_ranks(_flat_shards, 2):
        assert "the source model is sharded by FullyShardedDataParallel" in text


def _groups(context: RankContext) -> list[str]:
    """Two halves refit on their own; ranks of models and plans are those of the half."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = context.rank_idx // 2
    group = halves[half]
    wrong: list[str] = []
    first = refit.get_or_create_service("gloo", group)
    assert isinstance(first, GlooCopyService)
    assert first.world_size == 2
    everybody = refit.get_or_create_service("gloo")
    assert everybody is not first
    assert everybody.world_size == 4
    assert refit.get_or_create_service("gloo", group) is first
    src = ShardedNet(Parallelism(2, tp=2), context.rank_idx % 2)
    dst = ShardedNet(Parallelism(2), context.rank_idx % 2)
    for seed, method in enumerate(("gloo", "symmetric", "gloo")):
        # The halves hold different values.
        src.fill(2 * seed + half)
        refit.swap_model_weights(src, dst, method, group=group)
        wrong += dst.wrong(2 * seed + half)
    wide = [ShardedNet(Parallelism(4, tp=tp), context.rank_idx) for tp in (4, 2)]
    refit.swap_model_weights(wide[0].fill(9), wide[1], "gloo")
    wrong += wide[1].wrong(9)
    refit.clear_all_caches()
    return wrong


def test_a_group_has_services_and_plans_of_its_own() -> None:
    assert run_ranks(_groups, 4) == [[], [], [], []]


def _bad_model(context: RankContext) -> list[str]:
    texts = []
    for method in METHODS:
        src = ShardedNet(Parallelism(3), context.rank_idx)
        dst = ShardedNet(Parallelism(3), context.rank_idx)
        bad = ShardedNet(Parallelism(3), context.rank_idx)
        if context.rank_idx == 2:
            bad.norm = torch.nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
        texts.append(error_of(functools.partial(refit.swap_model_weights, src, bad, method)))
        assert not stale.is_stale(bad)
        assert all((param == -1).all() for name, param in bad.named_parameters() if name != "norm")
        refit.swap_model_weights(src.fill(1), dst, method)
        assert dst.wrong(1) == []
    refit.clear_all_caches()
    return texts


def test_one_rank_with_a_bad_model_is_named_on_every_rank() -> None:
    for texts in run_ranks(_bad_model, 3):
        for text in texts:
            assert text.startswith("PlanError")
            assert "norm" in text
            assert "rank 2" in text


def _badly_prepared(context: RankContext) -> str:
    pair = dist.new_group([0, 1])
    if context.rank_idx < 2:
        src, dst = (ShardedNet(Parallelism(2, tp=tp), context.rank_idx) for tp in (2, 1))
        refit.swap_model_weights(src.fill(1), dst, "gloo", group=pair)
    wide = [ShardedNet(Parallelism(3), context.rank_idx) for _ in range(2)]
    num_dst_pools = 0 if context.rank_idx == 1 else 1
    text = error_of(
        lambda: refit.prepare_swap_model_weights(wide[0], wide[1], num_dst_pools=num_dst_pools)
    )
    refit.swap_model_weights(wide[0].fill(2), wide[1], "gloo")
    assert wide[1].wrong(2) == []
    refit.clear_all_caches()
    return text


def test_one_rank_that_prepares_wrongly_after_a_refit_of_fewer_ranks() -> None:
    """Without a group it asks the default group, where its peers wait, not the ranks of that refit."""
    for text in run_ranks(_badly_prepared, 3, timeout_s=HANG_S):
        assert "num_dst_pools must be >= 1, got 0" in text


def _over_gloo(context: RankContext) -> list[str]:
    spoil_what_was_saved(context, "gloo")
    texts = [refuse_offloaded(context, "gloo", side) for side in ("source", "destination")]
    refit.clear_all_caches()
    return texts


def test_offloaded_and_saved_weights_over_gloo() -> None:
    for texts in run_ranks(_over_gloo, 2):
        for side, text in zip(("source", "destination"), texts, strict=True):
            assert text.startswith(f"ValueError: rank 1: up of the {side} module has elements in")


class _Lossy(GlooCopyService):
    """A transport that loses a bit on rank 1, after everything has arrived."""

    def run(self) -> None:
        recvs = [op.tensor for op in self._recvs]
        super().run()
        if self.rank == 1:
            recvs[0].view(torch.uint8).view(-1)[3] ^= 16


def _lossy(context: RankContext) -> tuple[str, bool]:
    src = ShardedNet(Parallelism(2, tp=2), context.rank_idx)
    dst = ShardedNet(Parallelism(2), context.rank_idx)
    service = _Lossy()
    text = error_of(lambda: refit.swap_model_weights(src.fill(1), dst, service, verify="checksum"))
    service.close()
    is_stale = stale.is_stale(dst)
    # A torn model is no source, for nobody.
    refusal = error_of(lambda: refit.swap_model_weights(dst, src, "gloo"))
    assert "rank 1" in refusal or "stale" in refusal
    assert src.wrong(1) == []
    refit.swap_model_weights(src, dst, "gloo")
    assert not stale.is_stale(dst)
    assert dst.wrong(1) == []
    refit.clear_all_caches()
    return text, is_stale


def test_checksums_catch_a_transport_that_loses_a_bit() -> None:
    told = run_ranks(_lossy, 2)
    for text, _ in told:
        assert text.startswith("RefitError")
        assert "rank 1" in text
        assert any(name in text for name in SHAPES)
    assert [is_stale for _, is_stale in told] == [False, True]


def _dies(context: RankContext, method: str, is_first: bool) -> object:
    src = ShardedNet(Parallelism(3, tp=1), context.rank_idx)
    dst = ShardedNet(Parallelism(3), context.rank_idx)
    if not is_first:
        refit.swap_model_weights(src.fill(0), dst, method)
        dist.barrier()  # a rank still in it would hear what others meet in the next
    if context.rank_idx == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        for seed in range(1000):
            refit.swap_model_weights(src.fill(seed), dst, method)
    except CommunicationError as error:
        return type(error).__name__, error.ranks, str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("method", "is_first"), [("symmetric", False), ("gloo", True), ("gloo", False)]
)
def test_a_peer_that_died_ends_the_refit(method: str, is_first: bool) -> None:
    told = run_ranks(_dies, 3, method, is_first, fresh=True, expect_dead=[1])
    assert told[1] is None
    for result in (told[0], told[2]):
        assert result[:2] == ("PeerFailedError", (1,)), result


def _asks_at_once(context: RankContext, method: str, dies: bool) -> object:
    """Rank 2 dies, or does not come, between two refits; the group would wait for ten minutes."""
    src = ShardedNet(Parallelism(4, tp=1), context.rank_idx).fill(0)
    dst = ShardedNet(Parallelism(4), context.rank_idx)
    service: Any = method
    if method == "service":
        communicator = Communicator(None, arrival_timeout_s=2 * HANG_S if dies else SHORT_S)
        service = SymmetricCopyService(communicator=communicator)
    told: list[object] = []
    refit.swap_model_weights(src, dst, service, group=dist.group.WORLD)
    dist.barrier()  # a rank still in it would hear what others meet in the next
    group = dist.group.WORLD
    assert group is not None
    if context.rank_idx == 2:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        service.communicator.recover()
        refit.swap_model_weights(src.fill(1), dst, service, group=group)
        return dst.wrong(1)
    try:
        refit.swap_model_weights(src, dst, service, group=group)
    except CommunicationError as error:
        told = [type(error).__name__, error.ranks, stale.is_stale(dst)]
    if not dies:
        dist.barrier()
        service.communicator.recover()
        refit.swap_model_weights(src.fill(1), dst, service, group=group)
        assert dst.wrong(1) == []
    elif method == "service":
        service.communicator.recover()
        with pytest.raises(PeerFailedError, match="a group of their own"):
            refit.swap_model_weights(src, dst, service, group=group)
    else:
        living = dist.new_group([0, 1, 3], backend="gloo", use_local_synchronization=True)
        src = ShardedNet(Parallelism(3, tp=1), dist.get_rank(living)).fill(2)
        dst = ShardedNet(Parallelism(3), dist.get_rank(living))
        refit.clear_all_caches()
        refit.swap_model_weights(src, dst, "symmetric", group=living)
        assert dst.wrong(2) == []
    return told


@pytest.mark.parametrize(
    ("method", "dies"),
    [
        ("service", True),
        pytest.param("service", False, marks=pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)),
        ("symmetric", True),
        ("nvshmem", True),
    ],
)
def test_the_dead_and_the_late_are_named_at_once(method: str, dies: bool) -> None:
    told = run_ranks(_asks_at_once, 4, method, dies, fresh=True, expect_dead=[2] if dies else [])
    kind = "PeerFailedError" if dies else "PeerTimeoutError"
    for rank_idx in (0, 1, 3):
        assert told[rank_idx] == [kind, (2,), False]


def _forgets(context: RankContext) -> list[str]:
    """Ranks lose their services in turn, or ask for what does not exist, and nobody waits."""
    src, dst = nets(context, "tp1", "tp4")
    wrong = []
    for seed in range(4):
        key = "symmetric", refit_group.identity_of(context.group)
        old = refit_services.service_cache.get(key)
        if seed and context.rank_idx == seed - 1:
            refit_services.service_cache.pop(key).close()
        swap(context, src.fill(seed), dst)
        wrong += dst.wrong(seed)
        if old is not None:
            assert "destroyed" in error_of(lambda old=old: old.communicator.all_gather(b""))
        method: Any = "no such" if context.rank_idx == seed else "symmetric"
        with pytest.raises(ValueError, match="no such"):
            refit.swap_model_weights(src, dst, method, group=context.group)
    return wrong


def test_a_rank_that_lost_its_service_makes_all_make_one_anew() -> None:
    assert threads(_forgets, 4) == [[]] * 4


def _ends_in_the_barrier(context: RankContext) -> list[object]:
    src = ShardedNet(Parallelism(3, tp=1), context.rank_idx).fill(0)
    dst = ShardedNet(Parallelism(3), context.rank_idx)
    service = GlooCopyService()
    run = service.run
    patch = pytest.MonkeyPatch()
    service.requires_process_group_barrier = True
    if context.rank_idx == 1:
        patch.setattr(service, "run", lambda: (run(), os.kill(os.getpid(), signal.SIGKILL)))
    try:
        refit.swap_model_weights(src, dst, service)
    except CommunicationError as error:
        told: list[object] = [type(error).__name__, error.ranks, stale.is_stale(dst)]
    service._failure = "lost", ()
    with pytest.raises(CommunicationError, match=r"must be made anew.*lost"):
        refit.swap_model_weights(src, dst, service)
    return told


def test_a_peer_that_died_before_the_barrier_is_named() -> None:
    told = run_ranks(_ends_in_the_barrier, 3, fresh=True, expect_dead=[1])
    assert told[0] == told[2] == ["PeerFailedError", (1,), True]


def _dies_among_blocks(context: RankContext, method: str, store: str) -> object:
    """Rank 1 dies when it has packed what changed; the others go on without it."""
    src = ShardedNet(Parallelism(3, tp=1), context.rank_idx)
    dst = ShardedNet(Parallelism(3), context.rank_idx)
    run = refit.Refit(src.fill(0), dst, method, deltas="blocks")
    run.run()
    pack = deltas._pack

    def dies(*given: Any) -> None:
        pack(*given)
        os.kill(os.getpid(), signal.SIGKILL)

    patch = pytest.MonkeyPatch()
    if context.rank_idx == 1:
        patch.setattr(deltas, "_pack", dies)
    dist.barrier()  # a rank still in the first refit would hear what others meet in the next
    with torch.no_grad():
        src.get_parameter("up").add_(1)  # whatever rank reads it
    try:
        run.run()
    except CommunicationError as error:
        told = type(error).__name__, error.ranks, stale.is_stale(dst), dst.wrong(0)
    # The rank that is left makes a group of its own, and holds nothing that it would not send again.
    place = context.rank_idx // 2
    group = unregistered_group(RankContext(place, 2, None), place, store)
    left = [ShardedNet(Parallelism(2, tp=1), place) for _ in range(2)]
    again = refit.Refit(left[0].fill(2), left[1], method, group, deltas="blocks")
    again.run()
    assert left[1].wrong(2) == []
    return (*told, len(again.last_delta.whole) > 0)


@pytest.mark.parametrize("method", ["symmetric", "gloo"])
def test_a_rank_that_dies_among_changed_blocks_is_named(method: str, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    told = run_ranks(_dies_among_blocks, 3, method, store, fresh=True, expect_dead=[1])
    assert told[0] == told[2] == ("PeerFailedError", (1,), False, [], True)
