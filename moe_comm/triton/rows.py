"""Permute and unpermute: rows of one rank between token order and expert order."""

from __future__ import annotations

import torch
import triton
from torch.autograd.graph import increment_version

from moe_comm.triton.checks import (
    check_dtype,
    check_no_gradient,
    check_tensor,
    int_view,
    on_device,
    rows_view,
    words_view,
)
from moe_comm.triton.row_kernels import gather_rows_kernel, sum_rows_kernel

_ADDABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MAX_BLOCK_COLUMNS = 1024


def permute(
    x: torch.Tensor,
    positions: torch.Tensor,
    num_rows: int,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Put every token's row at the positions of its choices; what no choice names is zero.

    Every row of the result is written once; rows move as bytes, NaN payloads included.

    Args:
        x: `[T, hidden]`, any dtype, contiguous.
        positions: int64 `[T, K]`, contiguous: rows in [0, num_rows), each at most once, or -1. Not
            checked. See `order_by_expert`.
        num_rows: Rows of the result, M, padding included.
        weights: `[T, K]` of any dtype, or None.

    Returns:
        rows `[M, hidden]`, and their weights `[M]`, 0 in padding, or None.

    Raises:
        ValueError: A shape or device does not fit; both values are named.
        TypeError: A dtype is wrong.

    Example:
        `positions = [[4, 0], [5, -1]]`, 8 rows: rows 0 and 4 are `x[0]`, row 5 is `x[1]`, the others
        are zero.
    """
    check_no_gradient(x=x, weights=weights)
    check_tensor("x", x, 2)
    _check_positions(positions, x.shape[0], x.device)
    if num_rows < 0:
        raise ValueError(f"num_rows must be >= 0, got {num_rows}")
    num_topk = positions.shape[1]
    # One row more than asked for takes what unused choices write.
    choice = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=x.device)
    flat = torch.where(positions < 0, num_rows, positions).flatten()
    choice[flat] = torch.arange(flat.numel(), device=x.device)
    choice = choice[:num_rows]
    rows = gather_rows(x, torch.where(choice < 0, -1, choice // max(1, num_topk)))
    if weights is None:
        return rows, None
    check_tensor("weights", weights, 2, x.device)
    if weights.shape != positions.shape:
        raise ValueError(
            f"weights must have the shape {tuple(positions.shape)} of positions, got "
            f"{tuple(weights.shape)}"
        )
    return rows, gather_rows(weights.view(-1, 1), choice).view(num_rows)


def unpermute(
    rows: torch.Tensor,
    positions: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`out[t] = round(sum over k of rows[positions[t, k]] * weights[t, k])`, added in order of k.

    float32 sums (float64 rows: float64) from +0.0; a product is rounded before it is added; one
    rounding to nearest even at the end; a NaN is stored as 0x7FC0, 0x7E00 or 0x7FC00000. A token
    without rows gives +0.0.

    Args:
        rows: `[M, hidden]`, bfloat16, float16, float32 or float64, contiguous.
        positions: int64 `[T, K]`, contiguous: rows in [0, M), or -1. Not checked.
        weights: None or float32 `[T, K]` (float64 rows: float64), contiguous.
        out: None, or `[T, hidden]` to write to.

    Returns:
        `[T, hidden]`, dtype of `rows`.

    Raises:
        ValueError: A shape or device does not fit; both values are named.
        TypeError: A dtype is wrong.
    """
    check_no_gradient(rows=rows, weights=weights)
    check_tensor("rows", rows, 2)
    check_dtype("rows", rows, *_ADDABLE)
    _check_positions(positions, None, rows.device)
    num_tokens, num_terms = positions.shape
    hidden = rows.shape[1]
    if weights is not None:
        check_tensor("weights", weights, 2, rows.device)
        check_dtype(
            "weights", weights, torch.float64 if rows.dtype == torch.float64 else torch.float32
        )
        if weights.shape != positions.shape:
            raise ValueError(
                f"weights must have the shape {tuple(positions.shape)} of positions, got "
                f"{tuple(weights.shape)}"
            )
    if out is None:
        out = torch.empty(num_tokens, hidden, dtype=rows.dtype, device=rows.device)
    else:
        check_tensor("out", out, 2, rows.device)
        check_dtype("out", out, rows.dtype)
        if out.shape != (num_tokens, hidden):
            raise ValueError(
                f"out must have shape ({num_tokens}, {hidden}), got {tuple(out.shape)}"
            )
    if out.numel() == 0:
        return out
    block_columns = min(_MAX_BLOCK_COLUMNS, triton.next_power_of_2(hidden))
    with on_device(rows):
        sum_rows_kernel[(num_tokens, triton.cdiv(hidden, block_columns))](
            rows_view(rows),
            positions,
            positions if weights is None else weights.detach(),
            int_view(out),
            num_terms,
            hidden,
            block_columns=block_columns,
            itemsize=rows.dtype.itemsize,
            is_bfloat16=rows.dtype == torch.bfloat16,
            has_weights=weights is not None,
            enable_fp_fusion=False,
        )
    increment_version(out)  # torch does not see what kernels write
    return out


def gather_rows(
    rows: torch.Tensor, row_idx: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """`out[i] = rows[row_idx[i]]`, zeros where the index is -1; rows move as bytes.

    Args:
        rows: `[N, hidden]`, any dtype, contiguous.
        row_idx: int64 `[M]`, contiguous: rows in [0, N), or -1. Not checked.
        out: None, or `[M, hidden]` to write to.

    Returns:
        `[M, hidden]`, dtype of `rows`.

    Raises:
        ValueError: A shape or device does not fit; both values are named.
        TypeError: A dtype is wrong.
    """
    check_no_gradient(rows=rows)
    check_tensor("rows", rows, 2)
    check_tensor("row_idx", row_idx, 1, rows.device)
    check_dtype("row_idx", row_idx, torch.int64)
    shape = (row_idx.shape[0], rows.shape[1])
    if out is None:
        out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
    else:
        check_tensor("out", out, 2, rows.device)
        check_dtype("out", out, rows.dtype)
        if out.shape != shape:
            raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")
    if out.numel() == 0:
        return out
    row_bytes = rows.shape[1] * rows.element_size()
    from_words, to_words = words_view(row_bytes, rows, out)
    num_words = row_bytes // from_words.element_size()
    block_words = min(_MAX_BLOCK_COLUMNS, triton.next_power_of_2(num_words))
    with on_device(rows):
        gather_rows_kernel[(shape[0], triton.cdiv(num_words, block_words))](
            from_words, row_idx, to_words, num_words, block_words=block_words
        )
    increment_version(out)
    return out


def _check_positions(positions: torch.Tensor, num_tokens: int | None, device: torch.device) -> None:
    check_tensor("positions", positions, 2, device)
    check_dtype("positions", positions, torch.int64)
    if num_tokens is not None and positions.shape[0] != num_tokens:
        raise ValueError(f"positions must have {num_tokens} rows, got {positions.shape[0]}")
