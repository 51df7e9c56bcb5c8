"""Device and stream of this module's calls: the device of their tensors, and on GPUs a stream of their own.

As in DeepEP, a call begins behind the caller's current stream or behind `previous_event`, and what the
caller puts into its stream afterwards comes behind the call, or behind the wait for its event.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import cuda

from moe_comm.ep.backends.base import Plan, PlanTensors

P = ParamSpec("P")
ResultT = TypeVar("ResultT")

GPU = "cuda"
"""The kind of device whose calls work in streams."""
_EARLY_ENDS = ("async_finish", "async_with_compute_stream", "return_recv_hook")


class Place(NamedTuple):
    """Device and stream that a call works on.

    Args:
        device: Device of its tensors.
        stream: Stream in which it works on a GPU; None on the CPU.
    """

    device: torch.device
    stream: cuda.Stream | None


_ON_CPU = Place(torch.device("cpu"), None)


class _Running(threading.local):
    place: Place | None = None


_running = _Running()


def running() -> Place:
    """Return the place of the call that this thread is in; the CPU outside of calls."""
    return _running.place or _ON_CPU


def on_call_device(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that the host has, where the call works that this thread is in."""
    return tensor.to(running().device)


def plan_on_call_device(plan: Plan) -> PlanTensors:
    """Return the tensors of a plan, moved like `on_call_device`."""
    tensors = plan.to_tensors()
    if tensors.counts.device == running().device:
        return tensors
    return dataclasses.replace(
        tensors,
        counts=on_call_device(tensors.counts),
        slots=on_call_device(tensors.slots),
        topk_idx=on_call_device(tensors.topk_idx),
    )


def present() -> cuda.Event | None:
    """The end of what the current stream holds; None in a process that has put nothing into any."""
    return cuda.current_stream().record_event() if cuda.is_initialized() else None  # type: ignore[no-untyped-call]


@contextmanager
def resumed(place: Place) -> Iterator[None]:
    """Within it work goes on where a call has worked."""
    outer = _running.place
    if outer == place:
        yield
        return
    _running.place = place
    try:
        if place.stream is not None:
            with place.device, cuda.stream(place.stream):
                yield
        elif torch.empty(0).device == place.device:
            yield  # torch's default already, whatever made it so
        else:
            with place.device:
                yield
    finally:
        _running.place = outer


def follow(mark: cuda.Event, place: Place) -> None:
    """Put later work of the caller's stream behind `mark`, which was made at `place`."""
    device = None if place.stream is None else place.device  # None: the current one
    cuda.current_stream(device).wait_event(mark)


def in_callers_stream(place: Place, work: Callable[[], ResultT]) -> ResultT:
    """Return the result of `work`, which finishes a call of `place` in the stream that is current now."""
    if place.stream is None:
        with resumed(place):
            return work()
    caller = cuda.current_stream(place.device)
    with resumed(Place(place.device, caller)):
        result = work()
    for tensor in tensors_in(result):
        tensor.record_stream(caller)
    # Memory that the call has taken in its own stream is offered again there, behind what reads it here.
    place.stream.wait_stream(caller)
    return result


class _Owner(Protocol):
    def device_of(self, given: tuple[Any, ...]) -> torch.device: ...

    def comm_stream(self, device: torch.device) -> CommStream: ...

    def use_on(self, stream: cuda.Stream) -> None: ...


class CommStream:
    """The stream in which one object's calls work on a GPU.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: cuda.Stream = cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._device = device

    def run(
        self,
        call: Callable[[], ResultT],
        given: tuple[Any, ...],
        *,
        is_after_event: bool,
        ends_early: bool,
    ) -> ResultT:
        """Return the result of `call`, whose work is put into this stream.

        Args:
            call: Waits for its `previous_event` itself.
            given: Its arguments.
            is_after_event: It comes behind that event alone, and not behind the caller's stream.
            ends_early: The caller waits by an event or a hook.
        """
        caller = cuda.current_stream(self._device)
        if not is_after_event:
            self.stream.wait_stream(caller)
        try:
            with resumed(Place(self._device, self.stream)):
                result = call()
        except BaseException:
            # A call that is refused may have looked at tensors, and gives nobody anything to wait by.
            caller.wait_stream(self.stream)
            raise
        if not ends_early:
            caller.wait_stream(self.stream)
        # The allocator offers memory again in the order of the stream that it was taken in.
        for tensors, stream in ((given, self.stream), (result, caller)):
            for tensor in tensors_in(tensors):
                if tensor.device == self._device:
                    tensor.record_stream(stream)
        return result


def on_device(method: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """A decorator of methods of objects with a `GroupOwner`: they work where the tensors passed are.

    Until it returns that device is torch's default: what is made lies there, what is passed has to.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        owner: _Owner = args[0]._owner  # type: ignore[attr-defined]
        given = (*args[1:], *kwargs.values())
        device = owner.device_of(given)
        if device == _ON_CPU.device:
            if _running.place is None and torch.empty(0).device == device:
                # The same as below without a context manager, which costs as much as the rest of this.
                _running.place = _ON_CPU
                try:
                    return method(*args, **kwargs)
                finally:
                    _running.place = None
            with resumed(_ON_CPU):
                return method(*args, **kwargs)
        try:
            named = signature.bind(*args, **kwargs).arguments
        except TypeError:
            named = {}  # the method says so itself
        event = named.get("previous_event")
        result = owner.comm_stream(device).run(
            lambda: method(*args, **kwargs),
            given,
            # An event without anything to wait for is none.
            is_after_event=getattr(event, "event", event) is not None,
            ends_early=any(named.get(name) for name in _EARLY_ENDS),
        )
        owner.use_on(cuda.current_stream(device))
        return result

    return called


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of arguments and results, in their order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from tensors_in(each)
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in([getattr(value, name) for name in value.__dataclass_fields__])
