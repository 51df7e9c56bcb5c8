"""Quantized rows in plain torch: the bits that every backend writes, and how to read them.

`moe_comm.tensors.quantization` says which formats there are. Divisions are IEEE float32; powers of two come
from bits, so that no logarithm is rounded. A block that holds a NaN or an infinity becomes all NaN.
"""

from __future__ import annotations

import torch

from moe_comm.tensors import arithmetic
from moe_comm.tensors.quantization import (
    QUANTIZABLE_DTYPES,
    Quantization,
    ScaleFormat,
    refusal,
    scale_column_stride,
)

_LARGEST = 448.0  # of e4m3
_NAN_DATA = 0x7F
_NAN_EXPONENT = 0xFF
_NAN_BITS = 0x7FC00000
_EXPONENT_BIAS = 127
_MANTISSA_BITS = 23


def quantize(x: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows as a dispatch with `quantization` does, bit for bit. Local.

    Args:
        x: `[num_tokens, hidden]`, bfloat16, float16 or float32; any hidden.
        quantization: Format, scale factors and their order.

    Returns:
        data, float8_e4m3fn `[num_tokens, hidden]`, and scale factors `[num_tokens, num_scales]`.

    Raises:
        ValueError: x is not two-dimensional, or there is no arithmetic for the format.
        TypeError: A dtype or type is wrong.
    """
    _check_quantization("quantize", quantization)
    if x.dim() != 2:
        raise ValueError(f"x must have 2 dimensions, got shape {tuple(x.shape)}")
    if x.dtype not in QUANTIZABLE_DTYPES:
        names = ", ".join(str(dtype) for dtype in QUANTIZABLE_DTYPES)
        raise TypeError(f"x must be one of {names}, got {x.dtype}")
    data, scales = quantize_rows(x.detach(), quantization)
    if quantization.is_column_major:
        scales = column_major(scales)
    return data, scales


def dequantize(
    data: torch.Tensor,
    sf: torch.Tensor,
    quantization: Quantization,
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`data * scale`, one float32 product of every element, rounded to `dtype`. Local.

    Args:
        data: float8_e4m3fn, the last dimension is hidden.
        sf: Scale factors of all its rows, the last dimension is num_scales; any strides. Other
            dimensions than those of `data` are allowed where the rows are as many (LOW_LATENCY).
        quantization: Format and scale factors; the order of `sf` follows from its strides.
        dtype: bfloat16, float16 or float32.

    Returns:
        Shape of `data`, dtype `dtype`, contiguous; NaN wherever a block held a NaN or an infinity.

    Raises:
        ValueError: Shapes do not fit; both are named. Or there is no arithmetic for the format.
        TypeError: A dtype or type is wrong.
    """
    _check_quantization("dequantize", quantization)
    if dtype not in QUANTIZABLE_DTYPES:
        names = ", ".join(str(each) for each in QUANTIZABLE_DTYPES)
        raise TypeError(f"dtype must be one of {names}, got {dtype}")
    for name, tensor, want in (
        ("data", data, quantization.data_dtype),
        ("sf", sf, quantization.sf_dtype),
    ):
        if tensor.dtype is not want:
            raise TypeError(f"{name} must be {want}, got {tensor.dtype}")
        if tensor.dim() < 2:
            raise ValueError(f"{name} must have rows, got shape {tuple(tensor.shape)}")
    hidden = data.shape[-1]
    num_scales = quantization.num_scales(hidden)
    num_rows = data.shape[:-1].numel()
    if sf.shape[-1] != num_scales or sf.shape[:-1].numel() != num_rows:
        raise ValueError(
            f"data {tuple(data.shape)} needs {num_rows} x {num_scales} scale factors, got "
            f"{tuple(sf.shape)}"
        )
    block = quantization.format.block
    num_blocks = quantization.num_blocks(hidden)
    factors = _factors(sf.detach().reshape(num_rows, num_scales), num_blocks).reshape(-1)
    padded = data.new_zeros((num_rows, num_blocks * block), dtype=torch.uint8)
    padded[:, :hidden] = data.detach().reshape(num_rows, hidden).view(torch.uint8)
    blocks = padded.view(-1, block)
    values = torch.empty(blocks.shape, dtype=dtype, device=data.device)
    with arithmetic.subnormals_kept():
        for some, columns in arithmetic.chunks(len(blocks), block, data.device):
            wide = blocks[some, columns].view(torch.float8_e4m3fn).to(torch.float32)
            values[some, columns] = arithmetic.round_to(wide * factors[some].unsqueeze(1), dtype)
    values = values.view(num_rows, num_blocks * block)[:, :hidden]
    return values.reshape(data.shape).contiguous()


def quantize_rows(x: torch.Tensor, quantization: Quantization) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize valid rows like `quantize`, with scale factors row-major."""
    num_rows, hidden = x.shape
    block = quantization.format.block
    num_blocks = quantization.num_blocks(hidden)
    padded = x.new_zeros((num_rows, num_blocks * block))
    padded[:, :hidden] = x
    blocks = padded.view(-1, block)
    data = torch.empty(blocks.shape, dtype=torch.uint8, device=x.device)
    factor_bits = torch.empty(len(blocks), dtype=torch.int32, device=x.device)
    with arithmetic.subnormals_kept():
        for some, columns in arithmetic.chunks(len(blocks), block, x.device):
            assert columns == slice(0, block)  # a chunk never cuts a block
            data[some], factor_bits[some] = quantize_blocks(
                arithmetic.widen(blocks[some]), quantization
            )
    rows = data.view(num_rows, num_blocks * block)[:, :hidden].contiguous()
    factors = store_factors(factor_bits.view(num_rows, num_blocks), quantization)
    return rows.view(torch.float8_e4m3fn), factors


def column_major(scales: torch.Tensor) -> torch.Tensor:
    """A copy `[M, num_scales]` with strides `(1, M rounded up to 16 bytes)`."""
    num_rows, num_scales = scales.shape
    stride = scale_column_stride(num_rows, scales.element_size())
    return scales.new_zeros((num_scales, stride))[:, :num_rows].T.copy_(scales)


def quantize_blocks(
    values: torch.Tensor, quantization: Quantization
) -> tuple[torch.Tensor, torch.Tensor]:
    """Data bytes `[n, block]` and the bits of float32 scale factors `[n]`; UE8M0: the exponent byte."""
    # Magnitudes of floats compare like their bits, and infinity and NaN are beyond all others.
    amax_bits = (values.view(torch.int32) & 0x7FFFFFFF).amax(dim=1)
    is_finite = amax_bits < 0x7F800000
    amax = torch.where(is_finite, amax_bits, 0).view(torch.float32)
    # Tensors, not numbers: torch may multiply by the reciprocal of a number.
    largest = torch.full_like(amax, _LARGEST)
    amax = amax.clamp(min=quantization.format.least_amax)
    factor = amax / largest
    if quantization.scale_format is ScaleFormat.FLOAT32:
        inverse = largest / amax
        factor_bits = torch.where(is_finite, factor.view(torch.int32), _NAN_BITS)
    else:
        exponent = _exponent_above(factor.view(torch.int32))
        inverse = _power_of_2(-exponent)
        if quantization.scale_format is ScaleFormat.UE8M0:
            factor_bits = torch.where(is_finite, exponent + _EXPONENT_BIAS, _NAN_EXPONENT)
        else:
            power = _power_of_2(exponent).view(torch.int32)
            factor_bits = torch.where(is_finite, power, _NAN_BITS)
    # A product with a power of two is exact, or so small that it becomes zero either way.
    scaled = (values * inverse.unsqueeze(1)).clamp(-_LARGEST, _LARGEST)
    data = scaled.to(torch.float8_e4m3fn).view(torch.uint8)
    return torch.where(is_finite.unsqueeze(1), data, _NAN_DATA), factor_bits


def _exponent_above(bits: torch.Tensor) -> torch.Tensor:
    """The least e in [-127, 127] with 2**e >= the non-negative float32 of these bits, as int32.

    Example:
        0.0: -127. 2**-127: -127. 0.75 * 2**-126: -126. 1.0: 0. 1.5: 1.
    """
    mantissa = bits & (1 << _MANTISSA_BITS) - 1
    biased = bits >> _MANTISSA_BITS
    # A subnormal, of biased exponent 0, is above 2**-127 where its mantissa is above the middle.
    is_above = mantissa > torch.where(biased == 0, 1 << (_MANTISSA_BITS - 1), 0)
    return (biased + is_above - _EXPONENT_BIAS).clamp(-127, 127)


def _power_of_2(exponent: torch.Tensor) -> torch.Tensor:
    """2**e as float32, of int32 e in [-127, 127]."""
    normal = exponent + _EXPONENT_BIAS << _MANTISSA_BITS
    return torch.where(exponent < -126, 1 << (_MANTISSA_BITS - 1), normal).view(torch.float32)


def store_factors(bits: torch.Tensor, quantization: Quantization) -> torch.Tensor:
    """`[T, num_blocks]` bits as `[T, num_scales]` of the dtype that `x_sf` has."""
    if quantization.scale_format is not ScaleFormat.UE8M0:
        return bits.view(torch.float32)
    exponents = bits.to(torch.uint8)
    if not quantization.is_packed:
        return exponents.view(torch.float8_e8m0fnu)
    num_rows, num_blocks = bits.shape
    num_scales = -(-num_blocks // 4)
    packed = exponents.new_zeros((num_rows, num_scales * 4))
    packed[:, :num_blocks] = exponents
    return packed.view(torch.int32)


def _factors(sf: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Scale factors `[T, num_scales]` of any format as float32 `[T, num_blocks]`."""
    if sf.dtype is torch.float32:
        return sf
    # A copy: one column counts as contiguous whatever its stride, and a view of bytes wants stride 1.
    exponents = (
        sf.clone(memory_format=torch.contiguous_format)
        .view(torch.uint8)[:, :num_blocks]
        .to(torch.int32)
    )
    power = _power_of_2((exponents - _EXPONENT_BIAS).clamp(max=127))
    nan = torch.full_like(power, float("nan"))
    return torch.where(exponents == _NAN_EXPONENT, nan, power)


def _check_quantization(who: str, quantization: object) -> None:
    if not isinstance(quantization, Quantization):
        raise TypeError(f"quantization must be a Quantization, got {quantization!r}")
    if not quantization.is_e4m3:
        raise ValueError(refusal(who, quantization))
