"""What the emulator promises to kernels and to the runtime; the cases are C++ programs."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_programs import build_program

CASES = {
    "emulator_kernels": (
        "barrier_errors",
        "block_barrier",
        "deadlock",
        "exceptions",
        "idle",
        "many_launches",
        "measure",
        "named_barriers",
        "shapes",
        "shuffles",
        "stack_overflow",
        "thread_indices",
        "threads",
        "two_grids",
        "votes",
        "warp_errors",
    ),
    "emulator_memory": ("bulk_copies", "bulk_errors", "mbarrier_phases", "words"),
    "emulator_streams": (
        "capture",
        "capture_of_two_streams",
        "exit",
        "fork",
        "kernel_error",
        "memory_lifetime",
        "stream_order",
        "two_streams",
    ),
}
# These end in another way, or only measure.
OTHERS = ("measure", "stack_overflow")


@pytest.fixture(scope="module")
def programs() -> dict[str, Path]:
    return {name: build_program(name) for name in CASES}


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_listed(programs: dict[str, Path], name: str) -> None:
    assert tuple(run(programs[name]).stdout.split()) == CASES[name]


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, cases in CASES.items() for case in cases if case not in OTHERS],
)
def test_case(programs: dict[str, Path], name: str, case: str) -> None:
    ended = run(programs[name], case)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ok\n", "", 0)


def test_a_stack_that_overflows_faults(programs: dict[str, Path]) -> None:
    ended = run(programs["emulator_kernels"], "stack_overflow")
    assert (ended.stdout, ended.returncode) == ("deep enough\n", -signal.SIGSEGV)
