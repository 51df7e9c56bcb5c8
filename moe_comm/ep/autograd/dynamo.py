"""Functions that dynamo takes into its graph whole, and functions that it does not look at.

torch marks functions by `torch.compiler.allow_in_graph` and `torch.compiler.disable`, which import
dynamo: a second that importing the package must not cost. So they are marked when a fake runs, which
is before dynamo meets them.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch

FunctionT = TypeVar("FunctionT")

_whole: list[object] = []
_kernels: list[_Kernel] = []

# Their frames run when dynamo calls an operator eagerly, after a graph break.
_SKIPPED_MODULES = ("moe_comm.ep.autograd.dynamo", "moe_comm.ep.autograd.formulas")


def taken_whole(function: FunctionT) -> FunctionT:
    """Decorator: dynamo does not look into `function`."""
    _whole.append(function)
    return function


class _Kernel:
    """A kernel of an operator, until dynamo is loaded as it is, then with dynamo kept out of it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.is_marked = False

    def __call__(self, *args: Any) -> Any:
        return self.function(*args)


def untraced(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel`, which dynamo does not trace where an operator runs outside a graph."""
    made = _Kernel(kernel)
    _kernels.append(made)
    return made


def is_loaded() -> bool:
    """Return whether anything of this process may be compiled: torch does not load dynamo by itself."""
    return "torch._dynamo" in sys.modules


def mark() -> None:
    """Tell dynamo, if it is loaded; called by the fakes."""
    if not is_loaded():
        return
    for function in _whole:
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    for kernel in _kernels:
        if not kernel.is_marked:
            kernel.is_marked = True
            kernel.function = torch.compiler.disable(kernel.function)  # type: ignore[no-untyped-call]
    _skip_modules()


@functools.cache
def _skip_modules() -> None:
    from torch._dynamo import trace_rules

    for name in _SKIPPED_MODULES:
        trace_rules.add(name)
