"""Kernels that quantize rows by blocks, and read them back."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.tensors.quantization import ScaleFormat
from moe_comm.triton.number_format import (
    e4m3_from_float32,
    float32_from_e4m3,
    load_wide,
    power_of_2,
    rounded_bits,
)

FLOAT32_SCALES = tl.constexpr(int(ScaleFormat.FLOAT32))
POWER_OF_2_SCALES = tl.constexpr(int(ScaleFormat.FLOAT32_POWER_OF_2))
UE8M0_SCALES = tl.constexpr(int(ScaleFormat.UE8M0))


# Grid: (rows, groups of `num_blocks_per_program` blocks).
# The scale factor of block b lies at `row * sf_row_stride + b // pack * sf_column_stride + b % pack`:
# float32 as its bits (pack 1), or bytes, of which an int32 holds four (pack 4).
@triton.jit
def quantize_kernel(
    x_ptr: tl.tensor,
    data_ptr: tl.tensor,
    sf_ptr: tl.tensor,
    hidden: tl.tensor,
    num_stored_blocks: tl.tensor,
    sf_row_stride: tl.tensor,
    sf_column_stride: tl.tensor,
    block: tl.constexpr,
    pack: tl.constexpr,
    num_blocks_per_program: tl.constexpr,
    scale_form: tl.constexpr,
    least_amax: tl.constexpr,
    is_bfloat16: tl.constexpr,
) -> None:
    """Data bytes and scale factors of one row's blocks.

    `num_stored_blocks` counts what fills up the last pack too. Must be compiled without contraction
    of products and sums.
    """
    row = tl.program_id(0).to(tl.int64)
    block_idx = tl.program_id(1) * num_blocks_per_program + tl.arange(0, num_blocks_per_program)
    columns = block_idx[:, None] * block + tl.arange(0, block)[None, :]
    is_inside = columns < hidden
    values = load_wide(x_ptr + row * hidden + columns, is_inside, is_bfloat16)
    # Magnitudes of floats compare like their bits; infinity and NaN are beyond all others.
    amax_bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    is_finite = amax_bits < 0x7F800000
    amax = tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True)
    amax = tl.where(amax < least_amax, least_amax, amax)
    largest = tl.full([num_blocks_per_program], 448.0, tl.float32)
    factor = tl.div_rn(amax, largest)
    if scale_form == FLOAT32_SCALES:
        inverse = tl.div_rn(largest, amax)
    else:
        # The least e in [-127, 127] with 2**e >= factor, from its bits. A subnormal, of biased
        # exponent 0, is above 2**-127 where its mantissa is above the middle.
        bits = factor.to(tl.int32, bitcast=True)
        biased = bits >> 23
        is_above = (bits & 0x7FFFFF) > tl.where(biased == 0, 0x400000, 0)
        exponent = tl.minimum(biased + is_above.to(tl.int32) - 127, 127)
        inverse = power_of_2(-exponent)
    data = e4m3_from_float32(values * inverse[:, None])
    data = tl.where(is_finite[:, None], data, 0x7F)
    tl.store(data_ptr + row * hidden + columns, data.to(tl.uint8), mask=is_inside)

    places = row * sf_row_stride + (block_idx // pack) * sf_column_stride + block_idx % pack
    is_stored = block_idx < num_stored_blocks
    if scale_form == UE8M0_SCALES:
        stored = tl.where(is_finite, exponent + 127, 0xFF)
        # The last pack is filled up with zeros.
        stored = tl.where(block_idx * block < hidden, stored, 0)
        tl.store(sf_ptr + places, stored.to(tl.uint8), mask=is_stored)
    else:
        if scale_form == POWER_OF_2_SCALES:
            factor = power_of_2(exponent)
        factor_bits = tl.where(is_finite, factor.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(sf_ptr + places, factor_bits, mask=is_stored)


# Grid as in `quantize_kernel`. Scale factors are read as they are stored: float32, bytes or int32.
@triton.jit
def dequantize_kernel(
    data_ptr: tl.tensor,
    sf_ptr: tl.tensor,
    out_ptr: tl.tensor,
    hidden: tl.tensor,
    sf_row_stride: tl.tensor,
    sf_column_stride: tl.tensor,
    block: tl.constexpr,
    pack: tl.constexpr,
    num_blocks_per_program: tl.constexpr,
    is_ue8m0: tl.constexpr,
    itemsize: tl.constexpr,
    is_bfloat16: tl.constexpr,
) -> None:
    """`out = round(data * factor)`; `out_ptr` is of integers of `itemsize` bytes."""
    row = tl.program_id(0).to(tl.int64)
    block_idx = tl.program_id(1) * num_blocks_per_program + tl.arange(0, num_blocks_per_program)
    columns = block_idx[:, None] * block + tl.arange(0, block)[None, :]
    is_inside = columns < hidden
    places = row * sf_row_stride + (block_idx // pack) * sf_column_stride
    raw = tl.load(sf_ptr + places, mask=block_idx * block < hidden, other=0)
    if is_ue8m0:
        exponent = (raw.to(tl.int32) >> (8 * (block_idx % pack))) & 0xFF
        power = power_of_2(tl.minimum(exponent, 254) - 127).to(tl.int32, bitcast=True)
        factor = tl.where(exponent == 0xFF, 0x7FC00000, power).to(tl.float32, bitcast=True)
    else:
        factor = raw
    data = tl.load(data_ptr + row * hidden + columns, mask=is_inside, other=0).to(tl.int32)
    out = rounded_bits(float32_from_e4m3(data) * factor[:, None], itemsize, is_bfloat16)
    tl.store(out_ptr + row * hidden + columns, out, mask=is_inside)
