"""Addresses of tensors of any library."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["TensorPointerExtractor"]


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
