"""One caller at a time, where a second one is a mistake."""

from __future__ import annotations

import threading
import types

__all__ = ["ExclusiveUse", "in_use"]


def in_use(operation: str) -> RuntimeError:
    """The error of a second caller, who wanted `operation`."""
    return RuntimeError(
        f"{operation}: another thread is using this EpBuffer; give each thread its own"
    )


class ExclusiveUse:
    """Holds a buffer for a call at a time; a second thread is refused, never queued.

    Args:
        busy: Held while a call runs; shared by all calls that exclude each other.
        operation: What the refused caller wanted.
    """

    __slots__ = ("_busy", "_operation")

    def __init__(self, busy: threading.Lock, operation: str) -> None:
        self._busy = busy
        self._operation = operation

    def __enter__(self) -> None:
        if not self._busy.acquire(False):
            raise in_use(self._operation)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        self._busy.release()
