"""Refits of models and with arguments that are legal but rare, or wrong on one rank alone."""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from moe_comm.resharding import refit
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.describe.parallelism import Parallelism, RankGroup
from moe_comm.resharding.hold.plan_cache import CachedPlans
from moe_comm.resharding.move import stale
from moe_comm.resharding.move.execution import execute_reshard_plan
from moe_comm.resharding.move.weak_cache import WeakCache
from moe_comm.resharding.plan import planner
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.sharded_nets import ShardedNet
from tests.helpers.threaded_refits import error_of, nets, swap

pytestmark = pytest.mark.usefixtures("no_refit_caches")


def _threads(fn: Any) -> list[Any]:
    return run_ranks(fn, 2, mode="threads")


def _module(context: RankContext, **tensors: torch.Tensor) -> nn.Module:
    """Replicated parameters and buffers."""
    module = nn.Module()
    module.pg_collection = Parallelism(context.num_ranks).groups(context.rank_idx)
    for name, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
    return module


# ---------------------------------------------------------------------------------------------
# One rank that could not even begin: nobody waits for it.


class _DestroyedGroup:
    def size(self) -> int:
        raise RuntimeError("the group was destroyed")


def _groups_of_numbers(dst: ShardedNet) -> dict[str, Any]:
    dst.pg_collection = SimpleNamespace(tp=2)
    return {}


def _destroyed_groups(dst: ShardedNet) -> dict[str, Any]:
    dst.pg_collection = SimpleNamespace(tp=_DestroyedGroup())
    return {}


