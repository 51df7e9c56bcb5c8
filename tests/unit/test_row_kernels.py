"""The row kernels of every instruction set against an oracle in numpy, bit for bit.

The oracle adds in float32 or float64 one numpy operation at a time and rounds to 16 bits through
exact float64 arithmetic, so it shares no method with the kernels.
"""

from __future__ import annotations

import itertools
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

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


@dataclass(frozen=True)
class Format:
    name: str
    code: Any  # unsigned integer type of one element
    number: Any  # type that is added
    mantissa_bits: int
    min_exponent: int
    max_finite: float
    canonical_nan: int

    @property
    def element_bytes(self) -> int:
        return np.dtype(self.code).itemsize


BFLOAT16 = Format("bfloat16", np.uint16, np.float32, 7, -126, 3.3895313892515355e38, 0x7FC0)
FLOAT16 = Format("float16", np.uint16, np.float32, 10, -14, 65504.0, 0x7E00)
FLOAT32 = Format("float32", np.uint32, np.float32, 23, -126, 3.4028234663852886e38, 0x7FC00000)
FLOAT64 = Format("float64", np.uint64, np.float64, 52, -1022, 1.7976931348623157e308, 0x7FF8 << 48)
FORMATS = {f.name: f for f in (BFLOAT16, FLOAT16, FLOAT32, FLOAT64)}
HIDDENS = [0, 1, 8, 24, 31, 32, 33, 40, 63, 129, 2880, 7176]


def widen(codes: np.ndarray, fmt: Format) -> np.ndarray:
    """Numbers of the codes, in the type that is added."""
    if fmt is BFLOAT16:
        return (codes.astype(np.uint32) << 16).view(np.float32)
    if fmt is FLOAT16:
        return codes.view(np.float16).astype(np.float32)
    return codes.view(fmt.number)


