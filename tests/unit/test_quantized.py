from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import pytest
import torch

import moe_comm
from moe_comm import _host
from moe_comm.ep import spec
from moe_comm.ep.backends.rows import arrange_scales
from moe_comm.tensors import quantized
from moe_comm.tensors.quantization import (
    FP8_BLOCK128,
    MXFP8,
    QUANTIZABLE_DTYPES,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
    scale_column_stride,
)
from moe_comm.testing.cases import Case, rows_of_case, seeded
from moe_comm.testing.compare import difference

POWERS = dataclasses.replace(FP8_BLOCK128, scale_format=ScaleFormat.FLOAT32_POWER_OF_2)
PACKED = dataclasses.replace(FP8_BLOCK128, scale_format=ScaleFormat.UE8M0)
Quantize = Callable[[torch.Tensor, Quantization], tuple[torch.Tensor, torch.Tensor]]
ALL = {"float32": FP8_BLOCK128, "powers": POWERS, "packed": PACKED, "mxfp8": MXFP8}


def codes(data: torch.Tensor) -> list[int]:
    return [int(code) for code in data.view(torch.uint8).flatten()]


def e4m3_value(code: int) -> Fraction:
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 0:
        return Fraction(mantissa, 512)
    return Fraction(8 + mantissa) * Fraction(2) ** (exponent - 10)


def test_the_values_of_codes() -> None:
    values = [float(e4m3_value(code)) for code in range(0x7F)]
    every_code = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    assert every_code.float().tolist() == values


@pytest.mark.parametrize("quantize", [moe_comm.quantize, spec.quantize_rows])
def test_rounding_is_to_nearest_even(quantize: Quantize) -> None:
    """Every value of e4m3, every middle of two, and their neighbors in float32."""
    table = [e4m3_value(code) for code in range(0x7F)]
    wanted: list[tuple[float, int]] = []
    for code, (low, high) in enumerate(itertools.pairwise(table)):
        middle = torch.tensor(float((low + high) / 2))
        below, above = (
            float(torch.nextafter(middle, torch.tensor(end))) for end in (0.0, math.inf)
        )
        wanted += [(float(low), code), (below, code), (above, code + 1)]
        wanted.append((float(middle), code + code % 2))
    # The first of a block is 448, so that the scale factor is one.
    for first in range(0, len(wanted), 31):
        some = wanted[first : first + 31]
        for sign, bit in ((1.0, 0), (-1.0, 0x80)):
            x = torch.tensor([[448.0] + [sign * value for value, _ in some]])
            data, scales = quantize(x, MXFP8)
            assert scales.view(torch.uint8).tolist() == [[127]]
            assert codes(data) == [0x7E] + [code | bit for _, code in some]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("hidden", [1, 31, 32, 128, 129, 416, 1000])
@pytest.mark.parametrize("quantization", ALL.values(), ids=ALL)
def test_bits_are_those_of_the_definition(
    quantization: Quantization, hidden: int, dtype: torch.dtype
) -> None:
    case = Case(name="rows", num_ranks=1, num_tokens=(1,), quantization=quantization)
    x = rows_of_case(case, 40, hidden, dtype, seeded(hidden, dtype))
    data, scales = moe_comm.quantize(x, quantization)
    want_data, want_scales = spec.quantize_rows(x, quantization)
    assert difference(data, want_data) is None
    assert difference(scales, want_scales) is None


@pytest.mark.parametrize("quantization", ALL.values(), ids=ALL)
def test_random_bits_of_float32(quantization: Quantization) -> None:
    raw = torch.randint(0, 1 << 32, (300, 128), generator=seeded("bits"))
    x = raw.to(torch.int32).view(torch.float32)
    x = torch.where(x.isfinite(), x, 1.0)
    data, scales = moe_comm.quantize(x, quantization)
    want_data, want_scales = spec.quantize_rows(x, quantization)
    assert difference(data, want_data) is None
    assert difference(scales, want_scales) is None


@pytest.mark.parametrize("quantize", [moe_comm.quantize, spec.quantize_rows])
def test_subnormals_count(flush_denormal: bool, quantize: Quantize) -> None:
    """amax 448 * 2**-127 * 2**-20 is a subnormal of float32; so are all quotients."""
    tiny = torch.zeros(1, 32)
    tiny.view(torch.int32)[0, 0] = 448  # 448 * 2**-149
    data, scales = quantize(tiny, MXFP8)
    # The exponent stops at -127: 448 * 2**-149 * 2**127 = 448 * 2**-22, which rounds to nothing.
    assert scales.view(torch.uint8).tolist() == [[0]]
    assert codes(data) == [0] * 32
    tiny.view(torch.int32)[0, 0] = 1 << 14  # 2**-135, 2**-8 after scaling
    tiny.view(torch.int32)[0, 1] = 3 << 12  # 1.5 * 2**-136
    data, scales = quantize(tiny, MXFP8)
    assert codes(data)[:3] == [2, 2, 0]  # 1.5 * 2**-9 is halfway between codes 1 and 2
    values = moe_comm.dequantize(data, scales, MXFP8, torch.float32)
    assert values.view(torch.int32)[0, :3].tolist() == [1 << 14, 1 << 14, 0]


