"""Weights of one layer on their way to another placement."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch

from moe_comm.errors import CommunicationError
from moe_comm.peers.agree import FirstError
from moe_comm.peers.communicator import Communicator
from moe_comm.replicas.plan import ReplicaMove
from moe_comm.replicas.slots import SlotTensors, batches_of, pieces_of
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy, CopyItem, copy_tensors

_ALIGNMENT = 64


class Copying(Protocol):
    """The ranks that copy, and by what."""

    communicator: Communicator
    engine: BatchedCopy

    def agree(self, call: str, first: FirstError, stated: dict[str, str]) -> None:
        """Raise on every rank what is wrong on any, or stated differently. Collective."""


class StagingArea:
    """Places in heap memory of this rank for tensors that arrive."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def take(self, num_bytes: int) -> int:
        """The first byte of a place, which does not exist before `allocate`."""
        begin = self.num_bytes
        self.num_bytes = begin + math.ceil(num_bytes / _ALIGNMENT) * _ALIGNMENT
        return begin

    def allocate(self, communicator: Communicator) -> None:
        """Make the memory of all places.

        Raises:
            CapacityError: The heap has no room.
        """
        if self.num_bytes:
            with torch.inference_mode(mode=False):
                self._memory = communicator.empty(self.num_bytes, dtype=torch.uint8)

    def view(self, begin: int, like: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor of dtype and shape of `like`."""
        num_bytes = like.numel() * like.element_size()
        return self._memory[begin : begin + num_bytes].view(like.dtype).view(like.shape)


class Prefetch:
    """Weights of one layer that come to where a placement wants them, in steps, and then all at once.

    Made by `ReplicaCopies.prefetch`. Until `commit` all slots that the present placement fills are as they
    were and may be used; bytes arrive in its empty slots, and in heap memory for the others. Ends with
    `commit` or `abandon`; what raises in between leaves the present placement whole.

    Attributes:
        num_steps: Steps until all bytes are there, equal on all ranks.
        num_steps_done: Steps that have come to their end.
        recv_bytes: Bytes that this rank receives.
        staging_bytes: Heap memory that this rank holds until the end.
        is_committed: Whether the wanted placement holds on this rank.

    Raises:
        CapacityError: The heap has no room for what arrives.
    """

    def __init__(
        self,
        copies: Copying,
        moves: Sequence[ReplicaMove],
        slots: SlotTensors,
        step_bytes: int | None,
    ) -> None:
        self.is_committed = False
        self.num_steps_done = 0
        self._copies = copies
        self._slots = slots
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._ending = ""
        self.recv_bytes = 0
        units = [(move, piece) for piece in pieces_of(slots, step_bytes) for move in moves]
        batch_of = batches_of(
            (
                [
                    (place, piece.num_bytes)
                    for place in (("from", move.src_rank), ("to", move.dst_rank))
                ]
                for move, piece in units
            ),
            step_bytes,
        )
        self.num_steps = max(batch_of, default=-1) + 1
        rank_idx = copies.communicator.rank_idx
        own = [move for move in moves if move.dst_rank == rank_idx]
        arrive = self._places(own)
        sends: list[list[CopyItem]] = [[] for _ in range(self.num_steps)]
        recvs: list[list[CopyItem]] = [[] for _ in range(self.num_steps)]
        for task_id, ((move, piece), batch_idx) in enumerate(zip(units, batch_of, strict=True)):
            if move.src_rank == rank_idx:
                source = piece.of(slots.views, move.src_slot)
                sends[batch_idx].append((task_id, source, move.dst_rank))
            if move.dst_rank == rank_idx:
                place = piece.within(arrive[move.dst_slot][piece.tensor_idx])
                recvs[batch_idx].append((task_id, place, move.src_rank))
                self.recv_bytes += piece.num_bytes
        # Places in empty slots and in memory of its own share no bytes with slots that are read.
        self._steps = [
            copies.engine.prepare(*items, are_apart=True)
            for items in zip(sends, recvs, strict=True)
        ]

    def _places(self, moves: list[ReplicaMove]) -> dict[int, list[torch.Tensor]]:
        """Return for every slot that changes a tensor of each of the list, in which its bytes arrive."""
        area = StagingArea()
        views = self._slots.views
        begins = {
            (move.dst_slot, tensor_idx): area.take(of_tensor[0].numel() * of_tensor[0].itemsize)
            for move in moves
            if not move.is_empty
            for tensor_idx, of_tensor in enumerate(views)
        }
        area.allocate(self._copies.communicator)
        self.staging_bytes = area.num_bytes
        found = {}
        for move in moves:
            of_slot = [of_tensor[move.dst_slot] for of_tensor in views]
            if not move.is_empty:
                staged = [
                    area.view(begins[move.dst_slot, tensor_idx], slot)
                    for tensor_idx, slot in enumerate(of_slot)
                ]
                self._staged += zip(of_slot, staged, strict=True)
                of_slot = staged
            found[move.dst_slot] = of_slot
        return found

    @property
    def is_complete(self) -> bool:
        """Return whether all bytes are there, as then on every rank; `commit` is next."""
        return self.num_steps_done == self.num_steps and not self._ending

    def step(self) -> bool:
        """Move what one step may move. Collective, in the order of calls of its `ReplicaCopies`.

        Returns:
            Whether all bytes are there. Then a step does nothing.

        Raises:
            ValueError: The prefetch has ended on some rank, a slot was moved or freed, or ranks step
                different prefetches; on every rank.
            CapacityError: A heap has no room for slots of the copies; on every rank.
            PeerFailedError: A peer died, left or gave up: the prefetch has ended, as by `abandon`.
            PeerTimeoutError: A peer did not come, or stopped; likewise.
        """
        if self._ending:
            self._copies.engine.reject(f"step of a prefetch that was {self._ending}")
        if not self.is_complete:
            try:
                self._copies.engine.run(self._steps[self.num_steps_done])
            except CommunicationError:
                self._end("broken off")  # others may have done this step
                raise
            self.num_steps_done += 1
        return self.is_complete

    def rewind(self) -> None:
        """Have the next steps move all bytes once more, from what the weights then hold. Local; all ranks do so.

        For prefetches into empty slots alone, which need no `commit`.
        """
        self.num_steps_done = 0

    def commit(self) -> None:
        """Let the wanted placement hold: slots get what has arrived. Collective.

        Ranks agree first, then each copies by itself. Where a peer dies while they agree, some of the living
        may have committed and others, who raise, not: after `recover()` all call this again, and all have.

        Raises:
            ValueError: Bytes are missing on some rank, the prefetch was abandoned, a slot was moved or
                freed, or ranks commit different prefetches; on every rank. Nothing was written.
            PeerFailedError: A peer died, left or gave up; nothing was written on this rank.
            PeerTimeoutError: A peer did not come; likewise.
        """
        with FirstError() as first:
            if self._ending and not self.is_committed:
                raise ValueError(f"commit of a prefetch that was {self._ending}")
            if not (self.is_complete or self.is_committed):
                raise ValueError(
                    f"commit after {self.num_steps_done} of {self.num_steps} steps of a prefetch"
                )
            self._slots.check_places("weights")
        self._copies.agree("commit", first, {})
        slots, arrived = ([pair[i] for pair in self._staged] for i in (0, 1))
        copy_tensors(arrived, slots)
        self.is_committed = True
        self._end("committed")

    def abandon(self) -> None:
        """Forget what has arrived; the present placement stays. Local, idempotent; all ranks do so.

        A peer that steps or commits on hears of it by a step or commit of this rank, which raises.

        Raises:
            ValueError: It was committed.
        """
        if self.is_committed:
            raise ValueError("abandon of a prefetch that was committed")
        self._end("abandoned")

    def _end(self, ending: str) -> None:
        self._ending = ending
        self._steps, self._staged = [], []