def narrow(values: np.ndarray, fmt: Format) -> np.ndarray:
    """Codes of the values: nearest even, subnormals kept, one NaN."""
    if fmt.number is np.float64 or fmt is FLOAT32:
        codes = values.view(fmt.code).copy()
    else:
        wide = values.astype(np.float64)
        finite = np.where(np.isfinite(wide), wide, 0.0)
        exponent = np.maximum(np.frexp(finite)[1] - 1, fmt.min_exponent)
        step = np.ldexp(1.0, exponent - fmt.mantissa_bits)
        rounded = np.copysign(np.rint(finite / step) * step, wide)
        rounded = np.where(np.abs(rounded) > fmt.max_finite, np.copysign(np.inf, wide), rounded)
        exact = np.where(np.isfinite(wide), rounded, wide)
        if fmt is FLOAT16:
            codes = exact.astype(np.float16).view(np.uint16)
        else:
            codes = (exact.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    codes[np.isnan(values)] = fmt.canonical_nan
    return codes


def expected_sum(rows: list[np.ndarray], weights: np.ndarray | None, fmt: Format) -> np.ndarray:
    """Codes of the sum of the rows, in ascending order from +0.0."""
    total = np.zeros(len(rows[0]), fmt.number)
    with np.errstate(all="ignore"):
        for k, row in enumerate(rows):
            term = widen(row, fmt)
            total = total + (term if weights is None else term * weights[k])
        return narrow(total, fmt)


def expected_dot(gradient: np.ndarray, value: np.ndarray, fmt: Format) -> float:
    """Element i into lane i mod 32, then lanes pairwise 16, 8, 4, 2, 1."""
    lanes = np.zeros(32, fmt.number)
    with np.errstate(all="ignore"):
        products = widen(gradient, fmt) * widen(value, fmt)
        for begin in range(0, len(products), 32):
            piece = products[begin : begin + 32]
            lanes[: len(piece)] += piece
        half = 16
        while half:
            lanes[:half] += lanes[half : 2 * half]
            half //= 2
    return float("nan") if np.isnan(lanes[0]) else float(lanes[0])


def make_codes(rng: np.random.Generator, fmt: Format, kind: str, count: int) -> np.ndarray:
    """`count` codes: any bits, or numbers of one kind."""
    if kind == "bits":
        return rng.integers(0, np.iinfo(fmt.code).max, count, fmt.code, endpoint=True)
    if kind == "special":
        sign = fmt.code(1) << fmt.code(8 * fmt.element_bytes - 1)
        inf = narrow(np.array([np.inf], fmt.number), fmt)[0]
        positive = [0, 1, 2, inf, inf - 1, inf + 1, fmt.canonical_nan, fmt.canonical_nan + 3]
        both = np.array([*positive, *(int(sign) | int(p) for p in positive)], fmt.code)
        return rng.choice(both, count)
    scale = {
        "normal": 1.0,
        "tiny": 2.0 ** (fmt.min_exponent - fmt.mantissa_bits // 2),
        "huge": fmt.max_finite / 4,
    }[kind]
    with np.errstate(over="ignore"):
        return narrow((rng.standard_normal(count) * scale).astype(fmt.number), fmt)


KINDS = ["bits", "special", "normal", "tiny", "huge"]


def check_sum(
    isa: str,
    fmt: Format,
    rows: list[np.ndarray],
    weights: np.ndarray | None,
    *,
    streaming: bool,
    src_offset: int = 0,
    dst_offset: int = 0,
    prefetch: bool = False,
) -> None:
    hidden = len(rows[0])
    sources = [place(row, (src_offset * (k + 1)) % 64) for k, row in enumerate(rows)]
    target = Guarded(hidden * fmt.element_bytes, dst_offset)
    kernels.sum_rows(
        isa,
        fmt.name,
        sources,
        None if weights is None else weights.view(np.uint8),
        target.bytes,
        streaming=streaming,
        prefetch=sources[1:] if prefetch else [],
    )
    got = target.bytes.copy().view(fmt.code)
    want = expected_sum(rows, weights, fmt)
    different = np.flatnonzero(got != want)
    assert not len(different), (
        f"{len(different)} of {hidden} differ, first at {different[0]}: got "
        f"{got[different[0]]:#x}, expected {want[different[0]]:#x} from "
        f"{[hex(row[different[0]]) for row in rows]} and weights {weights}"
    )
    target.check_margins()


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


def make_weights(rng: np.random.Generator, fmt: Format, num_src: int) -> np.ndarray:
    weights = rng.standard_normal(num_src).astype(fmt.number)
    if num_src > 4:
        weights[1:4] = [-0.0, np.finfo(fmt.number).smallest_subnormal, 2.0**100]
    return weights


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("num_src", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 64])
def test_sum_rows(rng: np.random.Generator, isa: str, name: str, num_src: int) -> None:
    fmt = FORMATS[name]
    for hidden in HIDDENS if num_src < 64 else [40, 2880]:
        for kind in KINDS if hidden < 200 else ["bits", "normal"]:
            rows = [make_codes(rng, fmt, kind, hidden) for _ in range(num_src)]
            for weights in (None, make_weights(rng, fmt, num_src)):
                check_sum(isa, fmt, rows, weights, streaming=True)
                check_sum(isa, fmt, rows, weights, streaming=False, prefetch=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("num_src", "group"),
    [(1, (0, 1)), (5, (1, 3)), (6, (0, 4)), (6, (4, 6)), (9, (3, 3)), (0, (0, 0))],
)
def test_sum_grouped_rows(
    rng: np.random.Generator, isa: str, name: str, num_src: int, group: tuple[int, int]
) -> None:
    """A group is added among itself and is one term: in float arithmetic, one addition at a time."""
    fmt = FORMATS[name]
    begin, end = group
    for hidden, kind, streaming, offset in itertools.product(
        (1, 33, 40, 1000), ("bits", "normal", "huge"), (False, True), (0, 16)
    ):
        rows = [make_codes(rng, fmt, kind, hidden) for _ in range(num_src)]
        for weights in (None, make_weights(rng, fmt, num_src)):
            factors = np.ones(num_src, fmt.number) if weights is None else weights
            acc = np.zeros(hidden, fmt.number)
            own = np.zeros(hidden, fmt.number)
            with np.errstate(all="ignore"):
                for k, row in enumerate(rows):
                    term = widen(row, fmt) * factors[k]
                    if begin <= k < end:
                        own = own + term
                    else:
                        acc = acc + term
                    if k == end - 1:
                        acc = acc + own
            target = Guarded(hidden * fmt.element_bytes, offset)
            kernels.sum_rows(
                isa,
                name,
                [place(row, 0) for row in rows],
                None if weights is None else weights.view(np.uint8),
                target.bytes,
                streaming=streaming,
                group=group,
            )
            assert np.array_equal(target.bytes.copy().view(fmt.code), narrow(acc, fmt))
            target.check_margins()
    with pytest.raises(ValueError, match="group: expected a part of"):
        kernels.sum_rows(isa, name, [], None, Guarded(64).bytes, streaming=False, group=(0, 1))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
def test_sum_of_no_rows_is_positive_zero(isa: str, name: str) -> None:
    target = Guarded(328)
    kernels.sum_rows(isa, name, [], None, target.bytes, streaming=False)
    assert not target.bytes.any()
    target.check_margins()


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=150)
@given(data=st.data())
def test_sum_rows_at_any_address(isa: str, data: st.DataObject) -> None:
    fmt = FORMATS[data.draw(st.sampled_from(list(FORMATS)))]
    hidden = data.draw(st.integers(0, 400))
    num_src = data.draw(st.integers(1, 10))
    kind = data.draw(st.sampled_from(KINDS))
    offsets = st.integers(0, 64 // fmt.element_bytes - 1)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    check_sum(
        isa,
        fmt,
        [make_codes(rng, fmt, kind, hidden) for _ in range(num_src)],
        make_weights(rng, fmt, num_src) if data.draw(st.booleans()) else None,
        streaming=data.draw(st.booleans()),
        src_offset=data.draw(offsets) * fmt.element_bytes,
        dst_offset=data.draw(offsets) * fmt.element_bytes,
        prefetch=data.draw(st.booleans()),
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_16_bit_code(rng: np.random.Generator, isa: str, name: str) -> None:
    fmt = FORMATS[name]
    codes = np.arange(65536, dtype=np.uint16)
    check_sum(isa, fmt, [codes], None, streaming=True)
    # Products and pairs fall between the codes: every exponent is rounded up, down and at ties.
    for weight in (1.0, -1.0, 0.5, 1.5, 1 + 2.0**-7, 1 + 2.0**-10, 2.0**-24, 2.0**-130, 3e38, 0.1):
        check_sum(isa, fmt, [codes], np.array([weight], np.float32), streaming=False)
    for _ in range(8):
        check_sum(isa, fmt, [codes, rng.permutation(codes)], None, streaming=True)
    check_sum(isa, fmt, [codes, codes ^ np.uint16(0x8000)], None, streaming=True)
    check_sum(isa, fmt, [codes, np.roll(codes, 0x80), np.roll(codes, 1)], None, streaming=True)


@pytest.mark.parametrize("isa", ISAS)
def test_known_bits(isa: str) -> None:
    cases = [  # rows, sum
        (BFLOAT16, [0x8000], 0x0000),  # +0.0 + -0.0
        (BFLOAT16, [0x0001], 0x0001),
        (BFLOAT16, [0x7F80, 0xFF80], 0x7FC0),  # infinity - infinity
        (BFLOAT16, [0xFFFF], 0x7FC0),
        (BFLOAT16, [0x7F7F, 0x7F7F], 0x7F80),
        (BFLOAT16, [0x3F80, 0x3B80], 0x3F80),  # 1 + 2^-8: tie, to even
        (BFLOAT16, [0x3F81, 0x3B80], 0x3F82),  # tie, to even, upwards
        (FLOAT16, [0x8000], 0x0000),
        (FLOAT16, [0x03FF, 0x0001], 0x0400),
        (FLOAT16, [0x7BFF, 0x4C00], 0x7C00),  # 65504 + 16: tie with infinity
        (FLOAT16, [0x7BFF, 0x4B80], 0x7BFF),  # 65504 + 15
        (FLOAT16, [0x7C01], 0x7E00),
        (FLOAT32, [0x00000001, 0x00000001], 0x00000002),
        (FLOAT32, [0xFF800001], 0x7FC00000),
        (FLOAT64, [1, 2], 3),
        (FLOAT64, [0xFFF8 << 48 | 5], 0x7FF8 << 48),
    ]
    for fmt, rows, want in cases:
        target = Guarded(40 * fmt.element_bytes)
        sources = [np.full(40, row, fmt.code).view(np.uint8) for row in rows]
        kernels.sum_rows(isa, fmt.name, sources, None, target.bytes, streaming=True)
        got = set(target.bytes.copy().view(fmt.code).tolist())
        assert got == {want}, (fmt.name, [hex(row) for row in rows])


@pytest.mark.parametrize("isa", ISAS)
def test_product_is_rounded_before_it_is_added(isa: str) -> None:
    # (1 + 2^-23)^2 - (1 + 2^-22) is 2^-46; the rounded product leaves 0.
    sources = [
        np.full(64, value, np.float32).view(np.uint8) for value in (-1 - 2.0**-22, 1 + 2.0**-23)
    ]
    weights = np.array([1, 1 + 2.0**-23], np.float32).view(np.uint8)
    target = Guarded(256)
    kernels.sum_rows(isa, "float32", sources, weights, target.bytes, streaming=True)
    assert not target.bytes.any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("hidden", HIDDENS)
def test_scale_and_dot(rng: np.random.Generator, isa: str, name: str, hidden: int) -> None:
    fmt = FORMATS[name]
    for kind in KINDS:
        for weight in (1.0, 0.3, -0.0, float("inf"), 2.0**-20):
            gradient = make_codes(rng, fmt, kind, hidden)
            value = make_codes(rng, fmt, "normal" if kind == "huge" else kind, hidden)
            target = Guarded(gradient.nbytes, 3 * fmt.element_bytes)
            target.bytes[:] = gradient.view(np.uint8)
            placed_value = place(value, fmt.element_bytes)
            got = kernels.scale_and_dot(isa, name, target.bytes, placed_value, float(weight))
            want = expected_dot(gradient, value, fmt)
            assert np.float64(got).tobytes() == np.float64(want).tobytes()
            with np.errstate(all="ignore"):
                scaled = narrow(widen(gradient, fmt) * fmt.number(weight), fmt)
            assert (target.bytes.copy().view(fmt.code) == scaled).all()
            target.check_margins()


@pytest.mark.parametrize("isa", ISAS)
def test_subnormals_survive_a_caller_who_flushes_them(isa: str) -> None:
    codes = np.full(100, 1, np.uint32)
    target = Guarded(400)
    gradient = codes.copy()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        kernels.sum_rows(
            isa, "float32", [codes.view(np.uint8)] * 3, None, target.bytes, streaming=True
        )
        kernels.scale_and_dot(isa, "float32", gradient.view(np.uint8), codes.view(np.uint8), 5.0)
        flushes_again = float(np.float32(2.0**-126) * np.float32(0.5)) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert (target.bytes.copy().view(np.uint32) == 3).all()
    assert (gradient == 5).all()
    assert flushes_again, "the caller's mode was not restored"


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60)
@given(
    num_rounds=st.integers(0, 12),
    src_offset=st.integers(0, 63),
    dst_offset=st.integers(0, 63),
    streaming=st.booleans(),
    is_copied=st.booleans(),
)
def test_checksum_lanes_take_what_is_copied(
    isa: str, num_rounds: int, src_offset: int, dst_offset: int, streaming: bool, is_copied: bool
) -> None:
    row = np.random.default_rng(num_rounds).integers(0, 256, 256 * num_rounds, np.uint8)
    target = Guarded(row.size, dst_offset)
    lanes = np.arange(32, dtype=np.uint64)
    expected = lanes.copy()
    for words in row.view(np.uint64).reshape(-1, 32):
        expected = (expected ^ words) * np.uint64(0x9E3779B97F4A7C15)
        expected ^= expected >> np.uint64(29)
    passed_to = target.bytes if is_copied else None
    kernels.absorb_copy(
        isa, place(row, src_offset), passed_to, lanes.view(np.uint8), streaming=streaming
    )
    assert np.array_equal(lanes, expected)
    assert not is_copied or (target.bytes == row).all()
    target.check_margins()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("num_dst", [0, 1, 2, 3, 8, 17, 65])
