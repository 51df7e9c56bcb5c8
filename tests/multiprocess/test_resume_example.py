"""`examples/resume_moe.py`: its claim on a few steps, and what it says when bits differ."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import types
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.parametrize("ranks", ["2,3,1", pytest.param("4,3,1", marks=pytest.mark.full)])
def test_losses_over_restarts_and_on_one_rank_are_identical(ranks: str) -> None:
    options = ["--ranks", ranks, "--steps", "12", "--every", "2", "--text-bytes", "50000"]
    ended = subprocess.run(
        [sys.executable, str(EXAMPLES / "resume_moe.py"), *options],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"identical: 12 losses over starts on {ranks} ranks" in ended.stdout
    assert "killed in save 4" in ended.stdout
    assert "PeerFailedError" in ended.stdout or "a save of a checkpoint ended" in ended.stdout


@pytest.fixture
def resume_moe(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    spec = importlib.util.spec_from_file_location("resume_moe", EXAMPLES / "resume_moe.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "resume_moe", module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("what", ["nothing", "loss", "step"])
def test_a_difference_is_found(
    resume_moe: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    what: str,
) -> None:
    first = 0

    def run(part: object, *_: object) -> object:
        nonlocal first
        number, first = first, first + 1
        steps = range(6 * (number % 2), 6 * (number % 2) + 6) if number < 2 else range(12)
        losses = {step: 4.0 - step / 4 for step in steps}
        if what == "loss" and number == 1:
            losses[7] += 2.0**-22
        if what == "step" and number == 1:
            del losses[7]
        return resume_moe.Outcome(losses=losses)

    monkeypatch.setattr(resume_moe, "run", run)
    code = resume_moe.main(["--ranks", "1,1", "--steps", "12", "--every", "2"])
    said = capsys.readouterr().out
    assert code == (0 if what == "nothing" else 1)
    expected = {
        "nothing": "identical: 12",
        "loss": "DIFFERENT at step 7",
        "step": "MISSING steps [7]",
    }
    assert expected[what] in said
