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

__all__ = ["PACKINGS", "WorkloadPacker", "aligned"]

PACKINGS = ("next_fit", "first_fit")


def aligned(num_bytes: int, alignment: int) -> int:
    """`num_bytes` rounded up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment


class WorkloadPacker:
    """Packs the tasks of each destination into batches, largest task first.

    Args:
        slot_bytes: Most bytes of a batch. A task that is larger gets a batch of its own.
        packing: "next_fit" looks at the last batch only; "first_fit" at all of them, which needs
            fewer batches.
        alignment: Every task begins at a multiple of this in its batch; both ends must agree on it.
        max_tasks: Most tasks of a batch.
    """

    def __init__(
        self,
        slot_bytes: int = MAX_SEGMENT_SIZE,
        *,
        packing: str = "next_fit",
        alignment: int = 1,
        max_tasks: int = MAX_TASKS_PER_BATCH,
    ) -> None:
        if packing not in PACKINGS:
            raise ValueError(f"packing must be one of {PACKINGS}, got {packing!r}")
        for name, value in (
            ("slot_bytes", slot_bytes),
            ("alignment", alignment),
            ("max_tasks", max_tasks),
        ):
            if value < 1:
                raise ValueError(f"{name} must be >= 1, got {value}")
        self.slot_bytes = slot_bytes
        self.packing = packing
        self.alignment = alignment
        self.max_tasks = max_tasks

    def pack_workloads(
        self, send_requests: Sequence[SendRequest], n_pes: int
    ) -> dict[int, list[WorkloadGroup]]:
        """Batches for every PE in [0, n_pes), none for one that nothing is sent to.

        Requests for a PE outside are left out: `RemoteCopyService` refuses them.
        """
        tasks_by_dest: dict[int, list[SendRequest]] = {dest_pe: [] for dest_pe in range(n_pes)}
        for request in send_requests:
            if request.dest_pe in tasks_by_dest:
                tasks_by_dest[request.dest_pe].append(request)
        workloads = {
            dest_pe: self._pack_single_destination(tasks, dest_pe)
            for dest_pe, tasks in tasks_by_dest.items()
        }
        for dest_pe, batches in workloads.items():
            PELogger.debug(
                "PE %d: %d tasks in %d batches", dest_pe, len(tasks_by_dest[dest_pe]), len(batches)
            )
        return workloads

    def _pack_single_destination(
        self, tasks: Sequence[SendRequest], dest_pe: int
    ) -> list[WorkloadGroup]:
        # A stable order: tasks of one size stay as they were registered.
        ordered = sorted(tasks, key=lambda task: -task.size)
        batches: list[WorkloadGroup] = []
        free_bytes = _FreeBytes(len(ordered)) if self.packing == "first_fit" else None
        for task in ordered:
            batch_idx = len(batches) - 1 if free_bytes is None else free_bytes.first_with(task.size)
            if not (0 <= batch_idx < len(batches) and self._fits(task, batches[batch_idx])):
                batch_idx = len(batches)
                batches.append(WorkloadGroup(dest_pe=dest_pe))
            batch = batches[batch_idx]
            batch.total_size = aligned(batch.total_size, self.alignment) + task.size
            batch.tasks.append(task)
            if free_bytes is not None:
                is_full = len(batch.tasks) >= self.max_tasks
                begin = aligned(batch.total_size, self.alignment)
                free_bytes.set(batch_idx, -1 if is_full else self.slot_bytes - begin)
        return batches

    def _fits(self, task: SendRequest, batch: WorkloadGroup) -> bool:
        begin = aligned(batch.total_size, self.alignment)
        return begin + task.size <= self.slot_bytes and len(batch.tasks) < self.max_tasks


class _FreeBytes:
    """Free bytes of batches 0, 1, ...: which is the first with enough, in logarithmic time."""

    def __init__(self, num_max_batches: int) -> None:
        self._num_leaves = 1 << max(num_max_batches - 1, 0).bit_length()
        # A node holds the most free bytes below it; a batch not yet made has none.
        self._most = [-1] * (2 * self._num_leaves)

    def set(self, batch_idx: int, num_bytes: int) -> None:
        node = batch_idx + self._num_leaves
        self._most[node] = num_bytes
        while node > 1:
            node //= 2
            self._most[node] = max(self._most[2 * node], self._most[2 * node + 1])

    def first_with(self, num_bytes: int) -> int:
        """The first batch with at least `num_bytes` free, or -1."""
        if self._most[1] < num_bytes:
            return -1
        node = 1
        while node < self._num_leaves:
            node = 2 * node if self._most[2 * node] >= num_bytes else 2 * node + 1
        return node - self._num_leaves