def test_fan_out(rng: np.random.Generator, isa: str, streaming: bool, num_dst: int) -> None:
    for num_bytes in (0, 16, 48, 64, 80, 256, 5760, 14352):
        row = rng.integers(0, 256, num_bytes, np.uint8)
        # All at the beginning of a line; then one in the middle of a line; then all anywhere.
        for steps in ([0], [0, 0, 16], [48, 16, 32, 0]):
            targets = [Guarded(num_bytes, steps[d % len(steps)]) for d in range(num_dst)]
            kernels.fan_out(isa, place(row, 2), [t.bytes for t in targets], streaming=streaming)
            for target in targets:
                assert (target.bytes == row).all()
                target.check_margins()


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=100)
@given(
    num_bytes=st.integers(0, 1000),
    src_offset=st.integers(0, 63),
    dst_offset=st.integers(0, 63),
    streaming=st.booleans(),
)
def test_copy_and_zero(
    isa: str, num_bytes: int, src_offset: int, dst_offset: int, streaming: bool
) -> None:
    row = np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)
    target = Guarded(num_bytes, dst_offset)
    kernels.copy(isa, place(row, src_offset), target.bytes, streaming=streaming)
    assert (target.bytes == row).all()
    target.check_margins()
    kernels.zero(isa, target.bytes, streaming=streaming)
    assert not target.bytes.any()
    target.check_margins()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("isa", ISAS)
