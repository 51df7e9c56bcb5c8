"""Promises of the emulator to kernels and to the runtime; the cases are C++ programs."""

from __future__ import annotations

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_programs import ROOT, build_program, cases_of
from tests.helpers.source_tree import captured

CASES = {
    name: cases_of(name) for name in ("emulator_kernels", "emulator_memory", "emulator_streams")
}
# These end in another way, or only measure.
OTHERS = ("measure", "stack_overflow")


def run(program: Path, case: str) -> subprocess.CompletedProcess[str]:
    return captured([str(program), case], timeout=300)


@pytest.mark.parametrize(
    ("name", "case"),
    [(name, case) for name, cases in CASES.items() for case in cases if case not in OTHERS],
)
def test_case(name: str, case: str) -> None:
    ended = run(build_program(name), case)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ok\n", "", 0)


def test_a_stack_that_overflows_faults() -> None:
    ended = run(build_program("emulator_kernels"), "stack_overflow")
    assert (ended.stdout, ended.returncode) == ("deep enough\n", -signal.SIGSEGV)


@pytest.mark.full
@pytest.mark.parametrize("switch", ["MOE_SIMT_UCONTEXT", "MOE_SIMT_BOOST_CONTEXT"])
def test_other_ways_to_switch(switch: str, tmp_path: Path) -> None:
    """Switches of contexts that CMake chooses on other machines than this one."""
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
    built = captured(command)
    assert built.returncode == 0, built.stderr
    for case in CASES["emulator_kernels"]:
        if case not in OTHERS:
            ended = run(program, case)
            assert (ended.stdout, ended.returncode) == ("ok\n", 0), case
