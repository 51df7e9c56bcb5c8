from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

import moe_comm
from moe_comm.resharding.formats.number_formats import (
    Block,
    FP8BlockTensor,
    MXFP8Tensor,
    dequantize_fp8_block,
    dequantize_mxfp8,
    is_mxfp8_tensor,
    quantize_fp8_block,
    quantize_mxfp8,
    scale_shape,
    swizzle_scales,
    unswizzle_scales,
    validate_fp8_block_tensor,
    validate_mxfp8_tensor,
)
from moe_comm.resharding.formats.transforms import _ensure_sendable
from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8, ScaleFormat
from tests.helpers.weights import same_bits, weight

SQUARE: Block = (128, 128)
ROWS: Block = (1, 128)


def test_fp8_block_against_plain_arithmetic() -> None:
    x = weight(200, 300)
    data, scale = quantize_fp8_block(x)
    assert scale.shape == (2, 3)
    assert data.shape == x.shape
    for row, column in itertools.product(range(2), range(3)):
        place = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
        block = x[place].float()
        amax = block.abs().max().clamp(min=1e-4)
        assert scale[row, column] == amax / torch.tensor(448.0)
        want = (block * (torch.tensor(448.0) / amax)).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert same_bits(data[place], want)
        got = dequantize_fp8_block(data, scale)[place]
        assert same_bits(got, (want.float() * scale[row, column]).bfloat16())


@pytest.mark.parametrize("scale_format", [ScaleFormat.FLOAT32, ScaleFormat.FLOAT32_POWER_OF_2])
def test_fp8_rows_are_those_of_a_quantized_dispatch(scale_format: ScaleFormat) -> None:
    x = weight(3, 40, 320)
    quantization = dataclasses.replace(FP8_BLOCK128, scale_format=scale_format)
    data, scale = quantize_fp8_block(x, ROWS, scale_format)
    want_data, want_scale = moe_comm.quantize(x.view(120, 320), quantization)
    assert same_bits(data.view(120, 320), want_data)
    assert same_bits(scale.view(120, 3), want_scale)


def test_fp8_block_of_one_row_of_blocks_is_its_rows_maximum() -> None:
    """Square blocks and rows agree where every row has the same maximum."""
    x = torch.randint(-7, 8, (128, 256)).bfloat16()
    x[:, ::128] = 448.0
    square, rows = quantize_fp8_block(x, SQUARE), quantize_fp8_block(x, ROWS)
    assert same_bits(square[0], rows[0])
    assert same_bits(square[1].expand(128, 2), rows[1])


def test_a_block_with_a_nan_is_nan_and_no_other() -> None:
    x = weight(256, 256)
    x[3, 130] = float("nan")
    x[200, 5] = float("inf")
    data, scale = quantize_fp8_block(x)
    is_nan = dequantize_fp8_block(data, scale).isnan()
    assert is_nan[:128, 128:].all()
    assert is_nan[128:, :128].all()
    assert not is_nan[:128, :128].any()
    assert not is_nan[128:, 128:].any()
    assert scale.isnan().tolist() == [[False, True], [True, False]]


def test_powers_of_two() -> None:
    data, scale = quantize_fp8_block(weight(130, 128), SQUARE, ScaleFormat.FLOAT32_POWER_OF_2)
    mantissa, _ = torch.frexp(scale)
    assert (mantissa == 0.5).all()
    assert data.shape == (130, 128)


@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (2, 0, 128), (1, 1), (3, 130, 257)])
@pytest.mark.parametrize("block", [SQUARE, ROWS])
def test_shapes_at_the_edge(shape: tuple[int, ...], block: Block) -> None:
    x = weight(*shape)
    data, scale = quantize_fp8_block(x, block)
    assert tuple(scale.shape) == scale_shape(shape, block)
    assert data.shape == x.shape
    if x.numel():
        error = (dequantize_fp8_block(data, scale, block, torch.float32) - x.float()).abs()
        assert (error <= x.float().abs().max() / 16).all()


def test_mxfp8_is_that_of_a_quantized_dispatch() -> None:
    x = weight(4, 8, 96)
    data, scale = quantize_mxfp8(x)
    want_data, want_scale = moe_comm.quantize(x.view(32, 96), MXFP8)
    assert same_bits(data.view(32, 96), want_data)
    assert same_bits(scale.view(32, 3), want_scale)
    want = moe_comm.dequantize(want_data, want_scale, MXFP8).view(4, 8, 96)
    assert same_bits(dequantize_mxfp8(data, scale), want)


def test_weights_are_quantized_from_bfloat16() -> None:
    x = weight(64, 64, dtype=torch.float32)
    assert same_bits(quantize_mxfp8(x)[0], quantize_mxfp8(x.bfloat16())[0])
    assert same_bits(quantize_fp8_block(x)[1], quantize_fp8_block(x.bfloat16())[1])
    with pytest.raises(TypeError, match="int32"):
        quantize_mxfp8(torch.zeros(2, 32, dtype=torch.int32))