def test_roofs_move_the_bytes_they_count(
    rng: np.random.Generator, isa: str, streaming: bool
) -> None:
    how = {"streaming": streaming, "num_passes": 2}
    streams = [place(rng.integers(0, 2**32, 912, np.uint32), 0) for _ in range(9)]
    num_bytes = streams[0].nbytes
    for num in (1, 2, 8, 9):
        targets = [Guarded(num_bytes) for _ in range(num)]
        _host.kernels.roof_fan_out(streams[0], 192, [t.bytes for t in targets], isa, **how)
        assert all((t.bytes == streams[0]).all() for t in targets)
        _host.kernels.roof_sum(streams[:num], targets[0].bytes, isa, **how)
        want = np.sum([s.view(np.uint32) for s in streams[:num]], axis=0, dtype=np.uint32)
        assert (targets[0].bytes.view(np.uint32) == want).all()
        for target in targets:
            target.check_margins()
    target = Guarded(num_bytes)
    _host.kernels.roof_copy(streams[1], target.bytes, isa, **how)
    assert (target.bytes == streams[1]).all()
    target.check_margins()


def test_ranks_of_a_roof_meet_before_and_after_their_rows() -> None:
    num_ranks, num_passes = 3, 5
    words = np.zeros(num_ranks * 64, np.uint8)
    rows = [np.full(128, rank_idx + 1, np.uint8) for rank_idx in range(num_ranks)]
    # Every rank writes to the next one's memory, and then adds what it was sent to its own row.
    windows = [aligned(128) for _ in range(num_ranks)]
    sums = [aligned(128) for _ in range(num_ranks)]

    def run(rank_idx: int) -> None:
        row = place(rows[rank_idx], 0)
        for _ in range(num_passes):
            _host.kernels.roof_of_meeting_ranks(
                *([(row, [windows[(rank_idx + 1) % num_ranks]])],),
                *([([row, windows[rank_idx]], sums[rank_idx])],),
                *(64, words, rank_idx),
                streaming=False,
                num_passes=2,
            )

    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(run, range(num_ranks)))
    for rank_idx in range(num_ranks):
        assert (sums[rank_idx] == rows[rank_idx] + rows[rank_idx - 1]).all()
    assert (words.view(np.uint64).reshape(num_ranks, 8)[:, 0] == 4 * 2 * num_passes).all()
    with pytest.raises(ValueError, match="rank 3 has no word among 3"):
        _host.kernels.roof_of_meeting_ranks([], [], 64, words, 3)


def test_wrong_arguments_are_named() -> None:
    row = aligned(64)
    with pytest.raises(ValueError, match="no row kernels named 'sse9'"):
        kernels.fan_out("sse9", row, [row], streaming=False)
    with pytest.raises(ValueError, match="destination: expected 64 bytes, got 32"):
        kernels.fan_out("portable", row, [aligned(32)], streaming=False)
    with pytest.raises(ValueError, match="aligned to 16 bytes, got one 8 past"):
        kernels.fan_out("portable", row, [aligned(72)[8:]], streaming=False)
    with pytest.raises(ValueError, match="got 'bytes'"):
        kernels.sum_rows("portable", "bytes", [row], None, aligned(64), streaming=False)
    with pytest.raises(ValueError, match="weights: expected 4 bytes, got 8"):
        kernels.sum_rows("portable", "float32", [row], row[:8], aligned(64), streaming=False)
    with pytest.raises(ValueError, match="row: expected a multiple of 64 bytes, got 32"):
        _host.kernels.roof_fan_out(row, 32, [aligned(64)])


def test_best_instruction_set_is_the_last() -> None:
    assert ISAS[0] == "portable"
    assert _host.kernels.best_instruction_set() == ISAS[-1]
