from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moe_comm.cli.trace_report import perfetto_document, summarize_phases
from moe_comm.ep.tracing import PhaseRecord, read_trace, write_trace
from tests.helpers.command_line import output_of
from tests.helpers.plots import cell_numbers


def record(
    rank: int, phase: str, start_us: int, end_us: int, peer: int = -1, **other: Any
) -> PhaseRecord:
    values = {"buffer": 1, "epoch": 0, "operation": "dispatch"} | other
    return PhaseRecord(
        rank=rank, phase=phase, start_ns=start_us * 1000, end_ns=end_us * 1000, peer=peer, **values
    )


RECORDS = [
    record(0, "rows", 1000, 1010),
    record(0, "wait", 1002, 1008, peer=1),
    record(0, "data", 1010, 1050),
    record(1, "rows", 1001, 1009),
    record(1, "data", 1009, 1030),
    record(1, "done", 1030, 1060),
    record(1, "wait", 1031, 1055, peer=0),
    record(1, "rows", 2000, 2004, operation="combine", epoch=1),
]


def test_files_keep_records(tmp_path: Path) -> None:
    for rank_idx in (0, 1):
        own = [item for item in RECORDS if item.rank == rank_idx]
        file_name = write_trace(tmp_path / "run", rank_idx, own[:2])
        assert write_trace(tmp_path / "run", rank_idx, own[2:]) == file_name
        assert file_name.name == f"run.rank{rank_idx}.json"
        assert read_trace(file_name) == own


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "bad:2: not a trace record"),
        ('{"rank": 0}', "bad:2: not a trace record"),
        (
            '{"rank":0,"buffer":1,"epoch":0,"operation":"x","phase":"y","start_ns":5,"end_ns":4}',
            "ends at 4, before its start 5",
        ),
    ],
)
def test_broken_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    good = tmp_path / "good"
    file_name = write_trace(good, 0, RECORDS[:1])
    bad = tmp_path / "bad"
    bad.write_text(file_name.read_text() + line + "\n")
    with pytest.raises(ValueError, match=message):
        read_trace(bad)


def test_waits_count_under_the_phase_they_lie_in() -> None:
    found = {
        (s.operation, s.phase, s.rank, s.peer): (s.count, s.total_us)
        for s in summarize_phases(RECORDS)
    }
    assert found == {
        ("dispatch", "rows", 0, -1): (1, 4.0),
        ("dispatch", "rows", 0, 1): (1, 6.0),
        ("dispatch", "data", 0, -1): (1, 40.0),
        ("dispatch", "rows", 1, -1): (1, 8.0),
        ("dispatch", "data", 1, -1): (1, 21.0),
        ("dispatch", "done", 1, -1): (1, 6.0),
        ("dispatch", "done", 1, 0): (1, 24.0),
        ("combine", "rows", 1, -1): (1, 4.0),
    }
    assert summarize_phases(RECORDS)[0].total_us == 40.0


def test_perfetto_has_a_process_per_rank_and_relative_times() -> None:
    events = perfetto_document(RECORDS)["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(RECORDS)
    assert min(event["ts"] for event in slices) == 0.0
    wait = next(event for event in slices if event["name"] == "wait for rank 0")
    assert (wait["pid"], wait["ts"], wait["dur"]) == (1, 31.0, 24.0)


def test_convert_writes_one_file(tmp_path: Path) -> None:
    files = [
        str(write_trace(tmp_path / "run", i, [item for item in RECORDS if item.rank == i]))
        for i in (0, 1)
    ]
    out = tmp_path / "all.json"
    plot = tmp_path / "waits.svg"
    said = output_of("trace", "convert", *files, "--out", str(out), "--plot", str(plot))
    assert "waiting for rank 0" in said
    document = json.loads(out.read_text())
    assert sum(event["ph"] == "X" for event in document["traceEvents"]) == len(RECORDS)
    # Rank 0 waited 6 us, and rank 1 24 us.
    assert cell_numbers(plot) == ["0.006", "0.024"]


def test_convert_without_records_fails(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.touch()
    said = output_of("trace", "convert", str(empty), exit_code=1)
    assert "no records" in said
