"""`examples/balanced_moe.py`: experts move when the hot ones change, and sums stay right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "balanced_moe.py"


@pytest.mark.full
def test_the_balancer_follows_the_routing() -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), "--ranks", "2", "--steps", "62"],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = re.findall(
        r"step (\d+): fullest rank (\d+) -> (\d+) rows \(mean (\d+)\), (\d+) experts", ended.stdout
    )
    moves = [[int(number) for number in line] for line in lines]
    assert moves[0][0] == 20
    assert moves[-1][0] == 60  # the hot experts have changed at 40
    for _, before, after, mean, num_moves in moves:
        assert mean <= after < before
        assert num_moves > 0
    # In the window after the first move the fullest rank is near the mean.
    assert moves[0][2] < 1.05 * moves[0][3] < moves[0][1]
