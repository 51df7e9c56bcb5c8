"""Checks of input that the functions of this package share, and how they launch."""

from __future__ import annotations

import contextlib

import torch

_INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


def check_tensor(
    name: str, tensor: torch.Tensor, num_dims: int, device: torch.device | None = None
) -> None:
    """A contiguous tensor of `num_dims` dimensions, on `device` where one is given."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() != num_dims:
        raise ValueError(f"{name} must have {num_dims} dimensions, got shape {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device}, got {tensor.device}")
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, got shape {tuple(tensor.shape)} with strides "
            f"{tensor.stride()}"
        )


def check_dtype(name: str, tensor: torch.Tensor, *allowed: torch.dtype) -> None:
    """A dtype that is allowed."""
    if tensor.dtype not in allowed:
        names = ", ".join(str(dtype) for dtype in allowed)
        raise TypeError(f"{name} must be one of {names}, got {tensor.dtype}")


def check_no_gradient(**tensors: torch.Tensor | None) -> None:
    """No tensor wants a gradient, which would silently be none."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, which this function does not have: detach it or work "
                "under torch.no_grad()"
            )


def int_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as integers of the same size."""
    return tensor.detach().view(_INTEGER_OF_SIZE[tensor.dtype.itemsize])


def rows_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory with bfloat16 as int16; the interpreter and the hardware differ on bfloat16."""
    tensor = tensor.detach()
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def words_view(row_bytes: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Contiguous rows of `row_bytes` as flat words, as wide as rows and addresses allow."""
    flat = [tensor.detach().view(-1).view(torch.uint8) for tensor in tensors]
    for word in _WORDS:
        size = word.itemsize
        if row_bytes % size == 0 and all(tensor.data_ptr() % size == 0 for tensor in flat):
            return tuple(tensor.view(word) for tensor in flat)
    raise AssertionError("a row is a whole number of bytes")


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Launches inside go to the device of `tensor`."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
