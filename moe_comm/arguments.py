"""Checks of plain arguments for every layer: integers, flags, tensors. Messages hold both values."""

from __future__ import annotations

import operator
from typing import Any

import torch


def as_int(name: str, value: Any, minimum: int | None = None, maximum: int | None = None) -> int:
    """An integer of any type that is one, NumPy's too, as an int.

    Raises:
        TypeError: A bool, a tensor, a float or anything else.
        ValueError: Below `minimum` or above `maximum`.
    """
    if type(value) is not int:
        if isinstance(value, bool | torch.Tensor) or not hasattr(type(value), "__index__"):
            raise TypeError(f"{name} must be an int, got {shown(value)}")
        value = operator.index(value)
    if minimum is not None and value < minimum:
        raise ValueError(f"{name} must be >= {minimum}, got {value}")
    if maximum is not None and value > maximum:
        raise ValueError(f"{name} must be <= {maximum}, got {value}")
    result: int = value
    return result


def check_bool(name: str, value: Any) -> None:
    """A bool and nothing that only counts as one.

    Raises:
        TypeError: It is none.
    """
    if value is not True and value is not False:
        raise TypeError(f"{name} must be a bool, got {shown(value)}")


def check_kind(name: str, value: Any, kind: type, *, is_optional: bool = False) -> None:
    """Check that `value` is of `kind`, or None where it may be.

    Raises:
        TypeError: It is anything else.
    """
    if not isinstance(value, kind) and not (is_optional and value is None):
        either = " or None" if is_optional else ""
        raise TypeError(f"{name} must be a {kind.__name__}{either}, got {type(value).__name__}")


def as_dense(name: str, value: Any) -> torch.Tensor:
    """A tensor, of the layout that has strides.

    Raises:
        TypeError: It is none.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {value.layout}")
    return value


def check_resolved(name: str, tensor: torch.Tensor) -> None:
    """Check that the bytes of a tensor hold its value.

    Raises:
        ValueError: torch only remembers that they are to be negated or conjugated.
    """
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{name} is a lazy conjugate or negation, got {tensor.dtype} with is_conj() = "
            f"{tensor.is_conj()} and is_neg() = {tensor.is_neg()}: give what "
            "resolve_conj().resolve_neg() returns"
        )


def shown(value: Any) -> str:
    """A value for a message: of a tensor what it is, not what it holds."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of an object of somebody else
        text = f"an object of {type(value).__name__}"
    return shortened(text)


def text_of(error: Exception) -> str:
    """Return the text of an error, or its type: errors of somebody else's objects may not even be shown."""
    try:
        return str(error) or type(error).__name__
    except Exception:  # noqa: BLE001 - of an object of somebody else
        return type(error).__name__


def as_utf8(text: str) -> str:
    """Make a text fit for UTF-8 on a wire: names of files, and what messages quote, may not be."""
    return text.encode("utf-8", "backslashreplace").decode()


def shortened(text: str) -> str:
    """At most 200 characters of a text for a message."""
    return text if len(text) <= 200 else f"{text[:197]}..."
