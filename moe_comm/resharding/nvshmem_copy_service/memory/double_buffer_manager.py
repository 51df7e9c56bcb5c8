"""Two slots to send from and two to receive into, in memory that peers address."""

from __future__ import annotations

import contextlib

import torch

from moe_comm.errors import CommunicationError
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.copy_services.batched_copy import BatchedCopy
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import MAX_SEGMENT_SIZE, ScheduledBatch

__all__ = ["NUM_SLOTS", "DoubleBufferManager"]

NUM_SLOTS = 2


class DoubleBufferManager:
    """The slots of one PE: iteration i uses slot i modulo 2.

    Args:
        slot_size: Bytes of a slot; a PE has four.
        communicator: Communicator whose heap holds them; needed by `allocate`.
    """

    def __init__(
        self, slot_size: int = MAX_SEGMENT_SIZE, communicator: Communicator | None = None
    ) -> None:
        if slot_size < 1:
            raise ValueError(f"slot_size must be >= 1, got {slot_size}")
        self.slot_size = slot_size
        self.communicator = communicator
        self.send_slots: list[torch.Tensor] = []
        self.recv_slots: list[torch.Tensor] = []
        self._copies: BatchedCopy | None = None

    def allocate(self) -> None:
        """Make the slots, filled with zeros. Collective; again after `free`.

        Raises:
            RuntimeError: There is no communicator.
            ValueError: Ranks ask for different sizes, or a rank's heap cannot hold its slots; on every
                rank.
        """
        if self._copies is not None:
            return
        communicator = self.communicator
        if communicator is None:
            raise RuntimeError("DoubleBufferManager needs a communicator to allocate slots")
        slots: list[torch.Tensor] = []

        def make_slots() -> str:
            slots.extend(
                communicator.empty(self.slot_size, dtype=torch.uint8).zero_()
                for _ in range(2 * NUM_SLOTS)
            )
            return f"slots of slot_size={self.slot_size}"

        communicator.check_together(make_slots)
        self._copies = BatchedCopy(communicator)
        self.send_slots, self.recv_slots = slots[:NUM_SLOTS], slots[NUM_SLOTS:]

    def get_send_slot(self, iteration: int) -> torch.Tensor:
        """Return what `iteration` packs into: uint8, `slot_size`."""
        self._require_copies()
        return self.send_slots[iteration % NUM_SLOTS]

    def get_recv_slot(self, iteration: int) -> torch.Tensor:
        """Return what `iteration` unpacks from: uint8, `slot_size`."""
        self._require_copies()
        return self.recv_slots[iteration % NUM_SLOTS]

    def exchange(
        self, iteration: int, sent: ScheduledBatch | None, received: ScheduledBatch | None
    ) -> None:
        """Copy this PE's send slot into the receive slot of `sent.dest_pe`. Collective, blocking.

        Args:
            iteration: Iteration whose slots are used; equal on all PEs.
            sent: Contents of the send slot, or None.
            received: Contents that come into the receive slot, or None.

        Raises:
            ValueError: A batch is larger than a slot, has one end only or another size there, or a PE
                gave up; on every PE.
            PeerFailedError: A PE died or left.
            PeerTimeoutError: A PE did not call or does not get on.
        """
        copies = self._require_copies()
        for batch in filter(None, (sent, received)):
            if not 0 <= batch.total_size <= self.slot_size:
                copies.reject(
                    f"a slot has {self.slot_size} bytes, got a batch of {batch.total_size}"
                )
        send_slot, recv_slot = self.get_send_slot(iteration), self.get_recv_slot(iteration)
        prepared = copies.prepare(
            [(b.batch_index, send_slot[: b.total_size], b.dest_pe) for b in [sent] if b],
            [(b.batch_index, recv_slot[: b.total_size], b.src_pe) for b in [received] if b],
        )
        copies.run(prepared, are_in_place=True)

    def give_up(self, reason: str) -> None:
        """Take no part in the `exchange` that the other PEs are in: it raises ValueError there."""
        with contextlib.suppress(ValueError, CommunicationError):
            self._require_copies().reject(f"gave up: {reason}")

    def free(self) -> None:
        """Give the slots back. Idempotent. Not while a peer may still write to them."""
        self.send_slots, self.recv_slots = [], []
        if self._copies is not None:
            self._copies.destroy()
            self._copies = None

    def _require_copies(self) -> BatchedCopy:
        if self._copies is None:
            raise RuntimeError("the slots are not allocated; call allocate() first")
        return self._copies
