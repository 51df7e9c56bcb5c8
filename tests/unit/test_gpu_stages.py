"""`make gpu` between its stages: what is run again, what is recorded, which exit status."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "gpu/run_stages.py"

Main = Callable[..., int]


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The program on a machine with a GPU, at commit "one", without stages."""
    spec = importlib.util.spec_from_file_location("run_stages", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_stages", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "STATE", tmp_path / "state.json")
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(module, "gpu_facts", lambda: {"name": "a GPU"})
    monkeypatch.setattr(module, "commit", lambda *, with_changes: "one")
    return module


@pytest.fixture
def main(stages: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> Main:
    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["run_stages.py", *arguments])
        status = stages.main()
        assert isinstance(status, int)
        return status

    return call


def results_of(stages: types.ModuleType) -> dict[str, Any]:
    return dict(json.loads(stages.RESULTS.read_text()))


def test_goes_on_behind_what_passed_on_this_commit(
    stages: types.ModuleType, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    problems: list[Exception] = [
        subprocess.CalledProcessError(7, ["tool", "an argument"], output="what it printed")
    ]

    def first() -> dict[str, Any]:
        calls.append("first")
        return {"seconds": 1}

    def second() -> dict[str, Any]:
        calls.append("second")
        if problems:
            raise problems.pop()
        return {}

    monkeypatch.setattr(
        stages, "STAGES", [stages.Stage("first", first), stages.Stage("second", second)]
    )
    assert main() == 1
    failed = results_of(stages)["second"]
    assert (failed["outcome"], failed["exit_status"], failed["output"]) == (
        "failed",
        7,
        "what it printed",
    )
    assert main() == 0
    assert calls == ["first", "second", "second"]
    assert {name: one["outcome"] for name, one in results_of(stages).items()} == {
        "first": "passed",
        "second": "passed",
    }
    assert main() == 0
    assert len(calls) == 3
    assert main("--fresh", "--stages", "first") == 0
    assert calls[3:] == ["first"]
    monkeypatch.setattr(stages, "commit", lambda *, with_changes: "two")
    assert main() == 0
    assert calls[4:] == ["first", "second"]


def test_a_stage_that_could_not_run_is_no_success(
    stages: types.ModuleType, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mps() -> dict[str, Any]:
        raise stages.NotRunError("no daemon")

    monkeypatch.setattr(stages, "STAGES", [stages.Stage("mps", mps)])
    assert main() == 3
    assert results_of(stages)["mps"]["reason"] == "no daemon"


def test_without_a_gpu_nothing_is_run(
    stages: types.ModuleType,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(stages, "gpu_facts", lambda: None)
    assert main() == 2
    assert "no GPU" in capsys.readouterr().out
    assert not stages.RESULTS.exists()


def test_an_unknown_stage_is_named(main: Main, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main("--stages", "bild")
    assert refused.value.code == 2
    assert "bild" in capsys.readouterr().err
