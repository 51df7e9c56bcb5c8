"""A barrier in shared memory that is no part of what is timed."""

from __future__ import annotations

import mmap
import os
import time
from pathlib import Path

CACHE_LINE_WORDS = 8
NUM_SPINS_BEFORE_YIELD = 50
NUM_YIELDS_BEFORE_SLEEP = 20_000


def bind_to_core(rank_idx: int) -> None:
    """Bind this process to one of its cores; ranks beyond the number of cores share."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank_idx % len(cores)]})


class SpinBarrier:
    """Every rank raises its own counter and waits for the others'.

    No system call while ranks have a core each, so they leave within a microsecond of each other.

    Args:
        path: File of `file_bytes(num_ranks)` zero bytes that all ranks share.
        rank_idx: This rank.
        num_ranks: Ranks.

    Attributes:
        words_of_roofs: Bytes that are shared likewise, a cache line for every rank, and left alone here.
    """

    def __init__(self, path: Path, rank_idx: int, num_ranks: int) -> None:
        with path.open("r+b") as file:
            shared = memoryview(mmap.mmap(file.fileno(), 0))
        self._words = shared[: len(shared) // 2].cast("q")
        self.words_of_roofs = shared[len(shared) // 2 :]
        self._own = rank_idx * CACHE_LINE_WORDS
        self._peers = [i * CACHE_LINE_WORDS for i in range(num_ranks) if i != rank_idx]
        self._epoch = 0

    @staticmethod
    def file_bytes(num_ranks: int) -> int:
        """Size of the shared file."""
        return 2 * num_ranks * CACHE_LINE_WORDS * 8

    def wait(self, timeout_s: float = 600.0) -> None:
        """Return when every rank has called it as often as this one.

        Raises:
            TimeoutError: A rank did not come.
        """
        self._epoch += 1
        words, epoch = self._words, self._epoch
        words[self._own] = epoch
        deadline_s = time.monotonic() + timeout_s
        for peer in self._peers:
            num_polls = 0
            while words[peer] < epoch:
                num_polls += 1
                if num_polls < NUM_SPINS_BEFORE_YIELD:
                    continue
                if num_polls < NUM_YIELDS_BEFORE_SLEEP:
                    os.sched_yield()
                    continue
                time.sleep(0.001)
                if time.monotonic() > deadline_s:
                    raise TimeoutError(
                        f"rank {peer // CACHE_LINE_WORDS} did not reach barrier {epoch} in {timeout_s} s"
                    )
