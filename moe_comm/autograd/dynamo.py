"""Functions that dynamo takes into its graph whole.

torch marks them by `torch.compiler.allow_in_graph`, which imports dynamo: a second that importing the
package must not cost. So they are marked when a fake runs, which is before dynamo meets them.
"""

from __future__ import annotations

import sys
from typing import TypeVar

import torch

__all__ = ["mark_whole", "taken_whole"]

FunctionT = TypeVar("FunctionT")

_whole: list[object] = []


def taken_whole(function: FunctionT) -> FunctionT:
    """Decorator: dynamo does not look into `function`."""
    _whole.append(function)
    return function


def mark_whole() -> None:
    """Tell dynamo, if it is loaded; called by the fakes."""
    if "torch._dynamo" in sys.modules:
        for function in _whole:
            torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
