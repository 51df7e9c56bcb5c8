"""Quantized weights as inference engines hold them: containers, blocks and layouts of scale factors.

The arithmetic is that of `moe_comm.tensors.quantized`. A weight is quantized from bfloat16: a source of another
dtype is rounded to bfloat16 first, so that it does not matter which end of a transfer quantizes.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import torch

from moe_comm.peers.plain_data import travels
from moe_comm.tensors import arithmetic, quantized
from moe_comm.tensors.quantization import (
    FP8_BLOCK128,
    MXFP8,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "FP8_BLOCKS",
    "MXFP8_BLOCK",
    "Block",
    "BlockFormat",
    "FP8BlockTensor",
    "MXFP8Backend",
    "MXFP8Tensor",
    "ScaledTensor",
    "dequantize_fp8_block",
    "dequantize_mxfp8",
    "is_mxfp8_tensor",
    "quantize_fp8_block",
    "quantize_mxfp8",
    "scale_shape",
    "swizzle_scales",
    "unswizzle_scales",
    "validate_fp8_block_tensor",
    "validate_mxfp8_tensor",
]

Block = tuple[int, int]
"""Rows and columns that share a scale factor."""

MXFP8_BLOCK: Block = (1, 32)
FP8_BLOCKS: tuple[Block, ...] = ((128, 128), (1, 128))

MXFP8Backend = Literal["flashinfer", "triton"]
"""Name of the kernels that read the weight: it decides the dtype of the scale bytes, not their values."""

_SCALE_DTYPES: dict[str, torch.dtype] = {
    "flashinfer": torch.uint8,
    "triton": torch.float8_e8m0fnu,
}
# A swizzled tile is 128 rows x 4 columns of scale bytes; its rows are stored by (row mod 32, row div 32).
_TILE_ROWS = 128
_TILE_COLUMNS = 4
_ROWS_PER_GROUP = 32


@travels
class BlockFormat(NamedTuple):
    """A format of weights in blocks, as ranks tell each other.

    Args:
        block: Rows and columns that share a scale factor; (1, 32) is MXFP8.
        scale_format: Name of a `ScaleFormat` of `quantize_fp8_block`; MXFP8 has one alone.
    """

    block: Block
    scale_format: str

    def quantize(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Data and scale factors of bfloat16 `values` `[..., M, K]`."""
        if self.block == MXFP8_BLOCK:
            return quantize_mxfp8(values)
        return quantize_fp8_block(values, self.block, ScaleFormat[self.scale_format])


class ScaledTensor(Protocol):
    """Interface of a quantized weight for transforms; modules may hold any class with these attributes."""

    data: torch.Tensor
    scale: torch.Tensor


