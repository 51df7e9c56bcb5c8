"""Eager calls go around torch's operators where nobody could see them, with the same bits."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.autograd.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import moe_comm
from moe_comm import Communicator, EpBuffer, EpConfig, Layout
from tests.helpers.configs import ep_config

HIDDEN, NUM_EXPERTS, NUM_TOPK = 16, 3, 2


class Look(TorchDispatchMode):
    """Lets every operator run."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        return func(*args, **(kwargs or {}))


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


WATCHERS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "mode": Look,
    "profiler": profile,
    "saved tensors": lambda: saved_tensors_hooks(same, same),
}


@pytest.fixture
def buffer() -> Iterator[EpBuffer]:
    config = ep_config(NUM_EXPERTS, NUM_TOPK, HIDDEN, 8)
    with Communicator(backend="host") as comm:
        yield EpBuffer(comm, config)


def went_around(result: moe_comm.DispatchResult) -> bool:
    """Return whether the handle is one of the buffer, itself or behind the tensors that a graph would take."""
    return getattr(result.handle, "local", result.handle) is not None


def step(
    buffer: EpBuffer, layout: Layout, *, is_weighted: bool, requires_grad: bool = True
) -> tuple[moe_comm.DispatchResult, list[torch.Tensor]]:
    """The result of a dispatch, and all that a step computes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, HIDDEN, generator=generator).bfloat16().requires_grad_(requires_grad)
    idx = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:NUM_TOPK] for _ in x])
    weights = torch.rand(5, NUM_TOPK, generator=generator).requires_grad_(requires_grad)
    result = moe_comm.dispatch(x, idx, weights, buffer=buffer, layout=layout)
    rows = result.x * 2
    y = moe_comm.combine(
        rows, result.handle, buffer=buffer, topk_weights=weights if is_weighted else None
    )
    if not requires_grad:
        return result, [y]
    (y.float().square().sum() + result.topk_weights.square().sum()).backward()
    return result, [y, x.grad, weights.grad]


@pytest.mark.parametrize("watcher", WATCHERS)
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.LOW_LATENCY])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_whoever_may_see_operators_gets_them_with_the_same_bits(
    buffer: EpBuffer, watcher: str, layout: Layout, is_weighted: bool
) -> None:
    alone, expected = step(buffer, layout, is_weighted=is_weighted)
    assert went_around(alone)
    with WATCHERS[watcher]():
        seen, found = step(buffer, layout, is_weighted=is_weighted)
    assert not went_around(seen)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("lazy", ["rows", "weights", "gradient"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_lazy_negations_have_their_values(buffer: EpBuffer, lazy: str, dtype: torch.dtype) -> None:
    def given(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return torch._neg_view(-tensor) if name == lazy else tensor

    x, weights = torch.rand(2, HIDDEN, dtype=dtype), torch.rand(2, 1, dtype=dtype)
    config = EpConfig(num_experts=1, num_topk=1, hidden=HIDDEN, dtype=dtype)
    with EpBuffer(buffer.communicator, config) as of_dtype:
        leaf = x.clone().requires_grad_()
        rows = torch._neg_view(-leaf) if lazy == "rows" else leaf
        idx = torch.zeros(2, 1, dtype=torch.int64)
        arrived = moe_comm.dispatch(rows, idx, given("weights", weights), buffer=of_dtype)
        y = moe_comm.combine(
            arrived.x, arrived.handle, buffer=of_dtype, topk_weights=given("weights", weights)
        )
        assert went_around(arrived)
        assert torch.equal(arrived.x, x)
        assert torch.equal(arrived.topk_weights, weights[:, 0])
        assert torch.equal(y, x * weights)
        gradient = torch.rand(2, HIDDEN, dtype=dtype)
        y.backward(given("gradient", gradient))
        assert torch.equal(leaf.grad, gradient * weights)


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, as those of functional collectives are."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls: type[Wrapped], inner: torch.Tensor) -> Wrapped:
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        return func(*args, **kwargs)


class Contagious(Wrapped):
    """The same, and so is all that operators make of it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, made)


