"""Ranks that are threads of a program, one of whose service threads is held where it hurts."""

from __future__ import annotations

import subprocess

import pytest

from tests.helpers.native_programs import build_program


@pytest.mark.parametrize(
    "name",
    [
        "group_leaves",  # who leaves right after its group was made fails nobody who still makes it
        "group_evicts",  # who was given up hears of it at once, if others have gone on by then
        "mesh_leaves",  # who leaves is heard to the end by a peer that reads slowly
        "group_gathers",  # a call that all have entered ends well, though one that left it aborts
        "group_recovers",  # who is in recover() hears that another has given it up and shrinks
    ],
)
def test_nobody_waits_for_a_service_thread(name: str) -> None:
    program = build_program(name)
    ended = subprocess.run([program], capture_output=True, text=True, check=False, timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr
