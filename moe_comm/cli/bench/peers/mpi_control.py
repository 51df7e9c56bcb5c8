"""Messages between the benchmark and the processes that mpiexec started: one small shared file.

MPI spins where it waits, so its processes must not wait inside MPI while others are timed: they poll
this file and sleep in between.

Words (int64):
  [0]                      number of the last command, raised last
  [1]                      what to do, an index of `COMMANDS`
  [2]                      iterations
  [8 + 8 r]                number of the last command that rank r has done
  [8 + 8 r + 1]            1 if it failed; the message is in `<file>.rank<r>.error`
  [results + ...]          start and end of every iteration, rank by rank
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

from moe_comm.cli.bench.statistics import Interval

COMMANDS = ("stop", "check", "dispatch", "combine", "dispatch+combine")
MAX_ITERATIONS = 4096
# Idle ranks must not take time from the ranks that are measured; who waits for them is alone.
IDLE_POLL_S = 0.02
ANSWER_POLL_S = 0.002
# The benchmark gives up a call of its own ranks as late, and ends.
IDLE_TIMEOUT_S = 3600.0


class ControlFile:
    """Both ends of the file described above.

    Args:
        path: The file, `file_bytes(num_ranks)` zero bytes at first.
        num_ranks: Ranks of MPI.
    """

    def __init__(self, path: Path, num_ranks: int) -> None:
        self.path = path
        self.num_ranks = num_ranks
        with path.open("r+b") as file:
            self._words = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")

    @staticmethod
    def file_bytes(num_ranks: int) -> int:
        """Size of the file."""
        return 8 * (8 + 8 * num_ranks + 2 * MAX_ITERATIONS * num_ranks)

    def _results_at(self, rank_idx: int) -> int:
        return 8 + 8 * self.num_ranks + 2 * MAX_ITERATIONS * rank_idx

    def error_path(self, rank_idx: int) -> Path:
        """Return the path at which a rank leaves its message."""
        return self.path.with_name(f"{self.path.name}.rank{rank_idx}.error")

    def post(self, command: str, num_iterations: int) -> int:
        """Give a command to every rank; returns its number."""
        if not 0 <= num_iterations <= MAX_ITERATIONS:
            raise ValueError(f"num_iterations must be <= {MAX_ITERATIONS}, got {num_iterations}")
        self._words[1] = COMMANDS.index(command)
        self._words[2] = num_iterations
        self._words[0] += 1
        return int(self._words[0])

    def wait_done(
        self, number: int, num_iterations: int, is_alive: Callable[[], bool], timeout_s: float
    ) -> list[list[Interval]]:
        """Every rank's intervals of command `number`, rank by rank.

        Raises:
            RuntimeError: A rank failed, MPI ended, or the time is over.
        """
        deadline_s = time.monotonic() + timeout_s
        for rank_idx in range(self.num_ranks):
            base = 8 + 8 * rank_idx
            while self._words[base] < number and not self._words[base + 1]:
                if not is_alive():
                    raise RuntimeError("mpiexec ended before its ranks had answered")
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"MPI rank {rank_idx} did not answer in {timeout_s} s")
                time.sleep(ANSWER_POLL_S)
            if self._words[base + 1]:
                message = self.error_path(rank_idx).read_text(encoding="utf-8")
                raise RuntimeError(f"MPI rank {rank_idx}: {message}")
        intervals = []
        for rank_idx in range(self.num_ranks):
            at = self._results_at(rank_idx)
            words = self._words[at : at + 2 * num_iterations].tolist()
            intervals.append(list(zip(words[0::2], words[1::2], strict=True)))
        return intervals

    def next_command(self, last_number: int) -> tuple[int, str, int]:
        """Sleep until there is a command after `last_number`: its number, name and iterations.

        Raises:
            TimeoutError: There is none: the benchmark has ended without a word.
        """
        deadline_s = time.monotonic() + IDLE_TIMEOUT_S
        while self._words[0] <= last_number:
            if time.monotonic() > deadline_s:
                raise TimeoutError(
                    f"the benchmark gave no command after {last_number} within {IDLE_TIMEOUT_S} s"
                )
            time.sleep(IDLE_POLL_S)
        return int(self._words[0]), COMMANDS[self._words[1]], int(self._words[2])

    def answer(self, rank_idx: int, number: int, intervals: list[Interval]) -> None:
        """Report a command done."""
        at = self._results_at(rank_idx)
        for start, end in intervals:
            self._words[at], self._words[at + 1] = start, end
            at += 2
        self._words[8 + 8 * rank_idx] = number

    def fail(self, rank_idx: int, message: str) -> None:
        """Report that this rank cannot go on."""
        self.error_path(rank_idx).write_text(message, encoding="utf-8")
        self._words[8 + 8 * rank_idx + 1] = 1
