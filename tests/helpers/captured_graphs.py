"""Graphs of operations, captured on the emulator."""

from __future__ import annotations

from typing import Any

from moe_comm import EpBuffer


class Graph:
    """Operations captured between `with` and its end runs at every replay."""

    def __init__(self, buffer: EpBuffer) -> None:
        self._backend: Any = buffer._backend
        self._endpoint = self._backend._endpoint

    def __enter__(self) -> Graph:
        self._backend._in_stream(self._endpoint.begin_capture)
        return self

    def __exit__(self, *_: object) -> None:
        self._native = self._endpoint.end_capture()

    @property
    def num_nodes(self) -> int:
        return int(self._native.num_nodes)

    def put(self) -> None:
        """A replay, in the current stream; the host does not wait for it."""
        self._backend._in_stream(self._native.replay)

    def wait(self) -> None:
        self._native.synchronize()

    def replay(self) -> None:
        self._native.replay()
        self.wait()
