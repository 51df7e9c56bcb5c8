"""What the emulator promises to kernels and to the runtime; the cases are C++ programs."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_programs import ROOT, build_program

CASES = {
    "emulator_kernels": (
        "barrier_errors",
        "block_barrier",
        "deadlock",
        "exceptions",
        "idle",
        "many_launches",
        "measure",
        "shapes",
        "shuffles",
        "stack_overflow",
        "thread_indices",
        "threads",
        "two_grids",
        "votes",
        "warp_errors",
    ),
    "emulator_memory": (
        "bulk_copies",
        "bulk_errors",
        "mbarrier_phases",
        "puts",
        "quiet",
        "words",
    ),
    "emulator_streams": (
        "capture",
        "capture_of_two_streams",
        "exit",
        "fork",
        "kernel_error",
        "marks_of_captured_streams",
        "marks_of_ended_streams",
        "memory_lifetime",
        "polling",
        "stream_marks",
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
        [str(program), *arguments], capture_output=True, text=True, check=False, timeout=300
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


@pytest.mark.full
@pytest.mark.parametrize("switch", ["MOE_SIMT_UCONTEXT", "MOE_SIMT_BOOST_CONTEXT"])
def test_other_ways_to_switch(switch: str, tmp_path: Path) -> None:
    """What CMake chooses on other machines than this one."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    flags = ["-std=c++20", "-O1", f"-D{switch}", "-I", str(ROOT / "csrc")]
    libraries = ["-lpthread"]
    if switch == "MOE_SIMT_BOOST_CONTEXT":
        libraries.append("-lboost_context")
        probe = tmp_path / "probe.cpp"
        probe.write_text("#include <boost/context/detail/fcontext.hpp>\nint main() {}\n")
        command = ["g++", *flags, str(probe), "-o", str(tmp_path / "probe"), *libraries]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("Boost.Context is not installed")
    names = (
        *("simt/direct_memory", "simt/fiber", "simt/grid", "simt/scheduler"),
        *("core/process", "core/sync"),
    )
    sources = [
        ROOT / "tests/cpp/emulator_kernels.cpp",
        *(ROOT / f"csrc/{name}.cpp" for name in names),
    ]
    flags.append('-DMOE_DEVICE_PRIMITIVES="simt/primitives.h"')
    program = tmp_path / "program"
    command = ["g++", *flags, *map(str, sources), "-o", str(program), *libraries]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    for case in CASES["emulator_kernels"]:
        if case not in OTHERS:
            ended = run(program, case)
            assert (ended.stdout, ended.returncode) == ("ok\n", 0), case
