"""Permute and unpermute in Triton: interpreted on the CPU, or on a GPU where there is one."""

from __future__ import annotations

import re

import pytest
import torch

from moe_comm.tensors import arithmetic
from moe_comm.testing.cases import random_rows, random_weights, seeded

pytest.importorskip("triton")

from moe_comm import triton as local

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = arithmetic.ADDABLE_DTYPES


# The interpreter adds infinities in numpy, which warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    raw = [tensor.cpu().contiguous().view(-1).view(torch.uint8) for tensor in (got, want)]
    assert torch.equal(*raw)


def rows_of(num_rows: int, hidden: int, dtype: torch.dtype, *key: object) -> torch.Tensor:
    rows = random_rows(num_rows, hidden, dtype, seeded(key), has_special_values=True)
    return rows.to(DEVICE)


def positions_of(num_tokens: int, num_topk: int, num_rows: int) -> torch.Tensor:
    return torch.randint(-1, num_rows, (num_tokens, num_topk)).to(DEVICE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpermute_has_the_bits_of_the_reference(dtype: torch.dtype, has_weights: bool) -> None:
    rows, positions = rows_of(23, 72, dtype), positions_of(11, 5, 23)
    positions[3] = -1
    weights = None
    if has_weights:
        weights = random_weights(
            (11, 5), arithmetic.accumulator_dtype(dtype), seeded(dtype), has_special_values=True
        ).to(DEVICE)
    want = arithmetic.sum_rows(rows, positions, weights)
    assert_same_bits(local.unpermute(rows, positions, weights), want)
    out = torch.empty_like(want)
    assert local.unpermute(rows, positions, weights, out=out) is out
    assert_same_bits(out, want)
    assert not torch.signbit(out[3]).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_rounding_of_sums_is_that_of_the_reference(dtype: torch.dtype) -> None:
    """Sums just below, at and above the middle of neighbors, in every binade."""
    neighbors = torch.arange(0, 1 << 15, 37, dtype=torch.int16).view(dtype).to(torch.float32)
    below = torch.nextafter(neighbors, torch.tensor(float("inf")))
    # A weight brings any float32 into the sum: row 1.0 times that.
    middles = torch.cat([neighbors, below, neighbors * (1 + 2**-9), neighbors * (1 + 2**-12)])
    middles = torch.cat([middles, -middles])
    ones = torch.ones(1, 8, dtype=dtype, device=DEVICE)
    weights = middles[: len(middles) // 256 * 256].reshape(-1, 256).to(DEVICE)
    for k in range(0, 256, 64):
        some = weights[:, k : k + 1].contiguous()
        positions = torch.zeros(len(some), 1, dtype=torch.int64, device=DEVICE)
        want = arithmetic.sum_rows(ones, positions, some)
        assert_same_bits(local.unpermute(ones, positions, some), want)


@pytest.mark.parametrize("hidden", [1, 8, 1000, 2050])
def test_any_hidden(hidden: int) -> None:
    rows, positions = rows_of(6, hidden, torch.bfloat16), positions_of(3, 2, 6)
    assert_same_bits(local.unpermute(rows, positions), arithmetic.sum_rows(rows, positions))
    row_idx = torch.tensor([5, -1, 0, 0], device=DEVICE)
    got = local.gather_rows(rows, row_idx)
    want = rows[[5, 0, 0, 0]]
    want[1] = 0
    assert_same_bits(got, want)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int32, torch.complex128]
)
def test_permute_moves_bytes(dtype: torch.dtype) -> None:
    x = rows_of(5, 3, dtype)
    topk_idx = torch.tensor([[2, 0], [-1, 2], [0, 0], [-1, -1], [3, 2]], device=DEVICE)
    order = local.order_by_expert(topk_idx, 4, expert_alignment=4)
    assert order.num_tokens_per_expert.tolist() == [3, 0, 3, 1]
    assert order.expert_offsets.tolist() == [0, 4, 4, 8, 12]
    assert order.positions.tolist() == [[4, 0], [-1, 5], [1, 2], [-1, -1], [8, 6]]
    weights = torch.rand(5, 2, device=DEVICE)
    rows, row_weights = local.permute(x, order.positions, 12, weights)
    want = torch.zeros(12, 3, dtype=dtype, device=DEVICE)
    want_weights = torch.zeros(12, device=DEVICE)
    for token_idx, choices in enumerate(order.positions.tolist()):
        for k, row in enumerate(choices):
            if row >= 0:
                want[row] = x[token_idx]
                want_weights[row] = weights[token_idx, k]
    assert_same_bits(rows, want)
    assert_same_bits(row_weights, want_weights)
    assert local.permute(x, order.positions, 12)[1] is None


