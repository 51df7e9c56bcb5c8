"""Dtypes as numbers, as extension modules of this package take them."""

from __future__ import annotations

import contextlib
import functools
import zlib

import torch
from torch.utils.dlpack import from_dlpack

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
# Dtypes that combine can add.
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


# Named by later versions of DLPack, which not every torch takes.
_LATER_TYPES: dict[torch.dtype, int] = {
    torch.float8_e4m3fn: 10 << 8 | 8,
    torch.float8_e5m2: 12 << 8 | 8,
    torch.float8_e8m0fnu: 14 << 8 | 8,
}


@functools.cache
def tensor_type(dtype: torch.dtype) -> int:
    """The number of what a native operation hands out, for `as_dtype`.

    That of `dtype` where the DLPack of this torch can name it, else of integers of its size.
    """
    known = DLPACK_TYPES.get(dtype)
    if known is not None:
        return known
    if dtype in _LATER_TYPES:
        with contextlib.suppress(BufferError, RuntimeError, TypeError):
            from_dlpack(torch.empty(1, dtype=dtype, device="cpu"))
            return _LATER_TYPES[dtype]
    return DLPACK_TYPES[torch.uint8] if dtype.itemsize == 1 else dtype.itemsize * 8


def as_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View the output of a native operation as `dtype`: it is of integers where DLPack cannot name that."""
    return tensor if tensor.dtype is dtype else tensor.view(dtype)
