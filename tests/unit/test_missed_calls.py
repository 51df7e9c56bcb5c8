"""Memory of a rank for calls that its peers have not heard of."""

from __future__ import annotations

import weakref
from typing import NoReturn

import pytest

from moe_comm.peers import missed_calls


class Held:
    """Object in a frame that an error has passed."""


def miss() -> weakref.ref[Held]:
    held = Held()
    try:
        with missed_calls.Telling(missed_calls.keep, missed_calls.GATHER):
            raise TypeError(f"no buffer but {type(held).__name__}")
    except TypeError:
        return weakref.ref(held)


def test_what_is_kept_of_an_error_holds_no_frame() -> None:
    former = miss()
    assert former() is None
    (missed,) = missed_calls.take()
    told = missed.as_peer_error("dispatch")
    assert isinstance(told, TypeError)
    assert str(told) == "no buffer but Held; this is told by its next call, dispatch"


def reject(operation: str, error: Exception) -> NoReturn:
    raise ValueError(f"rank 0: {error}, in {operation}")


def test_peers_hear_of_whatever_a_block_raises() -> None:
    with pytest.raises(ValueError, match="rank 0: 'x', in combine"):
        with missed_calls.Telling(reject, "combine"):
            raise KeyError("x")


def test_every_rank_raises_what_is_left_untold() -> None:
    with pytest.raises(NotImplementedError, match="no such format"):
        with missed_calls.Telling(reject, "combine", untold=NotImplementedError):
            raise NotImplementedError("no such format")


def test_an_interrupt_is_not_told() -> None:
    with pytest.raises(KeyboardInterrupt), missed_calls.Telling(reject, "combine"):
        raise KeyboardInterrupt
