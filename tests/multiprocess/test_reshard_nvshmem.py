"""`RemoteCopyService` between processes, and processes that die in it."""

from __future__ import annotations

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
from tests.helpers.failing_ranks import die, error_of

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
