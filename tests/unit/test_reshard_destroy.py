"""Copies and gathers that another thread takes away while they wait."""

from __future__ import annotations

import threading

import pytest
import torch

import moe_comm
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy
from tests.helpers.failing_ranks import HANG_S, SHORT_S, when_waiting
from tests.helpers.rank_threads import on_ranks


def test_a_batched_copy_is_destroyed_while_it_waits() -> None:
    """Its run ends by an error, and the peer that came late hears why."""
    has_ended = threading.Event()

    def body(comm: moe_comm.Communicator) -> None:
        engine = BatchedCopy(comm)
        peer_rank = 1 - comm.rank_idx
        sent, received = torch.ones(1000), torch.zeros(1000)
        prepared = engine.prepare([(1, sent, peer_rank)], [(1, received, peer_rank)])
        with pytest.raises(moe_comm.PeerFailedError, match=r"rank 0 destroyed batched copy"):
            if comm.rank_idx == 0:
                when_waiting(lambda: (engine.destroy(), has_ended.set()))
            else:
                assert has_ended.wait(HANG_S), "rank 0 did not destroy its batched copy"
            engine.run(prepared)
        assert received.eq(0).all()

    on_ranks(2, body, stall_timeout_s=SHORT_S)


def test_a_communicator_is_destroyed_while_it_gathers() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        if comm.rank_idx == 0:
            when_waiting(comm.destroy)
            with pytest.raises(ValueError, match="communicator has been destroyed"):
                comm.all_gather(b"")

    on_ranks(2, body)
