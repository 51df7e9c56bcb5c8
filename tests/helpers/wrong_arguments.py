"""Wrong arguments, drawn from signatures: of one rank, one parameter after the other.

Every rank makes the same call; one of them with a value that is wrong in type, shape, dtype, device or
range, with an argument too many, or with one too few. Some values turn out to be allowed. What must hold
is that all ranks end alike, at once, and that the next call works.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from moe_comm import CommunicationError, Communicator

ARRIVAL_S = 20.0
"""Limit of a wait for a rank that does not come: no wrong argument may lead to it."""


def tensors_in(result: Any) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, tuple | list):
        return [tensor for each in result for tensor in tensors_in(each)]
    return []


def same_as_first() -> Callable[[Any], None]:
    """A check that every result has the bits of the first one."""
    first: list[torch.Tensor] | None = None

    def check(result: Any) -> None:
        nonlocal first
        found = tensors_in(result)
        if first is None:
            first = [tensor.clone() for tensor in found]
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True)), (first, found)

    return check


def ended(result: Any) -> Any:
    """A result, whose event or hook has been waited for."""
    for each in result if isinstance(result, tuple) else ():
        if hasattr(each, "current_stream_wait") and getattr(each, "event", None) is not None:
            each.current_stream_wait()
        elif callable(each):
            each()
    if hasattr(result, "event"):
        result.event.wait()
    return result


@dataclasses.dataclass(frozen=True)
class Entry:
    """A collective call.

    Args:
        function: Function whose signature is read.
        right: Arguments by name that are right on every rank.
        check: Raises where the result of the right call is wrong; unless given, where the bits of its
            tensors are not those of the first result.
        left_out: Parameters that are not tried, and changes, as "name: what", that choose another
            buffer than the peers': those are found late. "unbound": calls that Python rejects.
        finish: Function that makes a result complete; unless given, its event or hook is waited
            for.
    """

    function: Callable[..., Any]
    right: Mapping[str, Any]
    check: Callable[[Any], None] = dataclasses.field(default_factory=same_as_first)
    left_out: frozenset[str] = frozenset()
    finish: Callable[[Any], Any] = ended

    def call(self, change: Change | None = None) -> Any:
        """The right call, or one that differs from it."""
        arguments = dict(self.right)
        more: tuple[Any, ...] = ()
        if change is not None:
            arguments.update(change.values)
            for name in change.missing:
                del arguments[name]
            more = change.more
        names = [
            name
            for name, parameter in inspect.signature(self.function).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        if more and names:
            positional = [arguments.pop(name, None) for name in names]
            return self.finish(self.function(*positional, *more, **arguments))
        return self.finish(self.function(**arguments))


@dataclasses.dataclass(frozen=True)
class Change:
    """Difference of a call from the right one."""

    name: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    missing: tuple[str, ...] = ()
    more: tuple[Any, ...] = ()


def wrong_tensors(right: torch.Tensor) -> Iterator[tuple[str, Any]]:
    """Like `right`, but for one property."""
    yield "dtype int8", right.to(torch.int8)
    yield "dtype float64", right.to(torch.float64)
    yield "dtype complex64", right.to(torch.complex64)
    yield "dtype bool", right.to(torch.bool)
    yield "meta device", right.to("meta")
    yield "one dimension more", right[None]
    yield "no dimension", right.new_zeros(())
    if right.dim():
        yield "a row more", torch.cat([right, right[:1]]) if len(right) else right.new_zeros(3)
        yield "a row less", right[:-1]
        yield "one dimension less", right.flatten()[: len(right)]
    if right.dim() == 2 and right.shape[1] > 1:
        yield "a column less", right[:, :-1].contiguous()
        yield "strides", right.new_zeros(right.shape[::-1]).T
        yield "sparse", right.to_sparse()
    yield "as a list", right.tolist()


def wrong_values(right: Any) -> Iterator[tuple[str, Any]]:
    """Values that might be given in the place of `right`, and are most likely wrong."""
    if isinstance(right, torch.Tensor):
        yield from wrong_tensors(right)
    elif isinstance(right, bool):
        yield from (("2", 2), ("a tensor", torch.ones(2)))
    elif isinstance(right, int):
        yield from (("-1", -1), ("0", 0), ("2**40", 1 << 40), ("True", True), ("2.5", 2.5))
    else:
        yield from (("7", 7), ("-1", -1), ("True", True), ("a tensor", torch.ones(3)))
    yield from (("None", None), ("a string", "b"), ("an empty list", []), ("an object", object()))


def changes(entry: Entry) -> Iterator[Change]:
    """Every change of one parameter, and of their number."""
    parameters = inspect.signature(entry.function).parameters
    for name, parameter in parameters.items():
        if name in entry.left_out or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        right = entry.right.get(name, parameter.default)
        for what, value in wrong_values(right):
            if f"{name}: {what}" not in entry.left_out:
                yield Change(f"{name}: {what}", {name: value})
        is_needed = name in entry.right and parameter.default is parameter.empty
        if is_needed and "unbound" not in entry.left_out:
            yield Change(f"{name}: missing", missing=(name,))
    if "unbound" in entry.left_out:
        return
    yield Change("unknown keyword", {"no_such_argument": 1})
    if not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        yield Change("too many arguments", more=(None,) * (len(parameters) + 1))


def outcome_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of what a call raises; empty where it raises nothing."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return type(error).__name__, str(error)
    return "", ""


def told_by(calls: Any, call: str, change: Callable[[Any], Mapping[str, Any]] | None) -> str:
    """ "ValueError: rank 1: x must ...", which a method of `calls` raises with changed arguments."""
    return ": ".join(outcome_of(lambda: getattr(calls, call)(**(change(calls) if change else {}))))


def missing_of(told: str, rank_idx: int, wanted: str) -> list[str]:
    """Parts of "ValueError: 16 .. 24" that an error of a rank lacks: type, rank and pieces, in any order."""
    kind, *pieces = re.split(r": | \.\. ", wanted)
    beginning = f"{kind}: rank {rank_idx}: " if pieces else f"{kind}: "
    return [beginning] * (not told.startswith(beginning)) + [p for p in pieces if p not in told]


def try_all(
    entries: Callable[[], Mapping[str, Entry]],
    rank_idx: int,
    num_ranks: int,
    communicators: Callable[[], list[Communicator]],
    only: str = "",
    step: int = 1,
) -> list[str]:
    """Every change of every entry, on the last rank; what is not as it should be.

    Args:
        entries: Makes the calls, by name. Collective.
        rank_idx: This rank.
        num_ranks: Ranks of the default process group.
        communicators: Returns communicators that an error may have left aborted.
        only: Cases that have this in their name, for whoever looks for one.
        step: Number of successive changes of which one is tried.
    """
    found: list[str] = []
    made = entries()
    numbers = itertools.count()
    for entry_name, entry in made.items():
        entry.check(entry.call())
        for change in changes(entry):
            name = f"{entry_name}({change.name})"
            if only not in name or next(numbers) % step:
                continue
            is_wrong = rank_idx == num_ranks - 1
            outcome = outcome_of(lambda: entry.call(change if is_wrong else None))  # noqa: B023
            after = outcome_of(lambda: entry.check(entry.call()))  # noqa: B023
            gathered: list[Any] = [None] * num_ranks
            dist.all_gather_object(gathered, (outcome, after))
            problem = problem_with(gathered)
            if problem:
                found.append(f"{name}: {problem}")
                for communicator in communicators():
                    if communicator.native is not None and any(
                        "Peer" in kind for pair in gathered for kind, _ in pair
                    ):
                        communicator.recover()
    return found


def problem_with(gathered: list[tuple[tuple[str, str], tuple[str, str]]]) -> str:
    """Mistakes in how the ranks ended, or nothing."""
    outcomes = [outcome for outcome, _ in gathered]
    bad_rank = len(gathered) - 1
    for rank_idx, (_, (kind, text)) in enumerate(gathered):
        if kind:
            return f"the next call on rank {rank_idx}: {kind}: {text[:300]}; was {outcomes}"[:1500]
    # A rank that asks for what is not offered is told so; for peers, who did not ask, it is a wrong value.
    kinds = {"ValueError" if kind == "NotImplementedError" else kind for kind, _ in outcomes}
    if len(kinds) > 1:
        return f"ranks end differently: {outcomes}"[:1500]
    (kind,) = kinds
    if kind not in ("", "TypeError", "ValueError", "PlanError"):
        return f"raised {outcomes}"[:1500]
    for rank_idx, (_, text) in enumerate(outcomes):
        if kind and rank_idx != bad_rank and f"rank {bad_rank}" not in text:
            return f"rank {rank_idx} does not name rank {bad_rank}: {text[:300]}"
        if len(text) > 800:
            return f"a text of {len(text)} characters: {text[:300]}"
    return ""


__all__ = ["ARRIVAL_S", "Change", "CommunicationError", "Entry", "changes", "try_all"]
