"""Sums of the gradients of replicas."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_comm.replicas.prefetch import Copying, StagingArea
from moe_comm.replicas.slots import Piece, SlotTensors, batches_of, pieces_of
from moe_comm.resharding.copy_services.batched_copy import CopyItem

Slots = Sequence[tuple[int, int]]
"""Rank and local slot of an expert's owner, and of each of its replicas."""


class _Sum:
    """Sum that is added on this rank.

    Args:
        owner: A piece of the owner's slot.

    Attributes:
        arrivals: Task id, first byte where it arrives and rank of each replica, in the order of slots.
        parts: Parts that arrive.
    """

    def __init__(self, owner: torch.Tensor) -> None:
        self.owner = owner
        self.arrivals: list[tuple[int, int, int]] = []
        self.parts: list[torch.Tensor] = []

    def take_parts(self, memory: StagingArea) -> None:
        """Let the parts lie in `memory`."""
        self.parts = [memory.view(begin, self.owner) for _, begin, _ in self.arrivals]

    def items(self) -> list[CopyItem]:
        """Return the copies that are received."""
        return [
            (task_id, part, rank_idx)
            for part, (task_id, _, rank_idx) in zip(self.parts, self.arrivals, strict=True)
        ]

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

    Args:
        copies: The ranks.
        experts: Experts that have replicas, which lie on other ranks than their owners.
        slots: The gradients.
        to_all: Whether replicas get the sums.
        step_bytes: Most bytes that a rank receives at once, unless one row has more.
    """

    def __init__(
        self,
        copies: Copying,
        experts: Sequence[Slots],
        slots: SlotTensors,
        *,
        to_all: bool,
        step_bytes: int | None,
    ) -> None:
        self._copies = copies
        self._to_all = to_all
        most = max(map(len, experts), default=1)
        piece_bytes = None if step_bytes is None else max(1, step_bytes // max(1, most - 1))
        units = [(held, piece) for piece in pieces_of(slots, piece_bytes) for held in experts]
        batch_of = batches_of(
            (
                [
                    (held[0][0], (len(held) - 1) * piece.num_bytes),
                    *((rank_idx, piece.num_bytes) for rank_idx, _ in held[1:]),
                ]
                for held, piece in units
            ),
            step_bytes,
        )
        num_batches = max(batch_of, default=-1) + 1
        # Sums of a batch go out while what the next one adds comes in.
        num_runs = num_batches + (to_all and num_batches > 0)
        self._sends: list[list[CopyItem]] = [[] for _ in range(num_runs)]
        self._recvs: list[list[CopyItem]] = [[] for _ in range(num_runs)]
        self._sums: list[list[_Sum]] = [[] for _ in range(num_runs)]
        areas = [StagingArea() for _ in range(num_runs)]
        for unit_idx, ((held, piece), batch_idx) in enumerate(zip(units, batch_of, strict=True)):
            self._add_unit(held, piece, slots, batch_idx, areas[batch_idx], unit_idx * 2 * most)
        memory = max(areas, key=lambda area: area.num_bytes, default=StagingArea())
        memory.allocate(copies.communicator)
        for of_batch, recvs in zip(self._sums, self._recvs, strict=True):
            for added in of_batch:
                added.take_parts(memory)
                recvs += added.items()
        self._runs = [
            copies.engine.prepare(*items, are_apart=True)
            for items in zip(self._sends, self._recvs, strict=True)
        ]

    def _add_unit(
        self,
        held: Slots,
        piece: Piece,
        slots: SlotTensors,
        batch_idx: int,
        area: StagingArea,
        first_task: int,
    ) -> None:
        """Say what this rank has to do with a piece of one expert's gradient."""
        rank_idx = self._copies.communicator.rank_idx
        (owner_rank, owner_slot), *replicas = held
        added: _Sum | None = None
        if owner_rank == rank_idx:
            added = _Sum(piece.of(slots.views, owner_slot))
            self._sums[batch_idx].append(added)
        for task_id, (replica_rank, replica_slot) in enumerate(replicas, first_task):
            back_id = task_id + len(held)
            if added is not None:
                added.arrivals.append((task_id, area.take(piece.num_bytes), replica_rank))
                if self._to_all:
                    self._sends[batch_idx + 1].append((back_id, added.owner, replica_rank))
            elif replica_rank == rank_idx:
                replica = piece.of(slots.views, replica_slot)
                self._sends[batch_idx].append((task_id, replica, owner_rank))
                if self._to_all:
                    self._recvs[batch_idx + 1].append((back_id, replica, owner_rank))

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
