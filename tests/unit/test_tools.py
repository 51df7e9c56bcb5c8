"""The scripts behind `make`: what they say while pip works, and which installations they check."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.source_tree import ROOT


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_silence_of_pip_is_noticed() -> None:
    read_fd, write_fd = os.pipe()
    with os.fdopen(read_fd) as stream:
        heard = tool("pip_install").lines_or_silence(stream, 0.02)
        assert next(heard) is None
        os.write(write_fd, b"Collecting torch\n")
        assert next(line for line in heard if line is not None) == "Collecting torch\n"
        assert next(heard) is None
        os.close(write_fd)
        assert list(filter(None, heard)) == []


def test_progress_counts_packages_that_are_complete(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "pip-26.0.dist-info").mkdir()
    (tmp_path / "pip-26.0.dist-info" / "INSTALLER").touch()
    progress = tool("pip_install").Progress(tmp_path, said.append)
    progress.hear(None)
    progress.hear("  Downloading rich-15.0.0-py3-none-any.whl (310 kB)\n")
    progress.hear("  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (532.1 MB)\n")
    progress.hear("Installing collected packages: rich, torch\n")
    (tmp_path / "rich-15.0.0.dist-info").mkdir()
    (tmp_path / "rich-15.0.0.dist-info" / "INSTALLER").touch()
    (tmp_path / "torch-2.13.0.dist-info").mkdir()  # still unpacked
    progress.hear(None)
    assert [re.sub(r"\d+ s$", "so long", line) for line in said] == [
        "looking for packages, so long",
        "downloading torch-2.13.0 (532.1 MB)",
        "installing rich, torch",
        "installing 2 packages, 1 done, so long",
    ]


def test_pip_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    assert tool("pip_install").main(["--no-index", "no-such-package"]) != 0
    assert "no-such-package" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "requirements", "extras", "has_dependencies", "is_beside"),
    [
        (["--no-compile", "-c", "constraints.txt", "torch"], ["torch"], None, True, False),
        (["--no-build-isolation", "-e", ".[lint,test]"], [], ["lint", "test"], True, False),
        (["-e", "."], [], [], True, False),
        (
            ["--no-deps", "torchtitan; python_version >= '3.11'"],
            ["torchtitan; python_version >= '3.11'"],
            None,
            False,
            False,
        ),
        (["--upgrade", "--target", "build/mpi", "mpi4py"], ["mpi4py"], None, True, True),
        (["--no-deps", "--target", "build/x", "accelerate"], ["accelerate"], None, False, True),
    ],
)
def test_arguments_of_pip_are_understood(
    words: list[str],
    requirements: list[str],
    extras: list[str] | None,
    has_dependencies: bool,
    is_beside: bool,
) -> None:
    found = tool("check_bare").Installation(words)
    assert (found.requirements, found.extras) == (requirements, extras)
    assert (found.has_dependencies, found.is_beside) == (has_dependencies, is_beside)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_every_installation_of_the_makefile_is_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check = tool("check_bare")
    monkeypatch.setattr(check, "WORK", tmp_path)
    found = [
        check.Installation(words) for words in check.installations(check.linked_programs("bin"))
    ]
    # Each `$(install)` of a rule, in its own words.
    rules = [line for line in (ROOT / "Makefile").read_text().splitlines() if "$(install)" in line]
    assert len(found) >= len(rules) - 1  # that of NVSHMEM needs nvcc
    names = {name for each in found for name in each.requirements}
    assert {"setuptools", "torch", "mpi4py"} <= names
    assert any(each.extras and {"lint", "test"} <= set(each.extras) for each in found)
