"""Dispatch on several nodes: what crosses between them, byte for byte, and what fails how.

What arrives is held to the definition by `test_conformance_nodes`.
"""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch

import moe_comm
from moe_comm import EpBuffer, EpConfig, Layout
from moe_comm.testing.launch import RankContext, run_ranks
from tests.helpers.configs import ep_config
from tests.helpers.internode_traffic import agreement_bytes
from tests.helpers.rank_threads import on_ranks
from tests.helpers.scripted_rails import Message, ScriptedRails

pytest.importorskip("moe_comm._host")

NUM_EXPERTS = 8
NUM_TOPK = 4
CHUNK_BYTES = 1 << 20


def config_of(hidden: int, num_tokens: int = 4096) -> EpConfig:
    return ep_config(NUM_EXPERTS, NUM_TOPK, hidden, num_tokens, dtype=torch.bfloat16)


def batch_of(
    rank_idx: int, num_tokens: int, hidden: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_idx (with -1, and tokens without any expert) and weights of one rank."""
    draw = torch.Generator().manual_seed(rank_idx)
    x = torch.randn(num_tokens, hidden, generator=draw).bfloat16()
    topk_idx = torch.rand(num_tokens, NUM_EXPERTS, generator=draw).topk(NUM_TOPK).indices
    topk_idx[torch.rand(num_tokens, NUM_TOPK, generator=draw) < 0.5] = -1
    return x, topk_idx, torch.rand(num_tokens, NUM_TOPK, generator=draw)


def up_to_64(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64


def chunk_sizes(parts: list[int], num_rows: int, chunk_bytes: int = CHUNK_BYTES) -> list[int]:
    """Sizes of the messages that carry so many rows, each of these parts."""
    per_chunk = max((chunk_bytes - 5 * 64) // sum(parts), 1)
    sizes = []
    while num_rows > 0:
        taken = min(num_rows, per_chunk)
        sizes.append(sum(up_to_64(taken * part) for part in parts))
        num_rows -= taken
    return sizes


def num_rows_to_node(topk_idx: torch.Tensor, num_ranks: int, num_local: int, node: int) -> int:
    """Tokens with an expert on that node: each crosses once."""
    rank = topk_idx.div(NUM_EXPERTS // num_ranks, rounding_mode="floor")
    is_there = (topk_idx >= 0) & (rank.div(num_local, rounding_mode="floor") == node)
    return int(is_there.any(dim=1).sum())


@pytest.mark.parametrize(
    ("num_ranks", "num_local_ranks"),
    [pytest.param(4, 2, id="2-nodes-of-2"), pytest.param(4, 1, id="4-nodes-of-1")],
)
@pytest.mark.parametrize("layout", list(Layout))
def test_messages_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, num_local_ranks: int, layout: Layout
) -> None:
    rails = ScriptedRails(monkeypatch)
    hidden, num_tokens = 2048, 600

    def body(comm: moe_comm.Communicator) -> tuple[int, int]:
        # Rank 1 has no tokens: nothing but its row leaves it.
        x, topk_idx, weights = batch_of(comm.rank_idx, num_tokens * (comm.rank_idx != 1), hidden)
        with EpBuffer(comm, config_of(hidden, num_tokens)) as buffer:
            buffer.dispatch(x, topk_idx, weights, layout=layout)
            return buffer._backend.internode_bytes()

    counted = on_ranks(num_ranks, body, num_local_ranks=num_local_ranks)
    is_rank_major = layout is Layout.RANK_MAJOR
    num_slots = min(NUM_TOPK, num_local_ranks) if is_rank_major else NUM_TOPK
    parts = [2 * hidden, 8 * num_slots, 4 * NUM_TOPK, 4 * NUM_TOPK * is_rank_major]
    row = agreement_bytes(NUM_EXPERTS, num_ranks)
    sent = [0] * num_ranks
    received = [0] * num_ranks
    assert len(rails.sizes) == num_ranks * (num_ranks // num_local_ranks - 1)
    for (src, dst), sizes in rails.sizes.items():
        topk_idx = batch_of(src, num_tokens * (src != 1), hidden)[1]
        num_rows = num_rows_to_node(topk_idx, num_ranks, num_local_ranks, dst // num_local_ranks)
        expected = [row, *([8, *chunk_sizes(parts, num_rows)] if num_rows > 0 else [])]
        # A rank that had no window of the size it needs makes a second offer, 64 bytes.
        assert [size for size in sizes if size != 64] == expected, (src, dst)
        assert sizes.count(64) <= 1
        sent[src] += sum(sizes)
        received[dst] += sum(sizes)
    assert counted == list(zip(sent, received, strict=True))


def test_chunks_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    ScriptedRails(monkeypatch, delay_s=0.01)
    hidden, num_tokens = 4096, 700

    def body(comm: moe_comm.Communicator) -> list[torch.Tensor]:
        x, topk_idx, weights = batch_of(comm.rank_idx, num_tokens, hidden)
        with EpBuffer(comm, config_of(hidden)) as buffer:
            result = buffer.dispatch(x, topk_idx, weights)
            return [result.x.clone(), result.topk_weights.clone()]

    one_node = on_ranks(4, body)
    for expected, got in zip(one_node, on_ranks(4, body, num_local_ranks=2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def failure_of(buffer: EpBuffer, batch: tuple[torch.Tensor, ...], num_calls: int) -> Exception:
    try:
        for _ in range(num_calls):
            buffer.dispatch(*batch)
    except (moe_comm.PeerFailedError, moe_comm.PeerTimeoutError) as error:
        return error
    raise AssertionError("a broken exchange ended well")


LIMITS = {"stall_timeout_s": 3.0, "arrival_timeout_s": 4.5}


@pytest.mark.clock(usual_s=0.2, limit_s=LIMITS["stall_timeout_s"])
@pytest.mark.parametrize(
    "position",
    [
        pytest.param(0, id="row"),
        pytest.param(1, id="header"),
        pytest.param(2, id="chunk"),
        pytest.param(3, id="later-chunk"),
    ],
)
def test_a_message_that_never_comes(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    """An end of that rail is named on every rank, and after a recovery the buffer goes on."""
    hidden, num_tokens = 4096, 700
    made: dict[str, int] = {}

    def withhold(message: Message) -> bool:
        return message[:2] == (2, 0) and message[2] == made["first"] + position

    rails = ScriptedRails(
        monkeypatch, withhold=lambda message: "first" in made and withhold(message)
    )

    def body(comm: moe_comm.Communicator) -> tuple[Exception, torch.Tensor]:
        batch = batch_of(comm.rank_idx, num_tokens, hidden)
        with EpBuffer(comm, config_of(hidden)) as buffer:
            # After these no rank is short: the messages of a call are a row, a header and chunks.
            for _ in range(2):
                expected = buffer.dispatch(*batch).x.clone()
            comm.bootstrap.all_gather(None)
            made.setdefault("first", len(rails.sizes[2, 0]))
            comm.bootstrap.all_gather(None)
            error = failure_of(buffer, batch, 3)
            assert comm.recover().failed_ranks == ()
            assert torch.equal(buffer.dispatch(*batch).x, expected)
            return error, expected

    for error, _ in on_ranks(4, body, num_local_ranks=2, **LIMITS):
        assert isinstance(error, moe_comm.PeerTimeoutError)
        # The end that waits for the message and the end that cannot send it see the same. Without a
        # row ranks 0 and 1 do not come as far as the others, who cannot see what these wait for.
        assert error.ranks in (((0,), (1,), (2,)) if position == 0 else ((0,), (2,))), error


@pytest.mark.parametrize("position", [0, 2], ids=["row", "chunk"])
def test_an_engine_that_fails(monkeypatch: pytest.MonkeyPatch, position: int) -> None:
    ScriptedRails(
        monkeypatch,
        break_at=lambda message: "the cable is cut" if message == (1, 3, position) else None,
    )

    def body(comm: moe_comm.Communicator) -> Exception:
        batch = batch_of(comm.rank_idx, 700, 4096)
        with EpBuffer(comm, config_of(4096)) as buffer:
            error = failure_of(buffer, batch, 3)
            assert comm.recover().failed_ranks == ()
            buffer.dispatch(*batch)
            return error

    for error in on_ranks(4, body, num_local_ranks=2):
        assert isinstance(error, moe_comm.PeerFailedError)
        # Either end may be the first to say so.
        assert error.ranks in ((1,), (3,)), error
        assert "scripted: the cable is cut" in str(error)


def dispatch_until_killed(context: RankContext, rail: str) -> list[int]:
    with moe_comm.Communicator(num_local_ranks=2, rail=rail, stall_timeout_s=20.0) as comm:
        batch = batch_of(comm.rank_idx, 700, 4096)
        with EpBuffer(comm, config_of(4096)) as buffer:
            if comm.rank_idx == 3:
                # Others may still be in this call when it dies in a later one.
                buffer.dispatch(*batch)
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            error = failure_of(buffer, batch, 10**6)
            assert isinstance(error, moe_comm.PeerFailedError), error
            return list(error.ranks)


@pytest.mark.parametrize("rail", ["sockets", "gloo"])
def test_a_rank_killed_in_the_middle(rail: str) -> None:
    named = run_ranks(dispatch_until_killed, 4, rail, fresh=True, expect_dead=[3])
    assert named[:3] == [[3]] * 3