def test_tensors_of_a_class_of_their_own_come_back_as_such(buffer: EpBuffer) -> None:
    x = torch.rand(2, HIDDEN).bfloat16()
    idx = torch.tensor([[0], [1]]).repeat(1, NUM_TOPK)

    def there_and_back(rows: torch.Tensor) -> torch.Tensor:
        arrived = moe_comm.dispatch(rows, idx, buffer=buffer)
        return moe_comm.combine(arrived.x, arrived.handle, buffer=buffer)

    found = there_and_back(Contagious(x))
    assert type(found) is Contagious
    assert torch.equal(found.inner, there_and_back(x))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_a_gradient_may_be_of_a_class_of_its_own(buffer: EpBuffer, is_weighted: bool) -> None:
    def gradients(wrap: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        x = torch.ones(2, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.full((2, 1), 0.5, requires_grad=True)
        arrived = moe_comm.dispatch(x, torch.tensor([[0], [1]]), weights, buffer=single)
        y = moe_comm.combine(
            *(arrived.x * 2, arrived.handle),
            buffer=single,
            topk_weights=weights if is_weighted else None,
        )
        wanted = torch.arange(2 * HIDDEN, dtype=torch.bfloat16).view(2, HIDDEN)
        torch.autograd.backward(
            [y, arrived.topk_weights], [wrap(wanted), wrap(torch.ones(len(arrived.topk_weights)))]
        )
        return [x.grad, weights.grad]

    config = EpConfig(num_experts=2, num_topk=1, hidden=HIDDEN)
    with EpBuffer(buffer.communicator, config) as single:
        found = gradients(Wrapped)
        assert all(torch.equal(a, b) for a, b in zip(gradients(same), found, strict=True))


def test_a_profile_names_the_operators(buffer: EpBuffer) -> None:
    with profile() as seen:
        step(buffer, Layout.EXPERT_MAJOR, is_weighted=True)
    names = {event.name for event in seen.function_events}
    operators = ["dispatch", "combine", "dispatch_backward", "combine_backward"]
    assert names >= {f"moe_comm::{name}" for name in operators}


def test_a_handle_serves_on_either_side(buffer: EpBuffer) -> None:
    """A dispatch that was seen and a combine that was not, and the other way round."""
    _, (expected,) = step(buffer, Layout.EXPERT_MAJOR, is_weighted=False, requires_grad=False)
    alone, _ = step(buffer, Layout.EXPERT_MAJOR, is_weighted=False, requires_grad=False)
    with Look():
        seen, _ = step(buffer, Layout.EXPERT_MAJOR, is_weighted=False, requires_grad=False)
        crossed = moe_comm.combine(alone.x * 2, alone.handle, buffer=buffer)
    assert torch.equal(crossed, expected)
    assert torch.equal(moe_comm.combine(seen.x * 2, seen.handle, buffer=buffer), expected)


def test_a_second_backward_is_refused(buffer: EpBuffer) -> None:
    x = torch.ones(2, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    result = moe_comm.dispatch(x, torch.tensor([[0], [1]]).repeat(1, 2), buffer=buffer)
    y = moe_comm.combine(result.x, result.handle, buffer=buffer).float().sum()
    y.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


@pytest.mark.parametrize("is_weighted", [False, True])
def test_what_nobody_holds_is_gone_without_the_garbage_collector(
    buffer: EpBuffer, is_weighted: bool
) -> None:
    result, _ = step(buffer, Layout.EXPERT_MAJOR, is_weighted=is_weighted)
    gone = [weakref.ref(tensor) for tensor in (result.x, result.topk_weights, result.handle.link)]
    gc.collect()
    gc.disable()
    try:
        del result, _
        assert [reference() for reference in gone] == [None] * 3
        node = moe_comm.dispatch(
            torch.zeros(1, HIDDEN, dtype=torch.bfloat16, requires_grad=True),
            torch.zeros(1, NUM_TOPK, dtype=torch.int64),
            buffer=buffer,
        ).x.grad_fn
        gone = weakref.ref(node)
        del node
        assert gone() is None
    finally:
        gc.enable()
