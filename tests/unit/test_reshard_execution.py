"""`execute_reshard_plan` on one rank, over a service that copies from the rank to itself."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import moe_comm
from moe_comm.resharding.move import execution, stale
from moe_comm.resharding.move.execution import execute_reshard_plan
from moe_comm.resharding.plan.reshard_plan import ReshardPlan, TensorSpec
from moe_comm.resharding.plan.transform_protocol import ReshardTransform
from tests.helpers.loopback_service import (
    LoopbackService,
    RepeatingService,
    StridedService,
    module_of,
    plan_of,
    raising,
    whole,
)

ROWS = (slice(0, 4), slice(0, 6))
COLUMNS = (slice(0, 8), slice(2, 5))


def source() -> torch.Tensor:
    return torch.arange(48, dtype=torch.float32).view(8, 6)


def run_one(
    service: LoopbackService,
    plan: ReshardPlan,
    src: torch.Tensor,
    dst: torch.Tensor,
    **options: object,
) -> nn.Module:
    target = module_of(w=dst)
    execute_reshard_plan(plan, module_of(w=src), target, service, **options)
    return target


# ---------------------------------------------------------------------------------------------
# What is handed to the service, and what arrives.


@pytest.mark.parametrize("service", [LoopbackService(), StridedService(), RepeatingService()])
def test_contiguous_pieces_go_from_tensor_to_tensor(service: LoopbackService) -> None:
    src, dst = source(), torch.zeros(8, 6)
    run_one(service, plan_of(("w", ROWS, (slice(4, 8), slice(0, 6)))), src, dst)
    assert torch.equal(dst, torch.cat([torch.zeros(4, 6), src[:4]]))
    (_, _, sent), (_, _, received) = service.submitted
    assert sent.data_ptr() == src.data_ptr()
    assert received.data_ptr() == dst[4:].data_ptr()


@pytest.mark.parametrize(
    ("service", "is_direct"), [(LoopbackService(), False), (StridedService(), True)]
)
def test_strided_pieces_are_staged_only_where_they_must(
    service: LoopbackService, is_direct: bool
) -> None:
    src, dst = source(), torch.zeros(8, 6)
    run_one(service, plan_of(("w", COLUMNS, COLUMNS)), src, dst)
    expected = torch.zeros(8, 6)
    expected[COLUMNS] = src[COLUMNS]
    assert torch.equal(dst, expected)
    (_, _, sent), (_, _, received) = service.submitted
    assert (sent.data_ptr() == src[COLUMNS].data_ptr()) is is_direct
    assert (received.data_ptr() == dst[COLUMNS].data_ptr()) is is_direct


def test_pieces_are_cut_in_the_plans_view() -> None:
    """Two experts side by side in the source's rows, one after the other in the target's."""
    src, dst = source().view(4, 12), torch.zeros(2, 24)
    box = (slice(0, 2), slice(1, 3), slice(0, 6))
    plan = plan_of(("w", box, box), src_view=(2, 4, 6), dst_view=(2, 4, 6))
    run_one(StridedService(), plan, src, dst)
    expected = torch.zeros(2, 4, 6)
    expected[box] = source().view(2, 4, 6)[box]
    assert torch.equal(dst.view(2, 4, 6), expected)


def test_a_tensor_that_has_no_such_view_is_named() -> None:
    plan = plan_of(("w", (slice(0, 48),), (slice(0, 48),)), src_view=(48,), dst_view=(48,))
    service = StridedService()
    with pytest.raises(ValueError, match=r"^w: a tensor of shape \(6, 8\) .* viewed as \(48,\)"):
        run_one(service, plan, source().mT, torch.zeros(48))
    assert service.num_runs == 0
    assert len(service.abandoned) == 1


@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype", "wire"),
    [
        (torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float16),
        (torch.float16, torch.bfloat16, torch.float16),
    ],
)
def test_the_wire_dtype_is_what_travels(
    src_dtype: torch.dtype, dst_dtype: torch.dtype, wire: torch.dtype
) -> None:
    src = torch.randn(8, 6).to(src_dtype)
    dst = torch.zeros(8, 6, dtype=dst_dtype)
    plan = plan_of(
        ("w", whole(src), whole(dst)), wire_dtype=wire, src_dtype=src_dtype, dst_dtype=dst_dtype
    )
    service = RepeatingService()
    run_one(service, plan, src, dst)
    assert torch.equal(dst, src.to(wire).to(dst_dtype))
    assert {tensor.dtype for _, _, tensor in service.submitted} == {wire}
    assert service.num_prepared == (src_dtype == dst_dtype), "what was converted must not be kept"


def test_empty_and_scalar_tensors() -> None:
    src = module_of(scalar=torch.tensor(3.0), empty=torch.empty(0, 4))
    dst = module_of(scalar=torch.tensor(0.0), empty=torch.empty(0, 4))
    none = (slice(0, 0), slice(0, 4))
    plan = plan_of(("scalar", (), ()), ("empty", none, none))
    execute_reshard_plan(plan, src, dst, LoopbackService())
    assert dst.scalar == 3


def test_one_side_only() -> None:
    src, dst = source(), torch.zeros(8, 6)
    plan = plan_of(("w", whole(src), whole(dst)))
    service = LoopbackService()
    execute_reshard_plan(ReshardPlan(plan.send_ops, []), module_of(w=src), None, service)
    execute_reshard_plan(ReshardPlan([], plan.recv_ops), None, module_of(w=dst), service)
    execute_reshard_plan(ReshardPlan([], []), None, None, service)
    assert [kind for kind, _, _ in service.submitted] == ["send", "recv"]
    assert service.num_runs == 3


def test_buffers_are_moved_and_gradients_are_left_alone() -> None:
    src, dst = module_of(w=source()), module_of(w=torch.zeros(8, 6))
    src.register_buffer("b", torch.ones(3))
    dst.register_buffer("b", torch.zeros(3))
    dst.w.grad = torch.full((8, 6), 7.0)
    execute_reshard_plan(
        plan_of(("w", whole(src.w), whole(dst.w)), ("b", (slice(0, 3),), (slice(0, 3),))),
        src,
        dst,
        LoopbackService(),
    )
    assert torch.equal(dst.w, src.w)
    assert dst.b.tolist() == [1, 1, 1]
    assert dst.w.requires_grad
    assert dst.w.is_leaf
    assert dst.w.grad.eq(7).all()


# ---------------------------------------------------------------------------------------------
# Quantized parameters.


class MXFP8Tensor(torch.Tensor):
    """Looks like a quantized parameter of Transformer Engine; holds halves of what it was given."""

    @staticmethod
    def make(values: torch.Tensor) -> MXFP8Tensor:
        result = values.clone().as_subclass(MXFP8Tensor)
        result.quantized = []
        return result

    def dequantize(self) -> torch.Tensor:
        return (self.as_subclass(torch.Tensor) * 2).to(torch.bfloat16)

    def quantize_(self, values: torch.Tensor) -> None:
        self.quantized.append(values)
        self.as_subclass(torch.Tensor).copy_(values / 2)


def test_a_quantized_source_is_dequantized_once_and_sent() -> None:
    quantized = MXFP8Tensor.make(source())
    quantized.dequantize = mock.Mock(side_effect=lambda: MXFP8Tensor.dequantize(quantized))
    src = nn.Module()
    src.register_buffer("w", quantized)
    dst = module_of(w=torch.zeros(8, 6, dtype=torch.bfloat16))
    halves = [(slice(i, i + 4), slice(0, 6)) for i in (0, 4)]
    plan = plan_of(*(("w", half, half) for half in halves))
    execute_reshard_plan(plan, src, dst, RepeatingService())
    assert torch.equal(dst.w, (source() * 2).bfloat16())
    quantized.dequantize.assert_called_once()


@pytest.mark.parametrize("service", [LoopbackService(), StridedService()])
def test_a_quantized_target_is_assembled_and_quantized_once(service: LoopbackService) -> None:
    quantized = MXFP8Tensor.make(torch.zeros(8, 6))
    dst = nn.Module()
    dst.register_buffer("w", quantized)
    src = module_of(w=source().bfloat16())
    parts = [(slice(0, 8), slice(0, 2)), (slice(0, 3), slice(2, 6)), (slice(3, 8), slice(2, 6))]
    execute_reshard_plan(plan_of(*(("w", part, part) for part in parts)), src, dst, service)
    (values,) = quantized.quantized
    assert torch.equal(values, src.w)


def test_quantized_targets_are_quantized_in_the_batch_that_completes_them() -> None:
    targets = {name: MXFP8Tensor.make(torch.zeros(8, 6)) for name in "vw"}
    dst = nn.Module()
    for name, target in targets.items():
        dst.register_buffer(name, target)
    src = module_of(v=source().bfloat16(), w=source().bfloat16() + 1)
    upper, lower = (slice(0, 3), slice(0, 6)), (slice(3, 8), slice(0, 6))
    plan = plan_of(
        ("v", upper, upper), ("v", lower, lower), ("w", upper, upper), ("w", lower, lower)
    )
    plan.batches = [
        dataclasses.replace(plan, send_ops=plan.send_ops[part], recv_ops=plan.recv_ops[part])
        for part in (slice(0, 3), slice(3, 4))
    ]
    seen = []

    class Looking(LoopbackService):
        def run(self) -> None:
            seen.append([len(target.quantized) for target in targets.values()])
            super().run()

    execute_reshard_plan(plan, src, dst, Looking())
    assert seen == [[0, 0], [1, 0]]
    for name, target in targets.items():
        (values,) = target.quantized
        assert torch.equal(values, getattr(src, name))


def test_a_failed_refit_does_not_touch_a_quantized_target() -> None:
    quantized = MXFP8Tensor.make(torch.zeros(8, 6))
    dst = nn.Module()
    dst.register_buffer("w", quantized)
    src = module_of(w=source().bfloat16())
    with pytest.raises(RuntimeError, match="broken"):
        execute_reshard_plan(
            plan_of(("w", whole(src.w), whole(src.w))),
            src,
            dst,
            LoopbackService(RuntimeError("broken")),
        )
    assert quantized.quantized == []
    assert not stale.is_stale(dst)


def test_the_accumulator_is_made_once() -> None:
    pending: dict[int, tuple[object, ...]] = {}
    parameter = torch.zeros(2, 3)
    full, pieces = execution._get_mxfp8_accumulator(pending, parameter)
    assert (full.shape, full.dtype) == ((2, 3), torch.bfloat16)
    again, same = execution._get_mxfp8_accumulator(pending, parameter)
    assert again is full
    assert same is pieces
    assert pending == {id(parameter): (parameter, full, pieces)}


# ---------------------------------------------------------------------------------------------
# Transforms.


class Split(ReshardTransform):
    """Sends the first column apart from the rest; writes the negative."""

    def __init__(self, target: torch.Tensor | None = None) -> None:
        self.target = target
        self.calls: list[str] = []

    def should_transform(self, param_name: str) -> bool:
        return param_name == "w"

    def prepare_send(
        self, param_name: str, src_slice: tuple[slice, ...], src_param: torch.Tensor
    ) -> list[torch.Tensor]:
        piece = src_param.detach()[src_slice]
        return [piece[:, :1], piece[:, 1:]]

    def prepare_recv(self, param_name: str, dst_slice: tuple[slice, ...]) -> list[torch.Tensor]:
        rows, columns = (part.stop - part.start for part in dst_slice)
        # Not contiguous on purpose.
        return [torch.zeros(rows, columns)[:, :1], torch.zeros(rows, columns)[:, 1:]]

    def finalize_recv(
        self, param_name: str, dst_slice: tuple[slice, ...], recv_buffers: list[torch.Tensor]
    ) -> None:
        self.calls.append("finalize")
        self.target[dst_slice] = -torch.cat(recv_buffers, 1)

    def begin(self) -> None:
        self.calls.append("begin")

    def finish(self) -> None:
        self.calls.append("finish")


@pytest.mark.parametrize("service", [LoopbackService(), StridedService(), RepeatingService()])
@pytest.mark.parametrize("is_of_the_plan", [False, True])
def test_a_transform_makes_and_takes_several_tensors(
    service: LoopbackService, is_of_the_plan: bool
) -> None:
    target = torch.zeros(8, 6)
    transform = Split(target)
    src, dst = module_of(w=source(), v=source()), module_of(v=torch.zeros(8, 6))
    halves = [(slice(i, i + 4), slice(0, 6)) for i in (0, 4)]
    plan = plan_of(*(("w", half, half) for half in halves), ("v", whole(src.v), whole(src.v)))
    if is_of_the_plan:
        plan.transform = transform
    for _ in range(2):
        service.submitted.clear()
        options = {} if is_of_the_plan else {"transform": transform}
        execute_reshard_plan(plan, src, dst, service, **options)
    assert torch.equal(target, -source())
    assert torch.equal(dst.v, src.v)
    assert transform.calls == ["begin", "finalize", "finalize", "finish"] * 2
    ids = [task_id for kind, task_id, _ in service.submitted if kind == "send"]
    assert ids[0] == 0
    assert ids[2] == 1
    assert len(set(ids)) == 5
    assert ids == [task_id for kind, task_id, _ in service.submitted if kind == "recv"]


def test_a_transform_of_another_package() -> None:
    target = torch.zeros(8, 6)
    inner = Split(target)
    foreign = SimpleNamespace(
        should_transform=inner.should_transform,
        prepare_send=inner.prepare_send,
        prepare_recv=inner.prepare_recv,
        finalize_recv=inner.finalize_recv,
    )
    src = module_of(w=source())
    plan = plan_of(("w", whole(src.w), whole(src.w)))
    execute_reshard_plan(plan, src, module_of(), LoopbackService(), transform=foreign)
    assert torch.equal(target, -source())


def test_ids_of_several_tensors() -> None:
    assert execution._task_ids(None, 3) == [None] * 3
    assert execution._task_ids(1 << 60, 1) == [1 << 60]
    ids = execution._task_ids(5, 32)
    assert ids[0] == 5
    assert len(set(ids)) == 32
    assert max(ids) < 1 << 63
    assert sorted(ids) == ids
    for task_id, num_tensors in ((5, 33), (1 << 58, 2)):
        with pytest.raises(ValueError, match=f"got {num_tensors} tensors and task id {task_id}"):
            execution._task_ids(task_id, num_tensors)


def test_an_error_of_a_transform_reaches_the_peers() -> None:
    transform = Split()
    transform.prepare_send = raising(KeyError("no such block"))
    service = LoopbackService()
    dst = module_of(w=torch.zeros(8, 6))
    src = module_of(w=source())
    with pytest.raises(KeyError):
        execute_reshard_plan(
            plan_of(("w", whole(src.w), whole(src.w))), src, dst, service, transform=transform
        )
    assert service.abandoned == ["'no such block'"]
    assert not stale.is_stale(dst)


# ---------------------------------------------------------------------------------------------
# Bad input.


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_missing_parameter(side: str, caplog: pytest.LogCaptureFixture) -> None:
    modules = {"source": module_of(w=source()), "destination": module_of(w=torch.zeros(8, 6))}
    modules[side] = module_of(other=source())
    stale.mark_stale(modules["destination"], "before")
    plan = plan_of(("w", whole(source()), whole(source())))
    service = LoopbackService()
    execute_reshard_plan(plan, modules["source"], modules["destination"], service)
    assert f"'w': '{side}'" in caplog.text
    assert stale.stale_reason(modules["destination"]) == "before" or side == "source"
    with pytest.raises(
        ValueError, match=f"the plan moves w, which the {side} module does not have"
    ):
        execute_reshard_plan(plan, modules["source"], modules["destination"], service, strict=True)
    assert service.num_runs == 1
    assert service.abandoned == [f"the plan moves w, which the {side} module does not have"]


@pytest.mark.parametrize("side", ["source", "destination"])
def test_another_shape_than_planned(side: str) -> None:
    plan = plan_of(("w", whole(source()), whole(source())))
    specs = plan.sources if side == "source" else plan.destinations
    specs["w"] = TensorSpec((8, 7), torch.float32)
    service = LoopbackService()
    message = rf"w of the {side} module was planned with shape \(8, 7\), it has \(8, 6\)"
    with pytest.raises(ValueError, match=message):
        run_one(service, plan, source(), torch.zeros(8, 6))
    assert service.num_runs == 0


def test_another_dtype_than_planned() -> None:
    plan = plan_of(("w", whole(source()), whole(source())), wire_dtype=torch.bfloat16)
    plan.destinations["w"] = TensorSpec((8, 6), torch.bfloat16)
    dst = torch.zeros(8, 6)
    run_one(LoopbackService(), plan, source(), dst)
    assert torch.equal(dst, source())
    message = r"w of the destination module was planned as torch\.bfloat16, it is torch\.float32"
    with pytest.raises(ValueError, match=message):
        run_one(LoopbackService(), plan, source(), dst, strict=True)


# ---------------------------------------------------------------------------------------------
# Failure.


def failing_refit(
    service: LoopbackService, columns: bool = False, **options: object
) -> tuple[nn.Module, BaseException]:
    target = module_of(w=torch.zeros(8, 6))
    part = COLUMNS if columns else ROWS
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller looks at it
        execute_reshard_plan(
            plan_of(("w", part, part)), module_of(w=source()), target, service, **options
        )
    return target, caught.value


@pytest.mark.parametrize("num_copies_before", [0, 1])
def test_a_target_written_in_place_is_stale_after_a_failure(num_copies_before: int) -> None:
    error = ConnectionError("peer gone\nmore")
    target, raised = failing_refit(LoopbackService(error, num_copies_before))
    assert raised is error
    assert stale.stale_reason(target) == "a refit failed: ConnectionError: peer gone"


def test_a_staged_target_is_as_it_was_after_a_failure() -> None:
    target, _ = failing_refit(LoopbackService(ConnectionError("peer gone")), columns=True)
    assert not stale.is_stale(target)
    assert target.w.eq(0).all()


def test_a_refused_batch_leaves_the_target_as_it_was() -> None:
    target, _ = failing_refit(LoopbackService(ValueError("no partner"), 0))
    assert not stale.is_stale(target)


def test_a_failure_while_writing_back_makes_the_target_stale() -> None:
    transform = Split()
    target, _ = failing_refit(LoopbackService(), columns=True, transform=transform)
    assert stale.is_stale(target)


def test_caches_that_cannot_be_refreshed_make_the_target_stale() -> None:
    target = module_of(w=torch.zeros(8, 6))
    target.refresh_cache = raising(ArithmeticError("cache"))
    plan = plan_of(("w", COLUMNS, COLUMNS))
    with pytest.raises(ArithmeticError):
        execute_reshard_plan(plan, module_of(w=source()), target, LoopbackService())
    assert stale.stale_reason(target) == "a refit failed: ArithmeticError: cache"


def test_a_whole_refit_takes_the_mark_away() -> None:
    target = module_of(w=torch.zeros(8, 6))
    stale.mark_stale(target, "before")
    plan = plan_of(("w", ROWS, ROWS))
    execute_reshard_plan(
        ReshardPlan(plan.send_ops, []), module_of(w=source()), target, LoopbackService()
    )
    assert stale.is_stale(target), "nothing was received"
    execute_reshard_plan(plan, module_of(w=source()), target, LoopbackService())
    assert not stale.is_stale(target)


# ---------------------------------------------------------------------------------------------
# Around the copies.


def test_caches_are_refreshed_between_the_two_synchronizations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    class Cached(nn.Module):
        def refresh_cache(self) -> None:
            events.append("refresh")

    service = LoopbackService()
    monkeypatch.setattr(service, "run", lambda: events.append("transfer"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append("sync"))
    execute_reshard_plan(ReshardPlan([], []), None, nn.Sequential(Cached()), service)
    assert events == ["transfer", "sync", "refresh", "sync"]


def test_barrier_only_where_the_service_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    barrier = mock.Mock()
    monkeypatch.setattr(execution.dist, "barrier", barrier)
    monkeypatch.setattr(execution.dist, "is_initialized", lambda: True)
    service = LoopbackService()
    execute_reshard_plan(ReshardPlan([], []), None, None, service)
    barrier.assert_not_called()
    service.requires_process_group_barrier = True
    execute_reshard_plan(ReshardPlan([], []), None, None, service)
    barrier.assert_called_once_with(group=None)
    ranks = moe_comm.RankThreads(1)
    with mock.patch.object(ranks, "exchange", wraps=ranks.exchange) as exchange:
        execute_reshard_plan(ReshardPlan([], []), None, None, service, group=ranks[0])
    exchange.assert_called_once()
    barrier.assert_called_once()


def test_no_barrier_without_torch_distributed() -> None:
    assert not dist.is_initialized()
    service = LoopbackService()
    service.requires_process_group_barrier = True
    execute_reshard_plan(ReshardPlan([], []), None, None, service)
    # But with a group that it has not made.
    group = dist.ProcessGroup(0, 1)
    with mock.patch.object(execution.dist, "barrier") as barrier:
        execute_reshard_plan(ReshardPlan([], []), None, None, service, group=group)
    barrier.assert_called_once_with(group=group)


# ---------------------------------------------------------------------------------------------
# The same refit again.


class Repeated:
    def __init__(self) -> None:
        self.src, self.dst = module_of(w=source()), module_of(w=torch.zeros(8, 6))
        self.plan = plan_of(("w", COLUMNS, COLUMNS))
        self.service = RepeatingService()

    def run(self) -> None:
        with torch.no_grad():
            self.src.w += 1
        execute_reshard_plan(self.plan, self.src, self.dst, self.service)
        assert torch.equal(self.dst.w[COLUMNS], self.src.w[COLUMNS])

    @property
    def num_kept(self) -> int:
        return sum(id(self.service) in key for key in execution._executions._entries)


def test_a_refit_of_the_same_tensors_submits_nothing() -> None:
    refit = Repeated()
    for _ in range(3):
        refit.run()
    assert refit.service.num_prepared == 1
    assert refit.service.num_runs == 3
    assert len(refit.service.submitted) == 2


@pytest.mark.parametrize("change", ["data", "strides", "parameter", "plan", "target"])
def test_a_change_is_noticed(change: str) -> None:
    refit = Repeated()
    refit.run()
    if change == "data":
        refit.dst.w.data = torch.zeros(8, 6)
    elif change == "strides":
        refit.src.w.data = refit.src.w.data.view(6, 8).mT
        refit.src.w.data = torch.as_strided(refit.src.w.data, (8, 6), (1, 8))
    elif change == "parameter":
        refit.src.w = nn.Parameter(source() * 3)
    elif change == "plan":
        other = (slice(0, 8), slice(0, 1))
        replaced = plan_of(("w", COLUMNS, COLUMNS), ("w", other, other))
        refit.plan.send_ops, refit.plan.recv_ops = replaced.send_ops, replaced.recv_ops
    else:
        refit.dst = module_of(w=torch.zeros(8, 6))
    refit.run()
    refit.run()
    assert refit.service.num_prepared == 2
    if change == "plan":
        assert torch.equal(refit.dst.w[:, 0], refit.src.w[:, 0])


@pytest.mark.parametrize("owner", ["src", "dst", "plan"])
def test_what_is_kept_dies_with_its_models_and_plan(owner: str) -> None:
    refit = Repeated()
    refit.run()
    assert refit.num_kept == 1
    setattr(refit, owner, None)
    gc.collect()
    assert refit.num_kept == 0


def test_a_failure_forgets_what_was_prepared() -> None:
    refit = Repeated()
    refit.run()
    refit.service.fail = ConnectionError("gone")
    with pytest.raises(ConnectionError):
        refit.run()
    assert stale.is_stale(refit.dst), "a repeated refit writes in place too"
    refit.service.fail = None
    refit.run()
    assert refit.service.num_prepared == 2
    assert not stale.is_stale(refit.dst)


def test_nothing_is_kept_where_tensors_were_skipped() -> None:
    refit = Repeated()
    refit.src = module_of(other=source())
    with contextlib.suppress(AttributeError):
        refit.run()
    execute_reshard_plan(refit.plan, refit.src, refit.dst, refit.service)
    assert refit.service.num_prepared == 0
