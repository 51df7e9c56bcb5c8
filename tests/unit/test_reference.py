from __future__ import annotations

import dataclasses
import math
import struct
from fractions import Fraction
from typing import Any

import pytest
import torch

from moe_comm import Communicator, EpBuffer
from moe_comm.ep.backends import messages
from moe_comm.ep.backends.base import PlanTensors
from moe_comm.ep.backends.reference import ReferenceBackend
from moe_comm.ep.call_options import DispatchOptions
from moe_comm.ep.config import Capacity, EpConfig, Layout
from moe_comm.peers.bootstrap import RankThreads
from moe_comm.tensors import arithmetic
from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8, ScaleFormat

QUIET_NAN = {
    torch.bfloat16: 0x7FC0,
    torch.float16: 0x7E00,
    torch.float32: 0x7FC00000,
    torch.float64: 0x7FF8000000000000,
}
BITS = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def from_bits(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    width = 8 * dtype.itemsize
    signed = [bit - (1 << width) if bit >> (width - 1) else bit for bit in bits]
    return torch.tensor(signed, dtype=BITS[dtype]).view(dtype)


def to_bits(values: torch.Tensor) -> list[int]:
    mask = (1 << (8 * values.element_size())) - 1
    return [int(bit) & mask for bit in values.view(BITS[values.dtype]).flatten()]


def exact(bits: int) -> Fraction:
    """The value of float32 bits, by integer arithmetic."""
    exponent, mantissa = bits >> 23 & 0xFF, bits & 0x7FFFFF
    significand = mantissa if exponent == 0 else mantissa | 1 << 23
    value = significand * Fraction(2) ** (max(exponent, 1) - 150)
    return -value if bits >> 31 else value


def nearest_even(value: Fraction, dtype: torch.dtype) -> int:
    """Bits of the value of `dtype` nearest to `value`, without floating-point arithmetic."""
    mantissa_bits, bias = {torch.bfloat16: (7, 127), torch.float16: (10, 15)}[dtype]
    sign = int(value < 0) << (8 * dtype.itemsize - 1)
    magnitude = abs(value)
    if magnitude == 0:
        return sign
    exponent = 1 - bias
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - mantissa_bits)
    units = round(magnitude / quantum)  # Python rounds a Fraction half to even
    # A carry in the units is a carry in the bits.
    bits = units if exponent == 1 - bias else units + ((exponent + bias - 1) << mantissa_bits)
    infinity = (2 * bias + 1) << mantissa_bits
    return sign | min(bits, infinity)


def interesting_float32_bits() -> list[int]:
    generator = torch.Generator().manual_seed(5)
    drawn = torch.randint(0, 1 << 32, (600,), generator=generator).tolist()
    # Half-way points of bfloat16 and float16, normal and subnormal, and their neighbors.
    halfway = [
        (exponent << 23) + mantissa + delta
        for exponent in (0, 1, 2, 101, 102, 103, 104, 110, 112, 113, 114, 126, 127, 142, 143, 254)
        for mantissa in (0, 0x800, 0x1000, 0x3000, 0x8000, 0x18000, 0x7F8000, 0x7FF000, 0x7FFFFF)
        for delta in (-1, 0, 1)
        if (exponent << 23) + mantissa + delta >= 0
    ]
    finite = [bits for bits in drawn + halfway if (bits >> 23 & 0xFF) != 0xFF]
    return finite + [bits ^ 1 << 31 for bits in finite]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_to_nearest_even(dtype: torch.dtype, flush_denormal: bool) -> None:
    bits = interesting_float32_bits()
    rounded = to_bits(arithmetic.round_to(from_bits(bits, torch.float32), dtype))
    for source, got in zip(bits, rounded, strict=True):
        want = nearest_even(exact(source), dtype)
        if exact(source) == 0:
            want = source >> 31 << 15
        assert got == want, f"0x{source:08x} gives 0x{got:04x}, want 0x{want:04x}"


@pytest.mark.parametrize("dtype", arithmetic.ADDABLE_DTYPES)
def test_every_nan_becomes_one(dtype: torch.dtype, flush_denormal: bool) -> None:
    wide = arithmetic.accumulator_dtype(dtype)
    sources = (
        [0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7F80FFFF]
        if wide is torch.float32
        else [0x7FF8000000000000, 0xFFF8000000000001, 0x7FF0000000000001, (1 << 64) - 1]
    )
    rounded = arithmetic.round_to(from_bits(sources, wide), dtype)
    assert to_bits(rounded) == [QUIET_NAN[dtype]] * len(sources)
    infinities = torch.tensor([math.inf, -math.inf], dtype=wide)
    assert arithmetic.round_to(infinities, dtype).tolist() == [math.inf, -math.inf]


