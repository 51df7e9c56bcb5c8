"""Every pipeline of bulk copies before a static checker of PTX: barriers, byte counts and races in all schedules.

The checker (sentryward) reads what nvcc makes of the package's own classes, called by the kernels of bulk_pipelines.cu. It
models neither fences nor groups of bulk stores (ptx_checked.cuh), so faults of those are left to the emulator.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.source_tree import captured
from tests.schedules.fault_catalogue import read_catalogue, write_copies

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed: no PTX"),
    pytest.mark.skipif(
        importlib.util.find_spec("sentryward") is None,
        reason="sentryward is not installed (it comes with the extra `test` on Linux, x86-64)",
    ),
]

# Dynamic shared memory of one warp.
PIPELINES = {
    "stage_ring": 2048,
    "stage_ring_of_one_lane": 2048,
    "staged_rows": 128 + 3 * 4096 + 64,
    "staged_copies": 4 * 4104,
}
# More than the stages of any: each is filled again, twice with the most.
NUM_PIECES = (1, 4, 9)
# By fault of the catalogue, where it shows.
FAULTS = {
    "half_a_copy_expected": "staged_copies",
    "half_a_piece_expected": "staged_rows",
    "half_a_stage_expected": "stage_ring",
    "combine_parity_stuck": "staged_rows",
    "copy_parity_stuck": "staged_copies",
    "stage_parity_never_flips": "stage_ring_of_one_lane",
    "other_lanes_not_awaited": "stage_ring",
    "stage_refilled_before_read": "staged_rows",
}
# Stands in the place of schedules/fault.h: the compiler decides which fault is in.
FAULT_HEADER = """#pragma once
constexpr bool is_named(const char* name, const char* wanted) {
  while (*name != '\\0' && *name == *wanted) {
    ++name;
    ++wanted;
  }
  return *name == *wanted;
}
#define MOE_FAULT(name) is_named(#name, MOE_FAULT_NAME)
"""


def compile_pipelines(target: Path, num_pieces: int, *flags: str) -> None:
    """Writes PTX of all pipelines for so many pieces."""
    subprocess.run(
        [
            *("nvcc", "-std=c++20", "--expt-relaxed-constexpr", "-ptx", "-arch=compute_100"),
            *(*flags, "-Icsrc", "-Itests", f"-DMOE_NUM_PIECES={num_pieces}u"),
            '-DMOE_DEVICE_PRIMITIVES="cpp/ptx_checked.cuh"',
            *("-o", str(target), "tests/cpp/bulk_pipelines.cu"),
        ],
        check=True,
        cwd=ROOT,
    )


def check(ptx: Path, pipeline: str) -> str:
    """Verdict of the checker on one kernel: `race_free`, or what it has found."""
    launch = {
        "grid_dim": [1, 1, 1],
        "block_dim": [32, 1, 1],
        "cluster_dim": [1, 1, 1],
        "dynamic_shared_bytes": PIPELINES[pipeline],
    }
    config = ptx.with_suffix(f".{pipeline}.json")
    config.write_text(
        json.dumps({"schema": "spverify.kernel-input/v1", "entry": pipeline, "launch": launch})
    )
    done = captured(
        [sys.executable, "-m", "sentryward", ptx, "--input", config, "--timeout", "120"]
    )
    said = json.loads(done.stdout)
    if said["result"] == "race_free":
        assert said["checks"]["synchronization"] == said["checks"]["memory"] == "passed"
    return str(said["result"])


@functools.cache
def write_faulty_sources(folder: Path) -> tuple[str, str]:
    """Flags for sources that have every fault of the catalogue, for the compiler to choose one."""
    header = folder / "switch/schedules/fault.h"
    header.parent.mkdir(parents=True)
    header.write_text(FAULT_HEADER)
    write_copies(ROOT / "csrc", folder / "sources", read_catalogue()[1])
    return f"-I{folder}/switch", f"-I{folder}/sources"


@pytest.mark.parametrize("num_pieces", NUM_PIECES)
def test_no_schedule_of_a_pipeline_is_wrong(tmp_path: Path, num_pieces: int) -> None:
    ptx = tmp_path / "pipelines.ptx"
    compile_pipelines(ptx, num_pieces)
    assert {pipeline: check(ptx, pipeline) for pipeline in PIPELINES} == dict.fromkeys(
        PIPELINES, "race_free"
    )


@pytest.mark.parametrize("fault", ["none", *FAULTS])
def test_a_fault_of_the_catalogue_is_found(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, fault: str
) -> None:
    folders = write_faulty_sources(tmp_path_factory.getbasetemp() / "faulty")
    ptx = tmp_path / "pipelines.ptx"
    compile_pipelines(ptx, 6, *folders, f'-DMOE_FAULT_NAME="{fault}"')
    pipeline = FAULTS.get(fault, "staged_rows")
    found = check(ptx, pipeline)
    assert found == ("race_free" if fault == "none" else "not_wellsynced")
