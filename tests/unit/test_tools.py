"""The scripts behind `make`: who waits for whom, what they say while pip works, which installations they check."""

from __future__ import annotations

import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.source_tree import ROOT


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The part of Python that the first rule of the Makefile needs: the environment is made once `go` is there.
PRETENDED_PYTHON = """\
#!/bin/sh
case "$*" in
tools/one_at_a_time.py*) exec "{python}" "$@" ;;
"-m venv .venv")
    echo venv >> log
    while [ ! -e go ]; do sleep 0.01; done
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
    ;;
*) echo install >> log ;;
esac
"""


def test_two_makes_from_nothing_make_the_environment_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):  # of a make that runs this test
        monkeypatch.delenv(name, raising=False)
    for name in ("Makefile", "constraints.txt", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    python = tmp_path / "python"
    python.write_text(PRETENDED_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    log = tmp_path / "log"

    def start() -> subprocess.Popen[str]:
        command = ["make", f"PYTHON={python}", ".venv/has-tools"]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)

    with start() as first:
        while not log.exists() and first.poll() is None:
            time.sleep(0.01)
        with start() as second:
            try:
                assert "waiting for another make" in second.stdout.readline()
            finally:
                (tmp_path / "go").touch()
                second.communicate()
                first.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert log.read_text().split() == ["venv", "install"]


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
    progress.take_line(None)
    progress.take_line("  Downloading rich-15.0.0-py3-none-any.whl (310 kB)\n")
    progress.take_line(
        "  Downloading torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl (532.1 MB)\n"
    )
    progress.take_line("Installing collected packages: rich, torch\n")
    (tmp_path / "rich-15.0.0.dist-info").mkdir()
    (tmp_path / "rich-15.0.0.dist-info" / "INSTALLER").touch()
    (tmp_path / "torch-2.13.0.dist-info").mkdir()  # still unpacked
    progress.take_line(None)
    assert [re.sub(r"\d+ s$", "so long", line) for line in said] == [
        "looking for packages, so long",
        "downloading torch-2.13.0 (532.1 MB)",
        "installing rich, torch",
        "installing 2 packages, 1 done, so long",
    ]


def test_pip_that_fails_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    assert tool("pip_install").main(["--no-index", "no-such-package"]) != 0
    assert "no-such-package" in capfd.readouterr().err


@pytest.mark.parametrize("is_terminal", [False, True])
def test_on_a_terminal_pip_writes_over_the_line_of_a_compiler(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Output(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    output = Output()
    monkeypatch.setattr(sys, "stdout", output)
    assert tool("pip_install").main(["--no-index", "--dry-run", "pip"]) == 0
    start, end = (r"\r", r"\x1b\[K\n") if is_terminal else ("", r"\n")
    assert re.fullmatch(rf"({start}pip: [^\r\x1b\n]*{end})+", output.getvalue())


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
        (["--prefix", "build/mpi", "moe_comm[mpi]"], [], ["mpi"], True, True),
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
    assert {"setuptools", "torch"} <= names
    for extras in ({"lint", "test"}, {"mpi"}):
        assert any(each.extras and extras <= set(each.extras) for each in found)


CLIENT_XML = (
    """<testsuites><testsuite timestamp="2026-11-20T09:00:00">{cases}</testsuite></testsuites>"""
)


def client_case(test: str, ran: str, outcome: str = "", **said: str) -> str:
    said = {
        "framework": "torchtitan",
        "release": "0.3.0",
        "way": "override",
        "on": "CPU ranks",
        "version": "0.2.0",
        "ran": ran,
        "test": f"tests/t.py::{test}",
        **said,
    }
    properties = "".join(f'<property name="{name}" value="{said[name]}"/>' for name in said)
    return f"<testcase><properties>{properties}</properties>{outcome}</testcase>"


def test_clients_are_rows_of_what_passed(tmp_path: Path) -> None:
    clients = tool("clients")
    xml, results = tmp_path / "ran.xml", tmp_path / "results"

    def add(*cases: str) -> str:
        xml.write_text(CLIENT_XML.format(cases="".join(cases)))
        clients.add(xml, results)
        return str(clients.page(results))

    skipped = client_case("test_b", "a model", "<skipped/>")
    page = add(client_case("test_a", "a layer"), client_case("test_a", "a layer"), skipped)
    row = "| torchtitan | 0.3.0 | override | a layer | 2 | 2026-11-20, 0.2.0 | (1) |"
    assert row + " `python -m pytest tests/t.py::test_a` |" in page
    assert "a model" not in page
    assert "(1) CPU ranks" in page
    # A test's rows are those of its last run; rows of other tests and releases stay.
    page = add(client_case("test_a", "another layer"), client_case("test_b", "a model"))
    assert row not in page
    assert "| another layer | 1 |" in page
    page = add(client_case("test_c", "a step", on="others", release="0.4.0"))
    assert all(f"| {ran} | 1 |" in page for ran in ("another layer", "a model", "a step"))
    assert "(2) others" in page
    # All that one command runs is one row, of all releases in which it ran the same.
    page = add(
        client_case("test_c", "one rank: a step", release="0.4.0"),
        client_case("test_c", "two ranks: a step", release="0.4.0"),
        client_case("test_c", "one rank: a step", release="0.5.0"),
        client_case("test_c", "two ranks: a step", release="0.5.0"),
    )
    row = "| torchtitan | 0.4.0, 0.5.0 | override | one rank; two ranks: a step | 4 | 2026-11-20, 0.2.0 | (1) |"
    assert row in page
    page = add(client_case("test_c", "one rank: a step", release="0.5.0"))
    assert row not in page
    assert "| 0.5.0 | override | one rank: a step | 1 |" in page
    page = add(client_case("test_d", "a loss"), client_case("test_d", "a loss", way="by hand"))
    assert "| 0.3.0 | by hand; override | a loss | 2 |" in page


def test_a_client_that_failed_is_no_row(tmp_path: Path) -> None:
    xml = tmp_path / "ran.xml"
    for cases, message in (
        (client_case("test_a", "x") + client_case("test_a", "x", "<failure/>"), "ended in failure"),
        (client_case("test_a", "x", "<error/>"), "ended in error"),
        (client_case("test_a", "x") + "<testcase><error/></testcase>", "ended in error"),
        (client_case("test_a", "x", "<skipped/>"), "no test of a client ran"),
        ("<testcase/>", "no test of a client ran"),
    ):
        xml.write_text(CLIENT_XML.format(cases=cases))
        with pytest.raises(ValueError, match=message):
            tool("clients").add(xml, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_the_page_of_clients_is_what_the_tool_writes() -> None:
    assert tool("clients").PAGE.read_text() == tool("clients").page()
