"""Copies and gathers that another thread takes away while they wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch

import moe_comm
from moe_comm.resharding.batched_copy import BatchedCopy
from tests.helpers.rank_threads import on_ranks


def ended_by(end: Callable[[], None]) -> threading.Thread:
    """A thread that calls `end` a little later."""

    def late() -> None:
        time.sleep(0.2)
        end()

    thread = threading.Thread(target=late)
    thread.start()
    return thread


def test_a_batched_copy_is_destroyed_while_it_waits() -> None:
    """Its run ends by an error, and the peer that came late hears why."""

    def body(comm: moe_comm.Communicator) -> None:
        engine = BatchedCopy(comm)
        peer_rank = 1 - comm.rank_idx
        sent, received = torch.ones(1000), torch.zeros(1000)
        prepared = engine.prepare([(1, sent, peer_rank)], [(1, received, peer_rank)])
        with pytest.raises(moe_comm.PeerFailedError, match=r"rank 0 destroyed batched copy"):
            if comm.rank_idx == 0:
                ending = ended_by(engine.destroy)
                try:
                    engine.run(prepared)
                finally:
                    ending.join()
            else:
                time.sleep(1.5)
                engine.run(prepared)
        assert received.eq(0).all()

    on_ranks(2, body, stall_timeout_s=0.5)


def test_a_communicator_is_destroyed_while_it_gathers() -> None:
    def body(comm: moe_comm.Communicator) -> None:
        if comm.rank_idx == 1:
            time.sleep(1.0)
            return
        ending = ended_by(comm.destroy)
        with pytest.raises(ValueError, match="communicator has been destroyed"):
            comm.all_gather(b"")
        ending.join()

    on_ranks(2, body)
