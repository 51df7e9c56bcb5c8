"""Ctrl-C while something is being ended: one error a rank, whoever sends how many."""

from __future__ import annotations

import pytest

from moe_comm import Communicator, EpBuffer, EpConfig


def _interrupt() -> None:
    raise KeyboardInterrupt("again")


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> EpBuffer:
    """Whose end is interrupted."""
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
