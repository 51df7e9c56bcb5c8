"""Callers that are streams, on the emulator: tensors of the CPU that nobody may touch meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from moe_comm import Communicator, EpConfig
from moe_comm.ep.backends.base import Backend
from moe_comm.ep.backends.simt import (
    SimtBackend,
    Stream,
    current_stream,
    use_device,
    use_stream,
)
from moe_comm.testing import RankContext
from tests.helpers.on_device import OnDevice

ResultT = TypeVar("ResultT")

LAG_S = 0.001
"""Time for which a stream lets the host run ahead, so that who does not wait for it comes too early."""


NUM_DEVICES = 2
"""Number of devices that ranks take in turn: of 3 ranks, two share one."""


class WaitsForStream(TorchDispatchMode):
    """Has the current stream end before every operation of torch's, for code that reads results at once.

    What a GPU's tensors do by themselves, as their operations go into the stream.
    """

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        stream = current_stream()
        if stream is not None:
            stream.synchronize()
        return func(*args, **(kwargs or {}))


def in_stream(
    context: RankContext, fn: Callable[..., ResultT], *args: Any, **options: Any
) -> ResultT:
    """Call `fn(context, ...)` on a rank whose caller is a stream, waited for before torch reads."""
    with use_stream(Stream()), WaitsForStream():
        return fn(context, *args, **options)


def on_devices(
    context: RankContext, fn: Callable[..., ResultT], *args: Any, **options: Any
) -> ResultT:
    """Call `fn(context, ...)` with ranks on several devices, in turn."""
    with use_device(context.rank_idx % NUM_DEVICES):
        return fn(context, *args, **options)


class OnStream(OnDevice):
    """Copies go in the caller's stream in both directions, and tensors hold garbage before.

    So an operation that does not follow the stream moves garbage, and so does a copy of its results that
    does not come behind it.
    """

    def __init__(self, communicator: Communicator, config: EpConfig) -> None:
        self._stream = Stream()
        with use_stream(self._stream):
            super().__init__(communicator, config, SimtBackend)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        _fill_with_garbage(target)
        self._stream.call(lambda: target.copy_(source))
        return target

    def _fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        fetched = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        _fill_with_garbage(fetched)
        self._stream.call(lambda: fetched.copy_(tensor))
        self._stream.synchronize()
        return fetched

    def _to_device(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if self._stream.is_idle():
            self._stream.call(lambda: time.sleep(LAG_S))
        return super()._to_device(tensor)


def _fill_with_garbage(tensor: torch.Tensor) -> None:
    """0xFF in every byte: NaN in every float format, and no expert."""
    tensor.untyped_storage().fill_(0xFF)


def connect_streams(group: Any) -> Communicator:
    """A communicator for `make_on_stream`."""
    return Communicator(group, backend="simt")


def make_on_stream(communicator: Communicator, config: EpConfig) -> Backend:
    """The emulator's backend with a stream as its caller, behind tensors of the host."""
    return OnStream(communicator, config)


def make_on_devices(communicator: Communicator, config: EpConfig) -> Backend:
    """The emulator's backend with ranks on several devices."""
    with use_device(communicator.rank_idx % NUM_DEVICES):
        return SimtBackend(communicator, config)


def make_on_devices_and_streams(communicator: Communicator, config: EpConfig) -> Backend:
    """Both: what a rank with a GPU of its own is."""
    with use_device(communicator.rank_idx % NUM_DEVICES):
        return OnStream(communicator, config)
