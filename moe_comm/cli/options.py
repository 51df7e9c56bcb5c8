"""Names that several commands take, and what they stand for."""

from __future__ import annotations

import enum

from moe_comm.quantization import Quantization, QuantizationFormat, ScaleFormat

__all__ = [
    "DtypeName",
    "LayoutName",
    "QuantizationName",
    "ScaleFormatName",
    "quantization_of",
]


class LayoutName(str, enum.Enum):
    """Names of `Layout` on the command line."""

    EXPERT_MAJOR = "expert-major"
    RANK_MAJOR = "rank-major"
    LOW_LATENCY = "low-latency"


class DtypeName(str, enum.Enum):
    """Row types on the command line."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    FP64 = "fp64"


class QuantizationName(str, enum.Enum):
    """Names of `QuantizationFormat` on the command line."""

    NONE = "none"
    FP8_BLOCK128 = "fp8_block128"
    MXFP8 = "mxfp8"


class ScaleFormatName(str, enum.Enum):
    """Names of `ScaleFormat` on the command line."""

    FLOAT32 = "float32"
    FLOAT32_POWER_OF_2 = "float32_power_of_2"
    UE8M0 = "ue8m0"


def quantization_of(
    quantization: QuantizationName,
    scale_format: ScaleFormatName | None,
    is_column_major: bool,
    dtype: DtypeName,
) -> Quantization | None:
    """What three options ask for, of rows of `dtype`; None for rows as they are.

    Raises:
        ValueError: The format has no such scale factors, there are none to shape, or rows of this
            dtype are not quantised.
    """
    if quantization is QuantizationName.NONE:
        if scale_format is not None or is_column_major:
            raise ValueError(
                "--scale-format and --column-major-scales need --quantization, got none"
            )
        return None
    if dtype is DtypeName.FP64:
        raise ValueError(
            f"rows that are to be quantised must be bf16, fp16 or fp32, got {dtype.value}"
        )
    return Quantization(
        format=QuantizationFormat[quantization.name],
        scale_format=None if scale_format is None else ScaleFormat[scale_format.name],
        is_column_major=is_column_major,
    )
