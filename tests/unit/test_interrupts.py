"""Ctrl-C while something is being ended: one error a rank, whoever sends how many."""

from __future__ import annotations

import threading

import pytest
import torch

from moe_comm import Communicator, EpBuffer, EpConfig


def _interrupt() -> None:
    raise KeyboardInterrupt("again")


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> EpBuffer:
    """Buffer whose end is interrupted."""
    config = EpConfig(num_experts=2, num_topk=1, hidden=64, num_max_tokens_per_rank=4)
    buffer = EpBuffer(Communicator(backend="host"), config)
    monkeypatch.setattr(buffer._backend, "destroy", _interrupt)
    return buffer


def test_a_second_interrupt_is_not_raised(buffer: EpBuffer) -> None:
    with pytest.raises(KeyboardInterrupt, match="first") as caught, buffer:
        raise KeyboardInterrupt("first")
    assert caught.value.__context__ is None


def test_an_error_after_the_first_interrupt_changes_nothing(buffer: EpBuffer) -> None:
    with pytest.raises(RuntimeError, match="cleaning up") as caught:
        try:
            raise KeyboardInterrupt("first")
        finally:
            try:
                raise RuntimeError("cleaning up")
            finally:
                buffer.destroy()
    assert isinstance(caught.value.__context__, KeyboardInterrupt)


def test_the_first_interrupt_is_raised(buffer: EpBuffer) -> None:
    with pytest.raises(KeyboardInterrupt, match="again"):
        buffer.destroy()


def test_an_interrupt_while_handling_another_error_is_raised(buffer: EpBuffer) -> None:
    with pytest.raises(KeyboardInterrupt, match="again"), buffer:
        raise ValueError("something else")


class _InterruptedLock:
    """A lock with which a signal raises as soon as it is taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.release = self._lock.release

    def acquire(self, is_waiting: bool) -> bool:
        assert self._lock.acquire(is_waiting)
        raise KeyboardInterrupt("first")


def test_an_interrupt_at_the_beginning_of_a_call_leaves_the_buffer_free(
    communicator: Communicator,
) -> None:
    config = EpConfig(num_experts=2, num_topk=1, hidden=64, num_max_tokens_per_rank=4)
    buffer = EpBuffer(communicator, config)
    x, topk_idx = torch.ones(3, 64, dtype=torch.bfloat16), torch.tensor([[0], [1], [0]])
    result = buffer.dispatch(x, topk_idx)
    free = buffer._busy
    for call in (
        lambda: buffer.dispatch(x, topk_idx),
        lambda: buffer.combine(result.x, result.handle),
        lambda: buffer.reject("dispatch", ValueError("not this")),
        buffer.destroy,
    ):
        busy = _InterruptedLock()
        buffer._busy = busy  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt, match="first"):
            call()
        assert not busy._lock.locked()
    buffer._busy = free
    assert torch.equal(buffer.combine(buffer.dispatch(x, topk_idx).x, result.handle), x)
    buffer.destroy()
    assert buffer.is_destroyed
