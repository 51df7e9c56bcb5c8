"""`make gpu` between its stages: what is run again, what is recorded, which exit status."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).resolve().parents[1] / "gpu/run_stages.py"

Main = Callable[..., int]


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The program on a machine with a GPU, with sources "one", without stages."""
    spec = importlib.util.spec_from_file_location("run_stages", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_stages", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(module, "gpu_facts", lambda: {"name": "a GPU"})
    monkeypatch.setattr(module, "sources_digest", lambda: "one")
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


def test_goes_on_behind_what_passed_with_these_sources(
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
    monkeypatch.setattr(stages, "sources_digest", lambda: "two")
    assert main() == 0
    assert calls[4:] == ["first", "second"]


def test_another_machine_goes_on_from_results_but_builds_again(
    stages: types.ModuleType, main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[str] = []

    def named(name: str) -> Callable[[], dict[str, Any]]:
        return lambda: calls.append(name) or {}  # type: ignore[func-returns-value]

    def build() -> dict[str, Any]:
        calls.append("build")
        (tmp_path / "moe_comm/_cuda.abi.so").touch()
        return {}

    monkeypatch.setattr(stages, "ROOT", tmp_path)
    (tmp_path / "moe_comm").mkdir()
    monkeypatch.setattr(
        stages,
        "STAGES",
        [
            stages.Stage("build", build, makes="_cuda"),
            *(stages.Stage(name, named(name)) for name in ("first", "second")),
        ],
    )
    assert main("--stages", "build,first") == 0
    assert main() == 0
    assert calls == ["build", "first", "second"]
    # What the first machine left, on one where nothing is built and nothing known.
    earlier = stages.RESULTS.rename(tmp_path / "earlier.json")
    (tmp_path / "moe_comm/_cuda.abi.so").unlink()
    del calls[:]
    assert main("--state", str(earlier)) == 0
    assert calls == ["build"]
    assert set(results_of(stages)) == {"build", "first", "second"}


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


def test_sources_are_known_without_git(
    stages: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.setattr(stages, "SOURCES", ("setup.py", "csrc"))
    (tmp_path / "setup.py").write_text("one")
    (tmp_path / "csrc").mkdir()
    kernel = tmp_path / "csrc/kernel.cu"
    kernel.write_text("one")
    first = stages.sources_digest()
    (tmp_path / "csrc/notes.md").write_text("what nobody compiles")
    assert stages.sources_digest() == first
    kernel.write_text("two")
    second = stages.sources_digest()
    kernel.rename(tmp_path / "csrc/other.cu")
    assert len({first, second, stages.sources_digest()}) == 3


def test_no_stage_begins_when_the_time_is_over(
    stages: types.ModuleType,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    calls: list[str] = []

    def first() -> dict[str, Any]:
        calls.append("first")
        assert 0 < stages.Clock.deadline - time.monotonic() <= 1000
        return dict(stages.command(sys.executable, "-c", "print('hello')"))

    has_printed = tmp_path / "has printed"

    class Timer(threading.Timer):
        """Ends the late stage once it has printed, whenever that is."""

        def run(self) -> None:
            while not has_printed.exists():
                if self.finished.wait(0.01):
                    return
            self.function()

    def late() -> dict[str, Any]:
        calls.append("late")
        stages.Clock.deadline = time.monotonic() + 3.0
        program = (
            "import pathlib, sys, time; print('so far', flush=True); "
            "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "Timer", Timer)
            return dict(stages.command(sys.executable, "-c", program, str(has_printed)))

    monkeypatch.setattr(stages.Clock, "deadline", stages.Clock.deadline)
    names = {"first": first, "late": late, "next": first}
    monkeypatch.setattr(stages, "STAGES", [stages.Stage(*entry) for entry in names.items()])
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    results = tmp_path / "elsewhere.json"
    assert main("--time-limit", "1000", "--results", str(results)) == 3
    assert calls == ["first", "late"]
    found = json.loads(results.read_text())
    assert found["first"]["output"] == "hello\n"
    assert found["late"]["outcome"] == "not run"
    assert "the time was over" in found["late"]["reason"]
    assert found["late"]["output"] == "so far\n"
    assert "=== next and those behind it: the time is over" in capsys.readouterr().out


def test_a_stage_that_fails_says_what_it_printed(
    stages: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        stages.command(sys.executable, "-c", "print('why'); raise SystemExit(5)")
    assert (failed.value.returncode, failed.value.output) == (5, "why\n")
    with pytest.raises(subprocess.CalledProcessError, match="exit status 124"):
        stages.command(sys.executable, "-c", "import time; time.sleep(600)", stage_limit_s=1.0)
