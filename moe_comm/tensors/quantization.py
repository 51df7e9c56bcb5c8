"""Quantizations of dispatched rows: formats, the form of their scale factors, shapes.

Formats and scale factors are those of the table in `csrc/layout/wire_format.cpp`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

QUANTIZABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of rows that a dispatch can quantize."""

_SCALE_COLUMN_BYTES = 16

_Named = TypeVar("_Named", bound=type[enum.IntEnum])


def _read_table(kind: str) -> dict[str, Any]:
    """Records of `_host.layout` by name."""
    try:
        from moe_comm import _host
    except ImportError:
        return {}  # `moe-comm doctor` says so, and has to be imported to say it
    return {record.name: record for record in getattr(_host.layout, kind)}


def _named_by(table: Mapping[str, object], first: int) -> Callable[[_Named], _Named]:
    """An enum of all names of `table` instead of those that are written for readers and type checkers.

    Raises:
        ImportError: A name that is written has no record, or another number.
    """

    def rename(written: _Named) -> _Named:
        numbers = {name: number for number, name in enumerate(table, start=first)}
        if not table:
            return written
        for name, each in written.__members__.items():
            if numbers.get(name) != each:
                raise ImportError(f"{written.__name__}.{name} is {each:d}, the table has {numbers}")
        make: Any = enum.IntEnum
        made = make(written.__name__, numbers, module=__name__)
        made.__doc__ = written.__doc__
        return cast("_Named", made)

    return rename


_SCALE_RECORDS = _read_table("SCALE_FORMATS")


@_named_by(_SCALE_RECORDS, first=0)
class ScaleFormat(enum.IntEnum):
    """Form of a scale factor.

    `FLOAT32`: amax / 448. `FLOAT32_POWER_OF_2`: the least power of two that is not smaller, as
    float32. `UE8M0`: the exponent byte of that power of two.
    """

    FLOAT32 = 0
    FLOAT32_POWER_OF_2 = 1
    UE8M0 = 2


_FORMAT_RECORDS = _read_table("WIRE_FORMATS")


@_named_by(_FORMAT_RECORDS, first=1)
class QuantizationFormat(enum.IntEnum):
    """Element type and block of a quantized row.

    `FP8_BLOCK128`: e4m3 data, one scale factor per 128 channels, amax clamped to at least 1e-4.
    `MXFP8`: e4m3 data, one UE8M0 scale factor per 32 channels (OCP microscaling).

    Attributes:
        block: Channels that share a scale factor.
        element_bits: Bits of an element.
        dtype: Dtype of the data.
        least_amax: Amax that a smaller one counts as.
        scale_formats: Formats of its scale factors, the default first.
        e4m3_scales: Members of `scale_formats` whose arithmetic is that of `docs/quantization.md`.
        has_packs: Whether four UE8M0 scale factors share an int32.
    """

    FP8_BLOCK128 = 1
    MXFP8 = 2

    block: int
    element_bits: int
    dtype: torch.dtype
    least_amax: float
    scale_formats: tuple[ScaleFormat, ...]
    e4m3_scales: tuple[ScaleFormat, ...]
    has_packs: bool


for _format in QuantizationFormat:
    if not _FORMAT_RECORDS:
        _format.scale_formats = tuple(ScaleFormat)
        continue
    _record = _FORMAT_RECORDS[_format.name]
    _format.block = _record.block
    _format.element_bits = _record.element_bits
    _format.dtype = getattr(torch, _record.dtype, torch.uint8)  # which an older torch may not have
    _format.least_amax = _record.least_amax
    _format.scale_formats = tuple(map(ScaleFormat, _record.scale_formats))
    _format.e4m3_scales = tuple(filter(_record.is_e4m3, _format.scale_formats))
    _format.has_packs = _record.packs_exponents


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantization:
    """Quantization of rows while they are dispatched.

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
        known = self.format.scale_formats
        if self.scale_format is None:
            object.__setattr__(self, "scale_format", known[0])
        if not isinstance(self.scale_format, ScaleFormat):
            raise TypeError(f"scale_format must be a ScaleFormat, got {self.scale_format!r}")
        if self.scale_format not in known:
            names = " or ".join(each.name for each in known)
            raise ValueError(
                f"{self.format.name} has {names} scale factors, got {self.scale_format.name}"
            )

    @property
    def data_dtype(self) -> torch.dtype:
        """Dtype of the quantized elements."""
        return self.format.dtype

    @property
    def is_packed(self) -> bool:
        """Return whether four scale factors share an int32, block 0 in the lowest byte."""
        return self.format.has_packs and self.scale_format is ScaleFormat.UE8M0

    @property
    def is_e4m3(self) -> bool:
        """Return whether the arithmetic is that of `docs/quantization.md`, which plain torch has."""
        return self.scale_format in self.format.e4m3_scales

    @property
    def sf_dtype(self) -> torch.dtype:
        """Dtype of `x_sf`: float32, int32 (packed) or float8_e8m0fnu (MXFP8)."""
        if self.is_packed:
            return torch.int32
        assert self.scale_format is not None
        dtype: torch.dtype = getattr(torch, _SCALE_RECORDS[self.scale_format.name].dtype)
        return dtype

    # The same as in `layout::WireFormat`; here too because `hidden` is symbolic while a graph is traced.

    def row_bytes(self, hidden: int) -> int:
        """Return the bytes of the data of a row, its number of columns: a byte may hold several elements."""
        return -(-hidden * self.format.element_bits // 8)

    def num_blocks(self, hidden: int) -> int:
        """Blocks of a row; the last may be shorter than the others."""
        return -(-hidden // self.format.block)

    def num_scales(self, hidden: int) -> int:
        """Columns of `x_sf`: blocks, or four blocks a column where they are packed."""
        num_blocks = self.num_blocks(hidden)
        return -(-num_blocks // 4) if self.is_packed else num_blocks


FP8_BLOCK128 = Quantization(format=QuantizationFormat.FP8_BLOCK128)
MXFP8 = Quantization(format=QuantizationFormat.MXFP8)


def refusal(who: str, quantization: Quantization) -> str:
    """The error of `who`, which cannot make such rows or read them."""
    form, scale_format = quantization.format, quantization.scale_format
    assert scale_format is not None
    return (
        f"{who} cannot quantize to {form.name} with {scale_format.name} scale factors: elements of "
        f"{form.element_bits} bits in blocks of {form.block}"
    )


def scale_column_stride(num_rows: int, scale_bytes: int) -> int:
    """Elements from one column of column-major scale factors to the next: rows, up to 16 bytes.

    `layout::ScaleMap` of csrc/layout has the same rule. It stands here too because `num_rows` is
    symbolic while a graph is traced.
    """
    multiple = _SCALE_COLUMN_BYTES // scale_bytes
    return (num_rows + multiple - 1) // multiple * multiple
