"""The quantize kernel of every instruction set, bit for bit.

The oracle takes powers of two from float64 arithmetic and codes from torch's cast to float8_e4m3fn,
so it shares no method with the kernels.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_comm import _host
from tests import _host_testing
from tests.guarded_bytes import Guarded, aligned, place

kernels = _host_testing.kernels

ISAS = _host.kernels.instruction_sets()
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
KINDS = ["bits", "normal", "spread", "tiny", "huge", "zero"]
# Around blocks, lines of codes and registers of every instruction set.
HIDDENS = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 191, 192, 250, 2880, 7200]


@dataclass(frozen=True)
class Recipe:
    block: int
    scale_format: str
    least_amax: float = 0.0

    @property
    def scale_dtype(self) -> type[np.generic]:
        return np.uint8 if self.scale_format == "UE8M0" else np.uint32

    @property
    def nan_scale(self) -> int:
        return 0xFF if self.scale_format == "UE8M0" else 0x7FC00000


FLOAT32 = Recipe(128, "FLOAT32", 1e-4)
POWER_OF_2 = Recipe(128, "FLOAT32_POWER_OF_2", 1e-4)
PACKED = Recipe(128, "UE8M0", 1e-4)
MX = Recipe(32, "UE8M0")
# A block of no format, which one could have.
BLOCK64 = Recipe(64, "FLOAT32_POWER_OF_2")
FLOAT32_64 = Recipe(64, "FLOAT32", 0.25)
RECIPES = [
    pytest.param(recipe, id=f"{recipe.scale_format.lower()}-{recipe.block}")
    for recipe in (FLOAT32, POWER_OF_2, PACKED, MX, BLOCK64, FLOAT32_64)
]
NAN_CODE = 0x7F


def expected(x: torch.Tensor, recipe: Recipe) -> tuple[np.ndarray, np.ndarray]:
    """Codes `[hidden]` and scale factors `[num_blocks]`, as unsigned integers."""
    hidden = len(x)
    num_blocks = -(-hidden // recipe.block)
    padded = torch.zeros(num_blocks * recipe.block)
    padded[:hidden] = x.float()
    blocks = padded.view(num_blocks, recipe.block)
    amax = blocks.abs().amax(dim=1)
    is_finite = amax.isfinite().numpy()
    amax[~amax.isfinite()] = 1.0
    amax = amax.clamp(min=recipe.least_amax)
    most = torch.full_like(amax, 448.0)
    quotient = amax / most
    if recipe.scale_format == "FLOAT32":
        scaled = blocks * (most / amax)[:, None]
        scales = quotient.numpy().view(np.uint32).copy()
    else:
        fraction, exponent = np.frexp(quotient.double().numpy())
        exponent = np.where(fraction == 0.5, exponent - 1, exponent)
        exponent = np.where(fraction == 0.0, -127, np.clip(exponent, -127, 127))
        wide = np.ldexp(blocks.double().numpy(), -exponent[:, None])
        scaled = torch.from_numpy(wide).float()
        if recipe.scale_format == "UE8M0":
            scales = (exponent + 127).astype(np.uint8)
        else:
            scales = np.ldexp(1.0, exponent).astype(np.float32).view(np.uint32)
    data = scaled.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8).numpy().copy()
    data[~is_finite] = NAN_CODE
    scales[~is_finite] = recipe.nan_scale
    return data.reshape(-1)[:hidden], scales


def check(
    isa: str,
    x: torch.Tensor,
    recipe: Recipe,
    *,
    streaming: bool,
    src_offset: int = 0,
    dst_offsets: tuple[int, ...] = (0,),
) -> None:
    """Quantizes x to one destination for each offset and compares all that was written."""
    name = str(x.dtype).removeprefix("torch.")
    want_data, want_scales = expected(x, recipe)
    source = place(x.view(torch.uint8).numpy(), src_offset)
    targets = [Guarded(len(x), offset) for offset in dst_offsets]
    scales = Guarded(want_scales.nbytes, want_scales.itemsize)
    kernels.quantize_row(
        isa,
        name,
        recipe.block,
        recipe.least_amax,
        recipe.scale_format,
        source,
        [target.bytes for target in targets],
        scales.bytes,
        streaming=streaming,
    )
    got_scales = scales.bytes.copy().view(recipe.scale_dtype)
    different = np.flatnonzero(got_scales != want_scales)
    assert not len(different), (
        f"{len(different)} of {len(got_scales)} scales differ, first of block {different[0]}: got "
        f"{got_scales[different[0]]:#x}, expected {want_scales[different[0]]:#x}"
    )
    scales.check_margins()
    for target in targets:
        different = np.flatnonzero(target.bytes != want_data)
        assert not len(different), (
            f"{len(different)} of {len(x)} codes differ, first at {different[0]}: got "
            f"{target.bytes[different[0]]:#x}, expected {want_data[different[0]]:#x} from "
            f"{x[different[0]].item()!r}"
        )
        target.check_margins()


def quantize(isa: str, x: torch.Tensor, recipe: Recipe) -> tuple[list[int], list[int]]:
    """Codes and scale factors of one row."""
    target = aligned(len(x))
    scales = np.zeros(-(-len(x) // recipe.block), recipe.scale_dtype)
    kernels.quantize_row(
        isa,
        str(x.dtype).removeprefix("torch."),
        recipe.block,
        recipe.least_amax,
        recipe.scale_format,
        place(x.view(torch.uint8).numpy(), 0),
        [target],
        scales.view(np.uint8),
        streaming=False,
    )
    return target.tolist(), scales.tolist()


def make_row(rng: np.random.Generator, dtype: torch.dtype, kind: str, hidden: int) -> torch.Tensor:
    """Any bits, or numbers of one kind."""
    if kind == "bits":
        code = np.int32 if dtype is torch.float32 else np.int16
        info = np.iinfo(code)
        codes = rng.integers(info.min, info.max, hidden, code, endpoint=True)
        return torch.from_numpy(codes).view(dtype)
    values = rng.standard_normal(hidden)
    if kind == "spread":  # each block finds every code
        values *= np.exp2(rng.uniform(-20.0, 20.0, hidden) / (2 if dtype is torch.float16 else 1))
    info = torch.finfo(dtype)
    scale = {"tiny": info.tiny * 4, "huge": info.max / 8, "zero": 0.0}.get(kind, 1.0)
    return torch.from_numpy(values * scale).to(dtype)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_any_length(rng: np.random.Generator, isa: str, dtype: torch.dtype, recipe: Recipe) -> None:
    for hidden in HIDDENS:
        for kind in KINDS:
            row = make_row(rng, dtype, kind, hidden)
            check(isa, row, recipe, streaming=True)
            check(isa, row, recipe, streaming=False)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=150)
@given(data=st.data())
def test_any_address(isa: str, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    row = make_row(rng, dtype, data.draw(st.sampled_from(KINDS)), data.draw(st.integers(1, 600)))
    check(
        isa,
        row,
        data.draw(st.sampled_from([FLOAT32, POWER_OF_2, PACKED, MX, BLOCK64, FLOAT32_64])),
        streaming=data.draw(st.booleans()),
        src_offset=dtype.itemsize * data.draw(st.integers(0, 64 // dtype.itemsize - 1)),
        dst_offsets=tuple(data.draw(st.lists(st.integers(0, 63), max_size=9))),
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("num_dst", range(10))
def test_destinations(rng: np.random.Generator, isa: str, streaming: bool, num_dst: int) -> None:
    for hidden in (64, 2880, 7168, 1001):
        row = make_row(rng, torch.bfloat16, "normal", hidden)
        # All at the beginning of a line; then one in the middle of a line; then all anywhere.
        for steps in ([0], [0, 0, 16], [48, 1, 32, 7]):
            offsets = tuple(steps[d % len(steps)] for d in range(num_dst))
            check(isa, row, FLOAT32, streaming=streaming, dst_offsets=offsets)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_16_bit_code(isa: str, dtype: torch.dtype, recipe: Recipe) -> None:
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    finite = every[every.float().isfinite()]
    info = torch.finfo(dtype)
    # Each block is scaled by its last element, the greatest; so every code meets every scale.
    for amax in (1.0, 1.77, 448.0, 449.0, 3e-4, 1e-4, 5e-5, info.tiny, info.tiny / 4, info.max):
        last = torch.tensor([amax], dtype=dtype)
        within = finite[finite.float().abs() <= last.float()]
        per_block = recipe.block - 1
        num_blocks = -(-len(within) // per_block)
        padded = torch.zeros(num_blocks * per_block, dtype=dtype)
        padded[: len(within)] = within
        blocks = torch.cat([padded.view(num_blocks, per_block), last.expand(num_blocks, 1)], dim=1)
        check(isa, blocks.reshape(-1), recipe, streaming=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_nan_and_infinity_spoil_their_block_only(
    rng: np.random.Generator, isa: str, dtype: torch.dtype, recipe: Recipe
) -> None:
    bits = torch.int32 if dtype is torch.float32 else torch.int16
    inf = torch.tensor(float("inf"), dtype=dtype).view(bits).item()
    sign = -(2 ** (8 * dtype.itemsize - 1))
    for hidden in (1000, 100):
        clean = make_row(rng, dtype, "normal", hidden)
        want_codes, want_scales = quantize(isa, clean, recipe)
        num_blocks = len(want_scales)
        for pattern in (inf, inf + 1, -sign - 1, inf + sign, inf + sign + 1, -1):
            for place_idx in {0, 31, 32, 64, min(127, hidden - 1), hidden - 1}:
                row = clean.clone()
                row.view(bits)[place_idx] = pattern
                codes, scales = quantize(isa, row, recipe)
                block = place_idx // recipe.block
                spoilt = range(block * recipe.block, min((block + 1) * recipe.block, hidden))
                assert scales[block] == recipe.nan_scale
                assert all(codes[i] == NAN_CODE for i in spoilt)
                assert all(scales[b] == want_scales[b] for b in range(num_blocks) if b != block)
                assert all(codes[i] == want_codes[i] for i in range(hidden) if i not in spoilt)


@pytest.mark.parametrize("isa", ISAS)
def test_ties_and_subnormals(isa: str) -> None:
    cases = [  # number in a block whose scale is 1, code
        (0.0, 0x00),
        (-0.0, 0x80),
        (2.0**-10, 0x00),  # half of the least subnormal: tie, to even
        (2.0**-10 * 1.0078125, 0x01),
        (-(2.0**-11), 0x80),
        (2.0**-9, 0x01),
        (1.5 * 2.0**-9, 0x02),  # tie, to even, upwards
        (2.5 * 2.0**-9, 0x02),
        (7.0 * 2.0**-9, 0x07),  # the greatest subnormal
        (7.5 * 2.0**-9, 0x08),  # tie between it and the least normal number
        (2.0**-6, 0x08),
        (8.5 * 2.0**-9, 0x08),
        (1.0, 0x38),
        (1.0625, 0x38),  # tie, to even
        (-1.1875, 0xBA),  # tie, to even, upwards
        (1.9375, 0x40),  # rounds to the next exponent
        (17.0, 0x58),
        (432.0, 0x7E),  # tie, to even, upwards
        (431.0, 0x7D),
        (-448.0, 0xFE),
    ]
    numbers = [number for number, _ in cases] + [448.0]
    want = [code for _, code in cases] + [0x7E]
    for name, dtype in DTYPES.items():
        row = torch.tensor(numbers, dtype=dtype)
        is_exact = (row.double() == torch.tensor(numbers, dtype=torch.float64)).tolist()
        for recipe, scale in (
            (FLOAT32, 0x3F800000),
            (POWER_OF_2, 0x3F800000),
            (PACKED, 127),
            (MX, 127),
        ):
            codes, scales = quantize(isa, row, recipe)
            assert scales == [scale], (name, recipe)
            kept = [(n, c) for n, c, exact in zip(numbers, codes, is_exact, strict=True) if exact]
            asked = [(n, c) for n, c, exact in zip(numbers, want, is_exact, strict=True) if exact]
            assert kept == asked, (name, recipe)
            assert len(kept) >= 19, name


@pytest.mark.parametrize("isa", ISAS)
def test_zero_and_clamped_blocks(isa: str) -> None:
    least = np.float32(1e-4) / np.float32(448.0)
    for value in (0.0, 1e-7):
        row = torch.full((200,), value)
        _, scales = quantize(isa, row, FLOAT32)
        assert scales == [int(least.view(np.uint32))] * 2
        _, scales = quantize(isa, row, POWER_OF_2)
        assert np.array(scales, np.uint32).view(np.float32).tolist() == [2.0**-22] * 2
        _, scales = quantize(isa, row, PACKED)
        assert scales == [127 - 22] * 2
    codes, scales = quantize(isa, torch.tensor([0.0, -0.0] * 20), MX)
    assert codes == [0x00, 0x80] * 20
    assert scales == [0, 0]
    # 448 * 2^-127 is the most that the least scale holds.
    codes, scales = quantize(isa, torch.full((32,), 448 * 2.0**-127), MX)
    assert (set(codes), scales) == ({0x7E}, [0])
    codes, scales = quantize(isa, torch.full((32,), 449 * 2.0**-127), MX)
    assert (set(codes), scales) == ({0x76}, [1])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_scales_next_to_powers_of_two(isa: str, recipe: Recipe) -> None:
    exact = np.ldexp(np.float32(448.0), np.arange(-158, 120)).astype(np.float32)
    below = np.nextafter(exact, np.float32(0.0))
    above = np.nextafter(exact, np.float32(np.inf))
    anchors = np.stack([exact, below, above]).reshape(-1, 1)
    blocks = anchors * np.linspace(-1.0, 1.0, recipe.block, dtype=np.float32)
    check(isa, torch.from_numpy(blocks.reshape(-1)), recipe, streaming=False)


@pytest.mark.parametrize("isa", ISAS)
def test_subnormals_survive_a_caller_who_flushes_them(isa: str) -> None:
    row = torch.full((32,), 2.0**-128)
    want = quantize(isa, row, MX)
    assert want == ([0x30] * 32, [0])  # 0.5 * 2^-127
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        got = quantize(isa, row, MX)
    finally:
        torch.set_flush_denormal(False)
    assert got == want


def test_wrong_arguments_are_named() -> None:
    row = aligned(256)
    scale = aligned(4)
    copies = [aligned(128)]
    bf16 = ("portable", "bfloat16")
    with pytest.raises(ValueError, match="expected bf16, fp16 or fp32, got float64"):
        kernels.quantize_row(
            "portable", "float64", 128, 0.0, "FLOAT32", row, copies, scale, streaming=False
        )
    with pytest.raises(ValueError, match="block: expected 128, 64 or 32, got 16"):
        kernels.quantize_row(*bf16, 16, 0.0, "FLOAT32", row, copies, scale, streaming=False)
    with pytest.raises(ValueError, match="scale factors are named 'FLOAT16'"):
        kernels.quantize_row(*bf16, 128, 0.0, "FLOAT16", row, copies, scale, streaming=False)
    with pytest.raises(ValueError, match="scales: expected 4 bytes, got 1"):
        kernels.quantize_row(*bf16, 32, 0.0, "UE8M0", row, copies, scale[:1], streaming=False)
    with pytest.raises(ValueError, match="destination: expected 128 bytes, got 127"):
        kernels.quantize_row(
            *bf16, 128, 0.0, "FLOAT32", row, [copies[0][1:]], scale, streaming=False
        )
