"""Streams and events where there is no device: work is done by the time a call returns."""

from __future__ import annotations

__all__ = ["HostEvent", "HostStream"]


class HostEvent:
    """A point in a `HostStream`; it has always been reached once it was recorded."""

    def __init__(self) -> None:
        self._is_recorded = False

    def record(self, stream: HostStream | None = None) -> None:
        """Mark now."""
        self._is_recorded = True

    def query(self) -> bool:
        """Whether the work before the event is done: true, as for a CUDA event never recorded."""
        return True

    def synchronize(self) -> None:
        """Wait for the work before the event: it is done."""

    @property
    def is_recorded(self) -> bool:
        """Whether `record` was called."""
        return self._is_recorded


class HostStream:
    """Executes at once, in the calling thread, so that everything is in order already.

    Has the methods of a `torch.cuda.Stream` and of a cuda-core stream that the pipeline calls.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def wait_event(self, event: HostEvent) -> None:
        """Let later work wait for `event`: it has been reached."""

    def wait_stream(self, stream: HostStream) -> None:
        """Let later work wait for that of `stream`: it is done."""

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        """Mark now by `event`, or a new one."""
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Wait for the work of the stream: it is done."""

    def sync(self) -> None:
        """As `synchronize`, by cuda-core's name."""

    def __repr__(self) -> str:
        return f"HostStream({self.name!r})"