@dataclasses.dataclass
class MXFP8Tensor:
    """An e4m3 weight with one UE8M0 scale byte per 32 columns; Megatron's has the same attributes.

    Args:
        data: float8_e4m3fn `[M, K]`, K a multiple of 32.
        scale: `[M, K / 32]` row-major, or one-dimensional and swizzled (see `swizzle_scales`);
            float8_e8m0fnu ("triton") or uint8 ("flashinfer").
        backend: Backend whose kernels read it; None where it is not known.
    """

    data: torch.Tensor
    scale: torch.Tensor
    backend: MXFP8Backend | None = None

    @classmethod
    def from_bf16(
        cls,
        x: torch.Tensor,
        group_size: int = 32,
        backend: MXFP8Backend = "triton",
        *,
        is_swizzled: bool = True,
    ) -> Self:
        """Quantize `x` `[M, K]`.

        Raises:
            ValueError: `group_size` is not 32, `backend` is unknown, or the shape does not fit.
        """
        if group_size != MXFP8_BLOCK[1]:
            raise ValueError(f"MXFP8 has groups of {MXFP8_BLOCK[1]}, got group_size={group_size}")
        if backend not in _SCALE_DTYPES:
            raise ValueError(f"backend must be one of {sorted(_SCALE_DTYPES)}, got {backend!r}")
        if x.dim() != 2 or x.shape[1] % group_size:
            raise ValueError(
                f"x must be [M, K] with K a multiple of {group_size}, got {tuple(x.shape)}"
            )
        data, scale = quantize_mxfp8(x)
        if is_swizzled:
            scale = swizzle_scales(scale)
        return cls(data, scale.view(_SCALE_DTYPES[backend]), backend)

    def size(self, idx: int | None = None) -> torch.Size | int:
        """Return the size of `data`."""
        return self.data.shape if idx is None else self.data.shape[idx]

    def scale_2d(self, K: int | None = None) -> torch.Tensor:  # noqa: N803 - Megatron's name
        """`scale` with two dimensions: as it is, or swizzled bytes as `[padded M, padded K / 32]`."""
        if self.scale.dim() == 2:
            return self.scale
        num_columns = (self.data.shape[1] if K is None else K) // MXFP8_BLOCK[1]
        return self.scale.reshape(-1, _round_up(num_columns, _TILE_COLUMNS))

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """`data * scale`, rounded to `dtype`."""
        rows, columns = self.data.shape
        scale = self.scale.view(torch.float8_e8m0fnu)
        if scale.dim() == 1:
            scale = unswizzle_scales(scale, rows, columns // MXFP8_BLOCK[1])
        return quantized.dequantize(self.data, scale, MXFP8, dtype)


@dataclasses.dataclass
class FP8BlockTensor:
    """An e4m3 weight with float32 scale factors per block: `value = data * scale`.

    DeepSeek checkpoints call `scale` `weight_scale_inv`.

    Args:
        data: float8_e4m3fn `[..., M, K]`.
        scale: float32, `scale_shape(data.shape, block)`.
        block: (128, 128), or (1, 128).
    """

    data: torch.Tensor
    scale: torch.Tensor
    block: Block = (128, 128)

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        block: Block = (128, 128),
        device: torch.device | str | None = None,
    ) -> Self:
        """Memory for a weight of `shape`, uninitialized."""
        return cls(
            torch.empty(shape, dtype=torch.float8_e4m3fn, device=device),
            torch.empty(scale_shape(shape, block), dtype=torch.float32, device=device),
            block,
        )

    @classmethod
    def from_bf16(
        cls,
        x: torch.Tensor,
        block: Block = (128, 128),
        scale_format: ScaleFormat = ScaleFormat.FLOAT32,
    ) -> Self:
        """Quantize `x`."""
        return cls(*quantize_fp8_block(x, block, scale_format), block)

    def dequantize(self, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """`data * scale`, rounded to `dtype`."""
        return dequantize_fp8_block(self.data, self.scale, self.block, dtype)


def scale_shape(shape: tuple[int, ...], block: Block) -> tuple[int, ...]:
    """Shape of the scale factors of a weight `[..., M, K]`; blocks at the end may be smaller.

    Example:
        `scale_shape((576, 7168), (128, 128)) == (5, 56)`.
    """
    if len(shape) < 2:
        raise ValueError(f"a weight in blocks has at least 2 dimensions, got shape {shape}")
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def quantize_mxfp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight to MXFP8.

    Args:
        x: `[..., K]`, K a multiple of 32.

    Returns:
        data, float8_e4m3fn of the shape of `x`, and scale, float8_e8m0fnu `[..., K / 32]`.
    """
    return _quantize_rows(_as_bfloat16(x), MXFP8)


def quantize_fp8_block(
    x: torch.Tensor, block: Block = (128, 128), scale_format: ScaleFormat = ScaleFormat.FLOAT32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight to e4m3 in blocks.

    Args:
        x: `[..., M, K]`.
        block: (128, 128) or (1, 128).
        scale_format: FLOAT32 or FLOAT32_POWER_OF_2.

    Returns:
        data, float8_e4m3fn of the shape of `x`, and scale, float32 `scale_shape(x.shape, block)`.

    Raises:
        ValueError: `block`, `scale_format` or the shape of `x` is none of these.
    """
    shape = tuple(x.shape)
    scales = scale_shape(shape, _known_block(block))
    if scale_format not in (ScaleFormat.FLOAT32, ScaleFormat.FLOAT32_POWER_OF_2):
        raise ValueError(f"weights in blocks have float32 scales, got {scale_format.name}")
    quantization = Quantization(format=QuantizationFormat.FP8_BLOCK128, scale_format=scale_format)
    values = _as_bfloat16(x)
    if block[0] == 1:
        return _quantize_rows(values, quantization)
    matrices = values.reshape(math.prod(shape[:-2]), *shape[-2:])
    data = torch.empty(matrices.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((len(matrices), *scales[-2:]), dtype=torch.float32, device=x.device)
    for matrix_idx, matrix in enumerate(matrices):
        _quantize_matrix(matrix, data[matrix_idx], scale[matrix_idx], quantization)
    return data.view(shape), scale.view(scales)


def dequantize_mxfp8(
    data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """`data * scale` of an MXFP8 weight `[..., K]` with row-major scale bytes `[..., K / 32]`."""
    return quantized.dequantize(data, scale.view(torch.float8_e8m0fnu), MXFP8, dtype)


def dequantize_fp8_block(
    data: torch.Tensor,
    scale: torch.Tensor,
    block: Block = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`data * scale`, one float32 product of every element, rounded to `dtype`."""
    shape = tuple(data.shape)
    if tuple(scale.shape) != scale_shape(shape, _known_block(block)):
        raise ValueError(
            f"data {shape} in blocks of {block} needs scale factors {scale_shape(shape, block)}, "
            f"got {tuple(scale.shape)}"
        )
    by_row = scale.repeat_interleave(block[0], dim=-2)[..., : shape[-2], :]
    return quantized.dequantize(data, by_row, FP8_BLOCK128, dtype)


def swizzle_scales(scale: torch.Tensor) -> torch.Tensor:
    """Scale bytes in the order that block-scaled matrix multiplications read.

    Tiles of 128 rows x 4 columns follow each other row by row of tiles; in a tile, byte
    `16 * (row mod 32) + 4 * (row div 32) + column`. Rows and columns are padded with zero bytes.

    Args:
        scale: `[M, K / 32]`, one byte an element.

    Returns:
        One-dimensional, `round_up(M, 128) * round_up(K / 32, 4)` elements, dtype of `scale`.

    Example:
        Row 33, column 5 of a weight with 8 columns of scales: tile 1, byte 512 + 16 + 4 + 1.
    """
    rows, columns = scale.shape
    tiles = (-(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS))
    padded = torch.zeros(
        (tiles[0] * _TILE_ROWS, tiles[1] * _TILE_COLUMNS), dtype=torch.uint8, device=scale.device
    )
    padded[:rows, :columns] = scale.view(torch.uint8)
    groups = _TILE_ROWS // _ROWS_PER_GROUP
    blocked = padded.view(tiles[0], groups, _ROWS_PER_GROUP, tiles[1], _TILE_COLUMNS)
    return blocked.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def unswizzle_scales(scale: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """`[rows, columns]` scale bytes, from what `swizzle_scales` made of them."""
    tiles = (-(-rows // _TILE_ROWS), -(-columns // _TILE_COLUMNS))
    groups = _TILE_ROWS // _ROWS_PER_GROUP
    blocked = scale.view(torch.uint8).view(
        tiles[0], tiles[1], _ROWS_PER_GROUP, groups, _TILE_COLUMNS
    )
    padded = blocked.permute(0, 3, 2, 1, 4).reshape(tiles[0] * _TILE_ROWS, -1)
    return padded[:rows, :columns].contiguous().view(scale.dtype)


def is_mxfp8_tensor(tensor: Any) -> bool:
    """Return whether this is a quantized MXFP8 weight: of Transformer Engine, Megatron, or `MXFP8Tensor`.

    Told by the name of the class, so that none of those need be installed.
    """
    candidates = [type(tensor)]
    if isinstance(tensor, torch.Tensor):
        candidates.append(type(tensor.data))
    return any(base.__name__ == "MXFP8Tensor" for kind in candidates for base in kind.__mro__)


def validate_mxfp8_tensor(
    tensor: Any, *, expected_backend: str | None = None, tensor_name: str = "MXFP8 tensor"
) -> None:
    """Hold a weight against the rules of `MXFP8Tensor`.

    Args:
        tensor: Anything with `data` and `scale`; `backend` may be missing or None.
        expected_backend: Required `backend`; None for any.
        tensor_name: Name of the weight, for error messages.

    Raises:
        TypeError: A dtype is wrong.
        ValueError: A shape or the backend is wrong; the message has both values.
    """
    data, scale = tensor.data, tensor.scale
    backend = getattr(tensor, "backend", None)
    if expected_backend is not None and backend not in (None, expected_backend):
        raise ValueError(f"{tensor_name}: backend is {backend!r}; expected {expected_backend!r}")
    backend = expected_backend if backend is None else backend
    if backend is not None and backend not in _SCALE_DTYPES:
        raise ValueError(
            f"{tensor_name}: backend must be one of {sorted(_SCALE_DTYPES)}, got {backend!r}"
        )
    if data.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{tensor_name}: data must be torch.float8_e4m3fn, got {data.dtype}")
    allowed = tuple(_SCALE_DTYPES.values()) if backend is None else (_SCALE_DTYPES[backend],)
    if scale.dtype not in allowed:
        raise TypeError(
            f"{tensor_name}: scale must be {' or '.join(map(str, allowed))}, got {scale.dtype}"
        )
    if data.dim() != 2 or data.shape[1] % MXFP8_BLOCK[1]:
        raise ValueError(
            f"{tensor_name}: data must be [M, K] with K a multiple of {MXFP8_BLOCK[1]}, got shape "
            f"{tuple(data.shape)}"
        )
    rows, columns = data.shape[0], data.shape[1] // MXFP8_BLOCK[1]
    swizzled = (_round_up(rows, _TILE_ROWS) * _round_up(columns, _TILE_COLUMNS),)
    if tuple(scale.shape) not in ((rows, columns), swizzled):
        raise ValueError(
            f"{tensor_name}: data {tuple(data.shape)} needs scale {(rows, columns)}, or swizzled "
            f"{swizzled}, got {tuple(scale.shape)}"
        )


def validate_fp8_block_tensor(
    tensor: Any, block: Block, *, tensor_name: str = "FP8 tensor"
) -> None:
    """Hold a weight against the rules of `FP8BlockTensor`.

    Raises:
        TypeError: A dtype is wrong.
        ValueError: A shape or the block is wrong; the message has both values.
    """
    data, scale = tensor.data, tensor.scale
    if getattr(tensor, "block", block) != block:
        raise ValueError(f"{tensor_name}: block is {tensor.block}; expected {block}")
    if data.dtype != torch.float8_e4m3fn:
        raise TypeError(f"{tensor_name}: data must be torch.float8_e4m3fn, got {data.dtype}")
    if scale.dtype != torch.float32:
        raise TypeError(f"{tensor_name}: scale must be torch.float32, got {scale.dtype}")
    if data.dim() < 2 or tuple(scale.shape) != scale_shape(tuple(data.shape), block):
        raise ValueError(
            f"{tensor_name}: data {tuple(data.shape)} in blocks of {block} does not fit scale "
            f"{tuple(scale.shape)}"
        )


def _quantize_rows(
    x: torch.Tensor, quantization: Quantization
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantized.quantize_rows` of a tensor of any number of dimensions, and of none of its elements."""
    leading, columns = x.shape[:-1], x.shape[-1]
    scales = (*leading, quantization.num_blocks(columns))
    if x.numel() == 0:
        return x.to(torch.float8_e4m3fn), x.new_empty(scales, dtype=quantization.sf_dtype)
    data, scale = quantized.quantize_rows(x.reshape(-1, columns), quantization)
    return data.view(x.shape), scale.view(scales)


def _quantize_matrix(
    matrix: torch.Tensor, data: torch.Tensor, scale: torch.Tensor, quantization: Quantization
) -> None:
    """Quantize `[M, K]` in blocks of 128 x 128 into `data` and `scale`, a strip of rows at a time."""
    side = FP8_BLOCKS[0][0]
    num_rows, num_columns = matrix.shape
    num_blocks = scale.shape[1]
    for strip_idx in range(scale.shape[0]):
        rows = slice(strip_idx * side, min((strip_idx + 1) * side, num_rows))
        height = rows.stop - rows.start
        strip = matrix.new_zeros((side, num_blocks * side))
        strip[:height, :num_columns] = matrix[rows]
        blocks = strip.view(side, num_blocks, side).transpose(0, 1).reshape(num_blocks, side * side)
        codes = torch.empty(blocks.shape, dtype=torch.uint8, device=matrix.device)
        with arithmetic.subnormals_kept():
            for some, columns in arithmetic.chunks(num_blocks, blocks.shape[1], matrix.device):
                assert columns == slice(0, blocks.shape[1])  # a chunk never cuts a block
                codes[some], factor_bits = quantized.quantize_blocks(
                    arithmetic.widen(blocks[some]), quantization
                )
                scale[strip_idx, some] = factor_bits.view(torch.float32)
        by_row = codes.view(num_blocks, side, side).transpose(0, 1).reshape(strip.shape)
        data[rows] = by_row[:height, :num_columns].view(torch.float8_e4m3fn)


def _known_block(block: Block) -> Block:
    if tuple(block) not in FP8_BLOCKS:
        raise ValueError(f"block must be one of {FP8_BLOCKS}, got {block}")
    return block


def _as_bfloat16(x: torch.Tensor) -> torch.Tensor:
    if not x.is_floating_point():
        raise TypeError(f"a weight is of a floating-point dtype, got {x.dtype}")
    return x.detach().to(torch.bfloat16)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
