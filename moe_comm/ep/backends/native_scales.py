"""Scale factors of a native dispatch: what the call is told, and what it hands out."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.ep.backends.native_dtypes import SUMMABLE_TYPES, tensor_type
from moe_comm.tensors.quantization import Quantization

__all__ = ["Scales", "describe_scales"]


@dataclasses.dataclass(frozen=True, eq=False)
class Scales:
    """Scale factors of a dispatch: what the native call is told, and dtypes of what it hands out."""

    arguments: tuple[int, ...]
    dtype: torch.dtype
    data_dtype: torch.dtype


def describe_scales(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    quantization: Quantization | None,
) -> Scales:
    """The scale factors that travel with `x`: `x_sf`, or those that quantizing it makes.

    Args:
        x: Rows.
        x_sf: Of rows that are quantized already, or None.
        quantization: None: `x_sf` travels as it is.
    """
    is_column_major = quantization is not None and quantization.is_column_major
    code = 1 | is_column_major << 1
    if x_sf is not None:
        num_scales, itemsize = x_sf.shape[1], x_sf.dtype.itemsize
        row_stride, step = x_sf.stride()
        return Scales(
            (
                *(code, 0, 0, 0, num_scales, itemsize, row_stride * itemsize, step * itemsize),
                *(tensor_type(x.dtype), tensor_type(x_sf.dtype)),
            ),
            dtype=x_sf.dtype,
            data_dtype=x.dtype,
        )
    assert quantization is not None
    scale_format = quantization.scale_format
    assert scale_format is not None
    code |= quantization.format << 4 | scale_format << 8
    num_scales = quantization.num_scales(x.shape[1])
    return Scales(
        (
            code,
            quantization.format.block,
            int(scale_format),
            SUMMABLE_TYPES[x.dtype],
            num_scales,
            quantization.sf_dtype.itemsize,
            0,
            0,
            tensor_type(quantization.data_dtype),
            tensor_type(quantization.sf_dtype),
        ),
        dtype=quantization.sf_dtype,
        data_dtype=quantization.data_dtype,
    )
