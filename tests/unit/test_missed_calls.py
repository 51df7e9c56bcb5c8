"""What a rank keeps of calls that its peers have not heard of."""

from __future__ import annotations

import weakref

from moe_comm.peers import missed_calls


class Held:
    """What a frame holds that an error has passed."""


def miss() -> weakref.ref[Held]:
    held = Held()
    try:
        with missed_calls.keep_for_peers(missed_calls.GATHER):
            raise TypeError(f"no buffer but {type(held).__name__}")
    except TypeError:
        return weakref.ref(held)


def test_what_is_kept_of_an_error_holds_no_frame() -> None:
    former = miss()
    assert former() is None
    (missed,) = missed_calls.take()
    told = missed.told_by("dispatch")
    assert isinstance(told, TypeError)
    assert str(told) == "no buffer but Held; this is told by its next call, dispatch"
