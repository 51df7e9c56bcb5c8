"""Scale factors of a native dispatch: what the call is told, and what it hands out."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.ep.backends.native_dtypes import SUMMABLE_TYPES, tensor_type
from moe_comm.tensors.quantization import Quantization


@dataclasses.dataclass(frozen=True, eq=False)
class Scales:
    """Scale factors of a dispatch: what the native call is told, and dtypes of what it hands out."""

    arguments: tuple[int, ...]
    dtype: torch.dtype
    data_dtype: torch.dtype


def quantization_code(quantization: Quantization) -> int:
    """`layout::QuantizationCode` of rows that are to be quantized."""
    assert quantization.scale_format is not None
    is_column_major = quantization.is_column_major
    return 1 | is_column_major << 1 | quantization.format << 4 | quantization.scale_format << 8


def describe_scales(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    quantization: Quantization | None,
) -> Scales:
    """The scale factors that travel with `x`: `x_sf`, or those that quantizing it makes.

    Args:
        x: Rows.
        x_sf: Scale factors of rows that are quantized already, or None.
        quantization: None: `x_sf` travels as it is.
    """
    if x_sf is not None:
        is_column_major = quantization is not None and quantization.is_column_major
        itemsize = x_sf.dtype.itemsize
        row_stride, step = x_sf.stride()
        return Scales(
            (
                *(1 | is_column_major << 1, 0, x_sf.shape[1], itemsize),
                *(row_stride * itemsize, step * itemsize),
                *(tensor_type(x.dtype), tensor_type(x_sf.dtype)),
            ),
            dtype=x_sf.dtype,
            data_dtype=x.dtype,
        )
    assert quantization is not None
    data_dtype, dtype = quantization.data_dtype, quantization.sf_dtype
    return Scales(
        (
            *(quantization_code(quantization), SUMMABLE_TYPES[x.dtype], 0, 0, 0, 0),
            *(tensor_type(data_dtype), tensor_type(dtype)),
        ),
        dtype=dtype,
        data_dtype=data_dtype,
    )
