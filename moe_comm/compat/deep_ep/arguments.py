"""Checks of arguments that several calls share. Messages hold both values."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from moe_comm.arguments import as_dense, as_int, check_bool
from moe_comm.compat.deep_ep.config import Config
from moe_comm.compat.deep_ep.streams import running
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap, wait_for
from moe_comm.tensors.memory import check_memory

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


def ints_as_bools(function: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """A decorator: 0 and 1 do for what is annotated as a bool, as DeepEP's bindings take them.

    Its callers pass what `argparse` read as an int. Arguments that cannot be bound are left to the
    function.
    """
    parameters = inspect.signature(function).parameters
    names = list(parameters)
    flags = {name for name in names if "bool" in str(parameters[name].annotation).split(" | ")}

    def taken(name: str, value: Any) -> Any:
        return bool(value) if name in flags and type(value) is int and value in (0, 1) else value

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        # Most calls have none of those: numbers of other names are left to the function.
        if not any(type(value) is int for value in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        named = [taken(name, value) for name, value in zip(names, args, strict=False)]
        rest = {name: taken(name, value) for name, value in kwargs.items()}
        return function(*named, *args[len(named) :], **rest)  # type: ignore[arg-type]

    return called


_STATISTICS = ("cumulative_local_expert_recv_stats", "dispatch_wait_recv_cost_stats")
_FP8_SWITCHES = ("use_fp8", "round_scale", "use_ue8m0")
_ENDS = ("async_finish", "return_recv_hook")
# Arguments behind num_experts in a low-latency dispatch: of DeepEP, of SGLang's build, of branch hybrid-ep.
_LINEAGES = (
    (*_STATISTICS, *_FP8_SWITCHES, *_ENDS),
    (*_STATISTICS, "x_global_scale", *_FP8_SWITCHES, "use_nvfp4", *_ENDS),
    (
        "topk_weights",
        *_STATISTICS,
        "x_global_scale",
        *_FP8_SWITCHES,
        "use_nvfp4",
        "use_ue8m0_for_sf",
        *_ENDS,
    ),
)
_DTYPE_OF_STATISTICS = dict(zip(_STATISTICS, (torch.int32, torch.int64), strict=True))
_NUM_COMMON = 5  # self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts


def in_order_of_lineage(method: Callable[P, ResultT]) -> Callable[P, ResultT]:
    """A decorator of `low_latency_dispatch`: arguments without names may be in the order of any lineage.

    Types tell which: the lineages differ in where tensors end and switches begin, and in the dtypes of
    tensors. What fits none is left to the method, which says what is wrong with it.
    """

    @functools.wraps(method)
    def called(*args: P.args, **kwargs: P.kwargs) -> ResultT:
        given = args[_NUM_COMMON:]
        lineage = next((names for names in _LINEAGES if _fits(names, given)), _LINEAGES[0])
        named = dict(zip(lineage, given, strict=False))
        if lineage is _LINEAGES[0] or named.keys() & kwargs.keys():
            return method(*args, **kwargs)
        return method(*args[:_NUM_COMMON], **named, **kwargs)  # type: ignore[arg-type]

    return called


def _fits(names: tuple[str, ...], given: tuple[Any, ...]) -> bool:
    """Return whether every value may be meant for the name at its place."""

    def could_be(name: str, value: Any) -> bool:
        if name in (*_FP8_SWITCHES, "use_nvfp4", "use_ue8m0_for_sf", *_ENDS):
            return type(value) in (bool, int)
        dtype = _DTYPE_OF_STATISTICS.get(name, torch.float32)
        return value is None or (isinstance(value, torch.Tensor) and value.dtype is dtype)

    return len(given) <= len(names) and all(map(could_be, names, given))


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
    """A tensor of one of the dtypes (any where none is given); None in `shape` is any size.

    It has to be where its call works (see `on_device`).
    """
    tensor = as_dense(name, value)
    if dtypes and tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {tensor.dtype}")
    sizes = tensor.shape
    is_shape = len(shape) == len(sizes)
    for want, size in zip(shape, sizes, strict=False):
        if want is not None and want != size:
            is_shape = False
    if not is_shape:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape ({wanted}), got {tuple(tensor.shape)}")
    device = running().device
    if tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if not strided and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    check_memory(name, tensor)
    return tensor


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
