"""Runs a case: every way is checked, then all of them take turns in rounds."""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moe_comm.cli.bench.checkpoint.case import CheckpointCase
from moe_comm.cli.bench.checkpoint.worker import FILES, PLAIN, STATE, TORCH, CheckpointWorker
from moe_comm.cli.bench.processes import WorkerError, WorkerProcesses
from moe_comm.cli.bench.result import MeasuredRow
from moe_comm.cli.bench.statistics import (
    Pair,
    all_wall_times_us,
    makespan_us,
    median_ratio,
    medians,
    percentile,
    time_columns,
)

CHECKPOINT_PEERS = (TORCH, STATE, "transformers")
"""torch with DTensors; torch with `CheckpointState` and `MappedFileReader`; `from_pretrained`."""

IN_MEMORY = ("tmpfs", "ramfs")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointRow(MeasuredRow):
    """One operation by one way, measured.

    Args:
        op: "save", "load" (files are in memory), "load cold" or "from_pretrained".
        way: `FILES` or `STATE`.
        case: Case as JSON writes it.
        peak_bytes: Memory that the operation took at its peak, the largest of the ranks', by way.
        pairs: Every single measurement; their roofs are plain files, right before and right after.
    """

    op: str
    way: str
    case: dict[str, Any]
    peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    pairs: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON writes it."""
        return {"op": self.op, "way": self.way, **self.case, **super().to_dict()}


def file_system(folder: Path) -> str:
    """Return the kind of file system that a folder is on, "unknown" where the kernel does not say."""
    best = Path("/"), "unknown"
    place = folder.resolve()
    try:
        mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return best[1]
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        mount = Path(fields.split()[4].replace("\\040", " "))
        if place.is_relative_to(mount) and len(mount.parts) >= len(best[0].parts):
            best = mount, rest.split()[0]
    return best[1]


def run_checkpoint(
    case: CheckpointCase,
    peers: tuple[str, ...],
    num_repeats: int,
    on_progress: Callable[[str], None] = lambda _: None,
) -> list[CheckpointRow]:
    """Check a case, then measure it.

    Args:
        case: The case.
        peers: Peers to measure, of `TORCH` and `STATE`.
        num_repeats: Rounds.
        on_progress: Called with a short text after every step.

    Raises:
        WorkerError: A rank failed, or an element is wrong.
    """
    ways = (FILES, *(way for way in (STATE, TORCH) if way in peers))
    operations = ["save", "load", "load cold"]
    if file_system(case.folder) in IN_MEMORY:
        operations.remove("load cold")
    times: dict[str, dict[str, list[list[tuple[int, int]]]]] = {
        operation: defaultdict(list) for operation in operations
    }
    on_progress("weights")
    with WorkerProcesses(case.num_ranks, functools.partial(CheckpointWorker, case)) as ranks:
        for way in ways:
            on_progress(f"check {way}")
            problems = [problem for problem in ranks.call("check", way) if problem is not None]
            if problems:
                # A wrong operation has no speed.
                raise WorkerError(f"the check of {way} failed: " + "; ".join(problems))
        for number in range(num_repeats):
            turn = number % len(ways)
            for operation in operations:
                for way in (PLAIN, *ways[turn:], *ways[:turn], PLAIN):
                    on_progress(f"{operation} {number + 1}/{num_repeats}: {way}")
                    if operation == "save":
                        found = ranks.call("save", way)
                    else:
                        found = ranks.call("load", way, operation == "load cold")
                    times[operation][way].append(found)
    return [
        _row(case, operation, way, times[operation])
        for operation in operations
        for way in ways
        if way != TORCH
    ]


def _row(
    case: CheckpointCase,
    operation: str,
    way: str,
    times: dict[str, list[list[tuple[int, int]]]],
) -> CheckpointRow:
    spans = {each: list(map(makespan_us, found)) for each, found in times.items()}
    plain = spans.pop(PLAIN)
    ours = spans.pop(way)
    pairs = [
        Pair(op_us=op_us, roof_before_us=before, roof_after_us=after)
        for op_us, before, after in zip(ours, plain[::2], plain[1::2], strict=True)
    ]
    return CheckpointRow(
        op=operation,
        way=way,
        case=case.to_dict(),
        **time_columns(all_wall_times_us(times[way]), percentile(ours, 0.5), case.num_bytes),
        roof_gbs=percentile([case.num_bytes / pair.roof_us / 1e3 for pair in pairs], 0.5),
        fraction_of_roof=percentile([pair.fraction for pair in pairs], 0.5),
        speedup={peer: median_ratio(found, ours) for peer, found in spans.items()},
        peer_p50_us=medians({peer: all_wall_times_us(times[peer]) for peer in spans}),
        pairs=[dataclasses.asdict(pair) for pair in pairs],
    )