@pytest.mark.parametrize(
    ("value", "exponent"),
    [
        (0.0, -127), (2.0**-149, -127), (2.0**-127, -127), (1.25 * 2.0**-127, -126), (2.0**-126, -126),
        (1.5 * 2.0**-126, -125), (0.75, 0), (1.0, 0), (1.0 + 2.0**-23, 1), (2.0**127, 127),
    ],
)  # fmt: skip
def test_exponent_above(value: float, exponent: int) -> None:
    bits = torch.tensor([value]).view(torch.int32)
    assert quantized._exponent_above(bits).tolist() == [exponent]
    if value:
        assert exponent == max(-127, math.ceil(math.log2(value))) or value == 1.0 + 2.0**-23
    power = quantized._power_of_2(torch.tensor([exponent], dtype=torch.int32))
    assert power.double().tolist() == [2.0**exponent]


def test_a_block_with_nan_or_infinity_is_all_nan() -> None:
    for bad in (math.nan, math.inf, -math.inf):
        for quantization in ALL.values():
            block = quantization.format.block
            x = torch.ones(2, block + 8)
            x[0, 3] = bad
            data, scales = moe_comm.quantize(x, quantization)
            assert codes(data[0, :block]) == [0x7F] * block
            assert 0x7F not in codes(data[0, block:]) + codes(data[1])
            values = moe_comm.dequantize(data, scales, quantization)
            assert bool(values[0, :block].isnan().all())
            assert not bool(values[0, block:].isnan().any() | values[1].isnan().any())
            first = scales[0].contiguous().view(torch.uint8).tolist()
            if quantization.scale_format is ScaleFormat.UE8M0:
                assert first[0] == 0xFF
            else:
                assert first[:4] == [0, 0, 0xC0, 0x7F]


@pytest.mark.parametrize("quantize", [moe_comm.quantize, spec.quantize_rows])
def test_scale_factors_by_hand(quantize: Quantize) -> None:
    x = torch.tensor([[0.0] * 128 + [448.0] * 128 + [449.0] * 128 + [-224.0] * 128 + [1.0] * 4])
    least = float(torch.tensor(1e-4) / torch.tensor(448.0))
    one = float(torch.tensor(1.0) / torch.tensor(448.0))
    factors = quantize(x, FP8_BLOCK128)[1]
    assert factors.tolist() == [
        [least, 1.0, float(torch.tensor(449.0) / torch.tensor(448.0)), 0.5, one]
    ]
    assert quantize(x, POWERS)[1].tolist() == [[2.0**-22, 1.0, 2.0, 0.5, 2.0**-8]]
    packed = quantize(x, PACKED)[1]
    assert packed.dtype is torch.int32
    exponents = [127 - 22, 127, 128, 126, 127 - 8, 0, 0, 0]
    assert packed.view(torch.uint8).tolist() == [exponents]
    assert packed.tolist() == [[105 | 127 << 8 | 128 << 16 | 126 << 24, 119]]
    mx = quantize(x, MXFP8)[1]
    assert mx.dtype is torch.float8_e8m0fnu
    wanted = [0] * 4 + [127] * 4 + [128] * 4 + [126] * 4 + [119]
    assert mx.view(torch.uint8).tolist() == [wanted]


@pytest.mark.parametrize("dtype", QUANTIZABLE_DTYPES)
@pytest.mark.parametrize("quantization", ALL.values(), ids=ALL)
def test_values_come_back_within_half_a_step(
    quantization: Quantization, dtype: torch.dtype
) -> None:
    x = torch.randn(20, 200, generator=seeded("near")).to(dtype)
    data, scales = moe_comm.quantize(x, quantization)
    values = moe_comm.dequantize(data, scales, quantization, torch.float32)
    # Three bits of mantissa, or half the least subnormal of the block's scale.
    block = quantization.format.block
    least = torch.zeros(20, 200)
    for first in range(0, 200, block):
        some = slice(first, first + block)
        least[:, some] = x[:, some].float().abs().amax(dim=1, keepdim=True) / 448 * 2 * 2.0**-10
    error = (values - x.float()).abs()
    assert bool((error <= torch.maximum(x.float().abs() / 16, least) * 1.0001).all())
    assert values.is_contiguous()  # as combine takes rows
    rounded = moe_comm.dequantize(data, scales, quantization, dtype)
    assert difference(rounded, values.to(dtype)) is None


