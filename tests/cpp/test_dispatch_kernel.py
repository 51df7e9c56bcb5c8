"""The dispatch kernel, emulated, against rows that plain loops put where the layouts say."""

from __future__ import annotations

import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"

FLAGS = [
    *("-std=c++20", "-O1", "-ffp-contract=off", "-Wno-unknown-pragmas", "-I", str(CSRC)),
    *('-DMOE_DEVICE_PRIMITIVES="simt/primitives.h"', "-DMOE_WITH_MUTANTS"),
]
# Faults that change bytes and nothing outside windows. The others, schedules find.
MUTANTS = ["slot_without_chunk_start", "slot_beyond_kept", "amax_of_one_lane", "padding_not_zeroed"]
INSTRUCTION_SETS = {
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-mavx2", "-mf16c", *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq"))],
}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    tmp_path = tmp_path_factory.mktemp("dispatch_kernel")
    sources = [
        ROOT / "tests/cpp/dispatch_kernel.cpp",
        CSRC / "kernels/dispatch.cu",
        CSRC / "layout/capacity.cpp",
        CSRC / "layout/routing.cpp",
        *(CSRC / "core").glob("*.cpp"),
        *(CSRC / "host").glob("row_kernels*.cpp"),
        *(CSRC / f"simt/{name}.cpp" for name in ("direct_memory", "fiber", "grid", "scheduler")),
    ]

    def compile_one(source: Path) -> str:
        instructions = INSTRUCTION_SETS.get(source.stem.split("_")[-1], [])
        if instructions and platform.machine() not in ("x86_64", "AMD64"):
            return ""
        target = tmp_path / f"{source.parent.name}_{source.name}.o"
        command = ["g++", *FLAGS, *instructions, "-xc++", "-c", str(source), "-o", str(target)]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
        assert built.returncode == 0, built.stderr
        return str(target)

    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = [target for target in pool.map(compile_one, sources) if target]
    # What a file of one instruction set shares with the others is kept from the first: last here.
    objects.sort(key=lambda target: "_avx" in target)
    program = tmp_path / "program"
    linked = subprocess.run(
        ["g++", *objects, "-o", str(program), "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert linked.returncode == 0, linked.stderr
    return program


def test_rows_lie_where_the_layouts_say(program: Path) -> None:
    ended = subprocess.run([program], capture_output=True, text=True, check=False, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.startswith("ok ")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_faults_are_seen(program: Path, mutant: str) -> None:
    ended = subprocess.run(
        [program, mutant], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == 1, f"{mutant} passes"
    assert "wanted" in ended.stdout or "assign_slots" in ended.stdout, ended.stdout
