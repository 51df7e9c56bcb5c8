"""Rows as callers pass them, and as bytes with int32 columns that travel beside them."""

from __future__ import annotations

import torch

from moe_comm.compat.deep_ep.arguments import check_tensor

Rows = torch.Tensor | tuple[torch.Tensor, ...]


def check_rows(x: Rows, *, is_triple_allowed: bool = False) -> torch.Tensor:
    """The data of what is to be sent.

    Args:
        x: `[N, H]`; or a pair (data of one-byte elements, scales float32 or int32 `[N, S]` of any strides).
        is_triple_allowed: Or (data int32 `[N, H / 8]`, scales int32 `[N, S]`, float32 `[N, 1]`), as rows of
            four-bit elements are written.

    Raises:
        ValueError: A shape is wrong.
        TypeError: A dtype or type is wrong.
    """
    if not isinstance(x, tuple):
        return check_tensor("x", x, (None, None))
    if len(x) == 3 and is_triple_allowed:
        data = check_tensor("data of x", x[0], (None, None), torch.int32)
        check_tensor("scales of x", x[1], (data.shape[0], None), torch.int32, strided=True)
        check_tensor("outer scales of x", x[2], (data.shape[0], 1), torch.float32, strided=True)
        return data
    if len(x) != 2:
        wanted = "a pair (data, scales)" + (" or a triple" if is_triple_allowed else "")
        raise ValueError(f"x must be a tensor or {wanted}, got {len(x)} values")
    data = check_tensor("data of x", x[0], (None, None))
    if data.dtype.itemsize != 1:
        raise TypeError(f"data of x must have elements of one byte, got {data.dtype}")
    check_tensor(
        "scales of x", x[1], (data.shape[0], None), torch.float32, torch.int32, strided=True
    )
    return data


def packed(x: Rows, *columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as bytes, and int32 scales and `columns` side by side."""
    data, *scales = x if isinstance(x, tuple) else (x,)
    bits = [each.detach().contiguous().view(torch.int32) for each in scales]
    return data.detach().view(torch.uint8), torch.cat([*bits, *columns], dim=1)


def unpacked(x: Rows, data: torch.Tensor, scale_bits: torch.Tensor) -> Rows:
    """Return arrived rows in the form of those that were sent; scales contiguous."""
    if not isinstance(x, tuple):
        return data.view(x.dtype)
    widths = [each.shape[1] for each in x[1:]]
    parts = zip(x[1:], torch.split(scale_bits, widths, dim=1), strict=True)
    scales = [bits.contiguous().view(sent.dtype) for sent, bits in parts]
    return (data.view(x[0].dtype), *scales)
