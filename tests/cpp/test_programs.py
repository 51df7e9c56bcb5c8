"""Programs that print "ok", or what they found; the source of each says what it watches."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.helpers.native_programs import build_program
from tests.helpers.source_tree import captured
from tests.schedules.fault_catalogue import names_found_by

# Those that have to see faults, which schedules do not find, and what they say of one.
SEEN = {
    "dispatch_kernel": "wanted|assign_slots",
    "kernel_rows": "differs|differ,",
    "stream_callers": "a window that a peer may write to is handed out",
}
PROGRAMS = [
    *SEEN,
    "region_pool",
    "socket_rail",
    "group_leaves",  # who leaves right after its group was made fails nobody who still makes it
    "group_evicts",  # who was given up hears of it at once, if others have gone on by then
    "mesh_leaves",  # who leaves is heard to the end by a peer that reads slowly
    "group_gathers",  # a call that all have entered ends well, though one that left it aborts
    "group_recovers",  # who is in recover() hears that another has given it up and shrinks
]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(build_program(name)), *arguments]
    return captured(command, timeout=300)


@pytest.mark.parametrize("name", PROGRAMS)
def test_all_is_well(name: str) -> None:
    ended = run(name)
    assert (ended.returncode, ended.stdout[:2]) == (0, "ok"), ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("name", "fault"), [(name, fault) for name in SEEN for fault in names_found_by(name)]
)
def test_faults_are_seen(name: str, fault: str) -> None:
    ended = run(name, fault)
    assert ended.returncode != 0, f"{fault} passes"
    assert re.search(SEEN[name], ended.stdout + ended.stderr), ended.stdout + ended.stderr
