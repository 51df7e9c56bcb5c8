"""Tensors that are one: several names of a parameter, or parameters that share their memory."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch.distributed.tensor import DTensor


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, any other tensor itself; without its gradient history."""
    if isinstance(tensor, DTensor):
        return tensor._local_tensor.detach()
    return tensor.detach()


def memory_of(tensor: torch.Tensor) -> Hashable:
    """Return a key of the memory of a tensor, equal for two that are one: the elements that a rank holds."""
    local = local_tensor(tensor)
    # Other kinds of tensors need not have a memory of their own.
    has_memory = (
        type(local) is torch.Tensor
        and local.layout is torch.strided
        and local.device.type != "meta"
        and local.numel() > 0
        and local.data_ptr() != 0
    )
    if not has_memory:
        return id(tensor)
    return local.device, local.data_ptr(), local.shape, local.stride(), local.dtype


def names_by_memory(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[tuple[str, ...], ...]:
    """Names of each of these tensors that has several, or shares its memory."""
    names: dict[Hashable, list[str]] = {}
    for name, tensor in named:
        names.setdefault(memory_of(tensor), []).append(name)
    return tuple(tuple(each) for each in names.values() if len(each) > 1)


def tied_names(module: torch.nn.Module) -> tuple[tuple[str, ...], ...]:
    """All names of each parameter or persistent buffer that has several, or shares its memory."""
    return names_by_memory(
        (f"{path}.{name}" if path else name, tensor)
        for path, owner in module.named_modules(remove_duplicate=False)
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items())
        if tensor is not None and name not in owner._non_persistent_buffers_set
    )
