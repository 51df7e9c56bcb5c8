"""All ranks go on, or all raise: what any of them finds wrong is an error on every one, in one wording.

Ranks tell each other before anything moves, in what they exchange anyway: objects over a bootstrap,
bytes over a communicator, a word in the row of an operation. What they raise then is worded here. For
the operations of native backends csrc/ops/agreement.cpp words it, alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from moe_comm.arguments import text_of
from moe_comm.errors import CapacityError, CheckpointError, PeerFailedError, PeerTimeoutError

KeyT = TypeVar("KeyT")
MineT = TypeVar("MineT")
SentT = TypeVar("SentT")
ReceivedT = TypeVar("ReceivedT")

Problem = Exception | str | None
"""Problem of one rank: an error, or the text of a ValueError; None for no problem."""

# Ranks that a message lists.
_MAX_RANKS = 8

_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind
    for kind in (
        CapacityError,
        CheckpointError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    )
}


class FirstError:
    """The first error of this rank, kept until all ranks have heard of it.

    A block under `with` that raises ends there, and its error is kept if it is the first. An error refers to
    the frames that it has passed, and they to all that they hold, such as the models of a caller: so it is
    kept in one place, which gives it away when it is raised.

    Args:
        error: Error that is known already, or None.

    Example:
        with FirstError() as first:
            check(mine)
        texts = all_gather(encode_problem(first.error))
        first.raise_own()
    """

    __slots__ = ("error",)

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def __bool__(self) -> bool:
        return self.error is not None

    def __enter__(self) -> FirstError:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.keep(error)
        return True

    def keep(self, error: Exception | None) -> None:
        """Keep an error, unless there is one already."""
        if self.error is None:
            self.error = error

    def take(self) -> Exception | None:
        """The error, which is not kept any more."""
        error, self.error = self.error, None
        return error

    def take_line(self) -> str | None:
        """Return the line by which other ranks hear of the error, or None; it is not kept any more."""
        error = self.take()
        return None if error is None else first_line(error)

    def raise_own(self) -> None:
        """Raise the error, if there is one; it is not kept any more."""
        error = self.take()
        try:
            if error is not None:
                raise error
        finally:
            del error  # or this frame, which it has passed, would keep it


def agree(
    all_gather: Callable[[Any], list[Any]], problem: Problem, mine: MineT | None = None
) -> list[MineT]:
    """Tell every rank what this one has, or what is wrong with it. Collective.

    Args:
        all_gather: Every rank's object, in rank order.
        problem: Problem of this rank, or None.
        mine: Data that the others are told; not sent if there is a problem.

    Returns:
        Every rank's `mine`, in rank order.

    Raises:
        Exception: See `raise_together`.
    """
    gathered = all_gather((problem, None if problem is not None else mine))
    raise_together([told for told, _ in gathered], problem)
    return [its for _, its in gathered]


def make_together(
    all_gather: Callable[[Any], list[Any]], problem: Problem, what: str, mine: MineT | None = None
) -> list[MineT]:
    """`agree` of ranks that are about to make something of their group, which must be the same thing.

    Args:
        all_gather: Every rank's object, in rank order.
        problem: Problem of this rank, or None.
        what: Name of what is made.
        mine: Data that the others are told besides.

    Returns:
        Every rank's `mine`, in rank order.

    Raises:
        ValueError: Ranks make different things; both are named.
        Exception: See `raise_together`.
    """
    gathered: list[tuple[str, Any]] = agree(all_gather, problem, (what, mine))
    raise_unequal("ranks make different things", [made for made, _ in gathered])
    return [its for _, its in gathered]


def raise_together(problems: Iterable[Problem], own: Problem = None) -> None:
    """Raise on every rank what any rank found wrong.

    Args:
        problems: Problems of all ranks, in order.
        own: Problem of this rank, as the cause of what it raises.

    Raises:
        Exception: Some rank has a problem; the message names all that have. Its type is that of the
            lowest rank's error, or its nearest base that takes a message alone.
    """
    found = [(rank_idx, each) for rank_idx, each in enumerate(problems) if each is not None]
    if not found:
        return
    lines = [f"rank {rank_idx}: {_text(each)}" for rank_idx, each in found[:_MAX_RANKS]]
    if len(found) > _MAX_RANKS:
        lines.append(f"and {len(found) - _MAX_RANKS} more ranks")
    raise _error_like(found[0][1], "; ".join(lines)) from (
        own if isinstance(own, Exception) else None
    )


def raise_different(what: str, said: Sequence[Mapping[str, object] | None]) -> None:
    """Raise on every rank the first thing that two ranks say differently.

    Args:
        what: Beginning of the message, such as "ranks ask for different rails".
        said: Values that must be equal, by name, of all ranks; None for a rank that takes no part.

    Raises:
        ValueError: Something differs; both values are named, and who says them.
    """
    present = [(rank_idx, mine) for rank_idx, mine in enumerate(said) if mine is not None]
    for rank_idx, mine in present:
        first_rank, first = present[0]
        for name, value in first.items():
            if mine[name] != value:
                raise ValueError(
                    f"{what}: {name} is {value} on rank {first_rank} and {mine[name]} on rank {rank_idx}"
                )


def raise_unequal(what: str, said: Sequence[str | None], shown: Callable[[str], str] = str) -> None:
    """Raise on every rank that two ranks are not in the same thing.

    Args:
        what: Beginning of the message.
        said: Text of every rank on what it is in; None for a rank that takes no part.
        shown: Function that returns a text as the message has it.

    Raises:
        ValueError: Two differ; both are named.
    """
    present = [(rank_idx, mine) for rank_idx, mine in enumerate(said) if mine is not None]
    for rank_idx, mine in present:
        first_rank, first = present[0]
        if mine != first:
            raise ValueError(
                f"{what}: {shown(first)} on rank {first_rank} met {shown(mine)} on rank {rank_idx}"
            )


def mismatched_transfers(
    sent: Mapping[KeyT, SentT],
    received: Mapping[KeyT, ReceivedT],
    stated: Callable[[SentT | ReceivedT], object] = lambda end: end,
) -> list[tuple[KeyT, SentT | None, ReceivedT | None]]:
    """The transfers from one rank to another whose two ends are not alike.

    Args:
        sent: Sender's end of every transfer, by a name that is the same on both ranks.
        received: Receiver's end of every transfer, by the same name.
        stated: Part of an end that must equal that of the other: its bytes, its dtype.

    Returns:
        (name, end of the sender, end of the receiver), None for an end that is missing: in the order of
        `sent`, then what is received alone.

    Example:
        `mismatched_transfers({1: 8, 2: 4}, {2: 5, 3: 6}) == [(1, 8, None), (2, 4, 5), (3, None, 6)]`.
    """
    unlike: list[tuple[KeyT, SentT | None, ReceivedT | None]] = []
    for key, there in sent.items():
        here = received.get(key)
        if here is None or stated(there) != stated(here):
            unlike.append((key, there, here))
    return unlike + [(key, None, here) for key, here in received.items() if key not in sent]


def encode_problem(problem: Problem) -> str:
    """A problem as text, for wires that carry bytes; "" for none."""
    if problem is None:
        return ""
    kind = type(problem).__name__ if isinstance(problem, Exception) else "ValueError"
    return f"{kind}\n{_text(problem)}"


def decode_problem(said: str) -> Problem:
    """Decode a rank's text from `encode_problem`; errors of kinds not in `_KINDS` become ValueErrors."""
    kind, _, text = said.partition("\n")
    return _KINDS.get(kind, ValueError)(text) if said else None


def first_line(error: BaseException) -> str:
    """Return the line by which other ranks hear of an error; its type's name says what its text does not."""
    text = str(error).split("\n", 1)[0]
    if isinstance(error, (TypeError, ValueError, PeerFailedError, PeerTimeoutError)):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def name_ranks(ranks: Sequence[int]) -> str:
    """Such as "rank 3" or "ranks 0, 1"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    shown = ", ".join(map(str, ranks[:_MAX_RANKS]))
    return f"ranks {shown}" + (" and more" if len(ranks) > _MAX_RANKS else "")


def _text(problem: Problem) -> str:
    return text_of(problem) if isinstance(problem, Exception) else str(problem)


def _error_like(problem: Problem, message: str) -> Exception:
    """An error of the type of `problem` that says `message`."""
    for kind in type(problem).__mro__ if isinstance(problem, Exception) else ():
        if not issubclass(kind, Exception):
            break
        try:
            return kind(message)
        except TypeError:
            continue
    return ValueError(message) if isinstance(problem, str) else RuntimeError(message)
