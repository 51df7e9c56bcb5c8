"""A refit that failed lets go of the models, though its service, its plans and its group are kept."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm.resharding import (
    Parallelism,
    Refit,
    ReshardTransform,
    SymmetricCopyService,
    get_or_create_service,
    refit,
)
from moe_comm.resharding.copy_services import distributed_copy_service
from moe_comm.resharding.plan.transfer_op import TransferOp
from moe_comm.testing import RankContext
from tests.helpers.sharded_nets import SHAPES, ShardedNet
from tests.helpers.threaded_refits import error_of, nets, swap, threads


@pytest.fixture(autouse=True)
def _no_garbage_collection(no_refit_caches: None) -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class LostCable(SymmetricCopyService):
    """Fails after everything has moved."""

    def run_prepared(self, prepared: Any) -> None:
        super().run_prepared(prepared)
        raise RuntimeError("a cable is loose")


class CannotWrite(ReshardTransform):
    """Fails when it writes."""

    def should_transform(self, param_name: str) -> bool:
        return param_name == "norm"

    def prepare_send_of(self, op: TransferOp, src_param: torch.Tensor) -> list[torch.Tensor]:
        return [src_param[op.my_slice].clone()]

    def prepare_recv_of(self, op: TransferOp) -> list[torch.Tensor]:
        return [torch.empty(8, dtype=torch.bfloat16)]

    def finalize_recv_of(self, op: TransferOp, recv_buffers: list[torch.Tensor]) -> None:
        raise RuntimeError("the disk is full")


Call = Callable[[], object]


def _wrong_argument(context: RankContext, src: ShardedNet, dst: ShardedNet) -> Call:
    verify = "sha" if context.rank_idx == 1 else "plan"
    return functools.partial(swap, context, src, dst, verify=verify)


def _unknown_argument(context: RankContext, src: ShardedNet, dst: ShardedNet) -> Call:
    options = {"unknown": 1} if context.rank_idx == 1 else {}
    return functools.partial(swap, context, src, dst, **options)


def _no_model(context: RankContext, src: ShardedNet, dst: ShardedNet) -> Call:
    target: Any = "net" if context.rank_idx == 1 else dst
    return functools.partial(Refit, src, target, "symmetric", context.group)


def _no_plan(context: RankContext, src: ShardedNet, dst: ShardedNet) -> Call:
    if context.rank_idx == 1:
        dst.norm = torch.nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
    return functools.partial(swap, context, src, dst)


def _no_plan_any_more(context: RankContext, src: ShardedNet, dst: ShardedNet) -> Call:
    held = Refit(src, dst, "symmetric", context.group)
    _no_plan(context, src, dst)
    return held.run


def _torn(context: RankContext, src: ShardedNet, dst: ShardedNet, **options: Any) -> Call:
    service = LostCable(context.group)
    SERVICES.append(service)
    return Refit(src, dst, service, context.group, **options).run


def _not_written(context: RankContext, src: ShardedNet, dst: ShardedNet) -> Call:
    return functools.partial(swap, context, src, dst, transform=TRANSFORM)


# Held as by programs, whatever a refit comes to.
SERVICES: list[SymmetricCopyService] = []
TRANSFORM = CannotWrite()


@pytest.mark.parametrize(
    ("making", "text"),
    [
        (_wrong_argument, "verify must be one of"),
        (_unknown_argument, "unexpected keyword argument 'unknown'"),
        (_no_model, "must be a torch.nn.Module or CheckpointViews, got str"),
        (_no_plan, "norm: shapes do not add up"),
        (_no_plan_any_more, "norm: shapes do not add up"),
        (_torn, "a cable is loose"),
        (functools.partial(_torn, verify="checksum"), "a cable is loose"),
        (_not_written, "the disk is full"),
    ],
    ids=["argument", "unbound", "model", "plan", "held-plan", "run", "checksum", "transform"],
)
def test_models_go_at_once(making: Any, text: str) -> None:
    """Not with the next collection of garbage, before which others may need the memory."""

    def rank(context: RankContext) -> list[weakref.ref[ShardedNet]]:
        src, dst = nets(context, "tp2", "single", shapes=dict(SHAPES))
        call = making(context, src, dst)
        assert text in error_of(call)
        return [weakref.ref(src), weakref.ref(dst)]

    references = [reference for rank_s in threads(rank, 2) for reference in rank_s]
    assert [reference() for reference in references] == [None] * 4
    for service in SERVICES:
        service.close()
    SERVICES.clear()


def test_a_service_of_messages_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says later what had failed, and is kept until then."""

    def no_cable(*_: object) -> None:
        raise RuntimeError("a cable is loose")

    def run() -> list[weakref.ref[ShardedNet]]:
        src, dst = (ShardedNet(Parallelism(1), 0) for _ in range(2))
        assert "a cable is loose" in error_of(lambda: refit.swap_model_weights(src, dst, "gloo"))
        return [weakref.ref(src), weakref.ref(dst)]

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        monkeypatch.setattr(distributed_copy_service, "copy_pair", no_cable)
        references = run()
        gc.collect()
        assert [reference() for reference in references] == [None, None]
        service: Any = get_or_create_service("gloo")
        assert "made anew, with a new process group: a cable is loose" in error_of(service.run)
        refit.clear_all_caches()
    finally:
        dist.destroy_process_group()
