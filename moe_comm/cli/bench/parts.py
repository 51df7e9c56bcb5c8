"""Parts of the time of a call: taken apart with the phases that the host backend records."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from moe_comm.cli.bench.statistics import Interval, percentile
from moe_comm.ep.tracing import NO_PEER, PhaseRecord

if TYPE_CHECKING:
    from moe_comm.ep.backends.host import HostBackend

PARTS = ("python", "binding", "rows", "waiting", "copies")
"""Names from the outside inwards: what is spent before the native call and after it; in the native call outside
the exchange; in the exchange outside the copies, in saying and hearing who sends what where; in waiting for
peers; in moving rows and adding them."""

COPY_PHASE = "data"

Parts = dict[str, float]
"""Microseconds of one call by the names of `PARTS`; their sum is the time of the call."""


class _TimedEndpoint:
    """Stands before a native endpoint and notes how long every dispatch and combine takes."""

    def __init__(self, endpoint: Any, spent_ns: list[int]) -> None:
        self._endpoint = endpoint
        self._spent_ns = spent_ns
        for name in ("dispatch", "combine"):
            setattr(self, name, self._timed(getattr(endpoint, name)))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start_ns = time.perf_counter_ns()
            submitted = call(*arguments)
            # A call whose arguments were not seen to be in order is made again.
            if submitted is not None:
                self._spent_ns.append(time.perf_counter_ns() - start_ns)
            return submitted

        return timed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._endpoint, name)


@contextlib.contextmanager
def timed_native_calls(backend: HostBackend) -> Iterator[list[int]]:
    """Nanoseconds of every native call that the backend makes inside, in order."""
    spent_ns: list[int] = []
    endpoint = backend._endpoint
    backend._endpoint = _TimedEndpoint(endpoint, spent_ns)  # type: ignore[assignment]  # in its place
    try:
        yield spent_ns
    finally:
        backend._endpoint = endpoint


def take_apart(
    calls: Sequence[Interval], native_ns: Sequence[int], records: Sequence[PhaseRecord]
) -> list[Parts]:
    """The parts of synchronous calls on one buffer of one rank.

    `python` is a call less its native call, and `binding` the native call less the exchange: both are
    differences. The others are sums of recorded phases.

    Args:
        calls: Start and end of every call, in order.
        native_ns: Nanoseconds of the native call of each, as `timed_native_calls` has them.
        records: Records of all of them and of nothing else.

    Raises:
        RuntimeError: There are not as many of each.
    """
    by_epoch: dict[int, list[PhaseRecord]] = defaultdict(list)
    for record in records:
        by_epoch[record.epoch].append(record)
    if not len(calls) == len(native_ns) == len(by_epoch):
        raise RuntimeError(
            f"{len(calls)} calls made {len(native_ns)} native calls and left records of "
            f"{len(by_epoch)} operations: they cannot be taken apart"
        )
    taken = []
    for (start_ns, end_ns), spent_ns, epoch in zip(calls, native_ns, sorted(by_epoch), strict=True):
        inside_ns = dict.fromkeys(("rows", "waiting", "copies"), 0)
        for record in by_epoch[epoch]:
            part = "copies" if record.phase == COPY_PHASE else "rows"
            if record.peer != NO_PEER:
                part = "waiting"
            inside_ns[part] += record.end_ns - record.start_ns
        exchange_ns = sum(inside_ns.values())
        outside_ns = {
            "python": end_ns - start_ns - spent_ns,
            "binding": spent_ns - exchange_ns,
        }
        taken.append({name: ns / 1e3 for name, ns in (outside_ns | inside_ns).items()})
    return taken


def middle_half(taken: Sequence[Parts]) -> Parts:
    """Means over the calls whose time lies between the quartiles, so that parts still add up.

    Medians of the parts would not; a mean over all calls is that of the few in which the process slept.

    Raises:
        ValueError: There are no calls.
    """
    totals = [sum(parts.values()) for parts in taken]
    low, high = percentile(totals, 0.25), percentile(totals, 0.75)
    kept = [parts for parts, us in zip(taken, totals, strict=True) if low <= us <= high]
    # Neither of two calls lies between the quartiles.
    kept = kept or list(taken)
    return {name: sum(parts[name] for parts in kept) / len(kept) for name in PARTS}
