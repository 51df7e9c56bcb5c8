"""Operations on a device whose callers are streams, on the emulator; see stream_callers.cpp."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_programs import build_program
from tests.schedules.fault_catalogue import names_found_by


@pytest.fixture(scope="module")
def program() -> Path:
    return build_program("stream_callers")


def test_a_window_of_a_late_receive_is_kept(program: Path) -> None:
    ended = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ok\n", "", 0)


@pytest.mark.parametrize("fault", names_found_by("stream_callers"))
def test_faults_are_seen(program: Path, fault: str) -> None:
    ended = subprocess.run(
        [program, "--fault", fault], capture_output=True, text=True, check=False, timeout=300
    )
    assert "a window that a peer may write to is handed out" in ended.stderr
