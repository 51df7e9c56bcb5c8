"""Dtypes as numbers, as extension modules of this package take them."""

from __future__ import annotations

import zlib

import torch

__all__ = ["DLPACK_TYPES", "SUMMABLE_TYPES", "as_dtype", "dlpack_type"]

# DLPack's `type code << 8 | bits`. Other dtypes travel as bytes and are viewed afterwards.
DLPACK_TYPES: dict[torch.dtype, int] = {
    torch.bfloat16: 4 << 8 | 16,
    torch.float16: 2 << 8 | 16,
    torch.float32: 2 << 8 | 32,
    torch.float64: 2 << 8 | 64,
    torch.int8: 0 << 8 | 8,
    torch.int16: 0 << 8 | 16,
    torch.int32: 0 << 8 | 32,
    torch.int64: 0 << 8 | 64,
    torch.uint8: 1 << 8 | 8,
}
# What combine can add.
SUMMABLE_TYPES: dict[torch.dtype, int] = {
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float32: 3,
    torch.float64: 4,
}


def dlpack_type(dtype: torch.dtype) -> int:
    """A number that is equal on all ranks for a dtype, and DLPack's where DLPack can name it."""
    known = DLPACK_TYPES.get(dtype)
    if known is not None:
        return known
    # Above every DLPack code: rows are handed out as bytes, ranks still compare the dtype.
    return (0x100 + zlib.crc32(str(dtype).encode()) % 0x7FFF00) << 8


def as_dtype(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows of a native operation, which are bytes where DLPack cannot name `dtype`."""
    return rows if rows.dtype is dtype else rows.view(dtype)
