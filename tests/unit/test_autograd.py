"""Operators, formulas and handles on one rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moe_comm
from moe_comm import Communicator, EpBuffer, EpConfig, Layout
from moe_comm.ep.autograd import operators
from moe_comm.ep.backends import BACKEND_CLASSES
from moe_comm.ep.call_options import DispatchOptions, encode_dispatch
from moe_comm.ep.gradient_word import ENABLED, NEEDS_ANY, NEEDS_ROWS
from tests.helpers.configs import ep_config
from tests.helpers.moe_layer import (
    MoeLayer,
    assert_same_bits,
    expert_scale,
    filled,
    forward_backward,
    recorded_operations,
)

# Those that need neither a process group nor a GPU.
BACKENDS = [name for name in BACKEND_CLASSES if name not in ("collective", "cuda", "nvshmem")]
NUM_EXPERTS, NUM_TOPK, HIDDEN = 4, 2, 2

PLACES = [
    pytest.param(Layout.EXPERT_MAJOR, "dispatch", id="expert_major-dispatch"),
    pytest.param(Layout.EXPERT_MAJOR, "combine", id="expert_major-combine"),
    pytest.param(Layout.RANK_MAJOR, "dispatch", id="rank_major-dispatch"),
    pytest.param(Layout.LOW_LATENCY, "dispatch", id="low_latency-dispatch"),
    pytest.param(Layout.LOW_LATENCY, "combine", id="low_latency-combine"),
]


@pytest.fixture(params=BACKENDS)
def communicator(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    with Communicator(backend=request.param) as communicator:
        yield communicator


@pytest.fixture
def buffer(communicator: Communicator) -> Iterator[EpBuffer]:
    """float64, 4 experts, top-2, hidden 2."""
    config = ep_config(NUM_EXPERTS, NUM_TOPK, HIDDEN, 16, dtype=torch.float64)
    with EpBuffer(communicator, config) as buffer:
        yield buffer


@pytest.fixture
def layer_buffer(communicator: Communicator) -> EpBuffer:
    """bfloat16, 8 experts, top-2, hidden 32: fits `MoeLayer`."""
    config = EpConfig(num_experts=8, num_topk=2, hidden=32, num_max_tokens_per_rank=64)
    return EpBuffer(communicator, config)


def inputs(num_tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, HIDDEN, dtype=torch.float64, requires_grad=True)
    topk_idx = torch.randint(-1, NUM_EXPERTS, (num_tokens, NUM_TOPK))
    topk_weights = torch.rand(num_tokens, NUM_TOPK, dtype=torch.float64, requires_grad=True)
    return x, topk_idx, topk_weights


def moe(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_idx: torch.Tensor,
    buffer: EpBuffer,
    layout: Layout,
    place: str,
) -> torch.Tensor:
    scale = torch.linspace(0.5, 1.5, NUM_EXPERTS, dtype=torch.float64)
    result = moe_comm.dispatch(
        x,
        topk_idx,
        topk_weights if place == "dispatch" else None,
        buffer=buffer,
        layout=layout,
        expert_alignment=1 if layout is Layout.LOW_LATENCY else 4,
    )
    out = expert_scale(result.x, result, buffer, layout, scale)
    return moe_comm.combine(
        out, result.handle, buffer=buffer, topk_weights=topk_weights if place == "combine" else None
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "place"), PLACES)
def test_gradcheck(buffer: EpBuffer, layout: Layout, place: str) -> None:
    x, topk_idx, topk_weights = inputs()
    function = functools.partial(moe, topk_idx=topk_idx, buffer=buffer, layout=layout, place=place)
    assert torch.autograd.gradcheck(function, (x, topk_weights))


@pytest.mark.parametrize("with_weights", [False, True])
def test_low_latency_rows_that_nothing_was_sent_to_have_gradient_zero(
    buffer: EpBuffer, with_weights: bool
) -> None:
    x, topk_idx, topk_weights = inputs()
    topk_idx[0, 0] = 1
    nan = torch.full((16, HIDDEN), torch.nan, dtype=x.dtype)
    windows = [buffer.dispatch(nan, torch.ones(16, 2).long()).x]
    windows += [torch.full_like(windows[0], torch.nan) for _ in range(4)]
    del windows  # what is in later windows before they are filled
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer, layout=Layout.LOW_LATENCY)
    is_filled = filled(result, buffer)
    assert (result.x[~is_filled] == 0).all()
    out = torch.randn(result.x.shape, dtype=x.dtype, requires_grad=True)
    y = moe_comm.combine(
        out, result.handle, buffer=buffer, topk_weights=topk_weights if with_weights else None
    )
    (grad,) = torch.autograd.grad(y.sum(), out)
    assert (grad[~is_filled] == 0).all()
    assert (grad[is_filled] != 0).all()


def test_only_the_weights_have_a_gradient(buffer: EpBuffer) -> None:
    x, topk_idx, topk_weights = inputs()
    result = moe_comm.dispatch(x, topk_idx, topk_weights, buffer=buffer)
    (result.topk_weights * 3).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(topk_weights.grad, torch.where(topk_idx < 0, 0.0, 3.0).double())


def test_strided_input_and_expanded_gradient(buffer: EpBuffer) -> None:
    x, topk_idx, topk_weights = inputs(num_tokens=6)
    strided = x.detach().t().contiguous().t().requires_grad_()
    assert not strided.is_contiguous()
    grads = []
    for rows in (x, strided):
        y = moe(rows, topk_weights, topk_idx, buffer, Layout.EXPERT_MAJOR, "combine")
        # The gradient of sum() is expanded: every stride is 0.
        grads.append(torch.autograd.grad(y.sum(), (rows, topk_weights)))
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


def test_strided_expert_output(buffer: EpBuffer) -> None:
    x, topk_idx, _ = inputs()
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer)
    strided = result.x.t().contiguous().t()
    y = moe_comm.combine(strided, result.handle, buffer=buffer)
    assert torch.equal(y, x.detach() * (topk_idx >= 0).sum(1, keepdim=True))


def test_skipped_experts_run_the_same_operations(buffer: EpBuffer) -> None:
    x, topk_idx, topk_weights = inputs()
    with recorded_operations(buffer) as used:
        moe(x, topk_weights, topk_idx, buffer, Layout.EXPERT_MAJOR, "dispatch").sum().backward()
    x.grad = topk_weights.grad = None
    with recorded_operations(buffer) as skipped:
        result = moe_comm.dispatch(x, topk_idx, topk_weights, buffer=buffer, expert_alignment=4)
        y = moe_comm.combine(torch.zeros_like(result.x.detach()), result.handle, buffer=buffer)
        y.sum().backward()
    assert skipped == used == ["dispatch", "combine", "cached dispatch", "combine"]
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(topk_weights.grad, torch.zeros_like(topk_weights))


@pytest.mark.parametrize("needs_x", [False, True])
@pytest.mark.parametrize("needs_weights", [False, True])
def test_operations_follow_from_what_any_rank_needs(
    buffer: EpBuffer, needs_x: bool, needs_weights: bool
) -> None:
    x, topk_idx, topk_weights = inputs()
    x.requires_grad_(needs_x)
    topk_weights.requires_grad_(needs_weights)
    with recorded_operations(buffer) as operations:
        result = moe_comm.dispatch(x, topk_idx, buffer=buffer)
        y = moe_comm.combine(result.x, result.handle, buffer=buffer, topk_weights=topk_weights)
        if y.requires_grad:
            y.sum().backward()
    of_combine = ["cached dispatch", "combine weights"] if needs_x or needs_weights else []
    of_dispatch = ["combine"] if needs_x else []
    assert operations == ["dispatch", "combine", *of_combine, *of_dispatch]
    assert y.requires_grad == (needs_x or needs_weights)
    assert result.x.requires_grad == result.handle.link.requires_grad == needs_x
    assert (x.grad is not None) == needs_x
    assert (topk_weights.grad is not None) == needs_weights


def test_without_gradients_nothing_requires_one(buffer: EpBuffer) -> None:
    x, topk_idx, topk_weights = inputs()
    with torch.no_grad():
        result = moe_comm.dispatch(x, topk_idx, topk_weights, buffer=buffer)
        y = moe_comm.combine(result.x, result.handle, buffer=buffer)
    assert not any(t.requires_grad for t in (result.x, result.topk_weights, result.handle.link, y))


@pytest.mark.parametrize("layout", list(Layout))
def test_outputs_equal_those_of_the_buffer(buffer: EpBuffer, layout: Layout) -> None:
    x, topk_idx, topk_weights = (tensor.detach() for tensor in inputs())
    alignment = 1 if layout is Layout.LOW_LATENCY else 4
    expected = buffer.dispatch(x, topk_idx, topk_weights, layout=layout, expert_alignment=alignment)
    actual = moe_comm.dispatch(
        x, topk_idx, topk_weights, buffer=buffer, layout=layout, expert_alignment=alignment
    )
    if layout is Layout.LOW_LATENCY:  # what is not filled is undefined in the buffer's result
        is_filled = filled(expected, buffer)
        expected.x[~is_filled] = 0
        expected.topk_weights[~is_filled] = 0
    for name in (
        *("x", "topk_weights", "num_tokens_per_expert", "expert_offsets"),
        *("num_dropped_per_expert", "num_required_rows", "has_overflow"),
    ):
        assert torch.equal(getattr(actual, name), getattr(expected, name))
        assert getattr(actual, name).dtype is getattr(expected, name).dtype
    assert (actual.topk_idx is None) == (expected.topk_idx is None)
    if expected.topk_idx is not None:
        assert torch.equal(actual.topk_idx, expected.topk_idx)
    assert actual.x_sf is None
    assert type(actual) is type(expected) is moe_comm.DispatchResult
    assert actual.event.is_complete()
    assert actual.wait_ns.shape == expected.wait_ns.shape
    assert actual.status is expected.status is None
    assert isinstance(actual.handle, moe_comm.DispatchHandle)
    for name in (
        *("buffer_id", "generation", "layout", "expert_alignment"),
        *("num_tokens", "num_topk", "num_recv_tokens", "num_recv_topk"),
    ):
        assert getattr(actual.handle, name) == getattr(expected.handle, name)


def test_handles_serve_the_buffer_and_the_operators_alike(buffer: EpBuffer) -> None:
    x, topk_idx, _ = (tensor.detach() for tensor in inputs())
    expected = x * (topk_idx >= 0).sum(1, keepdim=True)
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer, expert_alignment=2)
    out = buffer.empty_expert_output(result.handle).copy_(result.x)
    assert torch.equal(buffer.combine(out, result.handle), expected)
    eager = buffer.dispatch(x, topk_idx)
    assert torch.equal(moe_comm.combine(eager.x, eager.handle, buffer=buffer), expected)


def test_a_handle_may_be_combined_twice(buffer: EpBuffer) -> None:
    x, topk_idx, topk_weights = inputs()
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer)
    once = moe_comm.combine(result.x, result.handle, buffer=buffer, topk_weights=topk_weights)
    twice = moe_comm.combine(result.x * 2, result.handle, buffer=buffer, topk_weights=topk_weights)
    (once + twice).sum().backward()
    sums = torch.where(topk_idx < 0, 0.0, topk_weights.detach()).sum(1, keepdim=True)
    torch.testing.assert_close(x.grad, (3 * sums).expand_as(x))


def test_a_second_derivative_is_refused(buffer: EpBuffer) -> None:
    x, topk_idx, topk_weights = inputs()
    y = moe(x, topk_weights, topk_idx, buffer, Layout.EXPERT_MAJOR, "combine")
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_handle_of_another_buffer_is_refused(
    buffer: EpBuffer, communicator: Communicator
) -> None:
    x, topk_idx, _ = inputs()
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer)
    other = EpBuffer(communicator, buffer.config)
    message = f"belongs to buffer {buffer.buffer_id}, this is buffer {other.buffer_id}"
    with pytest.raises(ValueError, match=message):
        moe_comm.combine(result.x, result.handle, buffer=other)
    y = moe_comm.combine(result.x, result.handle, buffer=buffer)
    assert torch.equal(y, x * (topk_idx >= 0).sum(1, keepdim=True))


def test_the_backward_of_a_destroyed_buffer_is_refused(buffer: EpBuffer) -> None:
    x, topk_idx, topk_weights = inputs()
    y = moe(x, topk_weights, topk_idx, buffer, Layout.EXPERT_MAJOR, "dispatch")
    buffer.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        y.sum().backward()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("layout", "place"), PLACES)
def test_opcheck(buffer: EpBuffer, layout: Layout, place: str) -> None:
    x, topk_idx, topk_weights = inputs()
    # Effects are for the compiler; the schema, the fakes and the autograd registration are checked.
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    sizes = [1, NUM_EXPERTS, NUM_EXPERTS, NUM_TOPK, 16]
    sent = topk_weights if place == "dispatch" else None
    applied = topk_weights.detach() if place == "combine" else None
    alignment = 1 if layout is Layout.LOW_LATENCY else 4
    arguments = (
        *(x, None, topk_idx, sent, buffer.id_tensor, sizes),
        *encode_dispatch(DispatchOptions(layout, alignment)),
        *(ENABLED | NEEDS_ANY, buffer.gradient_anchor),
    )
    torch.library.opcheck(operators.DISPATCH, arguments, test_utils=utilities)
    with torch.no_grad():
        rows, weights, link, _, _, _, *rest = operators.DISPATCH(*arguments)
        handle = rest[:4]
    num_rows = len(rows)
    torch.library.opcheck(
        operators.COMBINE,
        (rows, applied, buffer.id_tensor, *handle, link, ENABLED | NEEDS_ROWS),
        test_utils=utilities,
    )
    grad_weights = None if sent is None else weights
    weights_dtype = None if sent is None else torch.float64
    torch.library.opcheck(
        operators.DISPATCH_BACKWARD,
        (rows, grad_weights, *handle, num_rows, HIDDEN, torch.float64, weights_dtype),
        test_utils=utilities,
    )
    torch.library.opcheck(
        operators.COMBINE_BACKWARD,
        (x.detach(), rows, applied, *handle, num_rows, HIDDEN, torch.float64),
        test_utils=utilities,
    )


def selective() -> object:
    return create_selective_checkpoint_contexts(list(moe_comm.SAVED_OPERATORS))


@pytest.mark.parametrize("weighted_by", ["dispatch", "combine"])
def test_selective_checkpointing_does_not_communicate_again(
    layer_buffer: EpBuffer, weighted_by: str
) -> None:
    layer = MoeLayer(layer_buffer, weighted_by=weighted_by)
    x = torch.randn(16, 32).bfloat16()
    with recorded_operations(layer_buffer) as expected_operations:
        expected = forward_backward(layer, layer, x)
    recomputed = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=selective)
    with recorded_operations(layer_buffer) as operations:
        actual = forward_backward(recomputed, layer, x)
    assert operations == expected_operations
    assert_same_bits(actual, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_plain_checkpointing_repeats_the_forward(
    layer_buffer: EpBuffer, use_reentrant: bool
) -> None:
    layer = MoeLayer(layer_buffer)
    x = torch.randn(16, 32).bfloat16()
    with recorded_operations(layer_buffer) as once:
        expected = forward_backward(layer, layer, x)
    recomputed = functools.partial(checkpoint, layer, use_reentrant=use_reentrant)
    with recorded_operations(layer_buffer) as operations:
        actual = forward_backward(recomputed, layer, x)
    assert operations == [*once[:2], *once]
    assert_same_bits(actual, expected)


def test_operators_end_with_their_buffer(communicator: Communicator) -> None:
    config = EpConfig(num_experts=4, num_topk=2, hidden=8, num_max_tokens_per_rank=4)
    buffer = EpBuffer(communicator, config)
    id_tensor = buffer.id_tensor
    arguments = (torch.zeros(1, 8).bfloat16(), None, torch.zeros(1, 2).long(), None)
    options = ([1, 4, 4, 2, 4], *encode_dispatch(DispatchOptions()), 0, None)
    operators.DISPATCH(*arguments, id_tensor, *options)
    del buffer
    with pytest.raises(ValueError, match=f"no living EpBuffer has id {int(id_tensor)}"):
        operators.DISPATCH(*arguments, id_tensor, *options)


@pytest.mark.parametrize("name", ["DifferentiableDispatchResult", "TensorHandle"])
def test_a_name_that_is_gone_says_what_it_is_now(name: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}', which is moe_comm.Dispatch"):
        getattr(moe_comm.ep.autograd, name)
    with pytest.raises(AttributeError, match=r"no attribute 'dispatches'$"):
        _ = moe_comm.ep.autograd.dispatches
