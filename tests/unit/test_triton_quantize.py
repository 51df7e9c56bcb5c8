"""Block quantization in Triton: interpreted on the CPU, or on a GPU where there is one."""

from __future__ import annotations

import re

import pytest
import torch

from moe_comm.tensors import quantized
from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8, Quantization
from moe_comm.testing.case_list import QUANTIZATIONS

pytest.importorskip("triton")

from moe_comm import triton as local

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The interpreter multiplies infinities in numpy, which warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def name_of(quantization: Quantization) -> str:
    order = "column" if quantization.is_column_major else "row"
    return f"{quantization.format.name}-{quantization.scale_format.name}-{order}"


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    raw = [tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in (got, want)]
    assert torch.equal(*raw)


def rows_of_every_size(dtype: torch.dtype, hidden: int) -> torch.Tensor:
    """Random rows of many magnitudes; then all zero, subnormal, largest, with infinity, with NaN."""
    rows = torch.randn(6, hidden) * torch.logspace(-38, 37, 6)[:, None]
    rows = rows.to(dtype)
    more = torch.randn(5, hidden).to(dtype)
    info = torch.finfo(dtype)
    more[0] = -0.0
    more[1] = torch.where(torch.rand(hidden) < 0.5, info.tiny / 4, -info.tiny / 64).to(dtype)
    more[2] = torch.where(torch.rand(hidden) < 0.5, info.max, -info.max / 3).to(dtype)
    more[3, hidden // 2] = -float("inf")
    more[4, -1] = float("nan")
    return torch.cat([rows, more]).to(DEVICE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("quantization", QUANTIZATIONS, ids=name_of)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [8, 128, 1000])
def test_quantize_has_the_bits_of_the_reference(
    quantization: Quantization, dtype: torch.dtype, hidden: int
) -> None:
    x = rows_of_every_size(dtype, hidden)
    data, sf = local.quantize(x, quantization)
    want_data, want_sf = quantized.quantize(x, quantization)
    assert_same_bits(data, want_data)
    assert_same_bits(sf, want_sf)
    assert sf.stride() == want_sf.stride()
    for out_dtype in DTYPES:
        assert_same_bits(
            local.dequantize(data, sf, quantization, out_dtype),
            quantized.dequantize(want_data, want_sf, quantization, out_dtype),
        )


def test_a_block_that_is_not_finite_is_all_nan() -> None:
    x = torch.ones(2, 256, device=DEVICE)
    x[0, 3] = float("inf")
    x[1, 200] = -float("nan")
    for quantization in QUANTIZATIONS:
        data, sf = local.quantize(x, quantization)
        values = local.dequantize(data, sf, quantization, torch.float32)
        raw, block = data.view(torch.uint8), quantization.format.block
        assert (raw[0, :block] == 0x7F).all()
        assert values[0, :block].isnan().all()
        assert not values[0, block:].isnan().any()
        assert values[1, 192 : 192 + 32].isnan().all()
        assert not values[1, :128].isnan().any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_reads_every_byte_and_every_exponent(dtype: torch.dtype) -> None:
    data = torch.arange(256, dtype=torch.uint8).repeat_interleave(32).view(1, -1)
    data = data.view(torch.float8_e4m3fn).repeat(8, 1).to(DEVICE)
    exponents = torch.arange(256, dtype=torch.uint8).repeat(8)
    sf = exponents[torch.randperm(len(exponents))].view(8, 256)
    sf = sf.view(torch.float8_e8m0fnu).to(DEVICE)
    assert_same_bits(
        local.dequantize(data, sf, MXFP8, dtype), quantized.dequantize(data, sf, MXFP8, dtype)
    )


def test_every_rounding_to_e4m3_is_that_of_the_reference() -> None:
    """Elements just below, at and above the middle of neighbors, with a factor of 1."""
    neighbors = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (neighbors[1:] + neighbors[:-1]) / 2
    infinity = torch.tensor(float("inf"))
    values = torch.cat(
        [
            neighbors,
            middles,
            torch.nextafter(middles, infinity),
            torch.nextafter(middles, -infinity),
        ]
    )
    values = torch.cat([values, -values, torch.tensor([2.0**-10, 2.0**-11, 2.0**-30])])
    values = values[: len(values) // 31 * 31].view(-1, 31)
    x = torch.cat([torch.full((len(values), 1), 448.0), values], dim=1).to(DEVICE)
    data, sf = local.quantize(x, MXFP8)
    assert (sf.view(torch.uint8) == 127).all()
    want_data, want_sf = quantized.quantize(x, MXFP8)
    assert_same_bits(data, want_data)
    assert_same_bits(sf, want_sf)


def test_nothing_to_do() -> None:
    x = torch.empty(0, 64, device=DEVICE)
    for quantization in QUANTIZATIONS:
        data, sf = local.quantize(x, quantization)
        assert sf.shape == (0, quantization.num_scales(64))
        assert sf.dtype is quantization.sf_dtype
        assert local.dequantize(data, sf, quantization).shape == (0, 64)


X = torch.zeros(2, 64, device=DEVICE)
DATA = torch.zeros(2, 64, device=DEVICE).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: local.quantize(X.double(), MXFP8), TypeError, "got torch.float64"),
        (lambda: local.quantize(X.T, MXFP8), ValueError, "x must be contiguous"),
        (lambda: local.quantize(X, 128), TypeError, "quantization must be a Quantization, got 128"),
        (lambda: local.quantize(X.clone().requires_grad_(), MXFP8), ValueError, "x requires a gradient"),
        (lambda: local.dequantize(X, X, FP8_BLOCK128), TypeError, "got torch.float32"),
        (lambda: local.dequantize(DATA, X, MXFP8), TypeError, "sf must be one of torch.float8_e8m0fnu"),
        (lambda: local.dequantize(DATA, X, FP8_BLOCK128), ValueError, "(2, 1) on "),
        (
            lambda: local.dequantize(DATA, X[:, :1], FP8_BLOCK128, torch.float64),
            TypeError,
            "got torch.float64",
        ),
    ],
)  # fmt: skip
def test_bad_input(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
