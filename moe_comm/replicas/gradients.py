"""Sums of the gradients of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from moe_comm.ep.placement import Placement
from moe_comm.replicas.prefetch import Copying, StagingArea
from moe_comm.replicas.slots import SlotTensors, batches_of, pieces_of
from moe_comm.resharding.copy_services.batched_copy import CopyItem

__all__ = ["GradientReduction"]

Slots = Sequence[tuple[int, int]]
"""Rank and local slot of an expert's owner and replicas."""


class _Sum(NamedTuple):
    """What is added on this rank: a piece of the owner's slot, and where those of replicas arrive."""

    owner: torch.Tensor
    parts: list[torch.Tensor]

    def add(self) -> None:
        """Add in the order of slots, in float32 at least."""
        with torch.inference_mode(self.owner.is_inference()), torch.no_grad():
            is_wide = self.owner.dtype.itemsize >= torch.float32.itemsize
            total = self.owner if is_wide else self.owner.float()
            for part in self.parts:
                total += part
            if not is_wide:
                self.owner.copy_(total)


class GradientReduction:
    """Gradients of one layer whose replicas are added into their owners, any number of times.

    Made by `ReplicaCopies.prepare_reduction`. Holds the tensors.
    """

    def __init__(
        self,
        copies: Copying,
        placement: Placement,
        slots: SlotTensors,
        *,
        to_all: bool,
        step_bytes: int | None,
    ) -> None:
        self._copies = copies
        self._slots = slots
        rank_idx = copies.communicator.rank_idx
        first_slots = [0]
        for held in placement.slots:
            first_slots.append(first_slots[-1] + len(held))
        experts: list[Slots] = [
            [(placement.slot_rank[s], s - first_slots[placement.slot_rank[s]]) for s in of_expert]
            for of_expert in placement.slots_of_expert
            if len(of_expert) > 1
        ]
        units = [
            (slots_of, piece) for piece in pieces_of(slots, step_bytes) for slots_of in experts
        ]
        batch_of = batches_of(
            (
                [
                    (slots_of[0][0], (len(slots_of) - 1) * piece.num_bytes),
                    *((rank, piece.num_bytes) for rank, _ in slots_of[1:]),
                ]
                for slots_of, piece in units
            ),
            step_bytes,
        )
        num_batches = max(batch_of, default=-1) + 1
        # Sums of a batch go out while what the next one adds comes in.
        num_runs = num_batches + (to_all and num_batches > 0)
        sends: list[list[CopyItem]] = [[] for _ in range(num_runs)]
        recvs: list[list[CopyItem]] = [[] for _ in range(num_runs)]
        areas = [StagingArea() for _ in range(num_batches)]
        arrivals: list[list[tuple[_Sum, int, int, int]]] = [[] for _ in range(num_batches)]
        for unit_idx, ((slots_of, piece), batch_idx) in enumerate(
            zip(units, batch_of, strict=True)
        ):
            owner_rank, owner_slot = slots_of[0]
            first_task = 2 * unit_idx * placement.num_slots
            added: _Sum | None = None
            if owner_rank == rank_idx:
                added = _Sum(piece.of(slots.views, owner_slot), [])
            for replica_idx, (replica_rank, replica_slot) in enumerate(slots_of[1:]):
                task_id = first_task + 2 * replica_idx
                if added is not None:
                    begin = areas[batch_idx].take(piece.num_bytes)
                    arrivals[batch_idx].append((added, begin, task_id, replica_rank))
                    if to_all:
                        sends[batch_idx + 1].append((task_id + 1, added.owner, replica_rank))
                elif replica_rank == rank_idx:
                    replica = piece.of(slots.views, replica_slot)
                    sends[batch_idx].append((task_id, replica, owner_rank))
                    if to_all:
                        recvs[batch_idx + 1].append((task_id + 1, replica, owner_rank))
        memory = StagingArea()
        memory.allocate(copies.communicator, max((area.num_bytes for area in areas), default=0))
        self._sums: list[list[_Sum]] = [[] for _ in range(num_runs)]
        for batch_idx, of_batch in enumerate(arrivals):
            for added, begin, task_id, replica_rank in of_batch:
                part = memory.view(begin, added.owner)
                if not added.parts:
                    self._sums[batch_idx].append(added)
                added.parts.append(part)
                recvs[batch_idx].append((task_id, part, replica_rank))
        self._runs = [
            copies.engine.prepare(*items, are_apart=True)
            for items in zip(sends, recvs, strict=True)
        ]

    def run(self) -> None:
        """Add what the gradients now hold. Collective.

        Raises:
            ValueError: A tensor was moved or freed on some rank; on every rank, before its batch moves.
            PeerFailedError: A peer died, left or gave up. Gradients are undefined.
            PeerTimeoutError: A peer did not come, or stopped; likewise.
        """
        for prepared, sums in zip(self._runs, self._sums, strict=True):
            self._copies.engine.run(prepared)
            for added in sums:
                added.add()
