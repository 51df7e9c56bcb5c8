"""Objects over an exchange of bytes: whole, in pieces of equal length, without ranks that are excluded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from moe_comm.peers.gather_objects import gather_objects


class Bytes:
    """Ranks that are threads, and the lengths of what each said in every exchange."""

    def __init__(self, num_ranks: int) -> None:
        self.lengths: list[list[int]] = []
        self._said: list[bytes] = [b""] * num_ranks
        self._together = threading.Barrier(num_ranks)

    def of(self, rank_idx: int) -> Callable[[bytes], list[bytes]]:
        def all_gather(payload: bytes) -> list[bytes]:
            self._said[rank_idx] = payload
            self._together.wait()
            said = [*self._said]
            if rank_idx == 0:
                self.lengths.append([len(each) for each in said])
            self._together.wait()
            return said

        return all_gather


def gathered(items: list[Any], piece_bytes: int | None) -> tuple[list[list[Any]], list[list[int]]]:
    """Objects that every rank hears, and the lengths of the payloads of every exchange."""
    ranks = Bytes(len(items))

    def run(rank_idx: int) -> list[Any]:
        return gather_objects(ranks.of(rank_idx), items[rank_idx], piece_bytes=piece_bytes)

    with ThreadPoolExecutor(len(items)) as pool:
        return [*pool.map(run, range(len(items)))], ranks.lengths


ITEMS = [None, "a", {"b": list(range(1000))}]


@pytest.mark.parametrize("piece_bytes", [None, 64, 1 << 20])
def test_every_rank_hears_every_item(piece_bytes: int | None) -> None:
    heard, lengths = gathered(ITEMS, piece_bytes)
    assert heard == [ITEMS] * 3
    if piece_bytes is None:
        assert len(lengths) == 1
        return
    assert len(lengths) > 20 if piece_bytes == 64 else len(lengths) == 1
    assert all(len(set(of_ranks)) == 1 and of_ranks[0] <= piece_bytes for of_ranks in lengths)


@pytest.mark.parametrize("piece_bytes", [None, 4])
@pytest.mark.parametrize("num_exchanges", [0, 1, 3])
def test_a_rank_that_is_excluded_gives_none(piece_bytes: int | None, num_exchanges: int) -> None:
    """Also one that is excluded after some of its pieces."""
    num_done = 0

    def all_gather(payload: bytes) -> list[bytes]:
        nonlocal num_done
        num_done += 1
        return [payload, payload if num_done <= num_exchanges else b""]

    is_whole = piece_bytes is None and num_exchanges > 0
    expected = ["abcdefgh", "abcdefgh" if is_whole else None]
    assert gather_objects(all_gather, "abcdefgh", piece_bytes=piece_bytes) == expected


def test_small_items_take_one_exchange_and_no_more_than_two_just_above() -> None:
    text = "a" * 3000
    heard, lengths = gathered(["", text], 1 << 20)
    assert heard == [["", text]] * 2
    assert lengths == [[4096, 4096]]
    heard, lengths = gathered(["", text * 2], 1 << 20)
    assert heard == [["", text * 2]] * 2
    assert len(lengths) == 2