def test_unpermute_undoes_permute() -> None:
    x = torch.randn(9, 16, device=DEVICE)
    topk_idx = torch.randint(-1, 6, (9, 1), device=DEVICE)
    order = local.order_by_expert(topk_idx, 6, expert_alignment=8)
    rows, _ = local.permute(x, order.positions, int(order.expert_offsets[-1]))
    want = torch.where(topk_idx < 0, 0.0, x)
    assert_same_bits(local.unpermute(rows, order.positions), want)


def test_order_at_given_starts() -> None:
    topk_idx = torch.tensor([[1, 0], [1, -1]], device=DEVICE)
    starts = torch.tensor([0, 100, 200], dtype=torch.int32, device=DEVICE)
    order = local.order_by_expert(topk_idx, 2, expert_offsets=starts)
    assert order.positions.tolist() == [[100, 0], [101, -1]]


def test_nothing_to_do() -> None:
    empty = torch.empty(0, 8, device=DEVICE)
    none = torch.empty(0, 2, dtype=torch.int64, device=DEVICE)
    assert local.unpermute(empty, none).shape == (0, 8)
    rows, weights = local.permute(empty, none, 4, torch.empty(0, 2, device=DEVICE))
    assert rows.tolist() == [[0.0] * 8] * 4
    assert weights.tolist() == [0.0] * 4
    absent = torch.full((2, 3), -1, device=DEVICE)
    assert local.unpermute(empty, absent).tolist() == [[0.0] * 8] * 2
    assert local.order_by_expert(none, 3).expert_offsets.tolist() == [0, 0, 0, 0]


X = torch.zeros(2, 8, device=DEVICE)
POSITIONS = torch.zeros(2, 1, dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: local.permute(X.T, POSITIONS, 1), ValueError, "x must be contiguous, got shape (8, 2)"),
        (lambda: local.permute(X, POSITIONS[:1], 1), ValueError, "positions must have 2 rows, got 1"),
        (lambda: local.permute(X, POSITIONS, -1), ValueError, "num_rows must be >= 0, got -1"),
        (lambda: local.permute(X, POSITIONS, 1, X), ValueError, "shape (2, 1) of positions, got (2, 8)"),
        (lambda: local.unpermute(X, POSITIONS, X), ValueError, "shape (2, 1) of positions, got (2, 8)"),
        (lambda: local.unpermute(X.int(), POSITIONS), TypeError, "got torch.int32"),
        (lambda: local.unpermute(X, POSITIONS.int()), TypeError, "torch.int64, got torch.int32"),
        (lambda: local.unpermute(X, POSITIONS, POSITIONS.double()), TypeError, "got torch.float64"),
        (lambda: local.unpermute(X, POSITIONS, out=X[:1]), ValueError, "(2, 8), got (1, 8)"),
        (lambda: local.unpermute(X[0], POSITIONS), ValueError, "2 dimensions, got shape (8,)"),
        (lambda: local.gather_rows(X, POSITIONS), ValueError, "1 dimensions, got shape (2, 1)"),
        (lambda: local.gather_rows(X, POSITIONS[0], out=X), ValueError, "(1, 8), got (2, 8)"),
        (lambda: local.order_by_expert(X, 1), TypeError, "torch.int64, got torch.float32"),
        (lambda: local.order_by_expert(POSITIONS, 1, expert_alignment=0), ValueError, "1 and 0"),
        (
            lambda: local.unpermute(X.clone().requires_grad_(), POSITIONS),
            ValueError,
            "rows requires a gradient",
        ),
    ],
)  # fmt: skip
def test_bad_input(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()
