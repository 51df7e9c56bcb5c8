"""Eager operations have no gradient, and say so where one may be expected; once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch

import moe_comm
from moe_comm import Communicator, EpBuffer, EpConfig


@pytest.fixture
def buffer() -> Iterator[EpBuffer]:
    """Buffer of one rank."""
    config = EpConfig(num_experts=2, num_topk=1, hidden=64, num_max_tokens_per_rank=4)
    with Communicator(backend="host") as comm:
        yield EpBuffer(comm, config)


def rows(*, requires_grad: bool) -> torch.Tensor:
    return torch.ones(4, 64, dtype=torch.bfloat16, requires_grad=requires_grad)


CHOICES = torch.tensor([[0], [1], [0], [1]])


def texts(call: Callable[[], object]) -> list[str]:
    """Warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught]


def test_dispatch_warns_once_and_says_what_to_call(buffer: EpBuffer) -> None:
    x = rows(requires_grad=True)
    first = texts(lambda: buffer.dispatch(x, CHOICES))
    assert len(first) == 1
    assert "x requires one" in first[0]
    assert "moe_comm.dispatch(..., buffer=buffer)" in first[0]
    assert texts(lambda: buffer.dispatch(x, CHOICES)) == []


def test_combine_warns_of_rows_and_of_weights(buffer: EpBuffer) -> None:
    result = buffer.dispatch(rows(requires_grad=False), CHOICES)
    weights = torch.ones(4, 1, requires_grad=True)
    said = texts(lambda: buffer.combine(result.x, result.handle, topk_weights=weights))
    assert len(said) == 1
    assert "topk_weights requires one" in said[0]
    assert "moe_comm.combine(" in said[0]


def test_combine_warns_of_sums_written_into_a_graph(buffer: EpBuffer) -> None:
    result = buffer.dispatch(rows(requires_grad=False), CHOICES)
    out = rows(requires_grad=True) * 2
    said = texts(lambda: buffer.combine(result.x, result.handle, out=out))
    assert len(said) == 1
    assert "out requires one" in said[0]


def test_the_place_that_is_named_is_the_call(buffer: EpBuffer) -> None:
    with pytest.warns(UserWarning, match="records no gradient") as caught:
        buffer.dispatch(rows(requires_grad=True), CHOICES)
    assert caught[0].filename == __file__


def test_calls_that_want_no_gradient_are_silent(buffer: EpBuffer) -> None:
    def without_grad() -> None:
        with torch.no_grad():
            buffer.dispatch(rows(requires_grad=True), CHOICES)

    assert texts(without_grad) == []
    assert texts(lambda: buffer.dispatch(rows(requires_grad=False), CHOICES)) == []


def test_differentiable_calls_are_silent(buffer: EpBuffer) -> None:
    def step() -> None:
        x = rows(requires_grad=True)
        weights = torch.ones(4, 1, requires_grad=True)
        result = moe_comm.dispatch(x, CHOICES, buffer=buffer)
        y = moe_comm.combine(result.x, result.handle, buffer=buffer, topk_weights=weights)
        y.float().sum().backward()

    assert texts(step) == []


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("backend", ["host", "simt", "collective", "reference"])
def test_sums_that_overwrite_what_was_saved_are_told(backend: str, async_op: bool) -> None:
    config = EpConfig(num_experts=2, num_topk=1, hidden=64, num_max_tokens_per_rank=4)
    with Communicator(backend=backend) as comm, torch.no_grad():
        buffer = EpBuffer(comm, config)
        result = buffer.dispatch(rows(requires_grad=False), CHOICES)
        out = torch.full((4, 64), 5.0, dtype=torch.bfloat16)
        factors = rows(requires_grad=True)
        with torch.enable_grad():
            loss = (factors * out).sum()
        sums = buffer.combine(result.x, result.handle, out=out, async_op=async_op)
        if isinstance(sums, moe_comm.CombineResult):
            sums.event.wait()
        assert out.eq(1).all()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        version = out._version
        with pytest.raises(ValueError, match="expert_out has 3 rows"):
            buffer.combine(result.x[:3], result.handle, out=out)
        assert out._version == version, "nothing was written"


@pytest.mark.parametrize("backend", ["host", "simt", "collective", "reference"])
def test_rows_that_a_backward_weighs_are_counted_as_written(backend: str) -> None:
    config = EpConfig(num_experts=2, num_topk=1, hidden=64, num_max_tokens_per_rank=4)
    with Communicator(backend=backend) as comm:
        buffer = EpBuffer(comm, config)
        gradient, version = rows(requires_grad=False), 0
        buffer.weighted_gradient(gradient, rows(requires_grad=False), torch.full((4,), 2.0))
        assert gradient.eq(2).all()
        assert gradient._version > version


def test_a_warning_that_is_an_error_leaves_the_buffer_usable(buffer: EpBuffer) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match="records no gradient"):
            buffer.dispatch(rows(requires_grad=True), CHOICES)
    buffer.dispatch(rows(requires_grad=False), CHOICES)
