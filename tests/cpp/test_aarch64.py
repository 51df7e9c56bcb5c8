"""The native sources compile for aarch64, through the portable path and its fences."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.source_tree import captured

ROOT = Path(__file__).resolve().parents[2]
COMPILER = "aarch64-linux-gnu-g++"

# bindings needs Python's headers for the target, cuda and nvshmem NVIDIA's, which a cross compiler
# does not bring.
NOT_HERE = {"bindings", "cuda", "nvshmem"}
SOURCES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "csrc").rglob("*.cpp")
    if not NOT_HERE & set(path.parts) and not re.search(r"_avx(2|512)$", path.stem)
)


@pytest.mark.full
@pytest.mark.parametrize("source", SOURCES)
def test_compiles_for_aarch64(source: str, tmp_path: Path) -> None:
    if shutil.which(COMPILER) is None:
        pytest.skip(f"{COMPILER} is not installed")
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-I", "csrc"]
    compiled = captured([COMPILER, *flags, "-c", source, "-o", str(tmp_path / "out.o")], cwd=ROOT)
    assert compiled.returncode == 0, compiled.stderr
