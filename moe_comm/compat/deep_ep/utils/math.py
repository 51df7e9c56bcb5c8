"""FP8 with one scale per 128 channels, and roundings of sizes."""

from __future__ import annotations

from typing import NoReturn

import torch

from moe_comm import gone
from moe_comm.tensors import quantized
from moe_comm.tensors.quantization import Quantization, QuantizationFormat, ScaleFormat

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "fp8_quantization",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
]


def ceil_div(x: int, y: int) -> int:
    """Quotient of positive ints, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Round x up to a multiple of y."""
    return ceil_div(x, y) * y


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """`1 - 2 <a, b> / (<a, a> + <b, b>)` of `a = x + 1` and `b = y + 1`, in float64."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def fp8_quantization(
    *, round_scale: bool, use_ue8m0: bool, is_column_major: bool = False
) -> Quantization:
    """Return the quantization that DeepEP's two switches mean.

    Raises:
        ValueError: `use_ue8m0` without `round_scale`.
    """
    if use_ue8m0 and not round_scale:
        raise ValueError("use_ue8m0 stores exponents only and needs round_scale=True, got False")
    scale_format = ScaleFormat.FLOAT32
    if round_scale:
        scale_format = ScaleFormat.UE8M0 if use_ue8m0 else ScaleFormat.FLOAT32_POWER_OF_2
    return Quantization(
        format=QuantizationFormat.FP8_BLOCK128,
        scale_format=scale_format,
        is_column_major=is_column_major,
    )


def per_token_cast_to_fp8(
    x: torch.Tensor, round_scale: bool = False, use_ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows, bit for bit as a dispatch here does.

    Args:
        x: `[num_tokens, hidden]`, bfloat16, float16 or float32; any hidden.
        round_scale: Scales are powers of two.
        use_ue8m0: Only their exponents are stored, four to an int32; needs `round_scale`.

    Returns:
        e4m3 `[num_tokens, hidden]`, and what each block is multiplied by to get it back: float32
        `[num_tokens, ceil(hidden / 128)]`, or int32 with a quarter of the columns.
    """
    return quantized.quantize(x, fp8_quantization(round_scale=round_scale, use_ue8m0=use_ue8m0))


def per_token_cast_back(x_fp8: torch.Tensor, x_scales: torch.Tensor) -> torch.Tensor:
    """bfloat16 rows of what `per_token_cast_to_fp8` gave.

    Args:
        x_fp8: e4m3 `[num_tokens, hidden]`.
        x_scales: float32 `[num_tokens, num_scales]`, or int32 with four exponents each; of any strides,
            or as many elements in the same order under another shape.
    """
    if x_fp8.dim() == 2 and x_scales.shape[:1] != x_fp8.shape[:1]:
        x_scales = x_scales.reshape(len(x_fp8), -1)
    is_packed = x_scales.dtype is torch.int32
    quantization = fp8_quantization(round_scale=is_packed, use_ue8m0=is_packed)
    return quantized.dequantize(x_fp8, x_scales, quantization, torch.bfloat16).contiguous()


def __getattr__(name: str) -> NoReturn:
    """Answer for names that this module does not have."""
    gone.refuse(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
