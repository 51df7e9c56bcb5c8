"""Kernels that add, scale and copy rows give the bytes of the CPU backend; so do no faulty ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_programs import build_program

# Faults that change bytes. Those that change the order of accesses only, schedules find.
MUTANTS = [
    "rows_added_out_of_order",
    "fused_multiply_add",
    "combine_next_row",
    "weight_of_first_choice",
    "nan_not_canonical",
    "pulled_weight_of_other_choice",
    "dot_of_scaled_gradient",
    "copy_tail_lost",
]


@pytest.fixture(scope="module")
def program() -> Path:
    return build_program("kernel_rows")


def test_bytes_are_those_of_the_cpu_backend(program: Path) -> None:
    ended = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr


@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_seen(program: Path, mutant: str) -> None:
    ended = subprocess.run(
        [program, mutant], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 1, f"{mutant} passes"
    assert "differs" in ended.stderr or "differ," in ended.stderr, ended.stderr
