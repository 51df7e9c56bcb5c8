"""Tells whether tensors are what and where they were: asked before a refit repeats what was prepared.

Tensors and modules are given themselves or as weak references.
"""

from __future__ import annotations

import contextlib
import operator
import weakref
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from moe_comm import _host

Tensors: TypeAlias = "list[torch.Tensor] | list[weakref.ref[torch.Tensor]]"

_DTYPE = operator.attrgetter("dtype")


# The command line imports this where the native module cannot be loaded, too, and says so.
def any_has(modules: list[Any], key: str) -> bool:
    """Return whether one of the modules has an attribute of its own of this name."""
    from moe_comm import _host

    return _host.any_has(modules, key)


class HeldObjects:
    """Parameters, buffers and submodules of modules, in order.

    Args:
        keys: Their names.
        values: Themselves or weak references.
    """

    def __init__(self, keys: list[str], values: list[Any]) -> None:
        from moe_comm import _host

        self._held = keys, values, _host.SeenDicts()

    def are_in(self, modules: list[Any]) -> bool:
        """Return whether the modules still hold, under these names, these very objects."""
        from moe_comm import _host

        return _host.hold_same(modules, *self._held)


def _plain(tensors: Tensors) -> list[torch.Tensor] | None:
    """The tensors themselves, and this rank's parts of DTensors; None where a tensor is gone."""
    plain: list[torch.Tensor] = []
    for given in tensors:
        tensor = given() if isinstance(given, weakref.ref) else given
        if tensor is None:
            return None
        plain.append(tensor._local_tensor if isinstance(tensor, DTensor) else tensor)
    return plain


class TensorTable:
    """Shapes, dtypes, addresses, strides and lazy signs of tensors when this was made. Keeps no tensor alive.

    Args:
        tensors: Tensors to describe; of a DTensor, this rank's part counts.

    Raises:
        ValueError: A tensor is gone.
    """

    def __init__(self, tensors: Tensors) -> None:
        from moe_comm import _host

        plain = _plain(tensors)
        if plain is None:
            raise ValueError(f"tensors of a table must be alive, one of {len(tensors)} is gone")
        self._native: _host.TensorTable | None = None
        self._described: list[list[Any]] | None = None
        # Python describes what DLPack cannot (a dtype, a subclass; with an old torch all).
        with contextlib.suppress(BufferError, RuntimeError, ValueError):
            self._native = _host.TensorTable(plain)
        if self._native is None:
            self._described = _describe(plain)

    def matches(self, tensors: Tensors, *, has_dtensors: bool = True) -> bool:
        """Return whether `tensors`, in the order of those that this was made of, are what those were.

        Args:
            tensors: The tensors.
            has_dtensors: False where the caller knows that no tensor is a DTensor: then none is looked
                at in Python.
        """
        if self._native is None or has_dtensors:
            plain = _plain(tensors)
            if plain is None:
                return False
            if self._native is None:
                return _describe(plain) == self._described
            tensors = plain
        try:
            return self._native.matches(tensors)
        except (BufferError, RuntimeError):
            return False  # one cannot be described, and all could


def _describe(plain: list[torch.Tensor]) -> list[list[Any]]:
    try:
        return [
            list(map(torch.Tensor.data_ptr, plain)),
            list(map(torch.Tensor.dim, plain)),
            # Numbers of all tensors in one list: ten thousand `torch.Size` that live on would set
            # off a full collection of garbage every few refits.
            list(chain.from_iterable(map(torch.Tensor.size, plain))),
            list(chain.from_iterable(map(torch.Tensor.stride, plain))),
            list(map(_DTYPE, plain)),
            list(map(torch.Tensor.is_neg, plain)),
            list(map(torch.Tensor.is_conj, plain)),
        ]
    except RuntimeError:
        # One has no address or strides, such as a sparse tensor. It may have changed.
        return [[object()]]
