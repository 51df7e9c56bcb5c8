"""Quantization and capacity as the integers that operators take."""

from __future__ import annotations

from collections.abc import Sequence

from moe_comm.ep.config import ON_OVERFLOW, Capacity, numbers_of
from moe_comm.tensors.quantization import Quantization, QuantizationFormat, ScaleFormat

__all__ = ["decode_capacity", "decode_quantization", "encode_capacity", "encode_quantization"]

_NO_OPTION: list[int] = []


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


def encode_capacity(capacity: Capacity | None) -> list[int]:
    """`[num_rows, num_rows_per_expert, on_overflow]`, -1 for no limit, or `[]` for None."""
    return _NO_OPTION if capacity is None else [*numbers_of(capacity)]


def decode_capacity(encoded: Sequence[int]) -> Capacity | None:
    """What `encode_capacity` was given."""
    if not encoded:
        return None
    num_rows, per_expert, on_overflow = encoded
    return Capacity(
        num_rows=None if num_rows < 0 else num_rows,
        num_rows_per_expert=None if per_expert < 0 else per_expert,
        on_overflow=ON_OVERFLOW[on_overflow],
    )
