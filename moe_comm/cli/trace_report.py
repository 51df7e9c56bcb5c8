"""Perfetto file of phase records, and who waited for whom."""

from __future__ import annotations

import bisect
import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from moe_comm.ep.tracing import NO_PEER, PhaseRecord

WAIT_PHASE = "wait"
"""Phase of a record that says which peer was waited for; it lies inside a record of a real phase."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseSummary:
    """One phase of one operation on one rank: its own work, or its waiting for one peer.

    Args:
        operation: Name of the operation, such as `"dispatch"`.
        phase: Name of the phase, such as `"rows"`.
        rank: Rank that spent the time.
        peer: Rank waited for, -1 for the rank's own work.
        count: Number of times.
        total_us: Sum.
        p50_us: Median.
        max_us: Longest.
    """

    operation: str
    phase: str
    rank: int
    peer: int
    count: int
    total_us: float
    p50_us: float
    max_us: float


def perfetto_document(records: Iterable[PhaseRecord]) -> dict[str, Any]:
    """The Chrome trace event format, which Perfetto opens: a process per rank, a track per buffer."""
    records = sorted(records, key=lambda record: (record.start_ns, -record.end_ns))
    # Times since boot have so many digits that a viewer's floats lose nanoseconds.
    origin_ns = records[0].start_ns if records else 0
    events: list[dict[str, Any]] = []
    for rank in sorted({record.rank for record in records}):
        events.append(_metadata("process_name", rank, 0, {"name": f"rank {rank}"}))
        events.append(_metadata("process_sort_index", rank, 0, {"sort_index": rank}))
    for rank, buffer in sorted({(record.rank, record.buffer) for record in records}):
        events.append(_metadata("thread_name", rank, buffer, {"name": f"buffer {buffer}"}))
    for record in records:
        is_wait = record.peer != NO_PEER
        name = f"wait for rank {record.peer}" if is_wait else f"{record.operation}: {record.phase}"
        events.append(
            {
                "ph": "X",
                "name": name,
                "cat": "wait" if is_wait else record.operation,
                "pid": record.rank,
                "tid": record.buffer,
                "ts": (record.start_ns - origin_ns) / 1e3,
                "dur": (record.end_ns - record.start_ns) / 1e3,
                "args": {
                    "operation": record.operation,
                    "epoch": record.epoch,
                    "phase": record.phase,
                    "peer": record.peer,
                },
            }
        )
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _metadata(name: str, rank: int, buffer: int, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": rank, "tid": buffer, "args": arguments}


def summarize_phases(records: Sequence[PhaseRecord]) -> list[PhaseSummary]:
    """Summarize the time of each rank in each phase, and the ranks it waited for; longest total first.

    A wait counts under the phase it lies in, and is taken off that phase's own work.
    """
    durations_us: dict[tuple[str, str, int, int], list[float]] = defaultdict(list)
    for group in _by_operation(records).values():
        phases = sorted(
            (record for record in group if record.phase != WAIT_PHASE),
            key=lambda record: record.start_ns,
        )
        starts = [record.start_ns for record in phases]
        waited_us = [0.0] * len(phases)
        for record in group:
            if record.phase != WAIT_PHASE:
                continue
            us = (record.end_ns - record.start_ns) / 1e3
            at = bisect.bisect_right(starts, record.start_ns) - 1
            is_inside = at >= 0 and record.start_ns <= phases[at].end_ns
            if is_inside:
                waited_us[at] += us
            phase = phases[at].phase if is_inside else WAIT_PHASE
            durations_us[record.operation, phase, record.rank, record.peer].append(us)
        for record, waited in zip(phases, waited_us, strict=True):
            us = (record.end_ns - record.start_ns) / 1e3
            key = (record.operation, record.phase, record.rank, record.peer)
            durations_us[key].append(max(0.0, us - waited))
    summaries = [_summarize(key, values) for key, values in durations_us.items()]
    return sorted(summaries, key=lambda summary: -summary.total_us)


def waited_us(summaries: Sequence[PhaseSummary]) -> dict[tuple[int, int], float]:
    """Return microseconds by (rank that waited, rank waited for), of every pair of other ranks that there is."""
    ranks = {summary.rank for summary in summaries}
    waited = {(rank, peer): 0.0 for rank in ranks for peer in ranks if rank != peer}
    for summary in summaries:
        if summary.peer != NO_PEER:
            pair = (summary.rank, summary.peer)
            waited[pair] = waited.get(pair, 0.0) + summary.total_us
    return waited


def _by_operation(
    records: Iterable[PhaseRecord],
) -> dict[tuple[int, int, int, str], list[PhaseRecord]]:
    groups: dict[tuple[int, int, int, str], list[PhaseRecord]] = defaultdict(list)
    for record in records:
        groups[record.rank, record.buffer, record.epoch, record.operation].append(record)
    return groups


def _summarize(key: tuple[str, str, int, int], values: list[float]) -> PhaseSummary:
    operation, phase, rank, peer = key
    values.sort()
    return PhaseSummary(
        operation=operation,
        phase=phase,
        rank=rank,
        peer=peer,
        count=len(values),
        total_us=sum(values),
        p50_us=values[len(values) // 2],
        max_us=values[-1],
    )
