"""Errors of `destroy()` at the end of a `with` block: the block's own error comes first."""

from __future__ import annotations

import logging

import pytest

from moe_comm import Communicator, EpBuffer, GradientSum
from moe_comm.peers.destroyable import Destroyable
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy


class Tells(Destroyable):
    def destroy(self) -> None:
        raise ValueError("late")


def test_a_block_that_ends_well_raises_what_destroy_tells() -> None:
    with pytest.raises(ValueError, match="late"), Tells():
        pass


def test_an_error_of_the_block_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING, "moe_comm"),
        pytest.raises(KeyError, match="own"),
        Tells(),
    ):
        raise KeyError("own")
    assert "besides the KeyError: ValueError: late" in caplog.text


@pytest.mark.parametrize("kind", [Communicator, EpBuffer, GradientSum, BatchedCopy])
def test_what_is_destroyed_ends_like_that(kind: type) -> None:
    assert issubclass(kind, Destroyable)
    assert kind.__exit__ is Destroyable.__exit__
