"""Ranks that agree on a region of symmetric memory; needs no NVSHMEM."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["tests/cpp/region_pool.cpp", "csrc/nvshmem/region_pool.cpp"]


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_ranks_take_the_same_region(tmp_path: Path) -> None:
    program = tmp_path / "region_pool"
    flags = ["-std=c++20", "-Wall", "-Wextra", "-Wno-restrict", "-Werror", f"-I{ROOT / 'csrc'}"]
    sources = [ROOT / source for source in SOURCES]
    built = subprocess.run(
        ["c++", *flags, *sources, "-o", program], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout
