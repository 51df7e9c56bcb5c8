"""The options of a dispatch as the integers that operators take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moe_comm.ep.config import ON_OVERFLOW, Capacity, Layout, numbers_of
from moe_comm.tensors.quantization import Quantization, QuantizationFormat, ScaleFormat

__all__ = [
    "decode_dispatch",
    "decode_quantization",
    "encode_dispatch",
    "encode_quantization",
]

_NO_OPTION: list[int] = []


def encode_dispatch(
    layout: Layout,
    expert_alignment: int,
    quantization: Quantization | None,
    capacity: Capacity | None,
) -> tuple[list[int], list[int]]:
    """Options of `moe_comm.dispatch`, those of a capacity apart: its rows may be a size of a graph."""
    return (
        [int(layout), expert_alignment, *encode_quantization(quantization)],
        [] if capacity is None else [*numbers_of(capacity)],
    )


def decode_dispatch(options: Sequence[int], capacity: Sequence[int]) -> dict[str, Any]:
    """What `encode_dispatch` was given, by name."""
    layout, expert_alignment, *quantization = options
    return {
        "layout": Layout(layout),
        "expert_alignment": expert_alignment,
        "quantization": decode_quantization(quantization),
        "capacity": _decode_capacity(capacity),
    }


def encode_quantization(quantization: Quantization | None) -> list[int]:
    """`[format, scale_format, is_column_major]`, or `[]` for None."""
    if quantization is None:
        return _NO_OPTION
    assert quantization.scale_format is not None
    return [
        int(quantization.format),
        int(quantization.scale_format),
        int(quantization.is_column_major),
    ]


def decode_quantization(encoded: Sequence[int]) -> Quantization | None:
    """What `encode_quantization` was given."""
    if not encoded:
        return None
    form, scale_format, is_column_major = encoded
    return Quantization(
        format=QuantizationFormat(form),
        scale_format=ScaleFormat(scale_format),
        is_column_major=bool(is_column_major),
    )


def _decode_capacity(encoded: Sequence[int]) -> Capacity | None:
    if not encoded:
        return None
    num_rows, per_expert, on_overflow = encoded
    return Capacity(
        num_rows=None if num_rows < 0 else num_rows,
        num_rows_per_expert=None if per_expert < 0 else per_expert,
        on_overflow=ON_OVERFLOW[on_overflow],
    )
