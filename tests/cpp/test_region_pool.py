"""Ranks that agree on a region of symmetric memory; needs no NVSHMEM."""

from __future__ import annotations

import subprocess

from tests.helpers.native_programs import build_program


def test_ranks_take_the_same_region() -> None:
    program = build_program("region_pool")
    done = subprocess.run([program], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout
