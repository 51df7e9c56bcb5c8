"""Small objects of all ranks, over whatever exchange of bytes or process group the ranks have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from moe_comm.errors import CommunicationError
from moe_comm.peers.plain_data import decode_plain, encode_plain

_LENGTH_BYTES = 8
# With the length: as much as most items are, so that they take one exchange.
_FIRST_BYTES = 4096
# Longer items are none: their length is damaged, and waiting for the rest would not end.
_MOST_BYTES = 1 << 36


def gather_objects(
    all_gather: Callable[[bytes], list[bytes]], item: Any, *, piece_bytes: int | None = None
) -> list[Any]:
    """Every rank's `item`, over an exchange of bytes. Collective.

    Args:
        all_gather: Every rank's payload in rank order, b"" of ranks that are excluded.
        item: Plain data, as `plain_data` has it.
        piece_bytes: Most bytes of a payload, where payloads of one exchange are to be equally long or
            an item may be longer; equal on every rank. None: an item is one payload.

    Returns:
        Items in rank order; None for ranks that are excluded.

    Raises:
        CommunicationError: Data of a rank are damaged; the rank is named.
    """
    mine = encode_plain(item)
    if piece_bytes is None:
        return decode_all(all_gather(mine))
    first_bytes = max(0, min(_FIRST_BYTES, piece_bytes) - _LENGTH_BYTES)
    firsts = all_gather(
        len(mine).to_bytes(_LENGTH_BYTES, "little") + mine[:first_bytes].ljust(first_bytes, b"\0")
    )
    lengths = [int.from_bytes(first[:_LENGTH_BYTES], "little") for first in firsts]
    for rank_idx, length in enumerate(lengths):
        if length > _MOST_BYTES:
            raise _damaged(
                f"rank {rank_idx}: expected plain data of at most {_MOST_BYTES} bytes, got {length}",
                rank_idx,
            )
    longest = max(lengths)
    said = [first[_LENGTH_BYTES:] for first in firsts]
    for start in range(first_bytes, longest, piece_bytes):
        size = min(piece_bytes, longest - start)
        pieces = all_gather(mine[start : start + size].ljust(size, b"\0"))
        said = [whole + piece for whole, piece in zip(said, pieces, strict=True)]
    # A rank that is excluded on the way has said less than it announced.
    return decode_all(
        [
            whole[:length] if len(whole) >= length else b""
            for whole, length in zip(said, lengths, strict=True)
        ]
    )


def decode_all(said: Sequence[bytes]) -> list[Any]:
    """Decode the data of the ranks from `encode_plain`, in rank order; None for a rank that sent nothing.

    Raises:
        CommunicationError: Data of a rank are damaged; the rank is named.
    """
    return [_decoded(rank_idx, data) if data else None for rank_idx, data in enumerate(said)]


def _decoded(rank_idx: int, data: bytes) -> Any:
    try:
        return decode_plain(data, f"rank {rank_idx}")
    except ValueError as error:
        raise _damaged(str(error), rank_idx) from None


def _damaged(text: str, rank_idx: int) -> CommunicationError:
    return CommunicationError(text, ranks=(rank_idx,), operation="all_gather")


def gather_objects_of_group(group: dist.ProcessGroup | None, item: Any) -> list[Any]:
    """Every rank's `item`, over a process group of torch.distributed. Collective.

    Args:
        group: None for the default process group, whose ranks trust each other: torch pickles.
        item: Can be pickled.

    Returns:
        Items in rank order of the group.
    """
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, item, group=group)
    return gathered
