"""Capacity and open configurations under autograd and torch.compile, on one rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moe_comm
from moe_comm import Capacity, CapacityError, Communicator, EpBuffer, Layout
from tests.helpers.configs import ep_config
from tests.helpers.moe_layer import recorded_operations

NUM_EXPERTS, NUM_TOPK, HIDDEN, ALIGNMENT = 4, 3, 2, 2
BACKENDS = ["host", "reference"]

DROPS = [
    pytest.param(Capacity(num_rows_per_expert=3, on_overflow="drop"), id="per_expert"),
    pytest.param(Capacity(num_rows=8, on_overflow="drop"), id="per_rank"),
    pytest.param(Capacity(num_rows=10, num_rows_per_expert=3, on_overflow="drop"), id="both"),
    pytest.param(Capacity(num_rows=0, on_overflow="drop"), id="everything"),
]


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(params=BACKENDS)
def buffer(request: pytest.FixtureRequest) -> Iterator[EpBuffer]:
    """Only the number of experts is configured."""
    config = ep_config(NUM_EXPERTS, None, None, None, dtype=None)
    with Communicator(backend=request.param) as communicator:
        with EpBuffer(communicator, config) as buffer:
            yield buffer


def inputs(
    num_tokens: int = 7, num_topk: int = NUM_TOPK
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    topk_idx = torch.randint(-1, NUM_EXPERTS, (num_tokens, num_topk))
    topk_weights = torch.rand(num_tokens, num_topk, dtype=torch.float64, requires_grad=True)
    return x, topk_idx, topk_weights


def kept(topk_idx: torch.Tensor, capacity: Capacity) -> torch.Tensor:
    """bool `[num_tokens, num_topk]`, by counting one choice after the other."""
    is_kept = torch.zeros_like(topk_idx, dtype=torch.bool)
    most = capacity.num_rows_per_expert
    end = 0
    for expert_idx in range(NUM_EXPERTS):
        places = (topk_idx == expert_idx).nonzero().tolist()[:most]
        for row, (token, choice) in enumerate(places):
            is_kept[token, choice] = capacity.num_rows is None or end + row < capacity.num_rows
        end += -(-len(places) // ALIGNMENT) * ALIGNMENT
    return is_kept


def moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buffer: EpBuffer,
    capacity: Capacity | None,
    place: str,
) -> tuple[torch.Tensor, Any]:
    """Rows weighted before or in the combine, through a nonlinear expert."""
    by_dispatch = place == "dispatch"
    result = moe_comm.dispatch(
        x,
        topk_idx,
        topk_weights if by_dispatch else None,
        buffer=buffer,
        expert_alignment=ALIGNMENT,
        capacity=capacity,
    )
    out = torch.sin(result.x)
    if by_dispatch:
        out = out * result.topk_weights[:, None]
    y = moe_comm.combine(
        out, result.handle, buffer=buffer, topk_weights=None if by_dispatch else topk_weights
    )
    return y, result


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("place", "is_compiled"), [("dispatch", False), ("combine", False), ("dispatch", True)]
)
@pytest.mark.parametrize("capacity", DROPS)
def test_what_is_dropped_has_no_gradient(
    buffer: EpBuffer, capacity: Capacity, place: str, is_compiled: bool
) -> None:
    x, topk_idx, topk_weights = inputs()
    is_kept = kept(topk_idx, capacity)
    assert (is_kept != (topk_idx >= 0)).any()
    expected = torch.sin(x) * (topk_weights * is_kept).sum(1, keepdim=True)
    expected_grads = torch.autograd.grad(expected.square().sum(), (x, topk_weights))

    def layer(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> Any:
        y, result = moe(x, topk_idx, topk_weights, buffer, capacity, place)
        return y, result.num_dropped_per_expert, result.num_required_rows, result.has_overflow

    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if is_compiled else layer
    actual, num_dropped, num_required, has_overflow = run(x, topk_idx, topk_weights)
    actual_grads = torch.autograd.grad(actual.square().sum(), (x, topk_weights))
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(actual_grads, expected_grads)
    assert (actual_grads[1][~is_kept] == 0).all()
    chosen = torch.bincount(topk_idx[topk_idx >= 0], minlength=NUM_EXPERTS)
    remaining = torch.bincount(topk_idx[is_kept], minlength=NUM_EXPERTS)
    assert torch.equal(num_dropped, chosen - remaining)
    assert num_required == (-(-chosen // ALIGNMENT) * ALIGNMENT).sum()
    assert has_overflow.dtype is torch.bool
    assert has_overflow


@pytest.mark.parametrize("alignment", [1, ALIGNMENT])
@pytest.mark.parametrize("on_overflow", ["drop", "raise", "grow"])
def test_as_many_rows_as_there_is_room_for_are_no_overflow(
    buffer: EpBuffer, on_overflow: Any, alignment: int
) -> None:
    given, topk_idx, given_weights = inputs()
    x, topk_weights = given.detach(), given_weights.detach()
    chosen = torch.bincount(topk_idx[topk_idx >= 0], minlength=NUM_EXPERTS)
    num_rows = int((-(-chosen // alignment) * alignment).sum())
    per_expert = None if on_overflow == "grow" else int(chosen.max())
    full = Capacity(num_rows=num_rows, num_rows_per_expert=per_expert, on_overflow=on_overflow)
    one_less = [Capacity(num_rows=num_rows - alignment, on_overflow=on_overflow)]
    if per_expert is not None:
        one_less.append(Capacity(num_rows_per_expert=per_expert - 1, on_overflow=on_overflow))
    for call in (buffer.dispatch, functools.partial(moe_comm.dispatch, buffer=buffer)):
        dispatch = functools.partial(call, x, topk_idx, topk_weights, expert_alignment=alignment)
        result = dispatch(capacity=full)
        assert not result.has_overflow
        assert not result.num_dropped_per_expert.any()
        assert result.x.shape[0] == result.num_required_rows == num_rows
        for capacity in one_less:
            if on_overflow == "raise":
                with pytest.raises(CapacityError):
                    dispatch(capacity=capacity)
                continue
            result = dispatch(capacity=capacity)
            assert result.has_overflow
            assert bool(result.num_dropped_per_expert.any()) == (on_overflow == "drop")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("capacity", [*DROPS, Capacity(num_rows=40, on_overflow="raise")])
def test_gradcheck(buffer: EpBuffer, capacity: Capacity) -> None:
    x, topk_idx, topk_weights = inputs(num_tokens=4)

    def function(x: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        return moe(x, topk_idx, topk_weights, buffer, capacity, "combine")[0]

    assert torch.autograd.gradcheck(function, (x, topk_weights))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("on_overflow", ["drop", "raise", "grow"])
def test_a_fixed_number_of_rows_is_a_static_shape(buffer: EpBuffer, on_overflow: str) -> None:
    capacity = Capacity(num_rows=40, on_overflow=on_overflow)

    def layer(x: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        result = moe_comm.dispatch(x, topk_idx, buffer=buffer, capacity=capacity)
        if result.x.shape[0] == 40:  # a guard on an unbacked size would not compile
            return result.x.view(4, 10, -1)
        return result.x

    x, topk_idx, _ = inputs()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    if on_overflow == "grow":
        with pytest.raises(Exception, match="data-dependent"):
            compiled(x, topk_idx)
    else:
        assert torch.equal(compiled(x, topk_idx), layer(x, topk_idx))
        assert compiled(x, topk_idx).shape == (4, 10, HIDDEN)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_overflow_raises_and_the_buffer_goes_on(buffer: EpBuffer, is_compiled: bool) -> None:
    def layer(x: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        return moe_comm.dispatch(
            x, topk_idx, buffer=buffer, capacity=Capacity(num_rows=6, on_overflow="raise")
        ).x

    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if is_compiled else layer
    x, topk_idx, _ = inputs()
    topk_idx[:] = 1
    with pytest.raises(CapacityError, match="6"):
        run(x, topk_idx)
    topk_idx[2:] = -1
    assert torch.equal(run(x, topk_idx), x[:2].repeat_interleave(NUM_TOPK, 0))


def test_growth_is_reported_and_drops_nothing(buffer: EpBuffer) -> None:
    x, topk_idx, topk_weights = inputs()
    topk_idx[:] = 2
    y, result = moe(x, topk_idx, topk_weights, buffer, Capacity(num_rows=6), "dispatch")
    torch.testing.assert_close(y, torch.sin(x) * topk_weights.sum(1, keepdim=True))
    assert result.has_overflow
    assert result.num_required_rows == len(result.x) == 22
    assert torch.equal(result.num_dropped_per_expert, torch.zeros(NUM_EXPERTS, dtype=torch.int64))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.RANK_MAJOR])
def test_every_call_of_an_open_configuration_compiles(buffer: EpBuffer, layout: Layout) -> None:
    """Choices per token, hidden and dtype differ from call to call, one graph for each."""

    def layer(x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        result = moe_comm.dispatch(x, topk_idx, topk_weights, buffer=buffer, layout=layout)
        sums = result.topk_weights.sum(-1) if layout is Layout.RANK_MAJOR else result.topk_weights
        return moe_comm.combine(result.x * sums[:, None], result.handle, buffer=buffer)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for num_topk, dtype in ((2, torch.float64), (5, torch.float64), (1, torch.float32)):
        x, topk_idx, topk_weights = (tensor.detach() for tensor in inputs(6, num_topk))
        x = x.to(dtype).repeat(1, 2).requires_grad_()
        topk_weights = topk_weights.to(dtype).requires_grad_()
        answers = []
        for run in (layer, compiled):
            with recorded_operations(buffer) as operations:
                y = run(x, topk_idx, topk_weights)
                answers.append((y, *torch.autograd.grad(y.square().sum(), (x, topk_weights))))
            assert operations == ["dispatch", "combine", "cached dispatch", "combine"]
        assert all(torch.equal(eager, other) for eager, other in zip(*answers, strict=True))
        expected = x * torch.where(topk_idx < 0, 0.0, topk_weights).sum(1, keepdim=True)
        torch.testing.assert_close(answers[0][0], expected)
