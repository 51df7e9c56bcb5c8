"""Two slots to send from and two to receive into, in memory that peers address."""

from __future__ import annotations

import torch

from moe_comm.peers.agree import raise_different
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.nvshmem_copy_service.memory.slot_signals import NUM_SLOTS, SlotSignals
from moe_comm.resharding.nvshmem_copy_service.memory.symmetric_bytes import SymmetricBytes
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import MAX_SEGMENT_SIZE

__all__ = ["DoubleBufferManager"]

_ALIGNMENT = 64


class DoubleBufferManager:
    """The slots of one PE: iteration i uses slot i modulo 2.

    Args:
        slot_size: Bytes of a slot; a PE has four.
        communicator: Whose heap holds them; needed by `allocate`.
    """

    def __init__(
        self, slot_size: int = MAX_SEGMENT_SIZE, communicator: Communicator | None = None
    ) -> None:
        if slot_size < 1:
            raise ValueError(f"slot_size must be >= 1, got {slot_size}")
        self.slot_size = slot_size
        self.communicator = communicator
        self.send_slots: list[torch.Tensor | None] = [None] * NUM_SLOTS
        self.recv_slots: list[torch.Tensor | None] = [None] * NUM_SLOTS
        self._memory: SymmetricBytes | None = None
        self._signals: SlotSignals | None = None
        # By (slot, destination): addresses of the slot to send and of the slot to fill.
        self._put_places: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._put_bytes = torch.zeros(1, dtype=torch.int64)

    @property
    def signals(self) -> SlotSignals:
        """What orders the slots of all PEs."""
        if self._signals is None:
            raise RuntimeError("the slots are not allocated; call allocate() first")
        return self._signals

    def allocate(self) -> None:
        """Make the slots. Collective; again after `free`.

        Raises:
            RuntimeError: There is no communicator.
            ValueError: Ranks ask for different sizes; on every rank.
            CapacityError: A rank's heap cannot hold its slots; on every rank.
        """
        if self._memory is not None:
            return
        if self.communicator is None:
            raise RuntimeError("DoubleBufferManager needs a communicator to allocate slots")
        step = -(-self.slot_size // _ALIGNMENT) * _ALIGNMENT
        sizes = [int(item or b"0") for item in self.communicator.all_gather(b"%d" % self.slot_size)]
        raise_different(
            "ranks ask for different slots",
            [{"slot_size": size} if size else None for size in sizes],
        )
        memory = SymmetricBytes(self.communicator, 2 * NUM_SLOTS * step)
        # Touched now, so that no put pays for it.
        memory.local.zero_()
        self._signals = SlotSignals(self.communicator)
        self._memory = memory
        for idx in range(NUM_SLOTS):
            self.send_slots[idx] = memory.local[idx * step :][: self.slot_size]
            self.recv_slots[idx] = memory.local[(NUM_SLOTS + idx) * step :][: self.slot_size]
        for dest_pe, size in enumerate(sizes):
            for idx in range(NUM_SLOTS if size else 0):
                filled = memory.peer(dest_pe)[(NUM_SLOTS + idx) * step :]
                self._put_places[idx, dest_pe] = (
                    torch.tensor([self.get_send_slot(idx).data_ptr()]),
                    torch.tensor([filled.data_ptr()]),
                )

    def get_send_slot(self, iteration: int) -> torch.Tensor:
        """uint8, `slot_size`: what `iteration` packs into."""
        return self._slot(self.send_slots, iteration)

    def get_recv_slot(self, iteration: int) -> torch.Tensor:
        """uint8, `slot_size`: what `iteration` unpacks from."""
        return self._slot(self.recv_slots, iteration)

    def put(self, iteration: int, dest_pe: int, num_bytes: int) -> None:
        """Copy the first bytes of this PE's send slot into the receive slot of `dest_pe`.

        The caller has waited until that slot is ready.

        Raises:
            ValueError: `num_bytes` are more than a slot, or `dest_pe` has no slots.
        """
        key = (iteration % NUM_SLOTS, dest_pe)
        if self.communicator is None or key not in self._put_places:
            raise ValueError(f"PE {dest_pe} has no slots to put into")
        if not 0 <= num_bytes <= self.slot_size:
            raise ValueError(f"a slot has {self.slot_size} bytes, got a batch of {num_bytes}")
        src, dst = self._put_places[key]
        self._put_bytes[0] = num_bytes
        native = self.communicator.require_native()
        native.copy_chunks(src, dst, self._put_bytes, is_streaming=False)

    def give_up(self, reason: str) -> None:
        """Tell every peer that this rank's run failed. Peers may still put into its slots.

        So the slots keep their memory until the communicator is destroyed.
        """
        if self.communicator is not None and self._memory is not None:
            self.communicator.retain((self._memory, self._signals))
            self.signals.give_up(reason)

    def free(self) -> None:
        """Give the slots back. Idempotent.

        Not while a peer may still put: a rank whose run ended without an error has got all it gets.
        """
        self.send_slots = [None] * NUM_SLOTS
        self.recv_slots = [None] * NUM_SLOTS
        self._put_places = {}
        self._signals = None
        self._memory = None

    def _slot(self, slots: list[torch.Tensor | None], iteration: int) -> torch.Tensor:
        slot = slots[iteration % NUM_SLOTS]
        if slot is None:
            raise RuntimeError("the slots are not allocated; call allocate() first")
        return slot
