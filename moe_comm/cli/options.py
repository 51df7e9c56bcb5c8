"""Names that several commands take, and what they stand for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, TypeAlias

from moe_comm.ep.config import Layout
from moe_comm.tensors.quantization import Quantization, QuantizationFormat, ScaleFormat

LayoutName = Literal["expert-major", "rank-major", "low-latency"]
"""Names of `Layout` on the command line."""

DtypeName = Literal["bf16", "fp16", "fp32", "fp64"]
"""Row types on the command line."""

# Names from the tables of formats, which a type checker cannot read.
if TYPE_CHECKING:
    QuantizationName: TypeAlias = str
    ScaleFormatName: TypeAlias = str
else:
    _FORMATS = ("none", *map(str.lower, QuantizationFormat.__members__))
    QuantizationName = Literal[_FORMATS]
    ScaleFormatName = Literal[tuple(map(str.lower, ScaleFormat.__members__))]


def layout_of(name: LayoutName) -> Layout:
    """Return the layout of a name."""
    return Layout[name.upper().replace("-", "_")]


def quantization_of(
    quantization: QuantizationName,
    scale_format: ScaleFormatName | None,
    is_column_major: bool,
    dtype: DtypeName,
) -> Quantization | None:
    """Return the quantization that three options ask for, of rows of `dtype`; None for rows as they are.

    Raises:
        ValueError: The format has no such scale factors, there are none to shape, or rows of this
            dtype are not quantized.
    """
    if quantization == "none":
        if scale_format is not None or is_column_major:
            raise ValueError(
                "--scale-format and --column-major-scales need --quantization, got none"
            )
        return None
    if dtype == "fp64":
        raise ValueError(f"rows that are to be quantized must be bf16, fp16 or fp32, got {dtype}")
    return Quantization(
        format=QuantizationFormat[quantization.upper()],
        scale_format=None if scale_format is None else ScaleFormat[scale_format.upper()],
        is_column_major=is_column_major,
    )


def reduced_ranks(local_ranks: int | None, has_node_reduction: bool) -> int | None:
    """Ranks of a node where `--node-reduction` is given, else None.

    Raises:
        ValueError: There is one node alone.
    """
    if not has_node_reduction:
        return None
    if local_ranks is None:
        raise ValueError("--node-reduction needs --local-ranks: one node has nothing to reduce")
    return local_ranks


BYTE_UNITS: dict[str, int] = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**i for i, letter in enumerate("kMGT", start=1)},
    **{f"{letter}iB": 1024**i for i, letter in enumerate("KMGT", start=1)},
}


def split_list(text: str) -> tuple[str, ...]:
    """Parts between commas, but for empty ones."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def parse_bytes(text: str) -> int:
    """Bytes of a text such as "4096", "4KiB", "1.5GB".

    Raises:
        ValueError: It is no positive number with a unit of bytes.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)", text)
    if match is None or match[2] not in BYTE_UNITS:
        units = ", ".join(unit for unit in BYTE_UNITS if unit)
        raise ValueError(f"a size is a number and one of {units}, got {text!r}")
    num_bytes = round(float(match[1]) * BYTE_UNITS[match[2]])
    if num_bytes < 1:
        raise ValueError(f"a size must be >= 1 byte, got {text!r}")
    return num_bytes
