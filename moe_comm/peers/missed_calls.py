"""Collective calls of this rank that come to nothing, while its peers are in them and wait.

Most mistakes are told at once, in the place of the call: see `Telling`. What is left is a call that Python itself rejects without an object to tell through, such as `dispatch(buffer="b")`:
it is kept here, by thread because ranks may be threads, until the next collective call tells it (`Communicator.tell_missed`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


GATHER = "gather"

# Keywords that calls have had.
_MOVED_ARGUMENTS = {
    "backend": "it is an argument of Communicator(group, backend=...), which is given to EpBuffer, or to "
    "group_buffers for all that takes the group alone"
}


class MissedCall(NamedTuple):
    """A call that peers wait in.

    Args:
        operation: "dispatch" or "combine" of a buffer, `GATHER` for an exchange of the communicator.
        kind: Type of the error that peers get.
        text: Text of the error that this rank raised, which itself would keep its frames and all
            they hold.
    """

    operation: str
    kind: type[TypeError | ValueError]
    text: str

    def as_peer_error(self, call: str) -> Exception:
        """The error as peers get it; `call` is what this rank did next."""
        return self.kind(f"{self.text}; this is told by its next call, {call}")


class _Kept(threading.local):
    calls: tuple[MissedCall, ...] = ()


kept = _Kept()
"""`kept.calls`: what this thread has still to tell, oldest first."""


def keep(operation: str, error: Exception) -> None:
    """Remember a call that raises `error` on this rank alone."""
    kind = TypeError if isinstance(error, TypeError) else ValueError
    kept.calls = (*kept.calls, MissedCall(operation, kind, str(error)))


def take() -> tuple[MissedCall, ...]:
    """Take the missed calls that are to be told now; none is left."""
    calls, kept.calls = kept.calls, ()
    return calls


class Telling:
    """A block in front of a collective call: whatever is raised in it, peers hear of it in place of the call.

    What is inside raises plain errors, and sends nothing. What ends a process (`KeyboardInterrupt`) is
    not told.

    Args:
        tell: Called with `place`, if there is one, and the error. Raises what every rank raises, as
            `EpBuffer.reject` does; where it returns, as `keep` does, the error is raised on this rank alone.
        place: Call that peers are in, as `tell` takes it; None for none.
        untold: Errors that every rank raises of itself, and peers do not hear of.

    Example:
        with Telling(buffer.reject, "dispatch"):
            check(mine)
        buffer.dispatch(mine, topk_idx)
    """

    __slots__ = ("_place", "_tell", "_untold")

    def __init__(
        self,
        tell: Callable[..., None],
        place: str | None = None,
        *,
        untold: type[Exception] | tuple[()] = (),
    ) -> None:
        self._tell = tell
        self._place = place
        self._untold = untold

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or not isinstance(error, Exception) or isinstance(error, self._untold):
            return
        if self._place is None:
            self._tell(error)
        else:
            self._tell(self._place, error)


def tells_peers(
    tell: Callable[[Exception, tuple[Any, ...], dict[str, Any]], None],
) -> Callable[[Callable[P, ResultT]], Callable[P, ResultT]]:
    """A decorator for collective calls: peers hear of arguments that Python cannot bind.

    An unknown keyword, a missing or a superfluous argument is a TypeError before the first line of a
    function runs, so that the function itself could tell nobody.

    Args:
        tell: Called with the error and the arguments as they were given. Raises what every rank
            raises; where it returns, the error is raised on this rank alone.
    """

    def decorate(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> ResultT:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if _raised_inside(error):
                    raise
                unbound = _with_hint(error)
                try:
                    tell(unbound, args, kwargs)
                    raise unbound from None
                finally:
                    # Or this frame, which it has passed, would keep it and the arguments.
                    del unbound

        return called

    return decorate


def _raised_inside(error: TypeError) -> bool:
    """Return whether an error has passed another frame than that of the call."""
    trace = error.__traceback__
    return trace is None or trace.tb_next is not None


def _with_hint(error: TypeError) -> TypeError:
    for name, instead in _MOVED_ARGUMENTS.items():
        if str(error).endswith(f"unexpected keyword argument '{name}'"):
            return TypeError(f"{error}: {instead}")
    return error


keeps_unbound = tells_peers(lambda error, args, kwargs: keep(GATHER, error))
"""For calls that begin with an exchange of a communicator which their arguments do not have."""
