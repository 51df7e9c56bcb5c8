"""Iterations in which no PE is asked for too much at once."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for
from moe_comm.resharding.nvshmem_copy_service.logger import PELogger
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    ScheduledBatch,
    WorkloadGroup,
    WorkloadSummary,
)

__all__ = ["CommunicationScheduler"]

BatchKey = tuple[int, int, int]
Workloads = Mapping[int, Sequence[WorkloadGroup]]
Group = dist.ProcessGroup | Bootstrap | None


class CommunicationScheduler:
    """Half-duplex: in one iteration a PE sends one batch, or receives one, or neither.

    Batches in conflict with most others come first, of equal ones the larger, and each takes the
    first iteration that has both its PEs free.

    Attributes:
        num_iterations: Iterations of the last schedule.
    """

    def __init__(self) -> None:
        self.num_iterations = 0

    def build_schedule(
        self, workloads: Workloads, my_pe: int, n_pes: int, group: Group = None
    ) -> tuple[dict[int, list[ScheduledBatch]], dict[BatchKey, WorkloadSummary]]:
        """Agree on a schedule. Collective over the group.

        Args:
            workloads: This PE's batches by destination; those for itself do not travel.
            my_pe: This PE.
            n_pes: PEs of the group.
            group: The PEs; None for the default group.

        Returns:
            Batches that this PE sends or receives, by iteration; and what is in them, by (source,
            destination, index).
        """
        batches = self._collect_all_batches(workloads, my_pe, n_pes, group)
        self._assign_iterations(batches)
        PELogger.info("%d batches in %d iterations", len(batches), self.num_iterations)
        summaries = self._exchange_workload_summaries(workloads, my_pe, n_pes, group)
        schedule: dict[int, list[ScheduledBatch]] = {}
        for batch in sorted(batches, key=lambda batch: batch.iteration):
            if my_pe in (batch.src_pe, batch.dest_pe):
                schedule.setdefault(batch.iteration, []).append(batch)
        return schedule, summaries

    def _collect_all_batches(
        self, workloads: Workloads, my_pe: int, n_pes: int, group: Group = None
    ) -> list[ScheduledBatch]:
        """Return every batch of every PE, with its size and without its tasks, in one order."""
        sizes = {
            dest_pe: [workload.total_size for workload in groups]
            for dest_pe, groups in workloads.items()
            if dest_pe != my_pe and groups
        }
        gathered = bootstrap_for(group).all_gather(sizes)
        if len(gathered) != n_pes:
            raise ValueError(f"n_pes must be {len(gathered)}, the ranks of the group, got {n_pes}")
        return [
            ScheduledBatch(src_pe, dest_pe, batch_index, iteration=-1, total_size=total_size)
            for src_pe, sizes_of_pe in enumerate(gathered)
            for dest_pe, dest_sizes in sizes_of_pe.items()
            for batch_index, total_size in enumerate(dest_sizes)
        ]

    def _assign_iterations(self, batches: list[ScheduledBatch]) -> None:
        """Set `iteration` of every batch, and `num_iterations`.

        Example:
            A ring of 8 PEs takes 2 iterations: 0 -> 1, 2 -> 3, ... and 1 -> 2, 3 -> 4, ...
        """
        at_pe: collections.Counter[int] = collections.Counter()
        at_pair: collections.Counter[frozenset[int]] = collections.Counter()
        for batch in batches:
            pair = frozenset((batch.src_pe, batch.dest_pe))
            at_pair[pair] += 1
            at_pe.update(pair)

        def num_conflicts(batch: ScheduledBatch) -> int:
            pair = frozenset((batch.src_pe, batch.dest_pe))
            shared = at_pair[pair] if len(pair) == 2 else 0
            return sum(at_pe[pe] for pe in pair) - shared - 1

        # Bit i: busy in iteration i.
        busy: dict[int, int] = collections.defaultdict(int)
        order = sorted(batches, key=lambda batch: (-num_conflicts(batch), -batch.total_size))
        self.num_iterations = 0
        for batch in order:
            taken = busy[batch.src_pe] | busy[batch.dest_pe]
            batch.iteration = (~taken & (taken + 1)).bit_length() - 1  # the lowest bit not set
            for pe in (batch.src_pe, batch.dest_pe):
                busy[pe] |= 1 << batch.iteration
            self.num_iterations = max(self.num_iterations, batch.iteration + 1)

    def _exchange_workload_summaries(
        self, workloads: Workloads, my_pe: int, n_pes: int, group: Group = None
    ) -> dict[BatchKey, WorkloadSummary]:
        """Return what is in the batches that this PE sends or receives. Collective."""
        mine = {
            dest_pe: [
                (
                    workload.total_size,
                    [task.task_id for task in workload.tasks],
                    [task.size for task in workload.tasks],
                )
                for workload in groups
            ]
            for dest_pe, groups in workloads.items()
            if dest_pe != my_pe
        }
        return {
            (src_pe, dest_pe, idx): WorkloadSummary(*summary)
            for src_pe, theirs in enumerate(bootstrap_for(group).all_gather(mine))
            for dest_pe, part in theirs.items()
            if my_pe in (src_pe, dest_pe)
            for idx, summary in enumerate(part)
        }
