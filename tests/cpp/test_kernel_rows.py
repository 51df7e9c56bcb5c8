"""Kernels that add, scale and copy rows give the bytes of the CPU backend; so do no faulty ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_programs import build_program
from tests.schedules.fault_catalogue import names_found_by

# Faults that change bytes. The others, schedules find.
FAULTS = names_found_by("kernel_rows")


@pytest.fixture(scope="module")
def program() -> Path:
    return build_program("kernel_rows")


def test_bytes_are_those_of_the_cpu_backend(program: Path) -> None:
    ended = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(program: Path, fault: str) -> None:
    ended = subprocess.run(
        [program, fault], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 1, f"{fault} passes"
    assert "differs" in ended.stderr or "differ," in ended.stderr, ended.stderr
