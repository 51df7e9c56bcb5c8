"""Scale factors of a native dispatch: what the call is told, and how its answer is read."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.ep.backends.native_dtypes import SUMMABLE_TYPES
from moe_comm.tensors.quantization import Quantization, scale_column_stride

__all__ = ["Scales", "describe_scales"]


@dataclasses.dataclass(frozen=True, eq=False)
class Scales:
    """Scale factors of a dispatch: what the native call is told, and how to read its answer."""

    arguments: tuple[int, ...]
    dtype: torch.dtype
    data_dtype: torch.dtype
    num_scales: int
    is_column_major: bool
    by_expert: tuple[int, int] | None  # LOW_LATENCY: local experts, and places of each

    def view(self, flat: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`x_sf` over the elements as they lie in memory."""
        elements = flat if flat.dtype is self.dtype else flat.view(self.dtype)
        if self.by_expert is not None:
            num_experts, num_places = self.by_expert
            if self.is_column_major:
                return elements.view(num_experts, self.num_scales, num_places).transpose(1, 2)
            return elements.view(num_experts, num_places, self.num_scales)
        if self.is_column_major:
            # Where there are no rows, torch wants a stride all the same.
            stride = max(scale_column_stride(num_rows, self.dtype.itemsize), 1)
            return elements.as_strided((num_rows, self.num_scales), (1, stride))
        return elements.view(num_rows, self.num_scales)


def describe_scales(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    quantization: Quantization | None,
    by_expert: tuple[int, int] | None,
) -> Scales:
    """The scale factors that travel with `x`: `x_sf`, or those that quantizing it makes.

    Args:
        x: Rows.
        x_sf: Of rows that are quantized already, or None.
        quantization: None: `x_sf` travels as it is.
        by_expert: See `Scales`.
    """
    is_column_major = quantization is not None and quantization.is_column_major
    code = 1 | is_column_major << 1
    if x_sf is not None:
        num_scales, itemsize = x_sf.shape[1], x_sf.dtype.itemsize
        row_stride, step = x_sf.stride()
        return Scales(
            (code, 0, 0, 0, num_scales, itemsize, row_stride * itemsize, step * itemsize),
            dtype=x_sf.dtype,
            data_dtype=x.dtype,
            num_scales=num_scales,
            is_column_major=is_column_major,
            by_expert=by_expert,
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
        ),
        dtype=quantization.sf_dtype,
        data_dtype=quantization.data_dtype,
        num_scales=num_scales,
        is_column_major=is_column_major,
        by_expert=by_expert,
    )
