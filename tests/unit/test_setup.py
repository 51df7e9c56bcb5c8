"""setup.py: which modules it builds, and what it shows of a build."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import setuptools

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = ("MOE_COMM_MODULES", "MOE_COMM_CUDA", "MOE_COMM_NVSHMEM", "MOE_COMM_SANITIZE")


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Names that setup.py defines, without a build; its text as setuptools changes it for a wheel."""
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    path = ROOT / "setup.py"
    defined: dict[str, Any] = {"__file__": str(path), "__name__": "__main__"}
    text = path.read_text().replace(r"\r\n", r"\n")
    exec(compile(text, str(path), "exec"), defined)
    return defined


@pytest.mark.parametrize(
    ("variables", "modules"),
    [
        ({}, ("host", "simt", "cuda", "nvshmem")),
        ({"MODULES": "host"}, ("host",)),
        ({"MODULES": "simt, host"}, ("host", "simt")),
        ({"CUDA": "off"}, ("host", "simt")),
        ({"NVSHMEM": "off"}, ("host", "simt", "cuda")),
        ({"SANITIZE": "thread"}, ("host", "simt")),
        ({"SANITIZE": "thread", "CUDA": "auto"}, ("host", "simt", "cuda", "nvshmem")),
    ],
)
def test_modules_are_chosen(
    names: dict[str, Any],
    variables: dict[str, str],
    modules: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(f"MOE_COMM_{variable}", value)
    assert names["wanted_modules"]() == modules


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"MODULES": "host,gpu"}, "MOE_COMM_MODULES=host,gpu: there is no 'gpu'"),
        ({"MODULES": "cuda", "CUDA": "off"}, "names cuda, which other variables turn off"),
        ({"MODULES": "nvshmem", "NVSHMEM": "off"}, "names nvshmem, which other variables turn off"),
        ({"NVSHMEM": "on", "CUDA": "off"}, "MOE_COMM_NVSHMEM=on needs moe_comm._cuda"),
        ({"CUDA": "yes"}, "MOE_COMM_CUDA must be auto, on or off, got 'yes'"),
    ],
)
def test_a_wrong_choice_is_refused(
    names: dict[str, Any],
    variables: dict[str, str],
    problem: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(f"MOE_COMM_{variable}", value)
    with pytest.raises(SystemExit, match=problem):
        names["wanted_modules"]()


# Says what ninja does when it compiles two files, of which the second ends once a file is removed.
NINJA = """
import os, sys, time
def status(started, finished, what):
    text = os.environ["NINJA_STATUS"].replace("%s", str(started)).replace("%f", str(finished))
    return "\\r" + text.replace("%t", "2") + what + "\\x1b[K"
def tell(text):  # as one piece
    os.write(1, text.encode())
objects = ["Building CXX object CMakeFiles/x.dir/Unity/unity_a_cxx.cxx.o", "Building CXX object CMakeFiles/x.dir/b.cpp.o"]
tell(status(1, 0, objects[0]) + "\\na.cpp:1: warning: what a compiler says\\n")
tell(status(1, 1, objects[0]) + status(2, 1, objects[1]))
while os.path.exists(sys.argv[1]):
    time.sleep(0.01)
tell(status(2, 2, objects[1]) + "\\n")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("status", [0, 3])
def test_a_build_shows_what_it_compiles(
    names: dict[str, Any], status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_running = tmp_path / "running"
    is_running.touch()

    class Output(io.StringIO):
        """Ends the build when a file that takes long has been named three times, or never is."""

        def write(self, text: str) -> int:
            written = super().write(text)
            if self.num_repeats() >= 3 or self.getvalue().count("\n") > 500:
                is_running.unlink(missing_ok=True)
            return written

        def num_repeats(self) -> int:
            return self.getvalue().count("compiling 2 of 2: b.cpp")

    output = Output()
    monkeypatch.setattr(names["Progress"], "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(sys, "stdout", output)
    command = [sys.executable, "-c", NINJA, str(is_running), str(status)]
    assert names["Progress"]().run(command) == status
    assert output.num_repeats() >= 3
    lines = output.getvalue().splitlines()
    assert lines[0] == "compiling 1 of 2: a"
    assert "a.cpp:1: warning: what a compiler says" in lines
    assert all(line.startswith(("compiling ", "a.cpp:1:")) for line in lines if line), lines


def test_a_narrow_terminal_shows_how_long_it_takes(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    progress = names["Progress"]()
    progress._take_line(f"@1 0 9@ Building CXX object x.dir/{'a_long_name_' * 4}.cpp.o")
    progress._running = {name: since - 75 for name, since in progress._running.items()}
    progress._show()
    shown = terminal.getvalue().rsplit("\r", 1)[1]
    assert shown == f"{'compiling 1 of 9, 75 s: a_long_name_a_long_name_'[:39]}\x1b[K"
