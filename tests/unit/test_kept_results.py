"""LOW_LATENCY results of a shape seen before take memory and tensors of those that nobody holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_comm import FP8_BLOCK128, Communicator, EpBuffer, EpConfig, Layout, Quantization
from tests.helpers.described_tensors import needs_described_tensors

CONFIG = EpConfig(num_experts=4, num_topk=2, hidden=256, num_max_tokens_per_rank=4)
TOPK_IDX = torch.tensor([[0, 1], [2, 1], [3, 0]])
WEIGHTS = torch.rand(3, 2)


pytestmark = needs_described_tensors  # without, none are kept


@pytest.fixture
def buffer(communicator: Communicator) -> Iterator[EpBuffer]:
    with EpBuffer(communicator, CONFIG) as made:
        yield made


def _x(seed: int) -> torch.Tensor:
    return torch.randn(3, 256, generator=torch.Generator().manual_seed(seed)).bfloat16()


def _dispatch(buffer: EpBuffer, seed: int, **options: Any) -> Any:
    return buffer.dispatch(_x(seed), TOPK_IDX, WEIGHTS, layout=Layout.LOW_LATENCY, **options)


class _Counts:
    """Of the steps since it was made: windows handed out, and tensors that nobody had before."""

    def __init__(self, buffer: EpBuffer) -> None:
        self._stats = buffer.communicator.heap_stats
        self._before = self._stats().num_allocations
        self.num_new_tensors = 0

    @property
    def num_windows(self) -> int:
        return self._stats().num_allocations - self._before

    def see(self, tensor: torch.Tensor) -> None:
        # Of a tensor that torch has just made over memory, nobody has counted a change.
        self.num_new_tensors += tensor._version == 0
        torch.autograd.graph.increment_version(tensor)


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("quantization", [None, FP8_BLOCK128])
def test_a_decode_loop_makes_no_tensor(
    buffer: EpBuffer, quantization: Quantization | None, async_op: bool
) -> None:
    options = {"quantization": quantization, "async_op": async_op}
    expert_out = buffer.empty_expert_output(_dispatch(buffer, 0).handle).zero_()

    xs = [_x(seed) for seed in range(13)]

    def step(seed: int, counts: _Counts) -> tuple[Any, torch.Tensor]:
        layout = Layout.LOW_LATENCY
        result = buffer.dispatch(xs[seed], TOPK_IDX, WEIGHTS, layout=layout, **options)
        result.event.wait()
        tensors = [result.x, result.topk_weights, result.num_tokens_per_expert]
        tensors += [result.expert_offsets, *([] if result.x_sf is None else [result.x_sf])]
        y = buffer.combine(expert_out, result.handle)
        for tensor in (*tensors, y):
            counts.see(tensor)
        return result, y

    # A loop has the latest result while it makes the next.
    held = step(0, _Counts(buffer))
    held = step(1, _Counts(buffer))
    held = step(2, _Counts(buffer))
    counts = _Counts(buffer)
    with torch.profiler.profile(profile_memory=True) as profiled:
        for seed in range(3, 13):
            held = step(seed, counts)
    assert (counts.num_windows, counts.num_new_tensors) == (0, 0)
    assert sum(max(event.self_cpu_memory_usage, 0) for event in profiled.events()) == 0
    assert [event.name for event in profiled.events() if event.name.startswith("aten::")] == []
    result, y = held
    assert torch.equal(y, torch.zeros_like(y))
    assert result.num_tokens_per_expert.tolist() == [2, 2, 1, 1]


def _saved(x: torch.Tensor) -> torch.Tensor:
    return x * torch.ones((), dtype=x.dtype, requires_grad=True)


HOLDERS: dict[str, Callable[[torch.Tensor], object]] = {
    "itself": lambda x: x,
    "a view": lambda x: x[1:3],
    "a view without gradients": torch.no_grad()(lambda x: x[1:3]),
    "a view of inference": torch.inference_mode()(lambda x: x.view(-1)),
    "detached": lambda x: x.detach(),
    "its storage": lambda x: x.untyped_storage(),
    "numpy": lambda x: x.view(torch.int16).numpy(),
    "dlpack": lambda x: x.__dlpack__(),
    "another tensor over it": torch.from_dlpack,
    "autograd": _saved,
}


@pytest.mark.parametrize("holder", list(HOLDERS))
def test_what_is_held_is_not_written_to(buffer: EpBuffer, holder: str) -> None:
    result = _dispatch(buffer, 0)
    y = buffer.combine(result.x, result.handle)
    expected_y = y.clone()
    address, y_address, first = result.x.data_ptr(), y.data_ptr(), result.x[0].clone()
    held, held_y = HOLDERS[holder](result.x), HOLDERS[holder](y)
    del result, y
    other_idx = torch.tensor([[3, 2], [3, 2], [3, 2]])
    for seed in range(1, 8):
        later = buffer.dispatch(_x(seed), other_idx, layout=Layout.LOW_LATENCY)
        later_y = buffer.combine(later.x, later.handle)
        assert later.x.data_ptr() != address
        assert later_y.data_ptr() != y_address
        del later, later_y
    if isinstance(held, torch.Tensor):
        if holder in ("itself", "detached", "autograd", "another tensor over it"):
            assert torch.equal(held[0], first)
        assert isinstance(held_y, torch.Tensor)
        if held_y.shape == expected_y.shape:
            assert torch.equal(held_y, expected_y)


@pytest.mark.parametrize("name", ["num_tokens_per_expert", "topk_weights"])
def test_what_goes_with_rows_is_not_written_to_where_it_is_held(
    buffer: EpBuffer, name: str
) -> None:
    held = getattr(_dispatch(buffer, 0), name)
    expected = held.clone()
    other_idx = torch.tensor([[3, 2], [3, 2], [3, 2]])
    for seed in range(1, 4):
        other = buffer.dispatch(_x(seed), other_idx, 2 * WEIGHTS, layout=Layout.LOW_LATENCY)
        assert not torch.equal(getattr(other, name), expected)
    num_filled = 2 if name == "topk_weights" else None  # of the first expert
    assert torch.equal(held[:num_filled], expected[:num_filled])


def test_memory_that_nobody_holds_is_taken_again(buffer: EpBuffer) -> None:
    """The test above would pass where nothing is ever taken again."""
    result = _dispatch(buffer, 0)
    address = result.x.data_ptr()
    del result
    assert _dispatch(buffer, 1).x.data_ptr() == address


def _with_hook(x: torch.Tensor, register: str) -> None:
    x.requires_grad_()
    getattr(x, register)(lambda _: None)
    x.requires_grad_(False)


def _in_a_graph_for_a_while(x: torch.Tensor) -> None:
    x.mul_(torch.ones((), dtype=x.dtype, requires_grad=True))
    x.retain_grad()
    x.detach_()


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "needs a gradient": lambda x: x.requires_grad_(),
    "a gradient": lambda x: setattr(x, "grad", torch.ones_like(x)),
    "a hook": lambda x: _with_hook(x, "register_hook"),
    "a later hook": lambda x: _with_hook(x, "register_post_accumulate_grad_hook"),
    "kept gradients": _in_a_graph_for_a_while,
    "a sign": lambda x: torch._C._set_neg(x, True),
    "an attribute": lambda x: setattr(x, "note", 1),
    "a shape": lambda x: x.t_(),
    "memory": lambda x: setattr(x, "data", torch.zeros(2, 2, dtype=x.dtype)),
    "a weak reference": weakref.ref,
    "an attribute of its storage": lambda x: setattr(x.untyped_storage(), "note", 1),
    "a weak reference to its storage": lambda x: weakref.ref(x.untyped_storage()),
}


@pytest.mark.parametrize("change", list(CHANGES))
def test_no_result_shows_what_was_done_to_an_earlier_one(buffer: EpBuffer, change: str) -> None:
    first = _dispatch(buffer, 0)
    shape = first.x.shape
    left = CHANGES[change](first.x)
    left = left if isinstance(left, weakref.ref) else None
    del first
    for seed in range(1, 4):
        result = _dispatch(buffer, seed)
        x, storage = result.x, result.x.untyped_storage()
        assert (x.shape, x.is_neg(), x.__dict__, storage.__dict__) == (shape, False, {}, {})
        assert (x.requires_grad, x.retains_grad, x.grad) == (False, False, None)
        assert x._backward_hooks is None
        assert x._post_accumulate_grad_hooks is None
        assert torch.equal(x[0], _x(seed)[0])
        if left is not None:
            assert left() is not x
            assert left() is not storage
        del x, storage
    assert left is None or left() is None


def test_tensors_are_of_the_mode_of_their_call(buffer: EpBuffer) -> None:
    for inference in (False, True, True, False, False, True):
        with torch.inference_mode(inference):
            result = _dispatch(buffer, 0)
            y = buffer.combine(result.x, result.handle)
            assert (result.x.is_inference(), y.is_inference()) == (inference, inference)
            del result, y


def test_memory_goes_back_when_it_is_asked_for(communicator: Communicator) -> None:
    with EpBuffer(communicator, CONFIG) as buffer:
        before = communicator.heap_stats().live_bytes

        def leave_results() -> None:
            result = _dispatch(buffer, 0)
            buffer.combine(result.x, result.handle)
            assert communicator.heap_stats().live_bytes > before

        leave_results()
        assert communicator.heap_stats().live_bytes > before
        communicator.trim()
        assert communicator.heap_stats().live_bytes == before
        leave_results()
        # Rows of another layout may need the memory.
        kept = buffer.dispatch(_x(0), TOPK_IDX)
        assert communicator.heap_stats().live_bytes < before + 4 * 1024 + kept.x.nbytes
        leave_results()
        with_rows = communicator.heap_stats().live_bytes
    assert communicator.heap_stats().live_bytes < with_rows


def test_a_refused_call_keeps_its_memory_for_the_next(buffer: EpBuffer) -> None:
    result = _dispatch(buffer, 0)
    del result
    num_allocations = buffer.communicator.heap_stats().num_allocations
    for _ in range(3):
        with pytest.raises(ValueError, match="9"):
            buffer.dispatch(_x(0), torch.full((3, 2), 9), WEIGHTS, layout=Layout.LOW_LATENCY)
    assert torch.equal(_dispatch(buffer, 1).x[0], _x(1)[0])
    assert buffer.communicator.heap_stats().num_allocations == num_allocations
