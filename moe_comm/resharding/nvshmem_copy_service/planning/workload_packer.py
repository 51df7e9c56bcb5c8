"""Tasks packed into batches of one slot each."""

from __future__ import annotations

from collections.abc import Sequence

from moe_comm.resharding.nvshmem_copy_service.logger import PELogger
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    MAX_SEGMENT_SIZE,
    MAX_TASKS_PER_BATCH,
    SendRequest,
    WorkloadGroup,
)

__all__ = ["WorkloadPacker"]


class WorkloadPacker:
    """Packs the tasks of each destination into batches, largest task first.

    A task goes into the last batch, or into a new one where that has no room.

    Args:
        slot_bytes: Most bytes of a batch. A task that is larger gets a batch of its own.
        max_tasks: Most tasks of a batch.
    """

    def __init__(
        self, slot_bytes: int = MAX_SEGMENT_SIZE, *, max_tasks: int = MAX_TASKS_PER_BATCH
    ) -> None:
        for name, value in (("slot_bytes", slot_bytes), ("max_tasks", max_tasks)):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.slot_bytes = slot_bytes
        self.max_tasks = max_tasks

    def pack_workloads(
        self, send_requests: Sequence[SendRequest], n_pes: int
    ) -> dict[int, list[WorkloadGroup]]:
        """Return batches for every PE in [0, n_pes), none for one that nothing is sent to.

        Requests for a PE outside are left out: `RemoteCopyService` refuses them.
        """
        tasks_by_dest: dict[int, list[SendRequest]] = {dest_pe: [] for dest_pe in range(n_pes)}
        for request in send_requests:
            if request.dest_pe in tasks_by_dest:
                tasks_by_dest[request.dest_pe].append(request)
        return {
            dest_pe: self._pack_single_destination(tasks, dest_pe)
            for dest_pe, tasks in tasks_by_dest.items()
        }

    def _pack_single_destination(
        self, tasks: Sequence[SendRequest], dest_pe: int
    ) -> list[WorkloadGroup]:
        batches: list[WorkloadGroup] = []
        # A stable order: tasks of one size stay as they were registered.
        for task in sorted(tasks, key=lambda task: -task.size):
            batch = batches[-1] if batches else None
            if (
                batch is None
                or batch.total_size + task.size > self.slot_bytes
                or len(batch.tasks) == self.max_tasks
            ):
                batch = WorkloadGroup(dest_pe=dest_pe)
                batches.append(batch)
            batch.total_size += task.size
            batch.tasks.append(task)
        PELogger.debug("PE %d: %d tasks in %d batches", dest_pe, len(tasks), len(batches))
        return batches
