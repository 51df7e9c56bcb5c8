"""How dispatched rows may be quantized: formats, the form of their scale factors, shapes."""

from __future__ import annotations

import dataclasses
import enum

import torch

__all__ = [
    "FP8_BLOCK128",
    "MXFP8",
    "QUANTIZABLE_DTYPES",
    "Quantization",
    "QuantizationFormat",
    "ScaleFormat",
    "scale_column_stride",
]

QUANTIZABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of rows that a dispatch can quantize."""

_SCALE_COLUMN_BYTES = 16


class QuantizationFormat(enum.IntEnum):
    """Element type and block of a quantized row.

    `FP8_BLOCK128`: e4m3 data, one scale factor per 128 channels, amax clamped to at least 1e-4.
    `MXFP8`: e4m3 data, one UE8M0 scale factor per 32 channels (OCP microscaling).
    """

    FP8_BLOCK128 = 1
    MXFP8 = 2

    @property
    def block(self) -> int:
        """Channels that share a scale factor."""
        return 128 if self is QuantizationFormat.FP8_BLOCK128 else 32


class ScaleFormat(enum.IntEnum):
    """What a scale factor is.

    `FLOAT32`: amax / 448. `FLOAT32_POWER_OF_2`: the least power of two that is not smaller, as
    float32. `UE8M0`: the exponent byte of that power of two.
    """

    FLOAT32 = 0
    FLOAT32_POWER_OF_2 = 1
    UE8M0 = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """How rows are quantized while they are dispatched.

    Args:
        format: Element type and block.
        scale_format: FLOAT32, FLOAT32_POWER_OF_2 or UE8M0 (packed, four to an int32) for
            FP8_BLOCK128; UE8M0 for MXFP8. None for the first that the format has.
        is_column_major: Scale factors of one block lie next to each other for successive rows, as
            grouped GEMMs want them: `x_sf` keeps its shape and has strides `(1, stride)` with
            `stride` the number of rows rounded up to 16 bytes (LOW_LATENCY: per expert, and not
            rounded).

    Raises:
        ValueError: The format has no such scale factors.
    """

    format: QuantizationFormat
    scale_format: ScaleFormat | None = None
    is_column_major: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.format, QuantizationFormat):
            raise TypeError(f"format must be a QuantizationFormat, got {self.format!r}")
        is_mx = self.format is QuantizationFormat.MXFP8
        if self.scale_format is None:
            first = ScaleFormat.UE8M0 if is_mx else ScaleFormat.FLOAT32
            object.__setattr__(self, "scale_format", first)
        if not isinstance(self.scale_format, ScaleFormat):
            raise TypeError(f"scale_format must be a ScaleFormat, got {self.scale_format!r}")
        if is_mx and self.scale_format is not ScaleFormat.UE8M0:
            raise ValueError(f"MXFP8 has UE8M0 scale factors, got {self.scale_format.name}")

    @property
    def data_dtype(self) -> torch.dtype:
        """Of the quantized elements."""
        return torch.float8_e4m3fn

    @property
    def is_packed(self) -> bool:
        """Whether four scale factors share an int32, block 0 in the lowest byte."""
        return (
            self.format is QuantizationFormat.FP8_BLOCK128
            and self.scale_format is ScaleFormat.UE8M0
        )

    @property
    def sf_dtype(self) -> torch.dtype:
        """Of `x_sf`: float32, int32 (packed) or float8_e8m0fnu (MXFP8)."""
        if self.is_packed:
            return torch.int32
        if self.scale_format is ScaleFormat.UE8M0:
            return torch.float8_e8m0fnu
        return torch.float32

    def num_blocks(self, hidden: int) -> int:
        """Blocks of a row; the last may be shorter than the others."""
        return -(-hidden // self.format.block)

    def num_scales(self, hidden: int) -> int:
        """Columns of `x_sf`: blocks, or four blocks a column where they are packed."""
        num_blocks = self.num_blocks(hidden)
        return -(-num_blocks // 4) if self.is_packed else num_blocks


FP8_BLOCK128 = Quantization(format=QuantizationFormat.FP8_BLOCK128)
MXFP8 = Quantization(format=QuantizationFormat.MXFP8)


def scale_column_stride(num_rows: int, scale_bytes: int) -> int:
    """Elements from one column of column-major scale factors to the next: rows, up to 16 bytes.

    `layout::ScaleMap` of csrc/layout has the same rule. It stands here too because `num_rows` is
    symbolic while a graph is traced.
    """
    multiple = _SCALE_COLUMN_BYTES // scale_bytes
    return (num_rows + multiple - 1) // multiple * multiple
