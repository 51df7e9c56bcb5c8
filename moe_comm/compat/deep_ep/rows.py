"""Rows as callers pass them, and as bytes with int32 columns that travel beside them."""

from __future__ import annotations

import torch

from moe_comm.compat.deep_ep.arguments import check_tensor

__all__ = ["Rows", "check_rows", "packed", "unpacked"]

Rows = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def check_rows(x: Rows) -> torch.Tensor:
    """The data of what is to be sent.

    Raises:
        ValueError: A shape is wrong.
        TypeError: A dtype or type is wrong.
    """
    if not isinstance(x, tuple):
        return check_tensor("x", x, (None, None))
    if len(x) != 2:
        raise ValueError(f"x must be a tensor or a pair (data, scales), got {len(x)} values")
    data = check_tensor("data of x", x[0], (None, None))
    if data.dtype.itemsize != 1:
        raise TypeError(f"data of x must have elements of one byte, got {data.dtype}")
    check_tensor(
        "scales of x", x[1], (data.shape[0], None), torch.float32, torch.int32, strided=True
    )
    return data


def packed(x: Rows, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as bytes, and int32 scales and `columns` side by side."""
    data, scales = x if isinstance(x, tuple) else (x, None)
    data = data.detach()
    if scales is None:
        return data.view(torch.uint8), columns
    bits = scales.detach().contiguous().view(torch.int32)
    return data, torch.cat([bits, columns], dim=1)


def unpacked(x: Rows, data: torch.Tensor, scale_bits: torch.Tensor) -> Rows:
    """What arrived, in the form of what was sent; scales contiguous."""
    if not isinstance(x, tuple):
        return data.view(x.dtype)
    return data, scale_bits.contiguous().view(x[1].dtype)
