"""Formats that are in the table alone; `test_wire_formats.py` runs this with `more_wire_formats`.

`FP8_BLOCK64` is what every engine has loops for, `FP8_BLOCK256` has blocks that the loops of CPUs do not
take, and `NVFP4` has elements and scale factors that no engine can make.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
import torch

import moe_comm
from moe_comm import (
    MXFP8,
    Communicator,
    EpBuffer,
    EpConfig,
    Layout,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
    _host,
)
from moe_comm.ep import spec
from moe_comm.testing.case_list import CASES
from moe_comm.testing.conformance import check_case
from moe_comm.testing.target import Target
from moe_comm.triton import dequantize as triton_dequantize
from moe_comm.triton import quantize as triton_quantize
from tests.helpers.command_line import output_of
from tests.helpers.rank_threads import on_ranks

BLOCK64 = Quantization(format=QuantizationFormat["FP8_BLOCK64"])
BLOCK256 = Quantization(format=QuantizationFormat["FP8_BLOCK256"])
NVFP4 = Quantization(format=QuantizationFormat["NVFP4"])
CONFIG = EpConfig(num_experts=2, num_topk=2, hidden=None, num_max_tokens_per_rank=4, dtype=None)
CHOICES = torch.tensor([[0, 1], [1, -1], [0, -1]])


def test_everything_that_lists_formats_has_them() -> None:
    added = ["FP8_BLOCK64", "FP8_BLOCK256", "NVFP4"]
    assert [each.name for each in QuantizationFormat] == ["FP8_BLOCK128", "MXFP8", *added]
    assert [each.name for each in ScaleFormat][3:] == ["E4M3"]
    assert BLOCK64.scale_format is ScaleFormat.FLOAT32_POWER_OF_2
    case_names = "\n".join(case.name for case in CASES)
    for scale in ("float32-power-of-2", "ue8m0", "float32"):
        assert f"low-latency-fp8-block64-{scale}-columns" in case_names
    options = ("--tokens", "256", "--hidden", "1024", "--json")
    sizes = {}
    for name in ("mxfp8", *map(str.lower, added)):
        said = output_of("budget", *options, "--quantization", name)
        sizes[name] = said
    assert len(set(sizes.values())) == 4
    said = output_of("budget", *options, "--quantization", "fp8_block96", exit_code=2)
    assert "nvfp4" in said


@pytest.mark.parametrize("form", list(QuantizationFormat), ids=lambda form: form.name)
def test_sizes_are_those_of_the_record(form: QuantizationFormat) -> None:
    (record,) = (each for each in _host.layout.WIRE_FORMATS if each.name == form.name)
    for scale_format in form.scale_formats:
        quantization = Quantization(format=form, scale_format=scale_format)
        assert quantization.sf_dtype.itemsize == record.scale_bytes(scale_format)
        for hidden in (1, 15, 16, 17, 64, 200, 1040, 7168):
            assert quantization.row_bytes(hidden) == record.row_bytes(hidden)
            assert quantization.num_scales(hidden) == record.num_scales(hidden, scale_format)


def test_four_bits_by_hand() -> None:
    assert (NVFP4.row_bytes(7168), NVFP4.num_scales(7168), NVFP4.sf_dtype) == (
        3584,
        448,
        torch.float8_e4m3fn,
    )
    assert (NVFP4.row_bytes(33), NVFP4.num_scales(33)) == (17, 3)
    sizes = dataclasses.replace(CONFIG, hidden=7168, dtype=torch.bfloat16).window_sizes
    options = {"layout": Layout.LOW_LATENCY, "quantization": NVFP4}
    # One expert with 8 places: rows, factors and float32 weights, in pages of 4096.
    assert 7 * 4096 < 8 * 3584 + 8 * 448 + 8 * 4 < 8 * 4096
    assert sizes(2, **options).dispatched == 8 * 4096


def test_blocks_of_64_by_hand() -> None:
    """Scale factors of three blocks with 0.25 as the least amax and powers of two."""
    x = torch.zeros(1, 192)
    x[0, 0], x[0, 1] = 448.0, -1.0
    x[0, 64] = 0.1
    x[0, 128] = float("inf")
    with Communicator(backend="host") as communicator, EpBuffer(communicator, CONFIG) as buffer:
        result = buffer.dispatch(x, torch.tensor([[0, 1]]), quantization=BLOCK64)
    codes = result.x.view(torch.uint8)
    assert result.x_sf is not None
    # 0.25 / 448 is between 2**-11 and 2**-10; 0.1 * 2**10 = 102.4 is next to 104, 0x6D.
    for row in range(2):
        assert result.x_sf[row, :2].tolist() == [1.0, 2.0**-10]
        assert result.x_sf[row, 2].isnan()
        assert codes[row, [0, 1, 64]].tolist() == [0x7E, 0xB8, 0x6D]
        assert codes[row, 2:64].count_nonzero() == codes[row, 65:128].count_nonzero() == 0
        assert codes[row, 128:].tolist() == [0x7F] * 64
    back = moe_comm.dequantize(result.x, result.x_sf, BLOCK64, torch.float32)
    assert back[0, [0, 1, 64]].tolist() == [448.0, -1.0, 104 / 1024]


@pytest.mark.parametrize(
    "case",
    [case for case in CASES if re.search("fp8-block64-.*-bfloat16-200", case.name)],
    ids=lambda case: case.name,
)
def test_the_cpu_backend_sends_what_the_definition_says(case: moe_comm.testing.Case) -> None:
    check_case(Target(name="host"), case, mode="threads")


@pytest.mark.parametrize("quantization", [BLOCK64, BLOCK256], ids=["64", "256"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_local_arithmetic_is_that_of_the_definition(
    quantization: Quantization, dtype: torch.dtype
) -> None:
    x = (torch.randn(5, 520) * torch.logspace(-6, 3, 520)).to(dtype)
    x[3, 70] = float("nan")
    want, want_sf = spec.quantize_rows(x, quantization)
    for quantize, dequantize in (
        (moe_comm.quantize, moe_comm.dequantize),
        (triton_quantize, triton_dequantize),
    ):
        data, sf = quantize(x, quantization)
        assert torch.equal(data.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(sf.view(torch.uint8), want_sf.view(torch.uint8))
        back = dequantize(data, sf, quantization, torch.float32)
        is_nan = back.isnan()
        assert is_nan[3, 64:128].all()
        torch.testing.assert_close(back[~is_nan], x.float()[~is_nan], rtol=2**-4, atol=0.01)


def _raised(act: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the caller compares the text
        act()
    return str(caught.value)


@pytest.mark.parametrize(
    ("backend", "quantization"),
    [
        ("host", BLOCK256),
        ("host", NVFP4),
        ("reference", NVFP4),
        # The emulator's module has a table of its own, without formats that are added to this one.
        ("simt", BLOCK64),
    ],
    ids=lambda each: each if isinstance(each, str) else each.format.name,
)
@pytest.mark.parametrize("is_mistaken_alone", [False, True])
def test_what_a_backend_cannot_make_is_refused_by_name_on_every_rank(
    backend: str, quantization: Quantization, is_mistaken_alone: bool
) -> None:
    def body(communicator: Communicator) -> tuple[str, int]:
        with EpBuffer(communicator, CONFIG) as buffer:
            is_mistaken = communicator.rank_idx == 1 or not is_mistaken_alone
            asked = quantization if is_mistaken else MXFP8
            x = torch.ones(3, 256, dtype=torch.bfloat16)
            text = _raised(lambda: buffer.dispatch(x, CHOICES, quantization=asked))
            # The buffer stays usable.
            result = buffer.dispatch(x, CHOICES, quantization=MXFP8)
            return text, len(result.x)

    name, scale_format = quantization.format.name, quantization.scale_format
    assert scale_format is not None
    for text, num_rows in on_ranks(2, body, backend=backend):
        assert f"backend {backend} cannot quantize to {name} with {scale_format.name}" in text
        assert "rank 1" in text or not is_mistaken_alone
        assert num_rows == 4


@pytest.mark.parametrize("backend", ["host", "reference"])
def test_ranks_that_disagree_hear_the_names(backend: str) -> None:
    def body(communicator: Communicator) -> str:
        with EpBuffer(communicator, CONFIG) as buffer:
            asked = BLOCK64 if communicator.rank_idx else MXFP8
            x = torch.ones(3, 256, dtype=torch.bfloat16)
            return _raised(lambda: buffer.dispatch(x, CHOICES, quantization=asked))

    for text in on_ranks(2, body, backend=backend):
        assert "bfloat16 rows of 512 bytes to be quantized to FP8_BLOCK64 with FLOAT32_POW" in text
        assert "bfloat16 rows of 512 bytes to be quantized to MXFP8 with UE8M0" in text


@pytest.mark.parametrize(
    "act",
    [
        lambda x: moe_comm.quantize(x, NVFP4),
        lambda x: moe_comm.dequantize(x, x, NVFP4),
        lambda x: spec.quantize_rows(x, NVFP4),
        lambda x: triton_quantize(x, NVFP4),
        lambda x: triton_dequantize(x, x, NVFP4),
    ],
)
def test_what_nobody_can_make_is_refused_by_name(act: Callable[[torch.Tensor], object]) -> None:
    text = _raised(lambda: act(torch.ones(2, 32)))
    assert re.search(
        r"cannot quantize to NVFP4 with E4M3 scale factors: elements of 4 bits in blocks of 16",
        text,
    )


@pytest.mark.parametrize("layout", list(Layout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("is_column_major", [False, True])
def test_four_bits_that_are_quantized_already_travel(layout: Layout, is_column_major: bool) -> None:
    """Two elements a byte, a scale factor for 16 of them: 100 channels, 50 bytes, 7 factors."""
    asked = dataclasses.replace(NVFP4, is_column_major=is_column_major)
    data = torch.randint(0, 256, (3, 50), dtype=torch.uint8)
    factors = torch.randint(0, 256, (3, 7), dtype=torch.uint8)
    sf = factors.view(torch.float8_e4m3fn)
    with Communicator(backend="host") as communicator, EpBuffer(communicator, CONFIG) as buffer:
        text = _raised(lambda: buffer.dispatch((data, sf[:, :4]), CHOICES, quantization=asked))
        assert "7 scale factors for 100 channels, sf has shape (3, 4)" in text
        result = buffer.dispatch((data, sf), CHOICES, layout=layout, quantization=asked)
    assert result.x_sf.dtype is torch.float8_e4m3fn
    rows, got = result.x, result.x_sf.contiguous().view(torch.uint8)
    if layout is Layout.LOW_LATENCY:
        rows, got = (part.reshape(2, 4, -1)[:, :2].flatten(0, 1) for part in (rows, got))
    tokens = [0, 1, 2] if layout is Layout.RANK_MAJOR else [0, 2, 0, 1]
    assert torch.equal(rows, data[tokens])
    assert torch.equal(got, factors[tokens])
