"""Values that a destination in blocks must hold of a piece of a weight, worked out at the piece's source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from moe_comm.peers.plain_data import travels
from moe_comm.resharding.formats.number_formats import Block, BlockFormat
from moe_comm.resharding.formats.scaled_buffers import Bounds, scale_bounds
from moe_comm.resharding.plan.transfer_op import Slices


@travels
class Maxima(NamedTuple):
    """The largest absolute value that a piece has of each block that it has a part of.

    Args:
        bounds: Bounds of the piece in its destination.
        values: float32, one after the other in row-major order of the blocks.
    """

    bounds: Bounds
    values: bytes


class _Place:
    """Position of a piece among the blocks of its destination, and the parts of these that others have.

    Args:
        bounds: Bounds of the piece in its destination.
        block: Rows and columns that share a scale factor.
    """

    def __init__(self, bounds: Bounds, block: Block) -> None:
        (top, bottom), (left, right) = bounds[-2:]
        self.above, self.below = top % block[0], -bottom % block[0]
        self.before, self.behind = left % block[1], -right % block[1]
        self.scale_bounds = scale_bounds(bounds, block)

    @property
    def is_cut(self) -> bool:
        """Return whether the piece has only a part of some block."""
        return bool(self.above or self.below or self.before or self.behind)

    def cut_blocks(self) -> torch.Tensor:
        """bool, of the last two dimensions of the scale factors."""
        (top, bottom), (left, right) = self.scale_bounds[-2:]
        cut = torch.zeros((bottom - top, right - left), dtype=torch.bool)
        cut[0] |= bool(self.above)
        cut[-1] |= bool(self.below)
        cut[:, 0] |= bool(self.before)
        cut[:, -1] |= bool(self.behind)
        return cut


def is_cut(bounds: Bounds, block: Block) -> bool:
    """Return whether a piece has only a part of some block, so that other pieces may have the rest."""
    return _Place(bounds, block).is_cut


class BlockPiece:
    """A piece of a weight, which may have a part of a block of its destination only.

    Args:
        values: bfloat16 `[..., M, K]`.
        bounds: Bounds of the piece in its destination.
        block: Rows and columns that share a scale factor.
    """

    def __init__(self, values: torch.Tensor, bounds: Bounds, block: Block) -> None:
        self._values = values
        self._bounds = bounds
        self._block = block
        self._place = _Place(bounds, block)

    def maxima(self) -> Maxima:
        """Return the maxima that the holders of the rest of its blocks must know."""
        values = self._own_maxima()[..., self._place.cut_blocks()].contiguous()
        return Maxima(self._bounds, values.numpy().tobytes())

    def expected(
        self, block_format: BlockFormat, others: Iterable[Maxima]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Data of the piece, and the scale factors of all blocks that it has a part of.

        Args:
            block_format: Format of the destination.
            others: Maxima of the pieces of the destination that have parts of blocks, this one among them.
        """
        place = self._place
        if not place.is_cut:
            return block_format.quantize(self._values)
        maxima = self._own_maxima()
        for bounds, values in others:
            _raise_to(maxima, place, _Place(bounds, self._block), values)
        # A block's scale factor depends on its largest absolute value alone: in the place of what others
        # have, one element stands for all of theirs.
        whole = self._padded()
        cells = self._cells(whole)
        largest = maxima.to(whole)
        if place.above:
            cells[..., 0, 0, :, 0] = largest[..., 0, :]
        if place.before:
            cells[..., :, 0, 0, 0] = largest[..., :, 0]
        if place.below:
            cells[..., -1, -1, :, -1] = largest[..., -1, :]
        if place.behind:
            cells[..., :, -1, -1, -1] = largest[..., :, -1]
        data, scale = block_format.quantize(whole)
        num_rows, num_columns = self._values.shape[-2:]
        own = data.narrow(-2, place.above, num_rows).narrow(-1, place.before, num_columns)
        return own, scale

    def _padded(self) -> torch.Tensor:
        """Whole blocks, with zeros in the place of what others have."""
        place = self._place
        pads = place.before, place.behind, place.above, place.below
        return torch.nn.functional.pad(self._values, pads)

    def _own_maxima(self) -> torch.Tensor:
        """float32 in CPU memory, as many as scale factors of the blocks that the piece has a part of."""
        return self._cells(self._padded().abs()).amax((-3, -1)).float().cpu()

    def _cells(self, whole: torch.Tensor) -> torch.Tensor:
        """`[..., M, K]` as `[..., blocks, rows, blocks, columns]`."""
        rows, columns = self._block
        *leading, num_rows, num_columns = whole.shape
        return whole.view(*leading, num_rows // rows, rows, num_columns // columns, columns)


def _raise_to(maxima: torch.Tensor, place: _Place, other: _Place, values: bytes) -> None:
    """Raise the maxima of a piece's blocks to those of the parts that another piece has."""
    here, there = place.scale_bounds, other.scale_bounds
    both = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(here, there, strict=True)]
    if any(start >= stop for start, stop in both):
        return
    theirs = torch.zeros([stop - start for start, stop in there])
    theirs[..., other.cut_blocks()] = torch.frombuffer(bytearray(values), dtype=torch.float32).view(
        *theirs.shape[:-2], -1
    )
    mine = maxima[_relative(both, here)]
    mine.copy_(torch.maximum(mine, theirs[_relative(both, there)]))


def _relative(bounds: Iterable[tuple[int, int]], origin: Bounds) -> Slices:
    """Slices of a tensor that begins at `origin`."""
    return tuple(
        slice(start - first, stop - first)
        for (start, stop), (first, _) in zip(bounds, origin, strict=True)
    )
