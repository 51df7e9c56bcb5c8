"""`make gpu` between its stages: what is run again, what is recorded, which exit status."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.source_tree import captured

PROGRAM = Path(__file__).resolve().parents[1] / "gpu/run_stages.py"

Main = Callable[..., int]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The program on this machine."""
    spec = importlib.util.spec_from_file_location("run_stages", PROGRAM)
    loaded = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_stages", loaded)
    spec.loader.exec_module(loaded)
    return loaded


@pytest.fixture
def stages(
    module: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> types.ModuleType:
    """The program on a machine with a GPU, with sources "one", without stages."""
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results.json")
    monkeypatch.setattr(module, "what_is_missing", lambda: None)
    monkeypatch.setattr(module, "gpu_facts", lambda: {"name": "a GPU", "compute_cap": "9.0"})
    monkeypatch.setattr(module, "gpu_names", lambda: ["0"])
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


class Machines:
    """Checkouts with the stages `build`, which makes `_one` and `_two`, and `first`.

    Args:
        stages: The program.
        patch: For the test.
        folder: Holds the checkouts.
    """

    def __init__(self, stages: types.ModuleType, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self._stages = stages
        self._patch = patch
        self._folder = folder
        self.calls: list[str] = []
        stage = stages.Stage
        patch.setattr(stages, "MODULE_SUFFIX", ".py")
        patch.setattr(
            stages,
            "STAGES",
            [stage("build", self._build, makes=("_one", "_two")), stage("first", self._first)],
        )
        self.go_to("machine 1")

    def go_to(self, name: str) -> None:
        """A machine where nothing is built and nothing known."""
        root = self._folder / name
        (root / "moe_comm").mkdir(parents=True)
        (root / "moe_comm/__init__.py").touch()
        self._patch.setattr(self._stages, "ROOT", root)
        self._patch.setattr(self._stages, "RESULTS", root / "results/gpu.json")
        del self.calls[:]

    def modules(self) -> list[Path]:
        return list(self._stages.Stage("any", self._first, makes=("_one", "_two")).files())

    def _build(self) -> dict[str, Any]:
        self.calls.append("build")
        for module in self.modules():
            module.write_text("IS_THERE = True\n")
        return {}

    def _first(self) -> dict[str, Any]:
        self.calls.append("first")
        return {}


@pytest.fixture
def machines(stages: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machines:
    return Machines(stages, monkeypatch, tmp_path)


def test_another_machine_takes_up_what_was_built(
    stages: types.ModuleType, main: Main, machines: Machines
) -> None:
    assert main("--stages", "build") == 0
    assert main() == 0
    assert machines.calls == ["build", "first"]
    earlier = stages.RESULTS
    machines.go_to("machine 2")
    assert main("--state", str(earlier)) == 0
    assert machines.calls == []
    assert all(module.read_text() == "IS_THERE = True\n" for module in machines.modules())
    # One of them was lost here.
    machines.modules()[1].unlink()
    assert main("--state", str(earlier)) == 0
    assert machines.calls == []
    assert machines.modules()[1].exists()


@pytest.mark.parametrize("why", ["cut", "absent", "cannot be loaded", "other GPU", "other sources"])
def test_what_does_not_fit_is_built_again(
    stages: types.ModuleType,
    main: Main,
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
    why: str,
) -> None:
    assert main() == 0
    earlier = stages.RESULTS
    kept = earlier.parent / machines.modules()[1].name
    if why == "cut":
        kept.write_text("")
    elif why == "absent":
        kept.unlink()
    elif why == "cannot be loaded":
        kept.write_text("import no_such_module")
        document = json.loads(earlier.read_text())
        digest = hashlib.sha256(kept.read_bytes()).hexdigest()
        document["build"]["modules"][kept.name] = digest
        earlier.write_text(json.dumps(document))
    elif why == "other GPU":
        monkeypatch.setattr(stages, "gpu_facts", lambda: {"name": "B200", "compute_cap": "10.0"})
    else:
        monkeypatch.setattr(stages, "sources_digest", lambda: "two")
    machines.go_to("machine 2")
    assert main("--state", str(earlier), "--stages", "build") == 0
    assert machines.calls == ["build"]
    assert all(module.read_text() == "IS_THERE = True\n" for module in machines.modules())


@pytest.mark.parametrize("text", ["", '{"first": {"outcome": "pas', "[1]", '{"first": 3}', "\x00"])
def test_half_of_the_results_is_as_none(
    stages: types.ModuleType,
    main: Main,
    machines: Machines,
    capsys: pytest.CaptureFixture[str],
    text: str,
) -> None:
    stages.RESULTS.parent.mkdir()
    stages.RESULTS.write_text(text)
    assert main("--stages", "first") == 0
    assert machines.calls == ["first"]
    assert f"=== {stages.RESULTS} is not read, everything runs again: " in capsys.readouterr().out
    assert results_of(stages)["first"]["outcome"] == "passed"


def test_results_are_whole_whenever_it_is_cut(
    stages: types.ModuleType,
    main: Main,
    machines: Machines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert main("--stages", "first") == 0
    write_text = Path.write_text

    def cut(path: Path, text: str, **options: Any) -> int:
        write_text(path, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", cut)
        with pytest.raises(KeyboardInterrupt):
            main("--stages", "first", "--fresh")
    assert main("--stages", "first") == 0
    assert machines.calls == ["first", "first"]


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_sanitizer_reads_kernels_of_this_package(
    stages: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_ranks: int
) -> None:
    tool = tmp_path / "compute-sanitizer"
    tool.write_text('#!/bin/sh\necho "$@"\necho "loads ${CUDA_MODULE_LOADING:-lazily}"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("CUDA_MODULE_LOADING", raising=False)
    told = stages.sanitizer("racecheck", num_ranks)()["output"]
    assert "--tool racecheck" in told
    assert "--kernel-regex kns=moe" in told
    assert told.splitlines()[-1] == ("loads lazily" if num_ranks == 1 else "loads EAGER")


def test_a_stage_that_could_not_run_is_no_success(
    stages: types.ModuleType, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mps() -> dict[str, Any]:
        raise stages.NotRunError("no daemon")

    monkeypatch.setattr(stages, "STAGES", [stages.Stage("mps", mps)])
    assert main() == 3
    assert results_of(stages)["mps"]["reason"] == "no daemon"


@pytest.mark.parametrize(
    ("lacks", "reason"),
    [
        ("nvidia-smi", "nvidia-smi, of NVIDIA's driver, is not in PATH"),
        ("gpu", "nvidia-smi shows no GPU"),
        ("visible", "CUDA_VISIBLE_DEVICES names no GPU"),
    ],
)
def test_without_a_gpu_nothing_is_run(
    stages: types.ModuleType,
    main: Main,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    lacks: str,
    reason: str,
) -> None:
    monkeypatch.undo()
    results = tmp_path / "results.json"
    smi = tmp_path / "nvidia-smi"
    if lacks != "nvidia-smi":
        smi.write_text("#!/bin/sh\n" + ("exit 6\n" if lacks == "gpu" else "echo , , , , , , ,\n"))
        smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if lacks == "visible":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(stages, "PROGRAMS", ("no-such-program",))
    monkeypatch.setattr(stages, "MODULES", ("json", "no_such_module"))
    monkeypatch.setattr(sys, "argv", ["run_stages.py", "--results", str(results)])
    assert stages.main() == 2
    told = capsys.readouterr().out
    assert f"there is no GPU on this machine ({reason}); nothing was run" in told
    assert "also missing: no-such-program, no_such_module\n" in told
    assert not results.exists()


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
    # Where it was is said by Python as it ends.
    assert found["late"]["output"].startswith("so far\n")
    assert 'File "<string>", line 1 in <module>' in found["late"]["output"]
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


def test_a_stage_that_answers_otherwise_has_failed(
    stages: types.ModuleType, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_document() -> dict[str, Any]:
        return dict(stages.last_document({"output": "no JSON\n"}))

    names = {"wrong": without_document, "next": lambda: {"output": "ran"}}
    monkeypatch.setattr(stages, "STAGES", [stages.Stage(*entry) for entry in names.items()])
    assert main() == 1
    found = results_of(stages)
    assert found["wrong"]["outcome"] == "failed"
    assert "JSONDecodeError" in found["wrong"]["output"]
    assert found["next"]["outcome"] == "passed"


def test_nobody_waits_for_what_a_command_has_left(
    stages: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process that has left its session keeps the output open until the command has been given up."""
    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.setattr(stages, "LAST_WORDS_S", 0.2)
    may_end = tmp_path / "may end"
    leave = (
        "import subprocess, sys; "
        "other = 'import pathlib, sys, time\\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)'; "
        "subprocess.Popen([sys.executable, '-c', other, sys.argv[1]], start_new_session=True); "
        "print('left it')"
    )
    try:
        found = stages.command(sys.executable, "-c", leave, str(may_end))
        assert found["output"] == "left it\n"
        with pytest.raises(subprocess.CalledProcessError, match="exit status 124") as failed:
            stages.command(
                *(sys.executable, "-c", f"{leave}; import time; time.sleep(600)", str(may_end)),
                stage_limit_s=3.0,
            )
        assert failed.value.output.startswith("left it\n")
    finally:
        may_end.touch()


def test_an_nvidia_smi_that_hangs_is_no_answer(
    module: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv(module.VISIBLE, raising=False)
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    assert module.gpu_facts() is None
    assert module.gpu_names() == []
    assert "shows no GPU" in str(module.what_is_missing())


def test_a_stage_sees_as_many_gpus_as_it_is_for(
    stages: types.ModuleType, main: Main, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def shown() -> dict[str, Any]:
        program = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"
        return dict(stages.command(sys.executable, "-c", program))

    monkeypatch.setattr(stages, "ROOT", tmp_path)
    monkeypatch.setattr(
        stages,
        "STAGES",
        [stages.Stage("one", shown), stages.Stage("two", shown, num_gpus=2)],
    )
    assert main() == 3
    found = results_of(stages)
    assert (found["one"]["outcome"], found["one"]["output"]) == ("passed", "0\n")
    assert (found["two"]["outcome"], found["two"]["reason"]) == ("not run", "1 GPU, it is for 2")
    monkeypatch.setattr(stages, "gpu_names", lambda: ["5", "GPU-ab", "7"])
    assert main("--fresh") == 0
    found = results_of(stages)
    assert [found[name]["output"] for name in ("one", "two")] == ["5\n", "5,GPU-ab\n"]
    # Back on the first machine: what the other one found stays.
    monkeypatch.setattr(stages, "gpu_names", lambda: ["0"])
    assert main("--fresh") == 0
    assert results_of(stages)["two"]["output"] == "5,GPU-ab\n"


def test_what_two_gpus_did_wrong_is_not_forgotten_on_one(
    stages: types.ModuleType, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> dict[str, Any]:
        raise subprocess.CalledProcessError(9, ["tool"], output="why")

    monkeypatch.setattr(stages, "STAGES", [stages.Stage("two", fails, num_gpus=2)])
    monkeypatch.setattr(stages, "gpu_names", lambda: ["0", "1"])
    assert main() == 1
    monkeypatch.setattr(stages, "gpu_names", lambda: ["0"])
    assert main() == 1
    assert results_of(stages)["two"]["output"] == "why"
    monkeypatch.setattr(stages, "sources_digest", lambda: "two")
    assert main() == 3
    assert results_of(stages)["two"]["outcome"] == "not run"


def test_gpus_are_those_that_this_program_was_given(
    stages: types.ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.undo()
    smi = tmp_path / "nvidia-smi"
    lines = (
        "GPU 0: NVIDIA H100 (UUID: GPU-1)",
        "  MIG 1g.10gb Device 0: (UUID: MIG-1)",
        "GPU 1: A",
    )
    smi.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert stages.gpu_names() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5")
    assert stages.gpu_names() == ["3", "GPU-5"]


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_probe_compiles(tmp_path: Path) -> None:
    flags = ("-std=c++20", "-arch=sm_90a", "--Werror=all-warnings", "-Xcompiler=-Wall,-Wextra")
    source = str(PROGRAM.with_name("probe.cu"))
    done = captured(["nvcc", *flags, "-o", str(tmp_path / "probe"), source])
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


def test_ranks_on_too_few_gpus_fail(stages: types.ModuleType) -> None:
    stages.Shown.names = ("0", "1")
    stages.check_spread(["cuda:0", "cuda:1", "cuda:0"])
    with pytest.raises(subprocess.CalledProcessError) as failed:
        stages.check_spread(["cuda:0", "cuda:0", "cuda:0"])
    assert "3 ranks on 2 GPUs were on ['cuda:0', 'cuda:0', 'cuda:0']" in failed.value.output


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="DeepEP is installed")
def test_where_no_deep_ep_is_installed_its_stage_says_so(
    stages: types.ModuleType, main: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "gpu_names", lambda: ["0", "1"])
    monkeypatch.setattr(
        stages, "STAGES", [stages.Stage("deep-ep", stages.deep_ep(2, 16), num_gpus=2)]
    )
    assert main() == 3
    assert "deep_ep is not installed" in results_of(stages)["deep-ep"]["reason"]
