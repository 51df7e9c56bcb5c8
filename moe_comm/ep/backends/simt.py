"""GPU kernels without a GPU: the CUDA backend's own kernels on an emulator of fibers.

For tests: every thread of a kernel is a fiber, so an operation takes milliseconds where the host
backend takes microseconds. Ranks are processes or threads over the shared-memory heap, as with the
host backend; ranks of other nodes are reached by an emulated network card.

Ranks lie on one device, or, of buffers that are made under `use_device()`, on several as ranks with a
GPU each do. The caller is the host, or, of buffers that are made under `use_stream()`, a stream that runs beside
the host as those of CUDA do (docs/emulator.md).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from moe_comm import _simt
from moe_comm._simt import Stream
from moe_comm.ep.backends.native import Settings
from moe_comm.ep.backends.stream_callers import StreamCallersBackend

if TYPE_CHECKING:
    from moe_comm.ep.config import EpConfig
    from moe_comm.peers.communicator import Communicator

__all__ = ["SimtBackend", "Stream", "current_stream", "use_device", "use_stream"]

# Enough blocks, warps and chunks to differ from one of each; more only make fibers take turns.
NUM_SMS = 2
NUM_THREADS = 64
TOKENS_PER_CHUNK = 16

ResultT = TypeVar("ResultT")


class _Current(threading.local):
    stream: Stream | None = None
    device_number: int = 0


_current = _Current()


def current_stream() -> Stream | None:
    """The stream that operations which this thread issues belong to; None for the host."""
    return _current.stream


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[Stream]:
    """Make `stream` the current one of this thread until the block ends; `torch.cuda.stream` of the emulator.

    Buffers made meanwhile have callers that are streams; their operations belong to the stream that is
    current when they are issued. They return before their results are there: callers that read tensors on
    the host call `stream.synchronize()` first, as with CUDA. A stream lives longer than the buffers
    that were used with it.
    """
    before = _current.stream
    _current.stream = stream
    try:
        yield stream
    finally:
        _current.stream = before


@contextlib.contextmanager
def use_device(number: int) -> Iterator[None]:
    """Make `number` the current device of this thread until the block ends; `torch.cuda.device` of the emulator.

    Buffers made meanwhile have this rank on it. Rows between ranks of different devices go as between GPUs:
    once to each rank, which copies them to their other places (docs/gpu.md).
    """
    before = _current.device_number
    _current.device_number = number
    try:
        yield
    finally:
        _current.device_number = before


class SimtBackend(StreamCallersBackend):
    """Operations by emulated kernels; see `Backend`."""

    name = "simt"
    has_node_reduction = True
    has_rank_reduction = True

    def __init__(self, communicator: Communicator, config: EpConfig) -> None:
        # Meant where none is current any more.
        self._default_stream = current_stream()
        super().__init__(communicator, config)

    def _create_endpoint(self, settings: Settings) -> _simt.Endpoint:
        self._simt_endpoint = _simt.Endpoint.create(
            settings,
            NUM_SMS,
            NUM_THREADS,
            TOKENS_PER_CHUNK,
            has_stream_callers=self._default_stream is not None,
            device_number=_current.device_number,
        )
        return self._simt_endpoint

    def _in_stream(self, call: Callable[[], ResultT]) -> ResultT:
        if self._default_stream is not None:
            stream = current_stream() or self._default_stream
            self._simt_endpoint.set_caller_stream(stream.handle)
        return call()
