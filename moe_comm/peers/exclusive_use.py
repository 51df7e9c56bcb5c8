"""One caller at a time, where a second one is a mistake."""

from __future__ import annotations

import threading
from collections.abc import Callable


def in_use(operation: str) -> RuntimeError:
    """The error of a second caller, who wanted `operation`."""
    return RuntimeError(
        f"{operation}: another thread is using this EpBuffer; give each thread its own"
    )


def use_alone(busy: threading.Lock, operation: str, call: Callable[[], None]) -> None:
    """Run a call with a buffer to itself; a second thread is refused, never queued.

    Args:
        busy: Held while a call runs; shared by all calls that exclude each other.
        operation: Wanted by a refused caller.
        call: Run meanwhile.

    Raises:
        RuntimeError: Another thread holds `busy`.
    """
    # A signal may raise as soon as the lock is taken, and at the first line of any function: no
    # context manager of Python releases it there.
    is_mine = True
    try:
        if not busy.acquire(False):
            is_mine = False
            raise in_use(operation)
        call()
    finally:
        if is_mine:
            busy.release()
