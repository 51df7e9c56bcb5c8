"""Trace files: when every phase of every operation ran, and which peer it waited for.

Format: JSON lines, one record each, keys `rank`, `buffer`, `epoch`, `operation`, `phase`, `start_ns`,
`end_ns`, `peer`. Times are `CLOCK_MONOTONIC`, one clock for all processes of a machine. `peer` is the
last rank that was waited for, -1 where the phase waited for nobody.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path

from moe_comm.output_files import check_output

__all__ = [
    "NO_PEER",
    "PhaseRecord",
    "check_trace_path",
    "read_trace",
    "trace_file_name",
    "write_trace",
]

NO_PEER = -1
"""In place of a rank: nobody was waited for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseRecord:
    """One phase of one operation on one rank.

    Args:
        rank: Rank of the communicator.
        buffer: Id of the buffer.
        epoch: Epoch of the operation on that buffer.
        operation: Such as `"dispatch"`.
        phase: Such as `"rows"` or `"data"`.
        start_ns: `CLOCK_MONOTONIC`.
        end_ns: `CLOCK_MONOTONIC`, not before `start_ns`.
        peer: Last rank waited for, or `NO_PEER`.
    """

    rank: int
    buffer: int
    epoch: int
    operation: str
    phase: str
    start_ns: int
    end_ns: int
    peer: int = -1


def trace_file_name(path: str | Path, rank_idx: int) -> Path:
    """`PATH.rank<N>.json`, the file of one rank."""
    return Path(f"{path}.rank{rank_idx}.json")


def check_trace_path(path: str | None, rank_idx: int) -> None:
    """Return whether the file of one rank can be written, before the operations that it is to record.

    Raises:
        ValueError: `MOE_COMM_TRACE` names a place where it cannot.
    """
    if path is not None:
        check_output("MOE_COMM_TRACE", trace_file_name(path, rank_idx))


def write_trace(path: str | Path, rank_idx: int, records: Iterable[PhaseRecord]) -> Path:
    """Append the records of one rank to its file.

    Appending, because a process may hold several communicators.

    Args:
        path: Common part of the names, see `trace_file_name`.
        rank_idx: Rank that recorded.
        records: Its records.

    Returns:
        The file.
    """
    file_name = trace_file_name(path, rank_idx)
    with file_name.open("a", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(dataclasses.asdict(record), separators=(",", ":")) + "\n")
    return file_name


def read_trace(file_name: str | Path) -> list[PhaseRecord]:
    """The records of one file.

    Raises:
        ValueError: A line is not a record; names file, line and what is wrong.
        OSError: The file cannot be read.
    """
    records = []
    with Path(file_name).open(encoding="utf-8") as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = PhaseRecord(**json.loads(line))
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"{file_name}:{line_number}: not a trace record: {error}"
                ) from error
            if record.end_ns < record.start_ns:
                raise ValueError(
                    f"{file_name}:{line_number}: ends at {record.end_ns}, before its start "
                    f"{record.start_ns}"
                )
            records.append(record)
    return records
