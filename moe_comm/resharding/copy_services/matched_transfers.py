"""Two ends of every transfer, compared by all ranks before any data moves."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from moe_comm.arguments import as_utf8
from moe_comm.peers.agree import mismatched_transfers, raise_together
from moe_comm.peers.gather_objects import gather_objects

__all__ = ["Transfer", "agree"]

Transfer: TypeAlias = tuple["int | None", int, str]
"""(task id, bytes, dtype) of one tensor, as one of its two ends sees it."""

AllGather: TypeAlias = Callable[[bytes], "list[bytes]"]

_MAX_LINES = 6
# `Communicator.all_gather` takes 1 MiB at a time.
_PIECE_BYTES = 1 << 19


def agree(
    rank_idx: int,
    sends: Sequence[Sequence[Transfer]],
    recvs: Sequence[Sequence[Transfer]],
    problem: str | None,
    all_gather: AllGather,
) -> None:
    """Compare what ranks mean to send with what their peers mean to receive. Collective.

    One exchange of a digest per pair; only where digests differ do ranks exchange their lists.

    Args:
        rank_idx: This rank.
        sends: Transfers that this rank sends to each rank, in the order of the wire.
        recvs: Transfers that this rank receives from each rank, in the order of the wire.
        problem: Message about what is wrong on this rank, or None.
        all_gather: Every rank's payload in rank order; payloads of one call are equally long. Ranks
            that failed and were excluded give b"".

    Raises:
        ValueError: A rank has a problem or a pair disagrees; the same text on every rank.
    """
    num_ranks = len(sends)
    row = np.zeros(1 + 2 * num_ranks, dtype=np.int64)
    row[0] = problem is not None
    row[1 : 1 + num_ranks] = [_digest(transfers) for transfers in sends]
    row[1 + num_ranks :] = [_digest(transfers) for transfers in recvs]
    excluded = bytes(row.nbytes)
    rows = np.stack(
        [np.frombuffer(item or excluded, np.int64) for item in all_gather(row.tobytes())]
    )
    if rows[:, 0].any():
        if problem == "":
            problem = "gave up, without a reason"
        # Names of files may hold what is no UTF-8.
        texts = gather_objects(all_gather, as_utf8(problem or ""), piece_bytes=_PIECE_BYTES)
        raise_together(text or None for text in texts)
    sent, received = rows[:, 1 : 1 + num_ranks], rows[:, 1 + num_ranks :].T
    odd_pairs = [(int(src), int(dst)) for src, dst in np.argwhere(sent != received)]
    if not odd_pairs:
        return
    mine = {
        (src, dst): list(sends[dst] if src == rank_idx else recvs[src])
        for src, dst in odd_pairs
        if rank_idx in (src, dst)
    }
    lists = [theirs or {} for theirs in gather_objects(all_gather, mine, piece_bytes=_PIECE_BYTES)]
    lines = [
        line
        for src, dst in odd_pairs
        for line in _differences(
            src, dst, lists[src].get((src, dst), []), lists[dst].get((src, dst), [])
        )
    ]
    more = f"; and {len(lines) - _MAX_LINES} more" if len(lines) > _MAX_LINES else ""
    raise ValueError("; ".join(lines[:_MAX_LINES]) + more)


def _digest(transfers: Sequence[Transfer]) -> int:
    """0 for no transfers."""
    if not transfers:
        return 0
    digest = hashlib.blake2b(repr(list(transfers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) or 1


def _differences(src: int, dst: int, sent: list[Transfer], received: list[Transfer]) -> list[str]:
    """Return the differences between the two ends of a pair, one line each."""
    if any(task_id is None for task_id, *_ in (*sent, *received)):
        return _differences_in_order(src, dst, sent, received)
    sent_by_id = {task_id: rest for task_id, *rest in sent}
    received_by_id = {task_id: rest for task_id, *rest in received}
    lines = []
    unlike = mismatched_transfers(sent_by_id, received_by_id)
    for task_id, there, here in sorted(unlike, key=lambda ends: ends[0] or 0):
        sends, receives = _text(there), _text(here)
        if here is None:
            line = f"rank {src} sends task {task_id} ({sends}) to rank {dst}, which does not receive it"
        elif there is None:
            line = (
                f"rank {dst} receives task {task_id} ({receives}) from rank {src}, which does not "
                "send it"
            )
        else:
            line = f"task {task_id}: rank {src} sends {sends}, rank {dst} receives {receives}"
        lines.append(line)
    return lines


def _differences_in_order(
    src: int, dst: int, sent: list[Transfer], received: list[Transfer]
) -> list[str]:
    has_ids = [
        any(task_id is not None for task_id, *_ in transfers) for transfers in (sent, received)
    ]
    if any(has_ids):
        with_ids, without = (src, dst) if has_ids[0] else (dst, src)
        return [
            f"from rank {src} to rank {dst}: rank {with_ids} gives task ids, rank {without} "
            f"gives none ({len(sent)} sends, {len(received)} receives)"
        ]
    lines = [
        f"transfer {position} from rank {src} to rank {dst}: sends {_text(there)}, receives "
        f"{_text(here)}"
        for position, ((_, *there), (_, *here)) in enumerate(zip(sent, received, strict=False))
        if there != here
    ]
    if len(sent) != len(received):
        lines.append(
            f"rank {src} sends {len(sent)} tensors to rank {dst}, which receives {len(received)}"
        )
    return lines


def _text(size_and_dtype: Sequence[object] | None) -> str:
    if size_and_dtype is None:
        return "nothing"
    num_bytes, dtype = size_and_dtype
    return f"{num_bytes} bytes of {dtype}"
