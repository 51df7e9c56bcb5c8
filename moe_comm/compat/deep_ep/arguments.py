"""Checks of arguments that several calls share. Messages hold both values."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.arguments import as_int, check_bool
from moe_comm.compat.deep_ep.config import Config
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap, wait_for

__all__ = [
    "begin",
    "check_bools",
    "check_ints",
    "check_num_sms",
    "check_tensor",
    "num_channels",
    "passed",
]


def check_ints(minimum: int, **values: Any) -> None:
    """Every value is an int of at least `minimum`."""
    for name, value in values.items():
        as_int(name, value, minimum)


def check_bools(**values: Any) -> None:
    """Every value is a bool."""
    for name, value in values.items():
        check_bool(name, value)


def check_tensor(
    name: str,
    value: Any,
    shape: tuple[int | None, ...],
    *dtypes: torch.dtype,
    strided: bool = False,
) -> torch.Tensor:
    """A tensor of one of the dtypes (any where none is given); None in `shape` is any size."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {value.layout}")
    if dtypes and value.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {value.dtype}")
    is_shape = len(shape) == value.dim() and all(
        want is None or want == size for want, size in zip(shape, value.shape, strict=True)
    )
    if not is_shape:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(value.shape)}")
    if not value.is_cpu:
        raise ValueError(f"{name} must be on cpu, got {value.device}")
    if not strided and not value.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {value.stride()}")
    return value


def check_num_sms(num_sms: Any) -> None:
    """An even int of at least 2."""
    check_ints(2, num_sms=num_sms)
    if num_sms % 2:
        raise ValueError(f"num_sms must be even, got {num_sms}")


def num_channels(config: Any) -> int:
    """Channels of a V1 handle."""
    if not isinstance(config, Config):
        raise TypeError(f"config must be a Config, got {type(config).__name__}")
    check_num_sms(config.num_sms)
    return config.num_sms // 2


def begin(previous_event: Any, async_finish: Any, allocate_on_comm_stream: Any) -> None:
    """Check what every call takes, and wait for what it is to come after."""
    check_bools(async_finish=async_finish, allocate_on_comm_stream=allocate_on_comm_stream)
    if allocate_on_comm_stream and (previous_event is None or not async_finish):
        raise ValueError(
            "allocate_on_comm_stream needs a previous_event and async_finish=True, got "
            f"{previous_event} and {async_finish}"
        )
    wait_for(previous_event)


def passed(async_finish: bool) -> EventOverlap:
    """The event of a call that has ended."""
    return EventOverlap(EventHandle()) if async_finish else EventOverlap()
