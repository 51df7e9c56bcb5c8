"""Tells whether a process is a forked child of the one that made an object.

`moe::heap::ForkGuard` is the same for native objects, and hears of forks outside Python, too.
"""

from __future__ import annotations

import os


class _Forks:
    __slots__ = ("generation",)

    def __init__(self) -> None:
        self.generation = 0

    def raise_generation(self) -> None:
        self.generation += 1


forks = _Forks()
"""`forks.generation` is one higher in every forked child; to ask for the process costs a system call."""

os.register_at_fork(after_in_child=forks.raise_generation)
