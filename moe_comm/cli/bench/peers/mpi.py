"""The MPI pipeline as the benchmark sees it: processes of its own, run in turns with ours."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

from moe_comm.cli.bench.barrier import SpinBarrier
from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.peers.mpi_control import ControlFile
from moe_comm.cli.bench.peers.mpi_launcher import MpiLauncher
from moe_comm.cli.bench.statistics import Interval

START_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0


class MpiPeer:
    """`num_ranks` processes under one mpiexec.

    Args:
        launcher: Launcher that starts them.
        case: The case.
        folder: Folder for the control file, the barrier and the log; belongs to the caller.
        is_pinned: Every rank is bound to one core.

    Raises:
        RuntimeError: mpiexec or a rank failed; with its message.
    """

    def __init__(
        self, launcher: MpiLauncher, case: BenchCase, folder: Path, *, is_pinned: bool = False
    ) -> None:
        self.launcher = launcher
        self.case = case
        self._log = folder / "mpiexec.log"
        case_file = folder / "case.pickle"
        case_file.write_bytes(pickle.dumps(case))
        control_file = folder / "mpi.control"
        control_file.write_bytes(bytes(ControlFile.file_bytes(case.num_ranks)))
        barrier_file = folder / "mpi.barrier"
        barrier_file.write_bytes(bytes(SpinBarrier.file_bytes(case.num_ranks)))
        self._control = ControlFile(control_file, case.num_ranks)
        module = "moe_comm.cli.bench.peers.mpi_worker"
        arguments = [sys.executable, "-m", module, str(case_file), str(control_file)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *(*launcher.command(case.num_ranks), *arguments, str(barrier_file)),
                    "pinned" if is_pinned else "free",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def check(self) -> None:
        """Compare with the oracle on every rank.

        Raises:
            RuntimeError: See the class.
        """
        self._command("check", 0, START_TIMEOUT_S)

    def run(self, operation: str, num_iterations: int) -> list[list[Interval]]:
        """Intervals of every rank, rank by rank."""
        return self._command(operation, num_iterations, RUN_TIMEOUT_S)

    def close(self) -> None:
        """Stop the processes. Idempotent."""
        if self._process.poll() is None:
            self._control.post("stop", 0)
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.terminate()
                try:
                    self._process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait(STOP_TIMEOUT_S)

    def _command(self, command: str, num_iterations: int, timeout_s: float) -> list[list[Interval]]:
        number = self._control.post(command, num_iterations)
        try:
            return self._control.wait_done(
                number, num_iterations, lambda: self._process.poll() is None, timeout_s
            )
        except RuntimeError as error:
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise RuntimeError(f"{error}\n{tail}") from None
