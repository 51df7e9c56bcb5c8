"""Values that ranks tell each other, as bytes that are parsed and never executed.

JSON carries None, bools, numbers, text and lists of them as they are. Everything else is an object with
one member, whose name says what it is: a tuple, a dict, a set, bytes, a dtype, an error, or one of the
data classes that `travels` has marked.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import numbers
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from moe_comm.arguments import shortened
from moe_comm.peers.agree import decode_problem, encode_problem

NOT_AS_EXPECTED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors of code that makes something of decoded data which is not what it should be."""

ClassT = TypeVar("ClassT", bound=type)

_SCALARS = frozenset((type(None), bool, int, float, str))
_classes: dict[str, type] = {}


def travels(data_class: ClassT) -> ClassT:
    """Let the values of a data class or named tuple be told to other ranks. A decorator."""
    _classes[data_class.__name__] = data_class
    return data_class


def _names(data_class: Any) -> tuple[str, ...]:
    """Fields in order."""
    if dataclasses.is_dataclass(data_class):
        return tuple(field.name for field in dataclasses.fields(data_class))
    return tuple(data_class._fields)


def _tagged(item: Any) -> Any:
    kind = type(item)
    if kind in _SCALARS:
        return item
    if _classes.get(kind.__name__) is kind:
        values = [_tagged(getattr(item, name)) for name in _names(kind)]
        return {"class": [kind.__name__, *values]}
    if isinstance(item, (list, tuple, set, frozenset)):
        parts = list(item)
        if not _SCALARS.issuperset(map(type, parts)):
            parts = [_tagged(part) for part in parts]
        if isinstance(item, list):
            return parts
        return {"tuple" if isinstance(item, tuple) else "set": parts}
    if isinstance(item, dict):
        return {"dict": [[_tagged(key), _tagged(value)] for key, value in item.items()]}
    if isinstance(item, (bytes, bytearray)):
        return {"bytes": base64.b64encode(item).decode()}
    if isinstance(item, str):
        return str.__str__(item)
    if isinstance(item, numbers.Integral):
        return int(item)
    if isinstance(item, numbers.Real):
        return float(item)
    if isinstance(item, torch.dtype):
        return {"dtype": str(item).removeprefix("torch.")}
    if isinstance(item, Exception):
        return {"error": encode_problem(item)}
    raise TypeError(f"{kind.__name__} is nothing that ranks tell each other as plain data")


def encode_plain(item: Any) -> bytes:
    """A value as bytes.

    Raises:
        TypeError: It holds something else than plain data.
    """
    return json.dumps(_tagged(item), separators=(",", ":")).encode()


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"torch.{name} is no dtype")
    return found


def _instance(parts: list[Any]) -> Any:
    name, *values = parts
    data_class = _classes[name]
    return data_class(
        **dict(zip(_names(data_class), [_item(value) for value in values], strict=True))
    )


_READERS: dict[str, Callable[[Any], Any]] = {
    "tuple": lambda parts: tuple(_item(parts)),
    "set": lambda parts: set(_item(parts)),
    "dict": lambda pairs: {_item(key): _item(value) for key, value in pairs},
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "dtype": _dtype,
    "error": decode_problem,
    "class": _instance,
}


def _item(tagged: Any) -> Any:
    if isinstance(tagged, list):
        if _SCALARS.issuperset(map(type, tagged)):
            return tagged
        return [_item(part) for part in tagged]
    if isinstance(tagged, dict):
        ((tag, content),) = tagged.items()
        return _READERS[tag](content)
    return tagged


def decode_plain(data: bytes, whose: str) -> Any:
    """The value that `encode_plain` made bytes of. Nothing in `data` is executed.

    Args:
        data: As it came.
        whose: Source of `data`, for the message.

    Raises:
        ValueError: It is damaged, or something else; the message begins with `whose`.
    """
    try:
        return _item(json.loads(data.decode("ascii")))
    except NOT_AS_EXPECTED as error:
        raise ValueError(
            f"{whose}: expected plain data (JSON), got {len(data)} bytes that are none "
            f"({type(error).__name__}): {shortened(repr(data[:80]))}"
        ) from None
