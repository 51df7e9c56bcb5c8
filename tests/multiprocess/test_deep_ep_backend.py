"""`backend="deep_ep"` over the package's own `deep_ep`, on CPU ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moe_comm
from moe_comm import CommunicationError, Communicator, EpBuffer, EpConfig, Layout, compat
from moe_comm.compat import deep_ep
from moe_comm.ep import group_buffers
from moe_comm.ep.backends.deep_ep_transport import problem_with_deep_ep
from moe_comm.ep.call_options import CombineOptions, DispatchOptions
from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8, Quantization
from moe_comm.testing import RankContext, run_ranks
from moe_comm.testing.case_list import CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import CHECKS, check_case
from moe_comm.testing.target import Target


class CommunicatorWithDeepEp(Communicator):
    """`deep_ep` can be imported while it lives: processes of the pool go on to other tests."""

    def __init__(self, group: Any) -> None:
        compat.install("deep_ep")
        super().__init__(group, backend="deep_ep")

    def destroy(self) -> None:
        super().destroy()
        compat.uninstall("deep_ep")


TARGET = Target(name="deep_ep", connect=CommunicatorWithDeepEp)


@pytest.mark.sampled(1, 2, of=("layout", "rows", "capacity"))
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(case: Case) -> None:
    check_case(TARGET, case)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check == "bad-input" else pytest.mark.full)
        for check in CHECKS
    ],
)
def test_check(check: str) -> None:
    CHECKS[check](TARGET)


CONFIG = EpConfig(num_experts=5, num_topk=3, hidden=256, num_max_tokens_per_rank=16)


def tokens_of(rank_idx: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank_idx)
    num_tokens = 7 + 4 * rank_idx
    x = torch.randn(num_tokens, 256, generator=generator).to(torch.bfloat16)
    topk_idx = torch.randint(-1, 5, (num_tokens, 3), generator=generator)
    return x, topk_idx, torch.rand(num_tokens, 3, generator=generator)


@dataclasses.dataclass
class Calls:
    """Calls of DeepEP."""

    layouts: int = 0
    dispatches: int = 0
    cached: int = 0
    pairs: int = 0
    combines: int = 0


@contextlib.contextmanager
def counted() -> Iterator[Calls]:
    calls = Calls()
    with pytest.MonkeyPatch.context() as patch:
        layout, dispatch, combine = (
            getattr(deep_ep.Buffer, name) for name in ("get_dispatch_layout", "dispatch", "combine")
        )

        def count_layout(buffer: Any, *args: Any, **options: Any) -> Any:
            calls.layouts += 1
            return layout(buffer, *args, **options)

        def count_dispatch(buffer: Any, x: Any, *args: Any, **options: Any) -> Any:
            calls.dispatches += 1
            calls.cached += options.get("handle") is not None
            calls.pairs += isinstance(x, tuple)
            return dispatch(buffer, x, *args, **options)

        def count_combine(buffer: Any, *args: Any, **options: Any) -> Any:
            calls.combines += 1
            return combine(buffer, *args, **options)

        patch.setattr(deep_ep.Buffer, "get_dispatch_layout", count_layout)
        patch.setattr(deep_ep.Buffer, "dispatch", count_dispatch)
        patch.setattr(deep_ep.Buffer, "combine", count_combine)
        yield calls


def count_calls(context: RankContext, layout: Layout) -> list[Calls]:
    """Calls of dispatch, combine, cached dispatch, and that with weights."""
    x, topk_idx, weights = tokens_of(context.rank_idx)
    found = []
    with CommunicatorWithDeepEp(context.group) as communicator:
        buffer = EpBuffer(communicator, CONFIG)
        with counted() as calls:
            result = buffer.dispatch(x, topk_idx, weights, layout=layout)
            found.append(dataclasses.replace(calls))
            buffer.combine(result.x, result.handle)
            found.append(dataclasses.replace(calls))
            buffer.dispatch(x, None, handle=result.handle)
            found.append(dataclasses.replace(calls))
            buffer.dispatch(x, None, weights, handle=result.handle)
            found.append(dataclasses.replace(calls))
            buffer.dispatch(x, topk_idx, quantization=FP8_BLOCK128, layout=layout)
            found.append(dataclasses.replace(calls))
    return found


def test_rank_major_is_deep_ep_itself() -> None:
    for calls in run_ranks(count_calls, 2, Layout.RANK_MAJOR):
        assert calls == [
            Calls(layouts=1, dispatches=1),
            Calls(layouts=1, dispatches=1, combines=1),
            Calls(layouts=1, dispatches=2, combines=1, cached=1),
            Calls(layouts=2, dispatches=3, combines=1, cached=1),
            Calls(layouts=3, dispatches=4, combines=1, cached=1, pairs=1),
        ]


def test_expert_major_dispatches_once_and_carries_rows_home_unreduced() -> None:
    for calls in run_ranks(count_calls, 2, Layout.EXPERT_MAJOR):
        assert calls == [
            Calls(layouts=1, dispatches=1),
            Calls(layouts=2, dispatches=2),
            Calls(layouts=2, dispatches=3, cached=1),
            Calls(layouts=3, dispatches=4, cached=1),
            Calls(layouts=4, dispatches=5, cached=1, pairs=1),
        ]


def differentiate(
    context: RankContext, backend: str, layout: Layout, quantization: Quantization | None
) -> list[torch.Tensor]:
    """Outputs and gradients of a layer whose experts multiply by their weight."""
    x, topk_idx, weights = tokens_of(context.rank_idx)
    x.requires_grad_()
    weights.requires_grad_()
    with contextlib.ExitStack() as stack:
        if backend == "deep_ep":
            communicator: Communicator = stack.enter_context(CommunicatorWithDeepEp(context.group))
        else:
            communicator = stack.enter_context(Communicator(context.group, backend=backend))
        buffer = EpBuffer(communicator, CONFIG)
        result = moe_comm.dispatch(
            x, topk_idx, weights, buffer=buffer, layout=layout, quantization=quantization
        )
        rows = result.x if quantization is None else result.x.dequantize()
        scale = result.topk_weights
        assert scale is not None
        scale = scale.sum(dim=1) if layout is Layout.RANK_MAJOR else scale
        y = moe_comm.combine((rows * scale.unsqueeze(1)).to(x.dtype), result.handle, buffer=buffer)
        y.backward(torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype))
        return [rows.detach().clone(), y.detach().clone(), x.grad.clone(), weights.grad.clone()]


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
@pytest.mark.parametrize("quantization", [None, FP8_BLOCK128, MXFP8])
def test_gradients_are_those_of_the_collective_backend(
    layout: Layout, quantization: Quantization | None
) -> None:
    got, want = (
        run_ranks(differentiate, 2, backend, layout, quantization)
        for backend in ("deep_ep", "collective")
    )
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def make_buffer(context: RankContext, ranks_with_deep_ep: tuple[int, ...]) -> str:
    """Error of a rank where only some ranks can import deep_ep, and whether it can go on."""
    compat.uninstall("deep_ep")
    if context.rank_idx in ranks_with_deep_ep:
        compat.install("deep_ep")
    try:
        with Communicator(context.group, backend="deep_ep") as communicator:
            with pytest.raises(ValueError, match="deep_ep") as raised:
                EpBuffer(communicator, CONFIG)
            assert communicator.all_gather(b"on") == [b"on"] * context.num_ranks
            return str(raised.value)
    finally:
        compat.uninstall("deep_ep")


@pytest.mark.skipif(
    importlib.util.find_spec("deep_ep") is not None, reason="a deep_ep is installed"
)
@pytest.mark.parametrize("ranks_with_deep_ep", [(), (1,)])
def test_a_missing_deep_ep_is_raised_on_every_rank(ranks_with_deep_ep: tuple[int, ...]) -> None:
    messages = run_ranks(make_buffer, 2, ranks_with_deep_ep)
    missing = [rank_idx for rank_idx in range(2) if rank_idx not in ranks_with_deep_ep]
    want = "; ".join(
        f'rank {rank_idx}: backend="deep_ep" needs DeepEP, and `import deep_ep` failed: No module '
        "named 'deep_ep'"
        for rank_idx in missing
    )
    assert messages == [want, want]


@contextlib.contextmanager
def bound_deep_ep() -> Iterator[None]:
    """A deep_ep that is not this package's, whose kernels have limits."""

    class Buffer(deep_ep.Buffer):
        @staticmethod
        def get_dispatch_config(num_ranks: int) -> Any:
            assert num_ranks in (2, 4, 8)
            return deep_ep.Buffer.get_dispatch_config(num_ranks)

    Buffer.__module__ = "deep_ep.buffer"
    module = types.ModuleType("deep_ep")
    module.Buffer = Buffer  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deep_ep", module)
        patch.setattr(torch.cuda, "is_available", lambda: False)  # its rows stay on the CPU
        yield


