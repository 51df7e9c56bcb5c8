"""Programs of tests/cpp that CMake builds from the objects of the modules."""

from __future__ import annotations

import fcntl
import functools
import re
import sys
from pathlib import Path

import pytest

from tests.helpers.source_tree import captured

ROOT = Path(__file__).resolve().parents[2]


@functools.cache
def build_program(name: str) -> Path:
    """Brings the target `name` up to date in the directory that the in-place build keeps."""
    build_dir = ROOT / "build" / f"native-inplace-{sys.implementation.cache_tag}"
    if not (build_dir / "build.ninja").exists():
        pytest.skip(f"{build_dir} was not configured; `make build` does it")
    cache = (build_dir / "CMakeCache.txt").read_text()
    cmake = cache.split("CMAKE_COMMAND:INTERNAL=")[1].splitlines()[0]
    # The lock that setup.py takes.
    with build_dir.with_suffix(".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        built = captured([cmake, "--build", str(build_dir), "--target", name])
    assert built.returncode == 0, built.stdout + built.stderr
    return build_dir / name


def cases_of(name: str) -> list[str]:
    """Names of the cases that the source of a program defines."""
    source = (ROOT / "tests/cpp" / f"{name}.cpp").read_text()
    return re.findall(r"^MOE_CASE\((\w+)\)", source, re.MULTILINE)