def _uninitialized(dst: ShardedNet) -> dict[str, Any]:
    dst.norm = nn.UninitializedParameter()
    return {}


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (_groups_of_numbers, "'int' object has no attribute 'size'"),
        (_destroyed_groups, "the group was destroyed"),
        (_uninitialized, "uninitialized parameter"),
        (lambda dst: {"num_dst_pools": "2"}, "num_dst_pools must be an int, got '2'"),
        (lambda dst: {"dst_pool_index": None}, "dst_pool_index must be an int, got None"),
        (lambda dst: {"src_rank_offset": [0]}, "src_rank_offset must be an int, got [0]"),
    ],
)
@pytest.mark.parametrize("call", ["swap", "prepare"])
def test_a_rank_that_cannot_begin_is_named_by_all(spoil: Any, text: str, call: str) -> None:
    def run(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        # The second time there is a plan, which the models are compared with.
        swap(context, src.fill(0), dst)
        options = spoil(dst) if context.rank_idx == 1 else {}
        if call == "prepare":
            prepare = refit.prepare_swap_model_weights
            return error_of(lambda: prepare(src, dst, group=context.group, **options))
        return error_of(lambda: swap(context, src, dst, **options))

    others, own = _threads(run)
    assert text in own
    assert text in others
    assert "rank 1" in others


@pytest.mark.parametrize(
    "tensor", [torch.eye(3).to_sparse(), torch.zeros(3, 3, device="meta")], ids=["sparse", "meta"]
)
@pytest.mark.parametrize("side", [0, 1])
def test_a_tensor_that_no_transport_takes(tensor: torch.Tensor, side: int) -> None:
    def run(context: RankContext) -> str:
        pair = [_module(context, weight=nn.Parameter(torch.ones(3, 3))) for _ in range(2)]
        if context.rank_idx == 1:
            pair[side].weight = nn.Parameter(tensor)
        for _ in range(2):
            text = error_of(lambda: swap(context, *pair))
        return text

    others, own = _threads(run)
    assert own
    assert "rank 1" in others


def test_a_rank_that_is_no_member() -> None:
    with pytest.raises(ValueError, match="this process as a member, got -100"):
        refit.swap_model_weights(None, None, "gloo", group=cast("Any", -100))


@pytest.mark.parametrize("options", [{"transform": 3}, {"dst_module": 3}])
def test_a_rank_that_cannot_execute_tells_the_others(options: dict[str, Any]) -> None:
    def run(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        plan = planner.build_local_reshard_plan(src.fill(1), dst, group=context.group)
        service = SymmetricCopyService(context.group)
        given: dict[str, Any] = {"dst_module": dst} | (options if context.rank_idx else {})
        text = error_of(
            lambda: execute_reshard_plan(plan, src_module=src, service=service, **given)
        )
        execute_reshard_plan(plan, src, dst, service)
        assert dst.wrong(1) == []
        service.close()
        return text

    others, own = _threads(run)
    assert own.startswith(("TypeError", "AttributeError"))
    assert others == f"ValueError: rank 1: {own.partition(': ')[2]}"


# ---------------------------------------------------------------------------------------------
# Models that are cut otherwise than before.


def _striped(context: RankContext, stride: int, start: float = 0.0) -> nn.Parameter:
    """Rank r's 4 of 8 elements, in segments."""
    whole = start + torch.arange(8.0)
    weight = nn.Parameter(whole.view(stride, 2, -1)[:, context.rank_idx].flatten())
    weight.tensor_model_parallel, weight.partition_dim = True, 0
    weight.partition_stride = stride
    return weight


def test_a_parameter_replaced_by_one_that_is_cut_otherwise() -> None:
    def run(context: RankContext) -> bool:
        src, dst = (_module(context, weight=nn.Parameter(torch.zeros(8))) for _ in range(2))
        src.pg_collection = Parallelism(2, tp=2).groups(context.rank_idx)
        for stride in (1, 2, 1, 4):
            src.weight = _striped(context, stride, start=stride)
            swap(context, src, dst, verify="checksum")
            assert torch.equal(dst.weight, stride + torch.arange(8.0))
        return True

    assert all(_threads(run))


def test_groups_replaced_by_others_of_the_same_sizes() -> None:
    def run(context: RankContext) -> bool:
        src, dst = (_module(context, weight=nn.Parameter(torch.zeros(8))) for _ in range(2))
        for order in ((0, 1), (1, 0), (0, 1)):
            group = RankGroup(order, context.rank_idx)
            src.pg_collection = SimpleNamespace(tp=group)
            values = torch.arange(8.0).chunk(2)[group.rank()].clone()
            src.weight.data = values
            src.weight.tensor_model_parallel, src.weight.partition_dim = True, 0
            swap(context, src, dst, verify="checksum")
            assert torch.equal(dst.weight, torch.arange(8.0)), order
        return True

    assert all(_threads(run))


def test_a_group_does_not_remember_the_models_that_are_gone() -> None:
    cache: WeakCache[int, CachedPlans] = WeakCache()
    group = WeakCache[int, int]()  # any object; a module might be known to dynamo too
    for number in range(3):
        model = nn.Identity()
        cache.put(number, CachedPlans(), (model, None, group))
        assert len(cache) == weakref.getweakrefcount(group) == 1
        del model
        gc.collect()
        assert len(cache) == weakref.getweakrefcount(group) == 0


# ---------------------------------------------------------------------------------------------
# Tensors that share memory.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_that_are_one_stay_one(dtype: torch.dtype) -> None:
    def run(context: RankContext) -> bool:
        shared = torch.zeros(3, dtype=dtype)
        dst = _module(context, one=shared, two=shared)
        for value in (1.0, 2.0):
            values = torch.full((3,), value)
            swap(context, _module(context, one=values, two=values), dst, verify="checksum")
            assert dst.one is dst.two
            assert torch.equal(dst.one, values)
        return True

    assert all(_threads(run))


def test_parameters_over_one_memory() -> None:
    def run(context: RankContext) -> str:
        memory, shared = torch.arange(6.0), torch.zeros(6)
        src = _module(context, one=nn.Parameter(memory), two=nn.Parameter(memory))
        dst = _module(context, one=nn.Parameter(shared), two=nn.Parameter(shared))
        for _ in range(2):
            memory += 1
            swap(context, src, dst, verify="checksum")
            assert torch.equal(shared, memory)
        # Values that differ cannot be held.
        before = shared.clone()
        src.two = nn.Parameter(memory + 1)
        text = error_of(lambda: swap(context, src, dst))
        assert torch.equal(shared, before)
        assert not stale.is_stale(dst)
        return text

    for text in _threads(run):
        assert text.startswith("PlanError: one and two are one tensor on destination rank 0")


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter], ids=["buffers", "parameters"])
@pytest.mark.parametrize("ranks", [[0, 0], [0, 1]], ids=["one_rank", "two_ranks"])
def test_what_is_one_in_the_target_alone_is_refused(kind: Any, ranks: list[int]) -> None:
    def run(context: RankContext) -> str:
        values = {"one": torch.arange(3.0), "two": torch.arange(10.0, 13.0)}
        here = {
            name: kind(value)
            for (name, value), rank in zip(values.items(), ranks, strict=True)
            if rank == context.rank_idx
        }
        shared = kind(torch.zeros(3))
        dst = _module(context, one=shared, two=shared)
        text = error_of(lambda: swap(context, _module(context, **here), dst))
        assert torch.equal(shared, torch.zeros(3))
        return text

    expected = f"apart in the source: one on rank {ranks[0]} and two on rank {ranks[1]}"
    for text in _threads(run):
        assert text.startswith("PlanError: one and two are one tensor on destination rank 0")
        assert expected in text


# ---------------------------------------------------------------------------------------------
# Tensors of inference mode.


def test_a_target_made_in_inference_mode_takes_another_dtype() -> None:
    def run(context: RankContext) -> bool:
        src = _module(context, weight=nn.Parameter(torch.arange(4.0, dtype=torch.bfloat16)))
        with torch.inference_mode():
            dst = _module(context, weight=nn.Parameter(torch.zeros(4)))
        for _ in range(2):
            src.weight.data += 1
            swap(context, src, dst, verify="checksum")
            assert torch.equal(dst.weight, src.weight.float())
        return dst.weight.is_inference() and not stale.is_stale(dst)

    assert all(_threads(run))
