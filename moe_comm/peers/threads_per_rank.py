"""Threads of a rank that copy and add rows on CPUs."""

from __future__ import annotations

import os


def default_num_threads(num_machine_ranks: int) -> int:
    """Equal share of the cores that this process may use among the communicator's ranks on its machine.

    Args:
        num_machine_ranks: Ranks on this machine.
    """
    return max(1, len(os.sched_getaffinity(0)) // num_machine_ranks)
