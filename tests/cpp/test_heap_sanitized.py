"""Heap and sockets under ThreadSanitizer and AddressSanitizer, with ranks as threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What a program needs of csrc besides heap.
SOURCES = {"socket_rail": ["core/*.cpp", "host/socket_rail.cpp"]}


@pytest.mark.full
@pytest.mark.parametrize("name", ["heap_stress", "mesh_stress", "socket_rail"])
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_heap_stress(sanitizer: str, name: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    flags = ["-std=c++20", "-O1", "-g", f"-fsanitize={sanitizer}", "-I", str(ROOT / "csrc")]
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() { return 0; }\n")
    program = tmp_path / "program"
    if not _succeeds(["g++", *flags, str(probe), "-o", str(program)]) or not _succeeds(
        [str(program)]
    ):
        pytest.skip(f"programs with -fsanitize={sanitizer} do not build or run here")
    patterns = ["heap/*.cpp", *SOURCES.get(name, [])]
    sources = [source for pattern in patterns for source in (ROOT / "csrc").glob(pattern)]
    sources.append(ROOT / f"tests/cpp/{name}.cpp")
    built = subprocess.run(
        ["g++", *flags, *map(str, sources), "-o", str(program), "-lpthread"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    ended = subprocess.run([str(program)], capture_output=True, text=True, check=False, timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
