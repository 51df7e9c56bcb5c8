"""Values that become values of another dtype by themselves, and values that can be reduced."""

from __future__ import annotations

import torch

NUMBERS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
"""Dtypes whose values are the weights themselves, and that round into each other."""

_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int32, torch.int64})
_COMPLEX = frozenset({torch.complex64, torch.complex128})


def is_scaled(dtype: torch.dtype) -> bool:
    """Return whether values mean something only together with scale factors, or are such factors."""
    return dtype.is_floating_point and dtype not in NUMBERS


def cannot_become(source: torch.dtype, target: torch.dtype, *, takes_over: bool = False) -> str:
    """Why values of one dtype do not become values of another one; empty where they do.

    Args:
        source: Dtype of the values.
        target: Dtype of the tensor that is to hold them.
        takes_over: Whether the tensor takes over the dtype of its source: integers become each other, too.
            Values with scale factors do not, whose reader counts on the dtype that it has.
    """
    if source == target or {source, target} <= NUMBERS:
        return ""
    scaled = next(filter(is_scaled, (source, target)), None)
    if scaled is not None:
        return (
            f"values of {scaled} are no weights without their scale factors: both sides must have the "
            "same dtype, or a transform must convert them"
        )
    return "" if takes_over else "only floating-point dtypes become each other"


def cannot_reduce(op: str, dtype: torch.dtype) -> str:
    """Why a pending reduction of a dtype cannot be run by every backend; empty where it can.

    Args:
        op: "sum", "avg", "min", "max" or "product".
        dtype: Dtype in which it is run.
    """
    able = NUMBERS
    if op in ("sum", "avg"):
        able = able | _COMPLEX
    if op != "avg":
        able = able | _INTEGERS | {torch.bool}
    if dtype in able:
        return ""
    names = ", ".join(sorted(str(each).removeprefix("torch.") for each in able))
    return f'a pending "{op}" of {dtype} cannot be reduced, only one of {names}'
