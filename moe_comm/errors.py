"""Exceptions that name who failed, where, and with which values.

A caller's mistake is a `ValueError` or `TypeError`; what a peer or the machine does to an
operation is one of the classes below.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

__all__ = [
    "CapacityError",
    "CheckpointError",
    "CommunicationError",
    "EvictedError",
    "Overflow",
    "PeerFailedError",
    "PeerTimeoutError",
    "RefitError",
    "has_timed_out",
    "interrupted_once",
]

_TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)


def has_timed_out(error: BaseException) -> bool:
    """Return whether an error of torch.distributed says that a limit ran out, which has no type of its own."""
    return _TIMED_OUT.search(str(error)) is not None


@contextlib.contextmanager
def interrupted_once() -> Iterator[None]:
    """Around what ends things: a second Ctrl-C ends it at once, but the first is what is raised.

    Launchers pass on the interrupt that the terminal has sent to every process already.
    """
    try:
        yield
    except KeyboardInterrupt as error:
        first = error.__context__
        while first is not None and not isinstance(first, KeyboardInterrupt):
            first = first.__context__
        if first is None:
            raise


class CommunicationError(RuntimeError):
    """An operation could not complete; the communicator is aborted until `recover()`.

    Attributes:
        ranks: Ranks of the communicator that caused it.
        operation: Operation that ended, such as `"dispatch"`.
        phase: Part of the operation that was waited for: `"rows"` (control rows), `"offers"` (a second window), `"data"` (rows, or
            done flags of peers), `"reuse"` (those of an earlier epoch), `"verdicts"` (of a batched copy);
            `"idle"` outside of these.
        epoch: Epoch of the buffer the operation belonged to, -1 outside an operation.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: Sequence[int] = (),
        operation: str = "",
        phase: str = "idle",
        epoch: int = -1,
    ) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.operation = operation
        self.phase = phase
        self.epoch = epoch


class PeerFailedError(CommunicationError):
    """A peer died, left, or gave up an operation in which it had already taken part."""


class PeerTimeoutError(CommunicationError):
    """A living peer entered an operation and stopped, or did not enter it within its limit."""


class EvictedError(CommunicationError):
    """Peers declared this rank failed (`Communicator.shrink`) and go on without it.

    Nothing this rank writes reaches them any more. Its communicator is of no further use; it may come
    back with `Communicator.join`.

    Attributes:
        ranks: Ranks that declared it.
        epoch: Last epoch that the declarer had completed, of its first buffer; -1 where it is not
            known.
    """


class CapacityError(RuntimeError):
    """The heap cannot hold what an operation needs; nothing was sent and the buffer is usable.

    Attributes:
        needed_bytes: Bytes that were asked for.
        available_bytes: Bytes that could have been had.
        ranks: Ranks that ran short.
        needed_rows: Rows the short rank would have received, per local expert.
    """

    def __init__(
        self,
        message: str,
        *,
        needed_bytes: int = 0,
        available_bytes: int = 0,
        ranks: Sequence[int] = (),
        needed_rows: Sequence[int] = (),
    ) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.ranks: tuple[int, ...] = tuple(ranks)
        self.needed_rows: tuple[int, ...] = tuple(needed_rows)


class Overflow(NamedTuple):
    """A limit of a dispatch that more rows were asked for than it allows.

    Args:
        rank_idx: Rank that the rows are of.
        expert_idx: The expert that the limit is of; None where it is of all rows of the rank.
        num_needed: Rows that were asked for.
        num_available: Rows that there is room for.
    """

    rank_idx: int
    expert_idx: int | None
    num_needed: int
    num_available: int


class RefitError(RuntimeError):
    """A target model does not hold what its source holds, or was left half-written by a failed refit.

    Attributes:
        ranks: Ranks whose target is concerned.
    """

    def __init__(self, message: str, *, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks: tuple[int, ...] = tuple(ranks)


class CheckpointError(RuntimeError):
    """Files of a checkpoint are not whole, not those that were asked for, or could not be written."""
