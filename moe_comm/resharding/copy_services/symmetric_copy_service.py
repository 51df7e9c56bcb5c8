"""Copies through the symmetric heap that dispatch uses."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence

import torch.distributed as dist

from moe_comm.errors import CommunicationError
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.copy_services.base import RecvOp, SendOp
from moe_comm.resharding.copy_services.batched_copy import (
    BatchedCopy,
    CopyItem,
    CopyStats,
    PreparedCopies,
)
from moe_comm.resharding.copy_services.queued_copy_service import (
    Batch,
    QueuedCopyService,
    check_either,
)

__all__ = ["PreparedBatch", "SymmetricCopyService"]


@dataclasses.dataclass(frozen=True)
class PreparedBatch:
    """Result of `SymmetricCopyService.prepare`: one batch, to be run any number of times.

    Args:
        copies: Copies of the batch; None if it was wrong before they were prepared.
        problem: Message about what is wrong with the batch, which every rank's run raises; None if nothing
            is.
        are_in_place: Whether who runs it sees for himself that no tensor has been moved or freed.
        with_checksums: Whether sources are hashed while they are copied.
    """

    copies: PreparedCopies | None
    problem: str | None
    are_in_place: bool = False
    with_checksums: bool = False


class SymmetricCopyService(QueuedCopyService):
    """Ranks of one machine copy straight between their tensors, or through slots of the heap.

    A destination in the heap (`Communicator.empty`) is written in place by its sender. Others
    receive through slots, whatever their size: for each receiver, alone and of a set that receives the same
    bytes, at most 6 such sets, and no more than goes through them. `run()` returns when this rank's destinations are
    written and its sources have been read; it needs no barrier. Tensors may have any strides,
    of at most 8 dimensions that cannot be merged.
    Transfers without task ids are matched by their order per pair.

    Collective: every rank makes it.

    Args:
        group: The ranks: a process group, a `Bootstrap` such as `RankThreads(n)[i]`, or None for the
            default group. The service makes a `Communicator` of it and destroys it in `close()`.
        communicator: Communicator that exists, in place of `group`; its backend must be "host".
        slot_bytes: Bytes of one slot; None to choose.
        num_slots: Slots per pair of ranks; None to choose.

    Attributes:
        communicator: Communicator whose heap is used.
        last_stats: Statistics of the last `run()`, None before it.

    Raises:
        ValueError: Both `group` and `communicator` are given, or there is no heap.
    """

    requires_process_group_barrier = False
    takes_strided_tensors = True
    takes_bootstrap = True
    device_types = ("cpu",)

    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None = None,
        communicator: Communicator | None = None,
        *,
        slot_bytes: int | None = None,
        num_slots: int | None = None,
    ) -> None:
        check_either(group, communicator)
        self._owns_communicator = communicator is None
        self.communicator = Communicator(group) if communicator is None else communicator
        super().__init__(ranks=self.communicator)
        self.last_stats: CopyStats | None = None
        try:
            self._copies = BatchedCopy(
                self.communicator, slot_bytes=slot_bytes, num_slots=num_slots
            )
        except BaseException:
            if self._owns_communicator:
                self.communicator.destroy()
            raise

    def run(self) -> None:
        """Execute everything submitted since the last `run()` or `prepare()`. Collective.

        Raises:
            ValueError: A rank's input is bad or two ends disagree; on every rank, before any data
                moves. The service stays usable.
            CapacityError: The heap of some rank cannot hold its slots; likewise.
            PeerFailedError: A peer died or left. `communicator.recover()` makes the service usable
                among the living.
            PeerTimeoutError: A peer did not arrive or stopped; likewise.
        """
        self.run_prepared(dataclasses.replace(self.prepare(), are_in_place=True))

    def prepare(self) -> PreparedBatch:
        """Take what was submitted, without running it. Local.

        What is wrong with it is raised by `run_prepared`, on every rank.
        """
        return self.prepare_batch(self._take())

    def prepare_batch(self, batch: Batch) -> PreparedBatch:
        """Return a batch ready to be run; what is wrong with it is raised by `run_prepared`. Local."""
        if batch.problem is not None:
            return PreparedBatch(None, batch.problem)
        # A batch without a problem has none with overlaps.
        copies = self._copies.prepare(_items(batch.sends), _items(batch.recvs), are_apart=True)
        return PreparedBatch(copies, copies.problem)

    def prepare_compared(self) -> PreparedBatch:
        """Take what was submitted and compare both ends of it now, not in its first run. Collective.

        Raises:
            ValueError: A rank's input is bad or two ends disagree; on every rank.
        """
        batch = self._take()
        self._pairs_within(batch)
        self._agree(batch)
        return self.prepare_batch(batch)

    def _gather(self, payload: bytes) -> list[bytes]:
        return self.communicator.all_gather(payload)

    def run_prepared(self, prepared: PreparedBatch) -> None:
        """Run a batch, for the first time or again. Collective; raises what `run()` does.

        A tensor that was moved or freed since it was submitted is refused.
        """
        if prepared.copies is None:
            self._copies.reject(prepared.problem or "")
        else:
            self.last_stats = self._copies.run(
                prepared.copies,
                are_in_place=prepared.are_in_place,
                with_checksums=prepared.with_checksums,
            )

    def abandon(self, reason: str) -> None:
        """Make the next `run()` of every other rank raise with `reason`."""
        self._take()
        with contextlib.suppress(ValueError, CommunicationError):
            self._copies.reject(reason)

    def close(self) -> None:
        """Free the slots, and destroy the communicator if the service made it. Idempotent."""
        self._copies.destroy()
        if self._owns_communicator:
            self.communicator.destroy()


def _items(by_peer: Sequence[Sequence[SendOp | RecvOp]]) -> list[CopyItem]:
    """(task id, tensor, peer) of every transfer; where there is no id, one that tells the order.

    Negative, so that it can never be the id of a transfer that has one.
    """
    return [
        (op.task_id if op.task_id is not None else -1 - position, op.tensor, peer_rank)
        for peer_rank, ops in enumerate(by_peer)
        for position, op in enumerate(ops)
    ]
