"""Base of objects that are released by `destroy()`, and by the end of a `with` block."""

from __future__ import annotations

import abc
import logging
import types
from typing import TypeVar

SelfT = TypeVar("SelfT", bound="Destroyable")


class Destroyable(abc.ABC):
    """Destroyed at the end of its `with` block, whose own error nothing replaces."""

    @abc.abstractmethod
    def destroy(self) -> None:
        """Release what it holds. Idempotent; what it has to tell it raises when it is done."""

    def __enter__(self: SelfT) -> SelfT:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        try:
            self.destroy()
        except Exception as late:
            if exc is None:
                raise
            logging.getLogger("moe_comm").warning(
                "besides the %s: %s: %s", type(exc).__name__, type(late).__name__, late
            )