@pytest.mark.parametrize("shape", [(128, 4), (1, 1), (33, 8), (300, 9), (129, 5)])
def test_swizzled_scales_byte_by_byte(shape: tuple[int, int]) -> None:
    rows, columns = shape
    scale = torch.randint(1, 256, shape, dtype=torch.uint8)
    swizzled = swizzle_scales(scale)
    tiles_per_row = -(-columns // 4)
    assert swizzled.numel() == -(-rows // 128) * tiles_per_row * 512
    used = set()
    for row, column in itertools.product(range(rows), range(columns)):
        tile = row // 128 * tiles_per_row + column // 4
        offset = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
        assert swizzled[offset] == scale[row, column]
        used.add(offset)
    padding = [i for i in range(swizzled.numel()) if i not in used]
    assert not swizzled[padding].any()
    assert same_bits(unswizzle_scales(swizzled, rows, columns), scale)


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
@pytest.mark.parametrize("is_swizzled", [False, True])
def test_an_mxfp8_tensor(backend: Any, is_swizzled: bool) -> None:
    x = weight(70, 160)
    tensor = MXFP8Tensor.from_bf16(x, backend=backend, is_swizzled=is_swizzled)
    validate_mxfp8_tensor(tensor, expected_backend=backend)
    assert tensor.scale.dtype == (torch.uint8 if backend == "flashinfer" else torch.float8_e8m0fnu)
    assert tensor.size() == (70, 160)
    assert tensor.size(1) == 160
    assert tensor.scale_2d().shape == ((128, 8) if is_swizzled else (70, 5))
    assert same_bits(tensor.dequantize(), dequantize_mxfp8(*quantize_mxfp8(x)))
    assert is_mxfp8_tensor(tensor)
    assert not is_mxfp8_tensor(x)
    assert same_bits(_ensure_sendable(tensor), tensor.dequantize())  # type: ignore[arg-type]


def test_what_is_no_mxfp8_tensor() -> None:
    x = weight(64, 64)
    good = MXFP8Tensor.from_bf16(x, is_swizzled=False)
    bad: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (ValueError, "backend is 'triton'; expected 'flashinfer'", {}),
        (ValueError, "got 'cutlass'", {"backend": "cutlass"}),
        (TypeError, "data must be torch.float8_e4m3fn, got torch.bfloat16", {"data": x}),
        (TypeError, "got torch.float32", {"scale": good.scale.float()}),
        (ValueError, r"needs scale \(64, 2\), or swizzled \(512,\), got \(64, 1\)", {}),
        (ValueError, r"got shape \(64, 33\)", {"data": good.data[:, :33]}),
    ]
    bad[4][2]["scale"] = good.scale[:, :1]
    for error, text, changes in bad:
        expected = "flashinfer" if not changes else None
        with pytest.raises(error, match=text):
            validate_mxfp8_tensor(
                dataclasses.replace(good, **changes), expected_backend=expected, tensor_name="w"
            )
    for call, text in (
        (lambda: MXFP8Tensor.from_bf16(x, group_size=16), "group_size=16"),
        (lambda: MXFP8Tensor.from_bf16(x, backend="cutlass"), "cutlass"),  # type: ignore[arg-type]
        (lambda: MXFP8Tensor.from_bf16(x[:, :33]), r"\(64, 33\)"),
    ):
        with pytest.raises(ValueError, match=text):
            call()


def test_what_is_no_fp8_block_tensor() -> None:
    good = FP8BlockTensor.from_bf16(weight(200, 130))
    validate_fp8_block_tensor(good, SQUARE)
    for error, text, changes, block in (
        (ValueError, r"expected \(1, 128\)", {}, ROWS),
        (TypeError, "torch.uint8", {"data": good.data.view(torch.uint8)}, SQUARE),
        (TypeError, "torch.bfloat16", {"scale": good.scale.bfloat16()}, SQUARE),
        (ValueError, r"\(2, 1\)", {"scale": good.scale[:, :1]}, SQUARE),
    ):
        with pytest.raises(error, match=text):
            validate_fp8_block_tensor(dataclasses.replace(good, **changes), block)
    with pytest.raises(ValueError, match=r"got \(64, 64\)"):
        quantize_fp8_block(weight(2, 2), (64, 64))
    with pytest.raises(ValueError, match="UE8M0"):
        quantize_fp8_block(weight(2, 2), SQUARE, ScaleFormat.UE8M0)
    with pytest.raises(ValueError, match=r"\(5,\)"):
        scale_shape((5,), SQUARE)
