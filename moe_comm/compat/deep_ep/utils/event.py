"""Events: the end of an operation of this package, and on GPUs of what a stream holds."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from moe_comm.compat.deep_ep import streams
from moe_comm.ep.handles import CommEvent

__all__ = ["EventHandle", "EventOverlap", "wait_for"]


class EventHandle:
    """A point in time; `EventHandle()` is the present.

    On a CPU it has come already; with GPUs it is the end of what the current stream holds.
    """

    def __init__(self) -> None:
        self._mark = streams.present()
        self._place = streams.running()
        self._event: CommEvent | None = None
        self._finish: Callable[[], None] | None = None
        self._earlier: tuple[EventHandle, ...] = ()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, event: CommEvent, finish: Callable[[], None] | None = None) -> EventHandle:
        """The end of an operation. Used by this package.

        Args:
            event: Event of the operation.
            finish: Called once, in the first wait after the end: fills what was promised.
        """
        handle = cls()
        handle._event = event
        handle._finish = finish
        return handle

    @classmethod
    def after(cls, first: EventHandle, last: EventHandle) -> EventHandle:
        """The end of two operations, of which the second began later. Used by this package."""
        handle = cls()
        handle._earlier = (first, last)
        return handle

    def current_stream_wait(self) -> None:
        """Wait until the operation ended; raise what ended it. Waiting again does the same.

        On a GPU the current stream waits. The host does too as far as it has a part in the operation.
        """
        for earlier in self._earlier:
            earlier.current_stream_wait()
        event = self._event
        if event is not None:
            # Work that is left belongs into the stream of the call, as does the end of the operation.
            with streams.resumed(self._place):
                event.wait()
                with self._lock:
                    finish, self._finish = self._finish, None
                    if finish is not None:
                        finish()
                    self._mark = streams.present()
                    self._event = None  # an event that has come keeps no rows
        if self._mark is not None:
            streams.follow(self._mark, self._place)


class EventOverlap:
    """An event as results carry it.

    Args:
        event: None where there is nothing to wait for.
        extra_tensors: Kept alive as long as this object, so that their memory is not offered again before.

    Attributes:
        hook_after_wait: Function that `register_hook_after_wait` was given, until it is called;
            else None.
        num_sms: SMs that kernels of a collective of a `BucketBuffer` would take; else None.
    """

    num_sms: int | None = None

    def __init__(
        self,
        event: EventHandle | None = None,
        extra_tensors: tuple[torch.Tensor, ...] | None = None,
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], object] | None = None
        self._releases = False

    def current_stream_wait(self, release_handle: bool = False) -> Any:
        """Wait as `EventHandle.current_stream_wait` does, then call the registered hook.

        Args:
            release_handle: Forget the event afterwards.

        Returns:
            Result of the hook; None if there is none, as after it was called.

        Raises:
            ValueError: There is no event.
        """
        if self.event is None:
            raise ValueError("this EventOverlap has no event to wait for")
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        result = None if hook is None else hook()
        if release_handle:
            self.event = None
            self.extra_tensors = None
        return result

    def wait(self) -> Any:
        """`current_stream_wait()`."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Call `hook_after_wait()` in the next `current_stream_wait`, after the wait.

        Raises:
            ValueError: Another one waits to be called.
        """
        if self.hook_after_wait is not None:
            raise ValueError(
                f"an event has one hook at a time, it has {self.hook_after_wait} and was given "
                f"{hook_after_wait}"
            )
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """Return a context for `with event(release_handle): ...`."""
        self._releases = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None:
        if self.event is not None:
            self.current_stream_wait(self._releases)


def wait_for(previous_event: EventOverlap | EventHandle | None) -> None:
    """Wait for what a call is to come after.

    Raises:
        TypeError: It is no event.
    """
    if previous_event is None:
        return
    if isinstance(previous_event, EventOverlap):
        if previous_event.event is not None:
            previous_event.current_stream_wait()
        return
    if not isinstance(previous_event, EventHandle):
        raise TypeError(
            "previous_event must be an EventOverlap, an EventHandle or None, got "
            f"{type(previous_event).__name__}"
        )
    previous_event.current_stream_wait()
