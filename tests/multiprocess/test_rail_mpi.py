"""The MPI rail, under an mpirun of its own."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 330.0  # after a rank that hangs has said where

pytestmark = [
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun"),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="there is no mpi4py"),
]


def mpirun(num_ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    launch = ["mpirun", "-n", str(num_ranks), "--bind-to", "none", "--oversubscribe"]
    if os.geteuid() == 0:
        launch.append("--allow-run-as-root")
    # Waits of more ranks than cores must not spin.
    launch += ["--mca", "mpi_yield_when_idle", "1"]
    return subprocess.run(
        [*launch, sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.mark.parametrize(
    ("num_ranks", "num_local_ranks"), [(4, 2), pytest.param(3, 1, marks=pytest.mark.full)]
)
def test_nodes_joined_by_mpi(num_ranks: int, num_local_ranks: int) -> None:
    done = mpirun(num_ranks, "-m", "tests.helpers.mpi_ranks", str(num_local_ranks))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ok = sorted(line for line in done.stdout.splitlines() if line.startswith("ok "))
    assert ok == [f"ok {rank}" for rank in range(num_ranks)]
