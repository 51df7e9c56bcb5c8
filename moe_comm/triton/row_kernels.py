"""Kernels that move and add rows."""

from __future__ import annotations

import triton
import triton.language as tl

from moe_comm.triton.number_format import load_wide, rounded_bits


# Grid: (rows of the output, blocks of columns). Words are integers: NaN payloads survive.
# Example: row_idx = [2, -1] -> out = [rows[2], zeros].
@triton.jit
def gather_rows_kernel(
    rows_ptr: tl.tensor,
    row_idx_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_words: tl.tensor,
    block_words: tl.constexpr,
) -> None:
    """`out[i] = rows[row_idx[i]]`, zero where the index is -1; rows of `num_words` words."""
    out_row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * block_words + tl.arange(0, block_words)
    is_inside = columns < num_words
    row = tl.load(row_idx_ptr + out_row).to(tl.int64)
    # The interpreter takes no mask that was combined with a scalar: an absent row has no words.
    num_present = tl.where(row >= 0, num_words, 0)
    words = tl.load(rows_ptr + row * num_words + columns, mask=columns < num_present, other=0)
    tl.store(out_ptr + out_row * num_words + columns, words, mask=is_inside)


# Grid: (tokens, blocks of columns). One thread adds all terms of an element, in order of k, so the
# bits do not depend on the grid.
@triton.jit
def sum_rows_kernel(
    rows_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_terms: tl.tensor,
    hidden: tl.tensor,
    block_columns: tl.constexpr,
    itemsize: tl.constexpr,
    is_bfloat16: tl.constexpr,
    has_weights: tl.constexpr,
) -> None:
    """`out[t] = round(sum over k of rows[positions[t, k]] * weights[t, k])`.

    `rows_ptr` is of int16 for bfloat16, `out_ptr` of integers of `itemsize` bytes. Must be compiled
    without contraction of products and sums.
    """
    token_idx = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1).to(tl.int64) * block_columns + tl.arange(0, block_columns)
    is_inside = columns < hidden
    if itemsize == 8:
        acc = tl.zeros([block_columns], dtype=tl.float64)
    else:
        acc = tl.zeros([block_columns], dtype=tl.float32)
    for k in range(num_terms):
        position = tl.load(positions_ptr + token_idx * num_terms + k).to(tl.int64)
        is_present = columns < tl.where(position >= 0, hidden, 0)
        term = load_wide(rows_ptr + position * hidden + columns, is_present, is_bfloat16)
        if has_weights:
            term = term * tl.load(weights_ptr + token_idx * num_terms + k)
        # Selected, not masked to zero: -0.0 + 0.0 would be another -0.0.
        acc = tl.where(is_present, acc + term, acc)
    out = rounded_bits(acc, itemsize, is_bfloat16)
    tl.store(out_ptr + token_idx * hidden + columns, out, mask=is_inside)
