"""The rail over sockets, between threads: whole messages, in order, and no more than a window."""

from __future__ import annotations

import subprocess

from tests.helpers.native_programs import build_program


def test_socket_rail() -> None:
    program = build_program("socket_rail")
    ended = subprocess.run([program], capture_output=True, text=True, check=False, timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr
