"""Sources and destinations of copies that share memory: refused on every rank, or right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_comm
from moe_comm.resharding import refit
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy
from moe_comm.resharding.copy_services.nvshmem_copy_service import NVSHMEMCopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.testing import RankContext
from tests.helpers.threaded_refits import error_of, nets, swap, threads

SERVICES = [SymmetricCopyService, NVSHMEMCopyService]


def _copies(context: RankContext) -> list[str]:
    """Errors of runs of rank 1 on both ranks; rank 0 copies nothing."""
    memory = torch.arange(64.0).view(8, 8)
    cases: list[tuple[torch.Tensor, torch.Tensor]] = [
        (memory[:4], memory[2:6]),  # rows of a matrix, shifted
        (memory[:, :4], memory[:, 3:7]),  # columns that share one
        (memory[:, :4], memory[:, 4:]),  # columns that interleave
        (memory[2], memory[2]),  # onto itself
    ]
    found = []
    with (
        moe_comm.Communicator(context.group) as communicator,
        BatchedCopy(communicator) as engine,
    ):
        for source, destination in cases:
            want = source.clone()
            items = (
                [] if context.rank_idx == 0 else [(7, source, 1)],
                ([] if context.rank_idx == 0 else [(7, destination, 1)]),
            )
            found.append(error_of(lambda items=items: engine.run(engine.prepare(*items))))
            assert found[-1] or context.rank_idx == 0 or torch.equal(destination, want)
        communicator.all_gather(b"")
    return found


def test_a_batched_copy_between_places_that_share_bytes() -> None:
    text = "rank 1: the destination of task 7 (from rank 1) and the source of task 7 (to rank 1) "
    refused = f"ValueError: {text}share bytes"
    assert threads(_copies, 2) == [[refused, refused, "", ""]] * 2


def _strided_destinations(context: RankContext) -> str:
    memory = torch.zeros(8, 8)
    sources = [torch.ones(8, 4), torch.ones(8, 4)]
    with (
        moe_comm.Communicator(context.group) as communicator,
        BatchedCopy(communicator) as engine,
    ):
        sends = [(idx, source, 0) for idx, source in enumerate(sources)]
        recvs = [(0, memory[:, :4], 0), (1, memory[:, 2:6], 0)]
        return error_of(lambda: engine.run(engine.prepare(sends, recvs)))


def test_strided_destinations_that_share_bytes() -> None:
    (text,) = threads(_strided_destinations, 1)
    assert "the destinations of tasks 0 (from rank 0) and 1 (from rank 0) share bytes" in text


@pytest.mark.parametrize("kind", SERVICES)
def test_a_service_between_places_that_share_bytes(kind: Any) -> None:
    def rank(context: RankContext) -> str:
        memory = torch.arange(16.0)
        service = kind(context.group)
        peer = 1 - context.rank_idx
        service.submit_send(memory[:8], peer, task_id=1)
        service.submit_recv(memory[4:12] if context.rank_idx else memory[8:], peer, task_id=1)
        text = error_of(service.run)
        assert torch.equal(memory, torch.arange(16.0))
        service.submit_send(memory[:8], peer, task_id=1)
        service.submit_recv(memory[8:], peer, task_id=1)
        service.run()
        assert torch.equal(memory, torch.arange(8.0).repeat(2))
        moe_comm.peers.bootstrap.bootstrap_for(context.group).all_gather(None)
        service.close()
        return text

    for text in threads(rank, 2):
        assert "rank 1: the destination of task 1 (from rank 0) and the source of task 1" in text


def test_a_refit_into_the_memory_of_its_source() -> None:
    def rank(context: RankContext) -> tuple[str, str]:
        src, dst = nets(context, "single", "single")
        src.fill(1)
        # In the very same place nothing is to be done; beside it the source would be written.
        dst.up.data = src.up.data
        same = error_of(lambda: swap(context, src, dst))
        assert dst.wrong(1) == []
        memory = torch.zeros(src.up.numel() + 8, dtype=src.up.dtype)
        src.up.data = memory[: src.up.numel()].view(src.up.shape)
        src.fill(2)
        dst.up.data = memory[8:].view(src.up.shape)
        other = error_of(lambda: swap(context, src, dst))
        assert src.wrong(2) == []
        return same, other

    for same, other in threads(rank, 2):
        assert same == ""
        assert "share bytes" in other
    refit.clear_all_caches()
