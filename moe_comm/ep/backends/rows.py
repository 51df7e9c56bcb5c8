"""Rows as bytes, and their scale factors in the order that was asked for."""

from __future__ import annotations

import torch

from moe_comm.tensors import quantized


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 `[N, row_bytes]`; `rows` is contiguous."""
    row_bytes = rows.shape[1] * rows.element_size()
    # By way of one dimension: a column of one element may have any stride, which a view refuses.
    flat = rows.detach().as_strided((rows.numel(),), (1,))
    return flat.view(torch.uint8).view(rows.shape[0], row_bytes)


def arrange_scales(
    scales: torch.Tensor, by_expert: tuple[int, int] | None, *, is_column_major: bool
) -> torch.Tensor:
    """Arrange arrived scale factors, row-major `[M, num_scales]`, as `x_sf` has them.

    Args:
        scales: As they arrived.
        by_expert: LOW_LATENCY: local experts, and places of each; else None.
        is_column_major: See `Quantization`.

    Returns:
        `[M, num_scales]`; LOW_LATENCY: `[num_local_experts, num_places_per_expert, num_scales]`.
    """
    if by_expert is not None:
        grouped = scales.view(*by_expert, scales.shape[1])
        return grouped.mT.contiguous().mT if is_column_major else grouped
    return quantized.column_major(scales) if is_column_major else scales
