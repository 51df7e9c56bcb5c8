"""FP8 with one scale per 128 channels, and the measures that tests of DeepEP use."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from moe_comm.tensors import quantized
from moe_comm.tensors.quantization import Quantization, QuantizationFormat, ScaleFormat

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "create_grouped_scores",
    "fp8_quantization",
    "hash_tensor",
    "hash_tensors",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]


def ceil_div(x: int, y: int) -> int:
    """Quotient of positive ints, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Round x up to a multiple of y."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """`a / b`, and 0 for 0 / 0.

    Raises:
        ZeroDivisionError: b is 0 and a is not.
    """
    return 0 if a == 0 and b == 0 else a / b


def count_bytes(*tensors: Any) -> int:
    """Bytes of the elements of tensors, also in tuples and lists of them; None has none."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _flat(tensors))


def hash_tensor(t: torch.Tensor) -> int:
    """Sum of a tensor's bytes read as int32; its last dimension has a multiple of four bytes."""
    return int(t.view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """Exclusive or of the hashes of tensors, also in tuples and lists of them; None has none."""
    return functools.reduce(operator.xor, map(hash_tensor, _flat(tensors)), 0)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Leave every number of a row once, descending, and -1 behind them.

    Args:
        x: int64 `[n, K]`, below `num_slots`; negative numbers are left out.
        num_slots: Upper limit of the numbers.
    """
    is_there = torch.zeros(len(x), num_slots + 1, dtype=torch.bool)
    is_there.scatter_(1, x.masked_fill(x < 0, num_slots), True)
    numbers = torch.where(is_there[:, :num_slots], torch.arange(num_slots), -1)
    num_kept = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :num_kept] = numbers.sort(dim=1, descending=True).values[:, :num_kept]


def create_grouped_scores(
    scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int
) -> torch.Tensor:
    """Scores of the experts of chosen groups, 0 elsewhere.

    Args:
        scores: `[N, E]`.
        group_idx: int64 `[N, G]`, the groups of every token.
        num_groups: Groups of E / num_groups neighboring experts.
    """
    is_chosen = torch.zeros(len(scores), num_groups, dtype=torch.bool).scatter_(1, group_idx, True)
    return scores * is_chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """`1 - 2 <a, b> / (<a, a> + <b, b>)` of `a = x + 1` and `b = y + 1`, in float64."""
    a, b = x.double() + 1, y.double() + 1
    return float(1 - 2 * (a * b).sum() / (a * a + b * b).sum())


def fp8_quantization(
    *, round_scale: bool, use_ue8m0: bool, is_column_major: bool = False
) -> Quantization:
    """What DeepEP's two switches mean.

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


def _flat(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in tensors:
        if isinstance(each, tuple | list):
            yield from _flat(each)
        elif each is not None:
            yield each
