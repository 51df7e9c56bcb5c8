"""Messages that rows between nodes are cut into."""

from __future__ import annotations

import pytest

_host = pytest.importorskip("moe_comm._host")

EXPERT_MAJOR, RANK_MAJOR = 0, 1
MIB = 1 << 20


def dispatch_bytes(num_rows: int, **changes: int) -> int:
    shape = {
        "layout": EXPERT_MAJOR,
        "row_bytes": 8192,
        "scale_bytes": 0,
        "weight_bytes": 4,
        "num_topk": 8,
        "num_local_ranks": 2,
        "with_ids": False,
        "num_nodes": 2,
    }
    return int(_host.internode.dispatch_bytes(num_rows=num_rows, **{**shape, **changes}))


def test_a_full_chunk_and_one_row_more() -> None:
    full = 126 * 8192 + 126 * 64 + 126 * 32  # each a multiple of 64
    assert full == 1044288 <= MIB
    assert dispatch_bytes(0) == 0
    assert dispatch_bytes(126) == 8 + full
    assert dispatch_bytes(127) == 8 + full + 8192 + 64 + 64
    assert dispatch_bytes(2 * 126) == 8 + 2 * full


def test_parts_start_at_multiples_of_64() -> None:
    assert dispatch_bytes(1, row_bytes=100, scale_bytes=3, num_topk=1) == 8 + 128 + 64 + 64 + 64


def test_rank_major_rows_have_a_slot_a_rank_and_their_ids() -> None:
    assert (
        dispatch_bytes(8, layout=RANK_MAJOR, with_ids=True)
        == 8 + 8 * 8192 + 8 * 2 * 8 + 8 * 8 * 4 + 8 * 8 * 4
    )


def test_a_row_wider_than_a_chunk_travels_alone() -> None:
    assert dispatch_bytes(3, row_bytes=4 * MIB) == 8 + 3 * (4 * MIB + 64 + 64)


@pytest.mark.parametrize(
    ("num_nodes", "chunk_bytes"), [(17, MIB), (65, MIB // 4), (1024, MIB // 16)]
)
def test_chunks_shrink_where_there_are_many_nodes(num_nodes: int, chunk_bytes: int) -> None:
    per_chunk = (chunk_bytes - 320) // 8288
    # Two rows are one chunk more exactly where one row fills one up: 32 bytes of it are padding.
    sizes = [dispatch_bytes(per_chunk + i, num_nodes=num_nodes) for i in range(2)]
    assert sizes[0] == 8 + sum(-(-per_chunk * part // 64) * 64 for part in (8192, 64, 32))
    assert sizes[1] == sizes[0] + 8192 + 64 + 64
