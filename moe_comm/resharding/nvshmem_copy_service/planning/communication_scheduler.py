"""Which batch travels when: iterations in which no PE is asked for too much at once."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from moe_comm.peers.plain_data import decode_plain, encode_plain
from moe_comm.resharding.nvshmem_copy_service.logger import PELogger
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    ScheduledBatch,
    WorkloadGroup,
    WorkloadSummary,
)
from moe_comm.resharding.nvshmem_copy_service.planning.exchange import Group, exchange_for

__all__ = ["CommunicationScheduler", "FullDuplexScheduler"]

BatchKey = tuple[int, int, int]


class CommunicationScheduler:
    """Half-duplex: in one iteration a PE sends one batch, or receives one, or neither.

    Batches in conflict with most others come first, of equal ones the larger, and each takes the
    first iteration that has both its PEs free.

    Attributes:
        num_iterations: Of the last schedule.
    """

    def __init__(self) -> None:
        self.num_iterations = 0

    def build_schedule(
        self,
        workloads: Mapping[int, Sequence[WorkloadGroup]],
        my_pe: int,
        n_pes: int,
        group: Group = None,
    ) -> tuple[dict[int, list[ScheduledBatch]], dict[BatchKey, WorkloadSummary]]:
        """Agree on a schedule. Collective over the group.

        Args:
            workloads: This PE's batches by destination; those for itself do not travel.
            my_pe: This PE.
            n_pes: PEs of the group.
            group: Over which PEs talk.

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
        self,
        workloads: Mapping[int, Sequence[WorkloadGroup]],
        my_pe: int,
        n_pes: int,
        group: Group = None,
    ) -> list[ScheduledBatch]:
        """Every batch of every PE, with its size and without its tasks, in one order everywhere."""
        sizes = {
            dest_pe: [workload.total_size for workload in groups]
            for dest_pe, groups in workloads.items()
            if dest_pe != my_pe and groups
        }
        gathered = exchange_for(group).all_gather(sizes)
        if len(gathered) != n_pes:
            raise ValueError(f"n_pes must be {len(gathered)}, the ranks of the group, got {n_pes}")
        return [
            ScheduledBatch(src_pe, dest_pe, batch_index, iteration=-1, total_size=total_size)
            for src_pe, sizes_of_pe in enumerate(gathered)
            for dest_pe, dest_sizes in (sizes_of_pe or {}).items()
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
            batch.iteration = _lowest_zero(busy[batch.src_pe] | busy[batch.dest_pe])
            for pe in (batch.src_pe, batch.dest_pe):
                busy[pe] |= 1 << batch.iteration
            self.num_iterations = max(self.num_iterations, batch.iteration + 1)

    def _exchange_workload_summaries(
        self,
        workloads: Mapping[int, Sequence[WorkloadGroup]],
        my_pe: int,
        n_pes: int,
        group: Group = None,
    ) -> dict[BatchKey, WorkloadSummary]:
        """What is in the batches that this PE sends or receives; what others exchange is not read."""
        mine: list[list[WorkloadSummary]] = [[] for _ in range(n_pes)]
        for dest_pe, groups in workloads.items():
            if dest_pe != my_pe:
                mine[dest_pe] = [
                    WorkloadSummary(
                        workload.total_size,
                        [task.task_id for task in workload.tasks],
                        [task.size for task in workload.tasks],
                    )
                    for workload in groups
                ]
        received = exchange_for(group).all_to_all([encode_plain(part) for part in mine])
        summaries = {
            (my_pe, dest_pe, idx): summary
            for dest_pe, part in enumerate(mine)
            for idx, summary in enumerate(part)
        }
        for src_pe, payload in enumerate(received):
            # A rank that is excluded says nothing.
            said = decode_plain(payload, f"the batches of rank {src_pe}") if payload else []
            for idx, summary in enumerate(said):
                summaries[src_pe, my_pe, idx] = summary
        return summaries


class FullDuplexScheduler(CommunicationScheduler):
    """A PE sends one batch and receives one in the same iteration.

    Takes exactly as many iterations as the busiest sender has batches, or the busiest receiver,
    whichever are more: batches are the edges of a bipartite graph, iterations its colors, and
    where a batch finds no color free at both ends, the two colors free at either end are swapped
    along the path that is in the way (König's theorem).
    """

    def _assign_iterations(self, batches: list[ScheduledBatch]) -> None:
        """Set `iteration` of every batch, and `num_iterations`.

        Example:
            All-to-all between 4 PEs takes 3 iterations; a ring of any size takes 1.
        """
        num_sent = collections.Counter(batch.src_pe for batch in batches)
        num_received = collections.Counter(batch.dest_pe for batch in batches)
        self.num_iterations = max([*num_sent.values(), *num_received.values()], default=0)
        # Of every sender and every receiver, its batch in each iteration.
        senders: dict[int, _Calendar] = collections.defaultdict(_Calendar)
        receivers: dict[int, _Calendar] = collections.defaultdict(_Calendar)
        for batch in sorted(
            batches,
            key=lambda batch: (
                -num_sent[batch.src_pe] - num_received[batch.dest_pe],
                -batch.total_size,
            ),
        ):
            sender, receiver = senders[batch.src_pe], receivers[batch.dest_pe]
            iteration = _lowest_zero(sender.busy | receiver.busy)
            if iteration >= self.num_iterations:
                iteration = _lowest_zero(sender.busy)
                _swap_path(
                    senders, receivers, batch.dest_pe, iteration, _lowest_zero(receiver.busy)
                )
            batch.iteration = iteration
            sender.add(batch)
            receiver.add(batch)


class _Calendar:
    """The batches of one sender or one receiver by iteration."""

    def __init__(self) -> None:
        self.busy = 0  # bit i: in iteration i
        self.batches: dict[int, ScheduledBatch] = {}

    def add(self, batch: ScheduledBatch) -> None:
        self.busy |= 1 << batch.iteration
        self.batches[batch.iteration] = batch

    def remove(self, batch: ScheduledBatch) -> None:
        self.busy &= ~(1 << batch.iteration)
        del self.batches[batch.iteration]


def _swap_path(
    senders: Mapping[int, _Calendar],
    receivers: Mapping[int, _Calendar],
    dest_pe: int,
    wanted: int,
    free: int,
) -> None:
    """Free iteration `wanted` of receiver `dest_pe`, whose iteration `free` is free.

    Its batch of `wanted` moves to `free`; what its sender had there moves to `wanted`; and so on.
    The path visits no vertex twice and never a sender that is free in `wanted`.
    """
    path = []
    batch = receivers[dest_pe].batches.get(wanted)
    while batch is not None:
        path.append(batch)
        if batch.iteration == wanted:
            batch = senders[batch.src_pe].batches.get(free)
        else:
            batch = receivers[batch.dest_pe].batches.get(wanted)
    for batch in path:
        senders[batch.src_pe].remove(batch)
        receivers[batch.dest_pe].remove(batch)
    for batch in path:
        batch.iteration = free if batch.iteration == wanted else wanted
        senders[batch.src_pe].add(batch)
        receivers[batch.dest_pe].add(batch)


def _lowest_zero(bits: int) -> int:
    """Index of the lowest bit that is not set.

    Example:
        `_lowest_zero(0b1011) == 2`.
    """
    return (~bits & (bits + 1)).bit_length() - 1
