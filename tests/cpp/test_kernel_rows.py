"""Kernels that add, scale and copy rows give the bytes of the CPU backend; so do no faulty ones."""

from __future__ import annotations

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

SOURCES = [
    "tests/cpp/kernel_rows.cpp",
    "tests/cpp/kernel_copies.cpp",
    *(f"csrc/kernels/{name}.cu" for name in ("combine", "weighted_gradient", "strided_copy")),
    *(f"csrc/simt/{name}.cpp" for name in ("direct_memory", "fiber", "grid", "scheduler")),
    *(f"csrc/host/{name}.cpp" for name in ("row_kernels", "row_kernels_portable", "strided_copy")),
    "csrc/core/sync.cpp",
    "csrc/layout/strided.cpp",
]
FLAGS = [
    *("-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"),
    *("-Wno-unknown-pragmas", "-DMOE_WITH_MUTANTS", '-DMOE_DEVICE_PRIMITIVES="simt/primitives.h"'),
    *("-I", str(ROOT / "csrc")),
]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-Wno-maybe-uninitialized"]
OF_INSTRUCTION_SET = {
    "csrc/host/row_kernels_avx2.cpp": ["-mavx2", "-mf16c"],
    "csrc/host/row_kernels_avx512.cpp": ["-mavx2", "-mf16c", *AVX512, "-Wno-uninitialized"],
}

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
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    folder = tmp_path_factory.mktemp("kernel_rows")
    sources = {source: list[str]() for source in SOURCES}
    if platform.machine() in ("x86_64", "AMD64"):
        sources |= OF_INSTRUCTION_SET

    def compile_one(source: str) -> str:
        made = folder / (source.replace("/", "_") + ".o")
        _run(["g++", *FLAGS, *sources[source], "-xc++", "-c", str(ROOT / source), "-o", str(made)])
        return str(made)

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = list(pool.map(compile_one, sources))
    program = folder / "kernel_rows"
    _run(["g++", *objects, "-o", str(program), "-lpthread"])
    return program


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


def _run(command: list[str]) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
