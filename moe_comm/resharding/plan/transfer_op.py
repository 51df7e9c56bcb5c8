"""One piece of a parameter on its way, and its id."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

Slices = tuple[slice, ...]

# A task id is (destination rank, parameter index, piece), most significant first, below 2^63: it
# depends on nothing but the destination's own parameters, so that appended ranks change no id.
_PIECE_BITS = 20
_PARAMETER_BITS = 22
MAX_PIECES = 1 << _PIECE_BITS
MAX_PARAMETERS = 1 << _PARAMETER_BITS
_MAX_RANKS = 1 << (63 - _PIECE_BITS - _PARAMETER_BITS)


def pack_task_id(dst_rank: int, parameter_idx: int, piece_idx: int) -> int:
    """The task id of one piece, equal on its sender and its receiver.

    Args:
        dst_rank: Destination rank in the plan's group.
        parameter_idx: Position of the parameter among those of the destination rank.
        piece_idx: Position of the piece in its parameter, by destination offset.

    Raises:
        ValueError: A number does not fit.

    Example:
        `pack_task_id(1, 2, 3) == (1 << 42) + (2 << 20) + 3`.
    """
    for name, value, limit in (
        ("dst_rank", dst_rank, _MAX_RANKS),
        ("parameter_idx", parameter_idx, MAX_PARAMETERS),
        ("piece_idx", piece_idx, MAX_PIECES),
    ):
        if not 0 <= value < limit:
            raise ValueError(f"{name} must be in [0, {limit}), got {value}")
    return (dst_rank << _PARAMETER_BITS | parameter_idx) << _PIECE_BITS | piece_idx


def unpack_task_id(task_id: int) -> tuple[int, int, int]:
    """(destination rank, parameter index, piece) of a task id."""
    piece_idx = task_id & (MAX_PIECES - 1)
    parameter_idx = task_id >> _PIECE_BITS & (MAX_PARAMETERS - 1)
    return task_id >> (_PIECE_BITS + _PARAMETER_BITS), parameter_idx, piece_idx


@dataclasses.dataclass(slots=True)
class TransferOp:
    """One piece of one parameter, as one of its two ends sees it.

    Args:
        param_name: Name in this rank's own module.
        peer_rank: The other end, a rank of the plan's group; may be this rank.
        is_send: Whether this rank sends.
        my_slice: Slices of this rank's tensor, one per dimension, with both bounds.
        peer_slice: Slices of the peer's tensor.
        task_id: Id that is equal on both ends, see `pack_task_id`.
        my_view: Shape that this rank's tensor is viewed as before it is sliced; None for its own.
        peer_view: The same of the peer's tensor.
        my_dtype: Dtype of this rank's tensor; None where the plan's maker did not know.
        peer_dtype: Dtype of the peer's tensor.
        wire_dtype: Dtype that travels; None for `my_dtype`. Equal on both ends.
        joined: Pieces that move as one tensor; the fields above are those of the first of them. None
            for a piece by itself.
    """

    param_name: str
    peer_rank: int
    is_send: bool
    my_slice: Slices
    peer_slice: Slices
    task_id: int | None = None
    my_view: tuple[int, ...] | None = None
    peer_view: tuple[int, ...] | None = None
    my_dtype: torch.dtype | None = None
    peer_dtype: torch.dtype | None = None
    wire_dtype: torch.dtype | None = None
    joined: JoinedPieces | None = None

    @property
    def pieces(self) -> Sequence[TransferOp]:
        """Each piece by itself."""
        return (self,) if self.joined is None else self.joined.ops


@dataclasses.dataclass(frozen=True)
class JoinedPieces:
    """Pieces of several views that lie in one pattern on both ends, see `joined_pieces`.

    Args:
        ops: Pieces in the order they lie in the pattern.
        offset: Offset of the first element in this rank's storage, in elements.
        sizes: Sizes of the pattern, equal on both ends.
        strides: Strides on this rank, in elements.
        views: Offset and strides, in storage, of this rank's view of each piece.
    """

    ops: tuple[TransferOp, ...]
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    views: tuple[tuple[int, tuple[int, ...]], ...]
