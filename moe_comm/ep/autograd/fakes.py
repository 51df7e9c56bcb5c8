"""Shapes, dtypes and strides of what the operators return, for the compiler."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.ep.call_options import decode_dispatch
from moe_comm.ep.config import Layout
from moe_comm.tensors.quantization import scale_column_stride

_GROW = 0


def dispatch(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer_id: torch.Tensor,
    sizes: list[int],
    options: list[int],
    capacity: list[int],
    gradients: int,
    anchor: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The rows are an unbacked size, except where layout or capacity fix it."""
    num_ranks, num_experts, num_local_experts, fixed_topk, num_max_tokens = sizes
    num_tokens, num_topk = topk_idx.shape
    # A capacity is read as it is: its rows may be a size of the graph.
    named = decode_dispatch(options, ())
    layout, how = named.layout, named.quantization
    by_rank = layout is Layout.RANK_MAJOR
    num_rows: int | torch.SymInt
    if layout is Layout.LOW_LATENCY:
        num_rows = num_local_experts * num_ranks * num_max_tokens
    elif capacity and capacity[0] >= 0 and capacity[2] != _GROW:
        num_rows = capacity[0]
    else:
        num_rows = torch.library.get_ctx().new_dynamic_size()
    num_recv_topk: int | torch.SymInt = num_topk
    if by_rank and not fixed_topk:
        num_recv_topk = torch.library.get_ctx().new_dynamic_size(min=1)
    num_slots = min(num_topk, num_ranks) if by_rank else num_topk
    weights = x.new_empty(0, dtype=torch.float32)
    if topk_weights is not None:
        weights = topk_weights.new_empty((num_rows, num_recv_topk) if by_rank else (num_rows,))
    shape = (num_rows, x.shape[1])
    is_quantized = x_sf is None and how is not None
    outputs = [
        x.new_empty_strided(shape, (0, 0)) if is_quantized else x.new_empty(shape),
        weights,
        x.new_empty(0, dtype=torch.float32),
        topk_idx.new_empty((num_rows, num_recv_topk) if by_rank else (0,)),
        buffer_id.new_empty(num_local_experts),
        topk_idx.new_empty(num_local_experts + 1, dtype=torch.int32),
        topk_idx.new_empty((num_ranks, num_experts + num_ranks + 2), dtype=torch.int32),
        topk_idx.new_empty((num_tokens, num_slots)),
        topk_idx.new_empty((num_tokens, num_topk)),
        buffer_id.new_empty(8 + num_local_experts),
    ]
    if capacity or layout is Layout.LOW_LATENCY:
        outputs += [buffer_id.new_empty(num_local_experts), buffer_id.new_empty(())]
    num_experts_apart = num_local_experts if layout is Layout.LOW_LATENCY else None
    if x_sf is not None:
        is_column_major = how is not None and how.is_column_major
        outputs.append(
            _scales(x_sf, num_rows, x_sf.shape[1], x_sf.dtype, is_column_major, num_experts_apart)
        )
    elif how is not None:
        outputs += [
            _scales(
                x,
                num_rows,
                how.num_scales(x.shape[1]),
                how.sf_dtype,
                how.is_column_major,
                num_experts_apart,
            ),
            x.new_empty((num_rows, how.row_bytes(x.shape[1])), dtype=how.data_dtype),
        ]
    return outputs


def _scales(
    like: torch.Tensor,
    num_rows: int | torch.SymInt,
    num_scales: int,
    dtype: torch.dtype,
    is_column_major: bool,
    num_experts_apart: int | None,
) -> torch.Tensor:
    if num_experts_apart is not None:
        num_places = num_rows // num_experts_apart if num_experts_apart else 0
        if is_column_major:
            columns = like.new_empty((num_experts_apart, num_scales, num_places), dtype=dtype)
            return columns.transpose(1, 2)
        return like.new_empty((num_experts_apart, num_places, num_scales), dtype=dtype)
    if not is_column_major:
        return like.new_empty((num_rows, num_scales), dtype=dtype)
    stride = scale_column_stride(num_rows, dtype.itemsize)  # type: ignore[arg-type]  # a SymInt adds up too
    return like.new_empty_strided((num_rows, num_scales), (1, stride), dtype=dtype)


def dispatch_backward(
    grad_x: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
    counts: torch.Tensor,
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    *rest: Any,
) -> list[torch.Tensor]:
    """Return empty gradients of x and of topk_weights."""
    hidden, dtype, weights_dtype = rest[-3:]
    weights = (
        slots.new_empty(0, dtype=torch.float32)
        if weights_dtype is None
        else slots.new_empty(topk_idx.shape, dtype=weights_dtype)
    )
    return [slots.new_empty((slots.shape[0], hidden), dtype=dtype), weights]


def combine(
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer_id: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    *rest: Any,
) -> list[torch.Tensor]:
    """Sums, and what ranks say of gradients where this one says anything."""
    sums = expert_out.new_empty((slots.shape[0], expert_out.shape[1]))
    return [sums, buffer_id.new_empty(1)] if rest[-1] else [sums]


def combine_backward(
    grad_y: torch.Tensor | None,
    expert_out: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    counts: torch.Tensor,
    slots: torch.Tensor,
    *rest: Any,
) -> list[torch.Tensor]:
    """Return empty gradients of expert_out and of topk_weights."""
    num_recv_tokens, hidden, dtype = rest[-3:]
    weights = (
        slots.new_empty(0, dtype=torch.float32)
        if topk_weights is None
        else topk_weights.new_empty(topk_weights.shape)
    )
    return [slots.new_empty((num_recv_tokens, hidden), dtype=dtype), weights]
