"""A `Refit`: planned when it is made, run as often as the source changes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from moe_comm.resharding import Refit, SymmetricCopyService, is_stale, mark_stale, refit
from moe_comm.resharding.copy_services.symmetric_copy_service import PreparedBatch
from moe_comm.resharding.hold import refit_group, refit_pass, refit_services
from moe_comm.testing import RankContext
from tests.helpers.sharded_nets import SHAPES, ShardedNet
from tests.helpers.threaded_refits import (
    error_of,
    nets,
    refuse_offloaded,
    spoil_what_was_saved,
    swap,
    threads,
)

pytestmark = pytest.mark.usefixtures("no_refit_caches")


class Counting(SymmetricCopyService):
    """Counts how often copies were prepared, and how often they ran."""

    num_prepared = 0
    num_runs = 0

    def prepare(self) -> PreparedBatch:
        self.num_prepared += 1
        return super().prepare()

    def run_prepared(self, prepared: PreparedBatch) -> None:
        self.num_runs += 1
        super().run_prepared(prepared)


def run_and_compare(held: Refit, src: ShardedNet, dst: ShardedNet, seed: int) -> None:
    src.fill(seed)
    held.run()
    assert dst.wrong(seed) == []


def test_it_is_planned_when_it_is_made_and_prepared_in_the_first_run(plans_made: list[int]) -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        service = Counting(context.group)
        held = Refit(src, dst, service)
        assert context.rank_idx in plans_made
        assert all((param == -1).all() for param in dst.parameters()), "nothing has moved"
        for seed in range(4):
            run_and_compare(held, src, dst, seed)
        assert (service.num_prepared, service.num_runs) == (1, 4)
        service.close()

    threads(rank, 2)
    assert sorted(plans_made) == [0, 1]


@pytest.mark.parametrize("method", ["symmetric", "nvshmem"])
@pytest.mark.parametrize("verify", [None, "checksum"])
def test_over_a_transport_by_its_name(method: Any, verify: Any) -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        held = Refit(src, dst, method, context.group, verify=verify)
        for seed in range(3):
            context.group.all_gather(None)  # none is still in the last run
            if seed == 2 and context.rank_idx == 0:
                key = method, refit_group.identity_of(context.group)
                refit_services.service_cache.pop(key).close()
            run_and_compare(held, src, dst, seed)

    threads(rank, 2)


def _data(net: ShardedNet) -> None:
    net.up.data = net.up.data.clone()


def _parameter(net: ShardedNet) -> None:
    old = net.up
    net.up = torch.nn.Parameter(old.detach().clone())
    vars(net.up).update(vars(old))


def _longer(net: ShardedNet) -> None:
    net.shapes["up"] = ((32, 8), 0)
    net.up.data = torch.zeros(32 // net.tp_size, 8, dtype=torch.bfloat16)


def _added(net: ShardedNet) -> None:
    net.shapes["more"] = ((4,), None)
    net.more = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))


def _overlapping(net: ShardedNet) -> None:
    flat = torch.zeros(192, dtype=torch.bfloat16)
    net.up.data, net.down.data = flat[:128].view(16, 8), flat[64:].view(8, 16)


def _twice(net: ShardedNet) -> None:
    net.norm.data = torch.zeros(1, dtype=torch.bfloat16).expand(8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_overlapping, "destination parameters up and down overlap in memory"),
        (_twice, "destination parameter norm has two elements in one place"),
    ],
)
def test_memory_that_no_target_may_have_is_named_after_planning_too(change: Any, text: str) -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        held = Refit(src, dst, "symmetric", context.group)
        run_and_compare(held, src, dst, 0)
        if context.rank_idx == 1:
            before = [param.data for param in dst.parameters()]
            change(dst)
        src.fill(1)
        assert error_of(held.run).startswith(f"ValueError: rank 1: {text}")
        assert not is_stale(dst)
        if context.rank_idx == 1:
            for param, data in zip(dst.parameters(), before, strict=True):
                param.data = data
        assert dst.wrong(0) == []
        run_and_compare(held, src, dst, 1)

    threads(rank, 2)


@pytest.mark.parametrize("side", ["src", "dst"])
@pytest.mark.parametrize("change", [_data, _parameter])
def test_a_rank_with_other_memory_prepares_alone(
    change: Any, side: str, plans_made: list[int]
) -> None:
    def rank(context: RankContext) -> int:
        src, dst = nets(context, "tp2", "single")
        service = Counting(context.group)
        held = Refit(src, dst, service)
        for seed in range(3):
            if seed == 1 and context.rank_idx == 1:
                change(src if side == "src" else dst)
            run_and_compare(held, src, dst, seed)
        service.close()
        return service.num_prepared

    assert threads(rank, 2) == [1, 2]
    assert sorted(plans_made) == [0, 1]


@pytest.mark.parametrize("method", ["symmetric", "nvshmem"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_offloaded_weights_are_refused_until_they_are_back(method: Any, side: str) -> None:
    def rank(context: RankContext) -> str:
        return refuse_offloaded(context, method, side)

    for text in threads(rank, 2):
        assert text.startswith(
            f"ValueError: rank 1: up of the {side} module has elements in bytes [32"
        )
        assert text.endswith("of a storage of 0 bytes, which was freed or cut")


@pytest.mark.parametrize("method", ["symmetric", "nvshmem"])
@pytest.mark.parametrize("side", ["source", "destination"])
def test_weights_that_become_a_lazy_negation_are_refused(method: Any, side: str) -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        held = Refit(src, dst, method, context.group)
        run_and_compare(held, src, dst, 0)
        up = (src if side == "source" else dst).up
        bits = up.data
        if context.rank_idx == 1:
            up.data = torch._neg_view(bits)  # at the same place
        text = error_of(held.run)
        assert not is_stale(dst)
        up.data = bits
        run_and_compare(held, src, dst, 1)
        return text

    for text in threads(rank, 2):
        assert text.startswith(
            f"ValueError: rank 1: up of the {side} module is a lazy conjugate or negation"
        )


@pytest.mark.parametrize("method", ["symmetric", "nvshmem"])
def test_autograd_knows_what_a_refit_has_written(method: Any) -> None:
    threads(spoil_what_was_saved, 2, method)


@pytest.mark.parametrize("change", [_longer, _added])
def test_all_plan_anew_where_models_hold_other_tensors(change: Any, plans_made: list[int]) -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single", shapes=dict(SHAPES))
        held = Refit(src, dst, "symmetric", context.group)
        for seed in range(4):
            if seed == 2:
                change(src)
                change(dst)
            run_and_compare(held, src, dst, seed)

    threads(rank, 2)
    assert sorted(plans_made) == [0, 0, 1, 1]


def test_one_rank_whose_tensors_do_not_fit_any_more() -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        held = Refit(src, dst, "symmetric", context.group)
        run_and_compare(held, src, dst, 1)
        norm = dst.norm
        if context.rank_idx == 1:
            dst.norm = torch.nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
        src.fill(2)
        text = error_of(held.run)
        if context.rank_idx == 1:
            dst.norm = norm
        assert dst.wrong(1) == [], "nothing has moved"
        run_and_compare(held, src, dst, 3)
        return text

    for text in threads(rank, 2):
        assert text.startswith("PlanError")
        assert "norm" in text
        assert "rank 1" in text


def test_one_rank_whose_source_is_stale() -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        held = Refit(src, dst, "symmetric", context.group)
        if context.rank_idx == 0:
            mark_stale(src, "a cable")
        text = error_of(held.run)
        vars(src).pop("_stale_reason", None)
        run_and_compare(held, src, dst, 1)
        return text

    own, told = threads(rank, 2)
    assert own.startswith("ValueError: the source model is stale")
    assert told.startswith("ValueError: rank 0: the source model is stale")


def test_one_rank_that_gives_run_an_argument() -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        held = Refit(src, dst, "symmetric", context.group)
        run: Any = functools.partial(held.run, 7) if context.rank_idx == 1 else held.run
        text = error_of(run)
        run_and_compare(held, src, dst, 1)
        return text

    told, own = threads(rank, 2)
    assert own.startswith("TypeError")
    assert told.startswith("TypeError: rank 1: ")


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"verify": "sha"}, ["ValueError", "verify must be one of", "'sha'"]),
        ({"strict": True}, ["different refits", "strict=True on rank 1"]),
        ({"num_dst_pools": 0}, ["num_dst_pools must be >= 1, got 0"]),
        ({"refit_method": 7}, ["TypeError", "got int"]),
        ({"refit_method": "nvshmem"}, ["different refits", "'symmetric' on rank 0", "'nvshmem'"]),
        ({"refit_method": "gloo"}, ["ValueError", "gloo needs a torch.distributed process group"]),
        ({"transform": object()}, ["TypeError", "should_transform"]),
        (
            {"target_model": "net"},
            ["TypeError", "must be a torch.nn.Module or CheckpointViews, got str"],
        ),
        ({"unknown": 1}, ["TypeError", "unknown"]),
    ],
)
def test_one_rank_that_makes_it_wrongly(options: dict[str, Any], texts: list[str]) -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        asked: dict[str, Any] = {
            "src_model": src,
            "target_model": dst,
            "refit_method": "symmetric",
            "group": context.group,
        }
        spoiled = asked | (options if context.rank_idx == 1 else {})
        text = error_of(lambda: Refit(**spoiled))
        run_and_compare(Refit(**asked), src, dst, 1)
        return text

    for text in threads(rank, 2):
        for expected in texts:
            assert expected in text


def test_ranks_that_run_different_refits() -> None:
    def rank(context: RankContext) -> tuple[str, str]:
        pairs = [nets(context, "tp2", "single") for _ in range(2)]
        held = [Refit(*pair, "symmetric", context.group) for pair in pairs]
        text = error_of(held[context.rank_idx].run)
        for seed, (each, pair) in enumerate(zip(held, pairs, strict=True)):
            run_and_compare(each, *pair, seed)
        one, other = pairs[0]
        is_first = context.rank_idx == 0
        mixed = error_of(held[0].run if is_first else lambda: swap(context, one, other))
        return text, mixed

    for text, mixed in threads(rank, 2):
        assert text.startswith("ValueError: ranks ask for different refits: refit='")
        assert "function='Refit.run' on rank 0, function='swap_model_weights' on rank 1" in mixed


def test_its_plan_is_that_of_the_functions(plans_made: list[int]) -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        refit.prepare_swap_model_weights(src, dst, group=context.group)
        held = Refit(src, dst, "symmetric", context.group)
        run_and_compare(held, src, dst, 1)
        swap(context, src.fill(2), dst)
        assert dst.wrong(2) == []

    threads(rank, 2)
    assert sorted(plans_made) == [0, 1]


def test_one_rank_that_forgot_its_plans_makes_all_plan_anew(plans_made: list[int]) -> None:
    def rank(context: RankContext) -> None:
        src, dst = nets(context, "tp2", "single")
        held = Refit(src, dst, "symmetric", context.group)
        for seed in range(3):
            if seed == 1 and context.rank_idx == 0:
                for key in [key for key in refit_pass.plan_cache._entries if key.rank == 0]:
                    refit_pass.plan_cache.drop(key)
            run_and_compare(held, src, dst, seed)

    threads(rank, 2)
    assert sorted(plans_made) == [0, 0, 1, 1]
