"""A rank, a thread, that leaves right after its group was made fails nobody who still makes it."""

from __future__ import annotations

import subprocess

from tests.helpers.native_programs import build_program


def test_who_leaves_early_fails_nobody() -> None:
    program = build_program("group_leaves")
    ended = subprocess.run([program], capture_output=True, text=True, check=False, timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr
