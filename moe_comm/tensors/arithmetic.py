"""Sums, products and roundings whose bits are part of the contract.

Plain torch on any device. Additions are single IEEE operations in a stated order; roundings are integer
arithmetic on the bits, because hardware conversions may flush subnormals or keep NaN payloads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

ADDABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

_NUM_LANES = 32
# torch runs an elementwise operation of fewer than 32768 elements on the calling thread. Others go to
# its pool, whose threads may flush subnormals whatever the calling thread does.
_SERIAL_CHUNK_ELEMENTS = 16384
_CACHED_CHUNK_ELEMENTS = 1 << 18
_SIGN_OF_FLOAT16 = 0x8000


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that rows of `dtype` are added in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@contextlib.contextmanager
def subnormals_kept() -> Iterator[None]:
    """The calling thread keeps subnormals inside, whatever `torch.set_flush_denormal` said."""
    smallest_normal = torch.tensor(
        torch.finfo(torch.float64).tiny, dtype=torch.float64, device="cpu"
    )
    flushes = bool(smallest_normal * 0.5 == 0)
    if flushes:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)


def round_to(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round an accumulator to the nearest value of `dtype`, ties to even.

    Subnormals are kept; every NaN becomes 0x7FC0 (bfloat16), 0x7E00 (float16), 0x7FC00000 (float32)
    or 0x7FF8000000000000 (float64).

    Args:
        values: float32 for bfloat16, float16 and float32; float64 for float64.
        dtype: One of `ADDABLE_DTYPES`.
    """
    if dtype == torch.bfloat16:
        return _to_bfloat16(values)
    if dtype == torch.float16:
        return _to_float16(values)
    bits, quiet = (
        (torch.int64, 0x7FF8000000000000) if dtype == torch.float64 else (torch.int32, 0x7FC00000)
    )
    return torch.where(values.isnan(), quiet, values.view(bits)).view(dtype)


def sum_rows(
    rows: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out[t] = round(sum over k of rows[positions[t, k]] * weights[t, k])`, added in order of k.

    The sum starts at +0.0; the product is rounded before it is added.

    Args:
        rows: `[N, hidden]`, one of `ADDABLE_DTYPES`.
        positions: int64 `[T, K]`, -1 where there is nothing to add.
        weights: None or `[T, K]`, of `accumulator_dtype`.
        out: None, or where to write.

    Returns:
        `[T, hidden]`, dtype of `rows`.
    """
    num_tokens, num_terms = positions.shape
    hidden = rows.shape[1]
    if out is None:
        out = torch.empty(num_tokens, hidden, dtype=rows.dtype, device=rows.device)
    wide = accumulator_dtype(rows.dtype)
    if rows.shape[0] == 0:
        return out.zero_()
    with subnormals_kept():
        for tokens, columns in chunks(num_tokens, hidden, rows.device):
            # Advanced indexing copies, so a term never aliases a row.
            chosen = positions[tokens]
            acc = torch.zeros(
                chosen.shape[0], columns.stop - columns.start, dtype=wide, device=rows.device
            )
            for k in range(num_terms):
                present = (chosen[:, k] >= 0).unsqueeze(1)
                term = widen(rows[chosen[:, k].clamp(min=0), columns])
                if weights is not None:
                    term = term * weights[tokens, k].unsqueeze(1)
                acc = torch.where(present, acc + term, acc)
            out[tokens, columns] = round_to(acc, rows.dtype)
    return out


def sum_rows_by_node(
    rows: torch.Tensor,
    positions: torch.Tensor,
    node_idx: torch.Tensor,
    own_node: int | None,
    weights: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Add rows like `sum_rows`, but those of a node among themselves first.

    A node's rows are added in order of k from +0.0; the sums of nodes are added in ascending
    `node_idx` from +0.0. Those of other nodes than `own_node` are rounded to the dtype of `rows`
    before, as they are when they cross.

    Args:
        rows: `[N, hidden]`, one of `ADDABLE_DTYPES`.
        positions: int64 `[T, K]`, -1 where there is nothing to add.
        node_idx: int64 `[T, K]`, the node of every row; anything where there is none.
        own_node: Node of the tokens; None where each sum is rounded.
        weights: None or `[T, K]`, of `accumulator_dtype`.
        out: None, or where to write.

    Returns:
        `[T, hidden]`, dtype of `rows`.

    Example:
        bfloat16, no weights: rows 256, 1 on node 0 and 1, 1 on node 1. On one node 256 + 1 + 1 + 1 =
        259 is rounded to 260. For a token of node 0 it is 257 + bfloat16(2) = 259, rounded to 260; of
        node 1, bfloat16(257) + 2 = 256 + 2 = 258.
    """
    num_tokens, num_terms = positions.shape
    hidden = rows.shape[1]
    if out is None:
        out = torch.empty(num_tokens, hidden, dtype=rows.dtype, device=rows.device)
    wide = accumulator_dtype(rows.dtype)
    if rows.shape[0] == 0:
        return out.zero_()
    is_present = positions >= 0
    nodes = sorted(set(node_idx[is_present].tolist()))
    with subnormals_kept():
        for tokens, columns in chunks(num_tokens, hidden, rows.device):
            chosen = positions[tokens]
            shape = (chosen.shape[0], columns.stop - columns.start)
            acc = torch.zeros(shape, dtype=wide, device=rows.device)
            for node in nodes:
                is_here = is_present[tokens] & (node_idx[tokens] == node)
                partial = torch.zeros(shape, dtype=wide, device=rows.device)
                for k in range(num_terms):
                    term = widen(rows[chosen[:, k].clamp(min=0), columns])
                    if weights is not None:
                        term = term * weights[tokens, k].unsqueeze(1)
                    partial = torch.where(is_here[:, k].unsqueeze(1), partial + term, partial)
                if node != own_node:
                    partial = widen(round_to(partial, rows.dtype))
                # A node without rows of a token has +0.0, which changes nothing: acc is never -0.0.
                acc = acc + partial
            out[tokens, columns] = round_to(acc, rows.dtype)
    return out


def scale_rows(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`round(weights[:, None] * rows)`.

    Args:
        rows: `[M, hidden]`, one of `ADDABLE_DTYPES`.
        weights: `[M]`, of `accumulator_dtype`.

    Returns:
        `[M, hidden]`, dtype of `rows`.
    """
    scaled = torch.empty_like(rows)
    with subnormals_kept():
        for some, columns in chunks(rows.shape[0], rows.shape[1], rows.device):
            product = widen(rows[some, columns]) * weights[some].unsqueeze(1)
            scaled[some, columns] = round_to(product, rows.dtype)
    return scaled


def dot_rows(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The dot product of every row of `a` with that of `b`.

    Element i is multiplied, rounded and added to lane i mod 32 in ascending i, every lane from +0.0;
    then lanes j and j + 16 are added, j and j + 8, 4, 2, 1.

    Args:
        a: `[M, hidden]`, one of `ADDABLE_DTYPES`.
        b: `[M, hidden]`, the same dtype.
        dtype: Dtype of the result; None for `accumulator_dtype`.

    Returns:
        `[M]`.
    """
    num_rows, hidden = a.shape
    wide = accumulator_dtype(a.dtype)
    dtype = dtype or wide
    dots = torch.empty(num_rows, dtype=dtype, device=a.device)
    with subnormals_kept():
        for some, columns in chunks(num_rows, hidden, a.device, whole_rows=True):
            products = torch.empty(dots[some].shape[0], hidden, dtype=wide, device=a.device)
            for piece in _split(columns, _chunk_elements(a.device)):
                products[:, piece] = widen(a[some, piece]) * widen(b[some, piece])
            lanes = torch.zeros(products.shape[0], _NUM_LANES, dtype=wide, device=a.device)
            for first in range(0, hidden, _NUM_LANES):
                terms = products[:, first : first + _NUM_LANES]
                lanes[:, : terms.shape[1]] += terms
            while lanes.shape[1] > 1:
                half = lanes.shape[1] // 2
                lanes = lanes[:, :half] + lanes[:, half:]
            dots[some] = round_to(lanes[:, 0].to(dtype), dtype)
    return dots


def empty_rows(
    num_rows: int, hidden: int, dtype: torch.dtype, device: torch.device | None = None
) -> torch.Tensor:
    """Rows of any dtype, `[num_rows, hidden]`, uninitialized.

    Deterministic algorithms fill what is uninitialized, for which torch lacks some dtypes.
    """
    rows = torch.empty(num_rows, hidden * dtype.itemsize, dtype=torch.uint8, device=device)
    return rows.view(dtype)


def widen(rows: torch.Tensor) -> torch.Tensor:
    """Exactly the same values in the accumulator's dtype."""
    if rows.dtype == torch.bfloat16:
        return (rows.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
    return rows.to(accumulator_dtype(rows.dtype))


def _to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    bits = values.view(torch.int32)
    # The shift is arithmetic, so what is left fits an int16 for either sign.
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return torch.where(values.isnan(), 0x7FC0, rounded).to(torch.int16).view(torch.bfloat16)


def _to_float16(values: torch.Tensor) -> torch.Tensor:
    bits = values.view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    # Normal results: the exponent moves from bias 127 to bias 15, 13 bits of mantissa are rounded off.
    # A carry out of the mantissa is the next exponent; out of the largest exponent it is infinity.
    rebased = magnitude - (112 << 23)
    normal = (rebased + 0xFFF + (rebased >> 13 & 1)) >> 13
    # Subnormal results: the significand with its leading bit, shifted by 14 to 24 places.
    significand = magnitude & 0x7FFFFF | 0x800000
    shift = (126 - (magnitude >> 23)).clamp(14, 24)
    kept = significand >> shift
    rest = significand - (kept << shift)
    half = torch.ones_like(shift) << (shift - 1)
    round_up = (rest > half) | ((rest == half) & (kept & 1 == 1))
    subnormal = kept + round_up.to(torch.int32)
    rounded = torch.where(magnitude >= 113 << 23, normal, subnormal)
    rounded = torch.where(magnitude >= 0x477FF000, 0x7C00, rounded)  # rounds to 65536 or more
    rounded = torch.where(magnitude < 0x33000001, 0, rounded)  # at most half the least subnormal
    signed = torch.where(bits < 0, rounded - _SIGN_OF_FLOAT16, rounded)
    return torch.where(values.isnan(), 0x7E00, signed).to(torch.int16).view(torch.float16)


def _chunk_elements(device: torch.device) -> int:
    if device.type != "cpu":
        return 1 << 62
    return _SERIAL_CHUNK_ELEMENTS if torch.get_num_threads() > 1 else _CACHED_CHUNK_ELEMENTS


def chunks(
    num_rows: int, hidden: int, device: torch.device, *, whole_rows: bool = False
) -> Iterator[tuple[slice, slice]]:
    """Rows and columns of pieces that torch works on with the calling thread alone."""
    num_elements = _chunk_elements(device)
    rows_per_chunk = max(1, num_elements // hidden)
    for some in _split(slice(0, num_rows), rows_per_chunk):
        for columns in _split(slice(0, hidden), hidden if whole_rows else num_elements):
            yield some, columns


def _split(whole: slice, length: int) -> Iterator[slice]:
    for start in range(whole.start, whole.stop, length):
        yield slice(start, min(start + length, whole.stop))
