"""Who may write a slot and who may read it: one word per pair of PEs and slot."""

from __future__ import annotations

import torch

from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.nvshmem_copy_service.memory.symmetric_bytes import SymmetricBytes

__all__ = ["NUM_SLOTS", "SlotSignals"]

NUM_SLOTS = 2
_WORD_BYTES = 64  # a cache line each, so that waiting for one does not slow stores to another


class SlotSignals:
    """Numbers that peers post to each other, ever larger ones.

    A receiver posts `ready` to the PE that may fill one of its slots next; that PE posts `arrived`
    when it has. Two PEs that exchange nothing never wait for each other.

    Byte map of a rank's memory, words 64 bytes apart, for peer p and slot s:
      [0, 2n) word 2p + s: what p posted as ready, for this rank's puts into slot s of p
      [2n, 4n) word 2n + 2p + s: what p posted as arrived, in slot s of this rank

    Collective to make.

    Args:
        communicator: Its ranks are the PEs.
    """

    def __init__(self, communicator: Communicator) -> None:
        self._native = communicator.require_native()
        num_words = 2 * NUM_SLOTS * communicator.num_ranks
        self._bytes = SymmetricBytes(communicator, num_words * _WORD_BYTES)
        self._bytes.local.zero_()
        rank_idx, num_ranks = communicator.rank_idx, communicator.num_ranks
        self._own = _words(self._bytes.local)
        # Of each peer, the words that this rank posts.
        self._posted: dict[int, list[torch.Tensor]] = {}
        # Nobody posts before every rank has zeroed its words.
        present = communicator.all_gather(b"zeroed")
        for peer_idx in range(num_ranks):
            if present[peer_idx]:
                words = _words(self._bytes.peer(peer_idx))
                self._posted[peer_idx] = [
                    words[(kind * num_ranks + rank_idx) * NUM_SLOTS + slot_idx]
                    for kind in range(2)
                    for slot_idx in range(NUM_SLOTS)
                ]
        self._first_arrived = num_ranks * NUM_SLOTS
        self.epoch = 0
        """Largest number used so far; equal on all ranks between runs that completed."""

    def take_epochs(self, num_iterations: int) -> int:
        """Use the next `num_iterations` numbers; iteration i has the result plus i."""
        first = self.epoch + 1
        self.epoch += num_iterations
        return first

    def post_ready(self, src_pe: int, slot_idx: int, epoch: int) -> None:
        """Let `src_pe` fill slot `slot_idx` of this rank in iteration `epoch`."""
        self._native.post_signal(self._posted[src_pe][slot_idx], epoch, src_pe)

    def await_ready(self, dest_pe: int, slot_idx: int, epoch: int) -> None:
        """Wait until `dest_pe` lets this rank fill its slot `slot_idx` in iteration `epoch`.

        Raises:
            PeerFailedError: The peer died, left or gave up.
            PeerTimeoutError: It does not get on.
        """
        word = self._own[dest_pe * NUM_SLOTS + slot_idx]
        self._native.await_signal(word, epoch, dest_pe, "a free slot")

    def post_arrived(self, dest_pe: int, slot_idx: int, epoch: int) -> None:
        """Tell `dest_pe` that its slot `slot_idx` holds the batch of iteration `epoch`."""
        self._native.post_signal(self._posted[dest_pe][NUM_SLOTS + slot_idx], epoch, dest_pe)

    def await_arrived(self, src_pe: int, slot_idx: int, epoch: int) -> None:
        """Wait until slot `slot_idx` of this rank holds the batch of iteration `epoch`.

        Raises:
            PeerFailedError: The peer died, left or gave up.
            PeerTimeoutError: It does not get on.
        """
        word = self._own[self._first_arrived + src_pe * NUM_SLOTS + slot_idx]
        self._native.await_signal(word, epoch, src_pe, "a batch of tensors")

    def give_up(self, reason: str) -> None:
        """Tell every peer that this rank posts nothing any more."""
        self._native.give_up_slots(reason)


def _words(memory: torch.Tensor) -> list[torch.Tensor]:
    """Its words, as vectors of one int64."""
    numbers = memory.view(torch.int64)
    step = _WORD_BYTES // 8
    return [numbers[begin : begin + 1] for begin in range(0, numbers.numel(), step)]