def float32(value: float) -> float:
    """Rounded by the C library's conversion, which keeps subnormals."""
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


@pytest.mark.parametrize("with_weights", [False, True])
def test_sums_are_single_float32_additions_in_order(
    with_weights: bool, flush_denormal: bool
) -> None:
    generator = torch.Generator().manual_seed(7)
    rows = torch.randn(9, 40, generator=generator) * 2.0 ** torch.randint(
        -20, 20, (9, 40), generator=generator
    )
    positions = torch.randint(-1, 9, (6, 5), generator=generator)
    weights = torch.rand(6, 5, generator=generator) if with_weights else None
    sums = arithmetic.sum_rows(rows, positions, weights)
    for token_idx, chosen in enumerate(positions.tolist()):
        for column in range(40):
            acc = 0.0
            for k, position in enumerate(chosen):
                if position < 0:
                    continue
                # A double holds the product, and the sum up to an innocuous rounding, exactly.
                term = float(rows[position, column])
                if weights is not None:
                    term = float32(term * float(weights[token_idx, k]))
                acc = float32(acc + term)
            assert float(sums[token_idx, column]) == acc


@pytest.mark.parametrize("dtype", arithmetic.ADDABLE_DTYPES)
def test_sums_keep_subnormals(dtype: torch.dtype, flush_denormal: bool) -> None:
    rows = from_bits([3] * 8 + [5] * 8, dtype).reshape(2, 8)
    sums = arithmetic.sum_rows(rows, torch.tensor([[0, 1, 0], [-1, -1, -1]]))
    assert to_bits(sums) == [11] * 8 + [0] * 8
    dots = arithmetic.dot_rows(rows, torch.ones_like(rows))
    # A unit of a subnormal: 2**-133, 2**-24, 2**-149 and 2**-1074, as bits of the accumulator.
    if dtype is torch.float16:
        assert dots.tolist() == [24 / 2**24, 40 / 2**24]
    else:
        unit = 1 << 16 if dtype is torch.bfloat16 else 1
        assert to_bits(dots) == [24 * unit, 40 * unit]
    # The caller's own setting is back.
    smallest_normal = torch.tensor(torch.finfo(torch.float64).tiny, dtype=torch.float64)
    assert bool(smallest_normal * 0.5 == 0) == flush_denormal


def test_sum_starts_at_positive_zero_and_skips_unused_choices() -> None:
    rows = torch.tensor([[-0.0] * 4, [math.nan] * 4])
    weights = torch.tensor([[1.0, math.nan], [math.inf, math.nan]])
    sums = arithmetic.sum_rows(rows, torch.tensor([[0, -1], [-1, -1]]), weights)
    assert to_bits(sums) == [0] * 8


def test_long_rows_and_many_tokens_are_chunked_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(5, 96, generator=generator)
    positions = torch.randint(-1, 5, (7, 3), generator=generator)
    whole = arithmetic.sum_rows(rows, positions)
    dots = arithmetic.dot_rows(rows, rows)
    scaled = arithmetic.scale_rows(rows, rows[:, 0])
    for num_elements in (1, 40, 96, 200):
        monkeypatch.setattr(arithmetic, "_SERIAL_CHUNK_ELEMENTS", num_elements)
        monkeypatch.setattr(arithmetic, "_CACHED_CHUNK_ELEMENTS", num_elements)
        assert torch.equal(arithmetic.sum_rows(rows, positions), whole)
        assert torch.equal(arithmetic.dot_rows(rows, rows), dots)
        assert torch.equal(arithmetic.scale_rows(rows, rows[:, 0]), scaled)


