"""The MPI rail, under an mpiexec of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from moe_comm.cli.bench.peers.mpi_launcher import find_mpi
from tests.helpers.mpi_here import why_no_mpi
from tests.helpers.source_tree import captured

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 330.0  # after a rank that hangs has said where

pytestmark = pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi())


def mpiexec(num_ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return captured(
        [*find_mpi().command(num_ranks), sys.executable, *arguments], cwd=ROOT, timeout=TIMEOUT_S
    )


@pytest.mark.parametrize(
    ("num_ranks", "num_local_ranks"), [(4, 2), pytest.param(3, 1, marks=pytest.mark.full)]
)
def test_nodes_joined_by_mpi(num_ranks: int, num_local_ranks: int) -> None:
    done = mpiexec(num_ranks, "-m", "tests.helpers.mpi_ranks", str(num_local_ranks))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    ok = sorted(line for line in done.stdout.splitlines() if line.startswith("ok "))
    assert ok == [f"ok {rank}" for rank in range(num_ranks)]
