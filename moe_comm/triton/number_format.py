"""Conversions between float32 and the formats that rows are stored in, as integer arithmetic.

Hardware conversions may flush subnormals or keep NaN payloads, and the interpreter has its own; bits
are the same everywhere. bfloat16 and float8 elements are loaded and stored as integers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_wide(ptrs: tl.tensor, mask: tl.tensor, is_bfloat16: tl.constexpr) -> tl.tensor:
    """Elements as exactly the same float32 (float64 stays); 0 where `mask` is false.

    `ptrs` are of int16 for bfloat16.
    """
    raw = tl.load(ptrs, mask=mask, other=0)
    if is_bfloat16:
        return (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif raw.dtype == tl.float64:  # noqa: RET505 - Triton compiles one branch only
        return raw
    else:
        return raw.to(tl.float32)


@triton.jit
def rounded_bits(acc: tl.tensor, itemsize: tl.constexpr, is_bfloat16: tl.constexpr) -> tl.tensor:
    """An accumulator rounded to nearest even, as an integer of `itemsize` bytes; NaN canonical."""
    is_nan = acc != acc  # only a NaN
    if itemsize == 8:
        bits = acc.to(tl.int64, bitcast=True)
        return tl.where(is_nan, 0x7FF8000000000000, bits)
    elif itemsize == 4:  # noqa: RET505 - Triton compiles one branch only
        bits = acc.to(tl.int32, bitcast=True)
        return tl.where(is_nan, 0x7FC00000, bits)
    elif is_bfloat16:
        bits = acc.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(is_nan, 0x7FC0, rounded).to(tl.int16)
    else:
        return tl.where(is_nan, 0x7E00, _float16_bits(acc)).to(tl.int16)


@triton.jit
def _float16_bits(values: tl.tensor) -> tl.tensor:
    """Bits of the nearest float16 as int32, of values that are no NaN."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal results: the exponent moves from bias 127 to bias 15, 13 bits of mantissa are rounded off.
    rebased = magnitude - (112 << 23)
    normal = (rebased + 0xFFF + ((rebased >> 13) & 1)) >> 13
    # Subnormal results: the significand with its leading bit, shifted by 14 to 24 places.
    significand = (magnitude & 0x7FFFFF) | 0x800000
    shift = tl.minimum(tl.maximum(126 - (magnitude >> 23), 14), 24)
    kept = significand >> shift
    rest = significand - (kept << shift)
    half = 1 << (shift - 1)
    subnormal = kept + ((rest > half) | ((rest == half) & ((kept & 1) == 1))).to(tl.int32)
    rounded = tl.where(magnitude >= (113 << 23), normal, subnormal)
    rounded = tl.where(magnitude >= 0x477FF000, 0x7C00, rounded)  # rounds to 65536 or more
    rounded = tl.where(magnitude < 0x33000001, 0, rounded)  # at most half the least subnormal
    return rounded | ((bits >> 16) & 0x8000)


@triton.jit
def e4m3_from_float32(values: tl.tensor) -> tl.tensor:
    """Bytes of the nearest e4m3, saturating at 448, as int32, of values that are no NaN."""
    bits = values.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # 448.0
    # Normal results: the exponent moves from bias 127 to bias 7, 20 bits of mantissa are rounded off.
    rebased = magnitude - (120 << 23)
    normal = (rebased + 0x7FFFF + ((rebased >> 20) & 1)) >> 20
    # Subnormal results are multiples of 2**-9: the significand, shifted by 21 to 25 places. What is
    # shifted further is less than half of the least one.
    significand = (magnitude & 0x7FFFFF) | 0x800000
    shift = tl.minimum(tl.maximum(141 - (magnitude >> 23), 21), 25)
    kept = significand >> shift
    rest = significand - (kept << shift)
    half = 1 << (shift - 1)
    subnormal = kept + ((rest > half) | ((rest == half) & ((kept & 1) == 1))).to(tl.int32)
    rounded = tl.where(magnitude >= (121 << 23), normal, subnormal)
    return rounded | ((bits >> 24) & 0x80)


@triton.jit
def float32_from_e4m3(data: tl.tensor) -> tl.tensor:
    """Values of e4m3 bytes, given as int32."""
    magnitude = data & 0x7F
    normal = ((magnitude << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(magnitude < 8, magnitude.to(tl.float32) * 0.001953125, normal)  # 2**-9
    bits = value.to(tl.int32, bitcast=True) | ((data & 0x80) << 24)
    return tl.where(magnitude == 0x7F, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def power_of_2(exponent: tl.tensor) -> tl.tensor:
    """2**e as float32, of int32 e in [-127, 127]."""
    bits = tl.where(exponent < -126, 0x400000, (exponent + 127) << 23)
    return bits.to(tl.float32, bitcast=True)
