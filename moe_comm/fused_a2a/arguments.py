"""Meaning of positional arguments in each release of Megatron, and checks of what only a GPU heeds."""

from __future__ import annotations

from typing import Any

from moe_comm.arguments import as_int, check_bool

_SMS = ("num_sms_dispatch_api", "num_sms_combine_api")
_BLOCKS = ("num_blocks_permute", "num_blocks_unpermute")
TUNING = (*_SMS, *_BLOCKS, "num_sms_preprocessing_api")
_LIMITS = ("num_permuted_tokens", "pad_multiple")
DISPATCH_FIXED = ("x", "routing_map", "probs", "group", "num_local_experts")
_DISPATCH_R0_16 = (*DISPATCH_FIXED, *_SMS, *_LIMITS)
_DISPATCH_R0_17 = (*DISPATCH_FIXED, *_SMS, *_BLOCKS, "fused", *_LIMITS)
DISPATCH_MAIN = (*_DISPATCH_R0_17, "num_sms_preprocessing_api")
DISPATCH_OPTIONS = frozenset(DISPATCH_MAIN[len(DISPATCH_FIXED) :])
# Up to the first seven, all releases have the same order.
DISPATCH_AS_IN_MAIN = (
    *range(len(DISPATCH_FIXED), len(DISPATCH_FIXED) + len(_SMS) + 1),
    len(DISPATCH_MAIN),
)
INIT_FIXED = ("group", "hidden_dim", "num_tokens", "num_local_experts")
INIT_R0_16 = (*INIT_FIXED, *_SMS, "fp8_dispatch")
INIT_MAIN = (*INIT_FIXED, *_SMS, *_BLOCKS, "fp8_dispatch", "num_sms_preprocessing_api")


def dispatch_order(num_args: int) -> tuple[str, ...]:
    """Names of the positional arguments of the release that has so many."""
    if num_args <= len(_DISPATCH_R0_16):
        return _DISPATCH_R0_16
    for order in (_DISPATCH_R0_17, DISPATCH_MAIN):
        if num_args == len(order):
            return order
    raise TypeError(
        f"a HybridEP dispatch takes up to {len(_DISPATCH_R0_16)} positional arguments (r0.16), "
        f"{len(_DISPATCH_R0_17)} (r0.17) or {len(DISPATCH_MAIN)} (main), got {num_args}"
    )


def bind_arguments(
    function: str,
    order: tuple[str, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: tuple[str, ...],
    required: tuple[str, ...],
) -> dict[str, Any]:
    """Arguments by name; keywords replace positions."""
    if len(args) > len(order):
        raise TypeError(
            f"{function} takes {len(order)} positional arguments at most, got {len(args)}"
        )
    for name in kwargs:
        if name not in known:
            unknown = sorted(set(kwargs) - set(known))
            raise TypeError(f"{function} has no argument {unknown[0]!r}")
    given = dict(zip(order, args, strict=False)) | kwargs
    if len(args) < len(required):
        missing = [name for name in required if name not in given]
        if missing:
            raise TypeError(f"{function} needs {', '.join(missing)}")
    return given


def check_tuning(fused: Any, *numbers: Any) -> None:
    """Options that choose among GPU kernels; numbers are in the order of `TUNING` and may be None."""
    for idx, value in enumerate(numbers):
        if value is not None and (type(value) is not int or value < 0):
            check_count(TUNING[idx], value)
    if fused is not False:
        check_bool("fused", fused)


def check_count(name: str, value: Any, minimum: int = 0) -> None:
    """An int of at least `minimum`."""
    as_int(name, value, minimum)


def check_flags(async_finish: Any, allocate_on_comm_stream: Any) -> None:
    """Options that choose among streams."""
    for name, value in (
        ("async_finish", async_finish),
        ("allocate_on_comm_stream", allocate_on_comm_stream),
    ):
        check_bool(name, value)
