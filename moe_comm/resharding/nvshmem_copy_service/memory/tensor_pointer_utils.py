"""Addresses of tensors of any library, and the bytes there."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from moe_comm.tensors.memory import bytes_of

__all__ = ["TensorPointerExtractor", "bytes_at"]


class TensorPointerExtractor:
    """Takes torch tensors, arrays with `data.ptr` (CuPy) or `ctypes.data` (NumPy), and addresses."""

    @staticmethod
    def get_pointer(tensor: Any) -> int:
        """Address of the first element.

        Raises:
            TypeError: `tensor` is none of these.
        """
        if isinstance(tensor, torch.Tensor):
            return tensor.data_ptr()
        if isinstance(tensor, int):
            return tensor
        for holder, field in (("data", "ptr"), ("ctypes", "data")):
            address = getattr(getattr(tensor, holder, None), field, None)
            if isinstance(address, int):
                return address
        raise TypeError(f"expected a tensor, an array or an address, got {type(tensor).__name__}")


def bytes_at(tensor: Any, position: int, num_bytes: int) -> torch.Tensor:
    """Return bytes of a contiguous CPU tensor, an array or an address, as uint8, without a copy.

    Args:
        tensor: Stays alive as long as the result is used, unless it is a torch tensor.
        position: First byte.
        num_bytes: Bytes; they lie in the memory of `tensor`.
    """
    if isinstance(tensor, torch.Tensor):
        return bytes_of(tensor.detach())[position : position + num_bytes]
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    address = TensorPointerExtractor.get_pointer(tensor) + position
    return torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=torch.uint8)
