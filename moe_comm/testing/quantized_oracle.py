"""Quantised rows in NumPy and exact float64, with a table of every e4m3 value.

Shares nothing with `moe_comm.quantized` but the format's definition.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from moe_comm.quantization import Quantization, QuantizationFormat, ScaleFormat

__all__ = ["E4M3_VALUES", "quantized_rows"]


def _e4m3_value(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3_VALUES = np.array([_e4m3_value(code) for code in range(0x7F)])
"""Values of the codes 0x00 to 0x7E, ascending; 0x7F is NaN."""


def quantized_rows(
    x: torch.Tensor, quantization: Quantization
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `x` becomes: float8_e4m3fn `[T, hidden]` and row-major scale factors `[T, num_scales]`."""
    values = x.detach().to(torch.float64).numpy()
    num_rows, hidden = values.shape
    block = quantization.format.block
    data = np.zeros((num_rows, hidden), dtype=np.uint8)
    scales = []
    for first in range(0, hidden, block):
        some = slice(first, first + block)
        data[:, some], column = _quantized_block(values[:, some], quantization)
        scales.append(column)
    while quantization.is_packed and len(scales) % 4:
        scales.append(np.zeros(num_rows, dtype=np.uint8))
    # By way of one dimension: rows of an empty array have no stride to view along.
    flat = torch.from_numpy(np.stack(scales, axis=1).reshape(-1)).view(quantization.sf_dtype)
    factors = flat.view(num_rows, quantization.num_scales(hidden))
    return torch.from_numpy(data).view(torch.float8_e4m3fn), factors


def _quantized_block(
    values: npt.NDArray[np.float64], quantization: Quantization
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.generic]]:
    """Data `[T, block]` and scale factors `[T]`, float32 or the exponent byte."""
    is_bad: npt.NDArray[np.bool_] = np.array([not np.isfinite(row).all() for row in values], bool)
    values = np.where(is_bad[:, None], 0.0, values)
    amax = np.abs(values).max(axis=1).astype(np.float32)
    if quantization.format is QuantizationFormat.FP8_BLOCK128:
        amax = np.maximum(amax, np.float32(1e-4))
    factor = amax / np.float32(448)
    column: npt.NDArray[np.generic]
    if quantization.scale_format is ScaleFormat.FLOAT32:
        column = np.where(is_bad, np.float32("nan"), factor).astype(np.float32)
        inverse = (np.float32(448) / amax).astype(np.float64)
        scaled = (values * inverse[:, None]).astype(np.float32).astype(np.float64)
    else:
        mantissa, exponent = np.frexp(factor.astype(np.float64))
        exponent = np.where(mantissa == 0.5, exponent - 1, exponent)
        exponent = np.clip(np.where(factor == 0, -127, exponent), -127, 127)
        scaled = np.ldexp(values, -exponent[:, None])
        column = np.where(is_bad, 255, exponent + 127).astype(np.uint8)
        if quantization.scale_format is ScaleFormat.FLOAT32_POWER_OF_2:
            power = np.ldexp(1.0, exponent)
            column = np.where(is_bad, np.float32("nan"), power).astype(np.float32)
    data = _nearest_even(np.abs(scaled)) | np.signbit(scaled).astype(np.uint8) << 7
    data[is_bad, :] = 0x7F
    return data, column


def _nearest_even(magnitudes: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """Codes of the nearest values, 448 at most; halfway the even code."""
    magnitudes = np.minimum(magnitudes, E4M3_VALUES[-1])
    above = np.searchsorted(E4M3_VALUES, magnitudes).astype(np.int64)
    below = np.maximum(above - 1, 0)
    to_above, to_below = E4M3_VALUES[above] - magnitudes, magnitudes - E4M3_VALUES[below]
    is_even = above % 2 == 0
    takes_above = (to_above < to_below) | ((to_above == to_below) & is_even)
    return np.where(takes_above, above, below).astype(np.uint8)
