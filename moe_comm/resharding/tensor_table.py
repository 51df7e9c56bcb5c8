"""Whether tensors are what and where they were: asked before a refit repeats what was prepared."""

from __future__ import annotations

import contextlib
import operator
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from moe_comm import _host

__all__ = ["TensorTable", "any_has", "hold_same"]

any_has = _host.any_has
hold_same = _host.hold_same

_DTYPE = operator.attrgetter("dtype")
# DLPack's table of C functions, which torch has from 2.10 on: it describes a tensor in some ten
# nanoseconds, where attributes of the object take most of a microsecond.
_EXCHANGE_API = vars(torch.Tensor).get("__dlpack_c_exchange_api__")


def _plain(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's parts of DTensors."""
    if set(map(type, tensors)) - {torch.Tensor, torch.nn.Parameter}:
        return [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    return tensors


class TensorTable:
    """Shapes, dtypes, addresses and strides of tensors when this was made. Keeps no tensor alive.

    Args:
        tensors: Of DTensors, this rank's part counts.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._native: _host.TensorTable | None = None
        self._described: list[list[Any]] | None = None
        plain = _plain(tensors)
        if _EXCHANGE_API is not None:
            # What DLPack cannot describe (a dtype, a subclass; another version) is described in Python.
            with contextlib.suppress(BufferError, RuntimeError, ValueError):
                self._native = _host.TensorTable(_EXCHANGE_API, plain)
        if self._native is None:
            self._described = _describe(plain)

    def matches(self, tensors: list[torch.Tensor]) -> bool:
        """Whether `tensors`, in the order of those that this was made of, are what those were."""
        plain = _plain(tensors)
        if self._native is None:
            return _describe(plain) == self._described
        try:
            return self._native.matches(plain)
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
        ]
    except RuntimeError:
        # One has no address or strides, such as a sparse tensor. It may have changed.
        return [[object()]]
