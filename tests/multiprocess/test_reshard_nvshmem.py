"""`RemoteCopyService` between processes, and processes that die in it."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from moe_comm import CommunicationError, Communicator
from moe_comm.resharding.nvshmem_copy_service import RemoteCopyService
from moe_comm.resharding.nvshmem_copy_service.validation import (
    generate_mixed_data,
    validate_received_data,
)
from moe_comm.resharding.plan.transfer_op import pack_task_id
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import HANG_S, die, error_of

SLOT = 64 * 1024


def everyone_to_everyone(
    service: RemoteCopyService, sizes: list[int]
) -> list[tuple[int, torch.Tensor]]:
    """Register one task of each size between every two PEs; (task id, destination) of this one."""
    targets = []
    for peer in range(service.n_pes):
        for idx, size in enumerate(sizes):
            sent = pack_task_id(peer, service.my_pe, idx)
            service.register_send(sent, generate_mixed_data(sent, size, "cpu"), 0, size, peer)
            received = pack_task_id(service.my_pe, peer, idx)
            target = torch.zeros(size, dtype=torch.uint8)
            service.register_receive(received, target, 0, size, peer)
            targets.append((received, target))
    return targets


def assert_arrived(targets: list[tuple[int, torch.Tensor]]) -> None:
    for task_id, target in targets:
        result = validate_received_data(task_id, target, target.numel(), pattern="mixed")
        assert result.passed, result


def _exchange(context: RankContext, in_subgroup: bool) -> int:
    group = context.group
    if in_subgroup:
        # Ranks of the group differ from those of the world, and one process takes no part.
        group = dist.new_group([3, 1, 2])
        if context.rank_idx == 0:
            return -1
    service = RemoteCopyService(group, slot_bytes=SLOT)
    service.init("WARNING")
    targets = everyone_to_everyone(service, [0, 1, 1000, SLOT, 5 * SLOT + 3, 40 * SLOT])
    service.schedule()
    for _ in range(3):
        for _, target in targets:
            target.zero_()
        service.run()
        assert_arrived(targets)
    my_pe = service.my_pe
    service.finalize()
    return my_pe


@pytest.mark.parametrize("in_subgroup", [False, True])
def test_processes(in_subgroup: bool) -> None:
    pes = run_ranks(_exchange, 4, in_subgroup)
    assert sorted(pes) == ([-1, 0, 1, 2] if in_subgroup else [0, 1, 2, 3])


def _die_while_others_copy(
    context: RankContext, victim: int, delay_s: float
) -> tuple[str, tuple[int, ...]]:
    communicator = Communicator(context.group, backend="host", stall_timeout_s=20.0)
    service = RemoteCopyService(communicator=communicator, slot_bytes=SLOT)
    service.init("WARNING")
    targets = everyone_to_everyone(service, [3, SLOT // 2, 60 * SLOT])
    service.schedule()
    service.run()
    assert_arrived(targets)
    dist.barrier()  # a rank still in it would hear what others meet in the next
    if context.rank_idx == victim:
        threading.Timer(delay_s, die).start()

    def run_on() -> None:
        deadline = time.monotonic() + HANG_S
        while time.monotonic() < deadline:
            service.run()

    error = error_of(run_on)
    assert isinstance(error, CommunicationError), repr(error)
    again = error_of(service.run)
    assert isinstance(again, CommunicationError)
    assert again.ranks == error.ranks
    service.finalize()
    return type(error).__name__, error.ranks


@pytest.mark.parametrize(
    ("victim", "delay_s"), [(1, 0.01), pytest.param(0, 0.2, marks=pytest.mark.full)]
)
def test_a_pe_that_dies_is_named(victim: int, delay_s: float) -> None:
    told = run_ranks(_die_while_others_copy, 3, victim, delay_s, fresh=True, expect_dead=[victim])
    for rank_idx, result in enumerate(told):
        if rank_idx != victim:
            assert result == ("PeerFailedError", (victim,))


def _go_on_without(context: RankContext) -> None:
    """The living recover; the service, which was made by all ranks, says who is missing."""
    communicator = Communicator(context.group, backend="host", stall_timeout_s=20.0)
    service = RemoteCopyService(communicator=communicator, slot_bytes=SLOT)
    service.init("WARNING")
    everyone_to_everyone(service, [3, 6 * SLOT])
    service.schedule()
    dist.barrier()
    if context.rank_idx == 2:
        die()
    error = error_of(service.run)
    assert isinstance(error, CommunicationError), repr(error)
    assert communicator.recover().failed_ranks == (2,)
    for call in (service.run, service.schedule):
        with pytest.raises(ValueError, match="rank 2 has failed"):
            call()


def test_a_service_needs_all_its_ranks() -> None:
    run_ranks(_go_on_without, 3, fresh=True, expect_dead=[2])