def test_what_deep_ep_does_not_support_is_named() -> None:
    with bound_deep_ep():
        assert problem_with_deep_ep(2, 128) is None
        assert problem_with_deep_ep(2, 129) == "DeepEP takes at most 128 experts a rank, got 129"
        assert problem_with_deep_ep(3, 1) == "DeepEP has no configuration for 3 ranks"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "deep_ep", types.ModuleType("deep_ep"))
        assert "found none" in str(problem_with_deep_ep(2, 1))


def exceed_limits(context: RankContext) -> list[str]:
    found = []
    x, topk_idx, weights = tokens_of(context.rank_idx)
    elastic = dataclasses.replace(CONFIG, num_topk=None, hidden=None)
    with bound_deep_ep(), Communicator(context.group, backend="deep_ep") as communicator:
        buffer = EpBuffer(communicator, elastic)
        want = buffer.dispatch(x, topk_idx, weights).x.clone()
        for wide, choices in (
            (torch.zeros(len(x), 8192, dtype=torch.bfloat16), topk_idx),
            (x, topk_idx.repeat(1, 11)),
        ):
            with pytest.raises(ValueError, match="at most") as raised:
                buffer.dispatch(wide, choices)
            found.append(str(raised.value))
        assert torch.equal(buffer.dispatch(x, topk_idx, weights).x, want)
    return found


