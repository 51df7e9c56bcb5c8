"""Blocks of weights and their checksums, by which a delta finds the ones that changed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from moe_comm.arguments import as_int
from moe_comm.resharding.copy_services.batched_copy import CopyItem, PreparedCopies

BLOCK_BYTES = 1 << 16
"""Size of the blocks by which changes are found."""

_HASHED_BYTES = 1 << 14  # kChecksumBlockBytes


def checksum(tensor: torch.Tensor) -> int:
    """A 64-bit hash of the bytes of `tensor` in logical order, whatever its strides.

    Depends on every byte, its position and their number; not on shape, dtype or machine. Tensors
    that differ in one element only never have the same one; others by chance (2**-64).

    Raises:
        ValueError: The tensor is not in CPU memory, or more than 8 of its dimensions cannot be
            merged.
    """
    from moe_comm import _host

    return _host.checksum(tensor)


def check_block_bytes(block_bytes: int) -> int:
    """Return the size of blocks that are hashed each by itself, or raise a ValueError."""
    if as_int("block_bytes", block_bytes, 1) % _HASHED_BYTES:
        raise ValueError(f"block_bytes must be a multiple of {_HASHED_BYTES}, got {block_bytes}")
    return block_bytes


def block_checksums(
    tensor: torch.Tensor, block_bytes: int = BLOCK_BYTES, num_threads: int | None = None
) -> npt.NDArray[np.uint64]:
    """64-bit hashes of the blocks of a tensor, by which a later look finds the blocks that changed.

    Blocks are of the bytes of `tensor` in logical order, whatever its strides; the last one may be
    shorter. A hash depends on every byte of its block and on the number of the block, not on dtype or
    machine, nor on how many zeros the last one ends with. It always changes with one element of its block alone; that another change
    leaves it as it was has odds of 2**-64: of 2**32 changed blocks (256 TiB), one goes unseen once in
    2**32 times. It is no defense against who makes two blocks of one hash on purpose.

    Args:
        tensor: Tensor in CPU memory.
        block_bytes: A multiple of 16384.
        num_threads: Threads that read, this one included; None for torch's number.

    Returns:
        Shape (ceil(bytes / block_bytes),). Of an empty tensor, none.

    Raises:
        ValueError: The tensor is not in CPU memory, more than 8 of its dimensions cannot be merged, or
            `block_bytes` is not such a multiple.
    """
    threads = (
        torch.get_num_threads() if num_threads is None else as_int("num_threads", num_threads, 1)
    )
    return PieceChecksums([(0, tensor, 0)]).compute_blocks(threads, block_bytes=block_bytes)


def mark_ranges(
    masks: list[tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]], marked: npt.NDArray[np.bool_]
) -> None:
    """Mark blocks whose masks have a flag set.

    Args:
        masks: Flags, and rows of (first block, end of blocks, first flag, end of flags).
        marked: Shape (blocks,). Those of a row with a flag set become true, others stay.

    Raises:
        ValueError: A row ends beyond the flags or the blocks.
    """
    from moe_comm import _host

    _host.mark_ranges(masks, marked)


class PieceChecksums:
    """Checksums of pieces of this rank's tensors, listed once and computed as often as they change.

    Args:
        pieces: `(task_id, tensor, rank of the other end)`, in CPU memory. Kept alive.

    Raises:
        ValueError: A tensor is not in CPU memory, or more than 8 of its dimensions cannot be merged.
    """

    def __init__(self, pieces: Iterable[CopyItem]) -> None:
        from moe_comm import _host

        items = list(pieces)
        self._native = _host.PieceChecksums(items)
        self._tensors = [tensor for _, tensor, _ in items]

    def compute(self, sent: Sequence[PreparedCopies], num_threads: int) -> npt.NDArray[np.uint64]:
        """`checksum` of each piece, in the order of the pieces.

        Args:
            sent: Copies that have been run by now. A piece is not read again that the last run of one of
                these sent from this very memory, and hashed as it did so.
            num_threads: Threads that read, this one included.
        """
        natives = [copies._native for copies in sent]
        return np.frombuffer(self._native.compute(natives, num_threads), np.uint64)

    def compute_blocks(
        self,
        num_threads: int,
        *,
        block_bytes: int = BLOCK_BYTES,
        sums: npt.NDArray[np.uint64] | None = None,
        wanted: npt.NDArray[np.bool_] | None = None,
    ) -> npt.NDArray[np.uint64]:
        """`block_checksums` of each piece, one behind the other, in the order of the pieces.

        Args:
            num_threads: Threads that read, this one included.
            block_bytes: As of `block_checksums`.
            sums: Array that is written and returned, of shape (blocks of all pieces,); None for a new array.
            wanted: Mask of the blocks that are read; `sums` keeps those of others. None for all.

        Raises:
            ValueError: `block_bytes` is of another kind, or an array of another size.
        """
        if sums is None:
            check_block_bytes(block_bytes)
            sums = np.zeros(
                sum(-(-each.nbytes // block_bytes) for each in self._tensors), np.uint64
            )
        self._native.compute_blocks(block_bytes, sums, wanted, num_threads)
        return sums

    def count_writes(self) -> None:
        """Have torch know that the pieces were written."""
        from moe_comm import _host

        _host.WrittenTensors(self._tensors).count()

    def of_blocks(self, sums: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """`checksum` of each piece, of what `compute_blocks` gave for its blocks of `BLOCK_BYTES`."""
        return np.frombuffer(self._native.of_blocks(BLOCK_BYTES, sums), np.uint64)

    def move_blocks(
        self,
        pieces: slice,
        wanted: npt.NDArray[np.bool_],
        packed: npt.NDArray[np.uint8],
        num_threads: int,
        *,
        is_packing: bool,
    ) -> None:
        """Copy blocks of `BLOCK_BYTES` of some pieces out of their tensors, or into these.

        Args:
            pieces: Positions in the list, first and end.
            wanted: Mask of their blocks to copy, in order.
            packed: These, one behind the other: written, or read.
            num_threads: Threads that copy, this one included.
            is_packing: Whether blocks are copied out of the tensors.

        Raises:
            ValueError: An array has another size.
        """
        ends = pieces.start, pieces.stop
        self._native.move_blocks(*ends, BLOCK_BYTES, wanted, packed, is_packing, num_threads)