@pytest.mark.parametrize("hidden", [4, 31, 32, 33, 100])
def test_dot_adds_in_lanes(hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    a, b = torch.randn(2, 3, hidden, generator=generator)
    dots = arithmetic.dot_rows(a, b)
    for row in range(3):
        lanes = [0.0] * 32
        for i in range(hidden):
            product = float32(float(a[row, i]) * float(b[row, i]))
            lanes[i % 32] = float32(lanes[i % 32] + product)
        for half in (16, 8, 4, 2, 1):
            lanes = [float32(lanes[j] + lanes[j + half]) for j in range(half)]
        assert float(dots[row]) == lanes[0]


@pytest.mark.parametrize("backend", ["reference", "collective", "host"])
def test_rows_of_every_dtype_travel_under_deterministic_algorithms(backend: str) -> None:
    """Torch fills what is uninitialized then, and cannot for every dtype."""
    dtypes = [torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float64]
    dtypes += [getattr(torch, name) for name in ("float4_e2m1fn_x2",) if hasattr(torch, name)]
    topk_idx = torch.tensor([[1], [0], [-1]])
    is_filled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with Communicator(RankThreads(1)[0], backend=backend) as communicator:
            for dtype in dtypes:
                config = EpConfig(num_experts=2, num_topk=1, hidden=16, dtype=dtype)
                buffer = EpBuffer(communicator, config)
                sent = torch.arange(48 * dtype.itemsize, dtype=torch.uint8).view(3, -1).view(dtype)
                result = buffer.dispatch(sent, topk_idx)
                assert torch.equal(result.x.view(torch.uint8), sent.view(torch.uint8)[[1, 0]])
                assert buffer.empty_expert_output(result.handle).shape == (2, 16)
    finally:
        torch.use_deterministic_algorithms(is_filled)


def test_calls_are_told_apart() -> None:
    x = torch.zeros(1, 8, dtype=torch.bfloat16)
    plan = PlanTensors(
        torch.zeros(1, 5, dtype=torch.int32),
        torch.zeros(1, 1),
        torch.zeros(1, 1),
        Layout.RANK_MAJOR,
        8,
        0,
        torch.zeros(2, dtype=torch.int64),
    )
    weights = torch.zeros(1, 1)
    plain = DispatchOptions()
    drop_2 = Capacity(num_rows=4, num_rows_per_expert=2, on_overflow="drop")
    changed: list[dict[str, Any]] = [
        {},
        {"layout": Layout.RANK_MAJOR},
        {"layout": Layout.LOW_LATENCY},
        {"expert_alignment": 2},
        {"quantization": FP8_BLOCK128},
        {"quantization": MXFP8},
        {"quantization": dataclasses.replace(MXFP8, is_column_major=True)},
        {"quantization": dataclasses.replace(FP8_BLOCK128, scale_format=ScaleFormat.UE8M0)},
        {"capacity": drop_2},
        {"capacity": dataclasses.replace(drop_2, num_rows_per_expert=3)},
        {"capacity": dataclasses.replace(drop_2, on_overflow="raise")},
    ]
    data = torch.zeros(1, 8, dtype=torch.float8_e4m3fn)
    calls = [
        *(messages.describe_dispatch(x, None, None, plain._replace(**more)) for more in changed),
        messages.describe_dispatch(x, None, weights, plain),
        messages.describe_dispatch(x, None, weights.double(), plain),
        messages.describe_dispatch(data, torch.zeros(1, 2), None, plain),
        messages.describe_dispatch(data, torch.zeros(1, 3), None, plain),
        messages.describe_dispatch(data, torch.zeros(1, 3).bfloat16(), None, plain),
        messages.describe_dispatch_cached(x, None, None, plan, None),
        messages.describe_dispatch_cached(x, None, None, plan, MXFP8),
        messages.describe_dispatch_cached(x.half(), None, None, plan, None),
        messages.describe_dispatch_cached(data, torch.zeros(1, 2), None, plan, None),
        messages.describe_dispatch_cached(torch.zeros(1, 16).bfloat16(), None, None, plan, None),
        messages.describe_combine(x, None, plan),
        messages.describe_combine(x, weights, plan),
        messages.describe_combine(None, weights, plan),
    ]
    assert len(set(calls)) == len(calls)
    assert len({messages.call_hash(call) for call in calls}) == len(calls)
    # The number of rows that a capacity allows is each rank's own.
    same = messages.describe_dispatch(
        x, None, None, plain._replace(capacity=dataclasses.replace(drop_2, num_rows=8))
    )
    assert same in calls
    growing = messages.describe_dispatch(
        x, None, None, plain._replace(capacity=Capacity(num_rows=8))
    )
    assert growing == calls[0]


def test_a_backend_of_a_third_party_that_names_options_one_by_one_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Old\.dispatch takes one DispatchOptions as its last"):

        class Old(ReferenceBackend):
            def dispatch(self, *tensors: Any, layout: Any, quantization: Any, **more: Any) -> Any:
                raise NotImplementedError

    with pytest.raises(TypeError, match=r"Older\.combine takes one CombineOptions .*\.gradients"):

        class Older(ReferenceBackend):
            def combine(self, *tensors: Any, gradients: int, **more: Any) -> Any:
                raise NotImplementedError