def test_limits_of_deep_ep_are_refused_before_it_is_called() -> None:
    want = [
        "DeepEP moves rows of at most 16352 bytes, got 16384",
        "DeepEP takes at most 32 choices, got 33",
    ]
    assert run_ranks(exceed_limits, 2) == [want, want]


def share_by_group(context: RankContext) -> bool:
    """Buffers of a group that DeepEP moves for, over a deep_ep that looks for buffers of its group."""
    x, topk_idx, weights = tokens_of(context.rank_idx)
    compat.install("deep_ep")
    try:
        with Communicator(context.group, backend="deep_ep") as communicator:
            shared = group_buffers.group_buffers(communicator)
            buffer = shared.get(CONFIG.num_experts)
            result = buffer.dispatch(x, topk_idx, weights)
            backends = {buffer.backend, shared.communicator.backend}
    finally:
        compat.uninstall("deep_ep")
    return backends == {"deep_ep"} and result.x.shape[1] == x.shape[1]


def test_deep_ep_below_itself_is_another_group() -> None:
    assert run_ranks(share_by_group, 2) == [True, True]


def grow(context: RankContext) -> bool:
    """A handle outlives the buffer that made it: rows that need a larger one come between."""
    x, topk_idx, weights = tokens_of(context.rank_idx)
    with CommunicatorWithDeepEp(context.group) as communicator:
        buffer = EpBuffer(communicator, dataclasses.replace(CONFIG, hidden=None))
        first = buffer.dispatch(x, topk_idx, weights, layout=Layout.RANK_MAJOR)
        sums = buffer.combine(first.x, first.handle).clone()
        wide = buffer.dispatch(torch.cat([x] * 20, dim=1), None, handle=first.handle)
        same = torch.equal(wide.x[:, :256], first.x) and torch.equal(wide.x[:, -256:], first.x)
        return same and torch.equal(buffer.combine(first.x, first.handle), sums)


def test_wider_rows_come_later() -> None:
    assert run_ranks(grow, 2) == [True, True]


def fail_inside(context: RankContext) -> str:
    x, topk_idx, _ = tokens_of(context.rank_idx)

    def fail(*args: Any, **options: Any) -> Any:
        raise RuntimeError("DeepEP error: timeout (dispatch CPU)")

    with CommunicatorWithDeepEp(context.group) as communicator:
        buffer = EpBuffer(communicator, CONFIG)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(deep_ep.Buffer, "dispatch", fail)
            with pytest.raises(CommunicationError) as raised:
                buffer.dispatch(x, topk_idx)
        with pytest.raises(CommunicationError, match=re.escape(str(raised.value))):
            buffer.dispatch(x, topk_idx)
        return str(raised.value)


def test_a_failure_inside_deep_ep_is_named_and_lasts() -> None:
    want = "dispatch failed in DeepEP: DeepEP error: timeout (dispatch CPU)"
    assert run_ranks(fail_inside, 2) == [want, want]


def use_an_imported_plan(context: RankContext) -> bool:
    """Of another buffer: only one rank knows how the rows travelled, so none may rely on it."""
    x, topk_idx, weights = tokens_of(context.rank_idx)
    with CommunicatorWithDeepEp(context.group) as communicator:
        target = Target(name="deep_ep")
        first, second = (target.backend(communicator, CONFIG) for _ in range(2))
        options = DispatchOptions(Layout.RANK_MAJOR)
        known = first.dispatch(x, None, topk_idx, weights, options).wait()
        plan = known.plan
        if context.rank_idx == 0:
            # Pretends that this rank has a route of its own that its peer has not.
            second._rows._routes.update(first._rows._routes)  # type: ignore[attr-defined]
        plan = second.import_plan(plan.to_tensors())
        again = second.dispatch_cached(x, None, plan, None, DispatchOptions()).wait()
        sums = [
            backend.combine(known.x, some, None, None, None, CombineOptions()).wait().x
            for backend, some in ((first, known.plan), (second, plan))
        ]
        assert sums[0] is not None
        assert sums[1] is not None
        same = torch.equal(again.x, known.x) and torch.equal(sums[0], sums[1])
        for backend in (first, second):
            backend.destroy()
        return same


def test_a_plan_that_only_one_rank_knows_a_route_of() -> None:
    assert run_ranks(use_an_imported_plan, 2) == [True, True]
