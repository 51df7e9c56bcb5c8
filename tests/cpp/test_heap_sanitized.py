"""Heap and sockets under ThreadSanitizer and AddressSanitizer, with ranks as threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_programs import build_program
from tests.helpers.source_tree import captured


@pytest.mark.full
@pytest.mark.parametrize("name", ["heap_stress", "mesh_stress", "socket_rail"])
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_heap_stress(sanitizer: str, name: str, tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    probe = tmp_path / "probe"
    probe.with_suffix(".cpp").write_text("int main() { return 0; }\n")
    command = ["g++", f"-fsanitize={sanitizer}", f"{probe}.cpp", "-o", str(probe)]
    if not _succeeds(command) or not _succeeds([str(probe)]):
        pytest.skip(f"programs with -fsanitize={sanitizer} do not build or run here")
    program = build_program(f"{name}_{sanitizer.replace(',', '_')}")
    ended = captured([str(program)], timeout=200)
    assert (ended.returncode, ended.stdout) == (0, "ok\n"), ended.stderr


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