@pytest.mark.sampled(2)
@pytest.mark.parametrize("quantization", ALL.values(), ids=ALL)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 16, 17])
def test_column_major_keeps_values(quantization: Quantization, num_rows: int) -> None:
    x = torch.randn(num_rows, 300, generator=seeded("columns"))
    in_columns = dataclasses.replace(quantization, is_column_major=True)
    data, scales = moe_comm.quantize(x, quantization)
    same_data, columns = moe_comm.quantize(x, in_columns)
    assert difference(same_data, data) is None
    assert difference(columns, scales) is None
    per_16_bytes = 16 // scales.element_size()
    if num_rows:
        assert columns.stride() == (1, -(-num_rows // per_16_bytes) * per_16_bytes)
        assert columns.data_ptr() % 16 == 0
    values = moe_comm.dequantize(data, scales, quantization)
    assert difference(moe_comm.dequantize(data, columns, in_columns), values) is None


@pytest.mark.parametrize("scale_bytes", [1, 4, 8])
@pytest.mark.parametrize("num_rows", [0, 1, 3, 4, 16, 17])
def test_columns_are_as_far_apart_as_in_a_window(num_rows: int, scale_bytes: int) -> None:
    stride = scale_column_stride(num_rows, scale_bytes)
    native_bytes = _host.layout.scale_region_bytes(0, num_rows, 0, 3, scale_bytes, True)
    assert 3 * stride * scale_bytes == native_bytes


def test_low_latency_results_are_read_by_expert() -> None:
    x = torch.randn(12, 64, generator=seeded("experts"))
    data, scales = moe_comm.quantize(x, MXFP8)
    values = moe_comm.dequantize(data, scales, MXFP8)
    for is_column_major in (False, True):
        by_expert = arrange_scales(scales, (3, 4), is_column_major=is_column_major)
        assert by_expert.shape == (3, 4, 2)
        assert by_expert.stride() == ((8, 1, 4) if is_column_major else (8, 2, 1))
        assert difference(moe_comm.dequantize(data, by_expert, MXFP8), values) is None
    by_expert_too = moe_comm.dequantize(data.view(3, 4, 64), by_expert, MXFP8)
    assert difference(by_expert_too, values.view(3, 4, 64)) is None


def test_quantize_leaves_autograd_out() -> None:
    x = torch.ones(1, 32, requires_grad=True)
    data, scales = moe_comm.quantize(x, MXFP8)
    assert not data.requires_grad
    assert not scales.requires_grad


def test_long_rows_and_many_are_chunked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(9, 400, generator=seeded("chunks"))
    whole = moe_comm.quantize(x, FP8_BLOCK128)
    values = moe_comm.dequantize(*whole, FP8_BLOCK128)
    monkeypatch.setattr(quantized.arithmetic, "_SERIAL_CHUNK_ELEMENTS", 256)
    monkeypatch.setattr(quantized.arithmetic, "_CACHED_CHUNK_ELEMENTS", 256)
    chunked = moe_comm.quantize(x, FP8_BLOCK128)
    for got, want in zip(chunked, whole, strict=True):
        assert difference(got, want) is None
    assert difference(moe_comm.dequantize(*whole, FP8_BLOCK128), values) is None


def test_mistakes_are_named_with_both_values() -> None:
    x = torch.ones(3, 64)
    data, scales = moe_comm.quantize(x, MXFP8)
    with pytest.raises(TypeError, match=r"Quantization, got 'fp8'"):
        moe_comm.quantize(x, "fp8")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"bfloat16, .*got torch\.float64"):
        moe_comm.quantize(x.double(), MXFP8)
    with pytest.raises(ValueError, match=r"2 dimensions, got shape \(64,\)"):
        moe_comm.quantize(x[0], MXFP8)
    with pytest.raises(ValueError, match=r"\(3, 64\) needs 3 x 2 scale factors, got \(2, 2\)"):
        moe_comm.dequantize(data, scales[:2], MXFP8)
    with pytest.raises(ValueError, match=r"3 x 2 .*\(3, 1\)"):
        moe_comm.dequantize(data, scales[:, :1], MXFP8)
    with pytest.raises(TypeError, match=r"sf must be torch\.float32, got torch\.float8_e8m0fnu"):
        moe_comm.dequantize(data, scales, FP8_BLOCK128)
    with pytest.raises(TypeError, match=r"data must be torch\.float8_e4m3fn, got torch\.float32"):
        moe_comm.dequantize(x, scales, MXFP8)
    with pytest.raises(TypeError, match=r"float32, got torch\.int8"):
        moe_comm.dequantize(data, scales, MXFP8, torch.int8)


def test_formats_have_the_scale_factors_they_name() -> None:
    assert MXFP8.scale_format is ScaleFormat.UE8M0
    assert FP8_BLOCK128.scale_format is ScaleFormat.FLOAT32
    assert [each.num_scales(1000) for each in ALL.values()] == [8, 8, 2, 32]
    with pytest.raises(ValueError, match="UE8M0 scale factors, got FLOAT32"):
        Quantization(format=QuantizationFormat.MXFP8, scale_format=ScaleFormat.FLOAT32)
