"""Blocks of a rank's sources in which a caller's masks have an element."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from moe_comm.arguments import shown
from moe_comm.resharding.copy_services.changed_blocks import BLOCK_BYTES, mark_ranges
from moe_comm.resharding.describe.module_tensors import local_tensor
from moe_comm.resharding.hold.piece_table import PieceTable
from moe_comm.resharding.move.sources import piece_of
from moe_comm.resharding.plan.transfer_op import TransferOp

Mask: TypeAlias = "bool | torch.Tensor"
Changed: TypeAlias = "Mapping[str, Mask] | Callable[[str], Mask]"
"""By name of this rank's source: whether it may have changed, or which elements; see `Refit.run`."""

_Shape: TypeAlias = "tuple[int, ...]"
_Ranges: TypeAlias = "npt.NDArray[np.int64]"
"""Rows of (first block, end of blocks, first element of the mask, end of elements): where some of these
elements is set, all of these blocks are wanted."""

_TRUE = np.ones(1, np.bool_)


class BlockMasks:
    """Places of the blocks of a table in masks of its tensors, found once for every shape of a mask.

    Args:
        table: The pieces.
        ends: Number of blocks up to each piece, and with it.
    """

    def __init__(self, table: PieceTable, ends: npt.NDArray[np.int64]) -> None:
        self._num_blocks = int(ends[-1]) if len(ends) else 0
        self._pieces: dict[str, list[tuple[TransferOp, int, int, int]]] = {}
        """By name of a tensor: the transfers that have a part of it, the blocks and the bytes of each."""
        first = 0
        for (op, _), end, size in zip(table.pieces, ends.tolist(), table.sizes, strict=True):
            for each in op.pieces:
                self._pieces.setdefault(each.param_name, []).append(
                    # A block of pieces that were joined may be of any of them.
                    (each, first, end, 0 if op.joined else size)
                )
            first = end
        self._ranges: dict[tuple[str, _Shape], _Ranges] = {}

    def wanted(
        self, tensors: Mapping[str, torch.Tensor], changed: Changed
    ) -> npt.NDArray[np.bool_]:
        """Return the blocks to look at: all that a mask has an element in.

        And some others, where a piece is a part of each row and the mask has elements beside it.

        Args:
            tensors: Tensors of the source on this rank, by name.
            changed: Masks of these.

        Raises:
            TypeError, ValueError: A mask is none of its tensor, or of no tensor of this rank.
        """
        if isinstance(changed, Mapping):
            unknown = [name for name in changed if name not in tensors]
            if unknown:
                raise ValueError(
                    f"changed names {shown(unknown[0])}, which the source on this rank does not have"
                )
            mask_of: Callable[[str], Any] = functools.partial(_of_mapping, changed)
        elif callable(changed):
            mask_of = changed
        else:
            raise TypeError(
                f"changed must be a mapping by name, or a callable, got {shown(changed)}"
            )
        masks = []
        for name in self._pieces:
            mask = mask_of(name)
            if mask is not False:
                flags, shape = _flags(name, mask, tensors[name])
                masks.append((flags, self._ranges_of(name, shape, tensors[name])))
        wanted = np.zeros(self._num_blocks, np.bool_)
        mark_ranges(masks, wanted)
        return wanted

    def _ranges_of(self, name: str, shape: _Shape, tensor: torch.Tensor) -> _Ranges:
        ranges = self._ranges.get((name, shape))
        if ranges is None:
            # A tensor that has strides and no memory.
            like = torch.empty(shape, dtype=torch.bool, device="meta")
            like = like.expand(local_tensor(tensor).shape)
            item = local_tensor(tensor).element_size()
            parts = [
                _ranges_of_piece(piece_of(like, op), item, first, end, size)
                for op, first, end, size in self._pieces[name]
            ]
            ranges = self._ranges[name, shape] = np.concatenate(parts)
        return ranges


def _of_mapping(masks: Mapping[str, Mask], name: str) -> Mask:
    return masks.get(name, False)


def _flags(name: str, mask: Any, tensor: torch.Tensor) -> tuple[npt.NDArray[np.bool_], _Shape]:
    """Elements of a mask, in order, and its shape."""
    if mask is True:
        return _TRUE, ()
    if not isinstance(mask, torch.Tensor) or mask.dtype is not torch.bool:
        raise TypeError(
            f"the mask of {name} must be a bool or a tensor of bools, got {shown(mask)}"
        )
    shape, whole = tuple(mask.shape), tuple(local_tensor(tensor).shape)
    tail = whole[len(whole) - len(shape) :]
    if len(shape) > len(whole) or any(a not in (1, b) for a, b in zip(shape, tail, strict=True)):
        raise ValueError(
            f"the mask of {name} has shape {shape}, which does not become that of this rank's part, "
            f"{whole}"
        )
    return mask.numpy(force=True).reshape(-1), shape


def _ranges_of_piece(
    mask: torch.Tensor, item_bytes: int, first_block: int, end_block: int, num_bytes: int
) -> _Ranges:
    """Ranges of the blocks of one piece.

    Args:
        mask: Strides and first element, in the caller's mask, of what belongs to the piece's elements.
        item_bytes: Size of an element.
        first_block: First block of the piece.
        end_block: Block behind its last one.
        num_bytes: Size of the piece; 0 where each of its blocks needs all of the mask.
    """
    sizes, strides, start = list(mask.shape), list(mask.stride()), mask.storage_offset()
    if 0 in sizes:
        return np.empty((0, 4), np.int64)
    span = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if num_bytes == 0:
        return np.array([[first_block, end_block, start, start + span + 1]])
    # One flag for elements that are one in memory: of a mask of rows, one for each row.
    while sizes and (strides[-1] == 0 or sizes[-1] == 1):
        item_bytes *= sizes.pop()
        strides.pop()
    begins = np.arange(end_block - first_block) * BLOCK_BYTES
    ends = np.minimum(begins + BLOCK_BYTES, num_bytes)
    blocks = np.arange(first_block, end_block)
    low = np.full(len(blocks), start)
    high = low + 1
    if sizes:
        at = np.stack(np.unravel_index(begins // item_bytes, sizes))
        to = np.stack(np.unravel_index((ends - 1) // item_bytes, sizes))
        if not _is_in_order(sizes, strides):
            # All of the dimensions inside the one in which a block goes on.
            inside = np.cumsum(at != to, axis=0) - (at != to) > 0
            at = np.where(inside, 0, at)
            to = np.where(inside, np.array(sizes)[:, None] - 1, to)
        low, high = low + strides @ at, high + strides @ to
    return np.stack((blocks, blocks + 1, low, high), axis=1)


def _is_in_order(sizes: list[int], strides: list[int]) -> bool:
    """Return whether later elements lie behind earlier ones."""
    span = 0
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        if stride < span:
            return False
        span += (size - 1) * stride
    return True
