"""`examples/train_elastic.py`: ranks are killed at random, and the losses are those of an undisturbed run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_elastic.py"


def _train(*arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), "--text-bytes", "20000", *arguments],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_losses_of_a_run_with_two_deaths() -> None:
    said = _train("--ranks", "3", "--steps", "14", "--kills", "2", "--no-return")
    assert "identical: 14 losses on 1 ranks at the end, 2 killed" in said
    assert said.count("failed") == 2


@pytest.mark.full
def test_losses_of_a_run_with_a_rank_that_returns() -> None:
    said = _train("--ranks", "3", "--steps", "10", "--kills", "1")
    assert "identical: 10 losses on 3 ranks at the end, 1 killed" in said
    assert "grew to 3 ranks" in said


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_losses_of_a_run_with_deaths_while_others_die(seed: int) -> None:
    """Two ranks die within 60 ms, several times: often the second in the middle of the shrink."""
    said = _train(
        *("--ranks", "4", "--steps", "30", "--kills", "3", "--at-once", "2"),
        *("--seed", str(seed)),
    )
    assert "identical: 30 losses" in said
