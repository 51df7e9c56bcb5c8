"""The dispatch kernel, emulated, against rows that plain loops put where the layouts say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_programs import build_program
from tests.schedules.fault_catalogue import names_found_by

# Faults that change bytes and nothing outside windows. The others, schedules find.
FAULTS = names_found_by("dispatch_kernel")


@pytest.fixture(scope="module")
def program() -> Path:
    return build_program("dispatch_kernel")


def test_rows_lie_where_the_layouts_say(program: Path) -> None:
    ended = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("ok ")


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(program: Path, fault: str) -> None:
    ended = subprocess.run(
        [program, fault], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 1, f"{fault} passes"
    assert "wanted" in ended.stdout or "assign_slots" in ended.stdout, ended.stdout
