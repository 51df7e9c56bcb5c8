"""Many copies between the tensors of ranks in one call, over the symmetric heap."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.utils.dlpack

from moe_comm.arguments import as_int, as_utf8, shortened, shown, text_of
from moe_comm.errors import CapacityError
from moe_comm.peers.communicator import Communicator, gathers
from moe_comm.peers.destroyable import Destroyable
from moe_comm.peers.missed_calls import tells_peers
from moe_comm.resharding.describe.tensor_table import TensorTable
from moe_comm.tensors.memory import problem_with_memory
from moe_comm.tensors.memory_overlap import first_overlap, is_same_place

if TYPE_CHECKING:
    from moe_comm import _host

__all__ = [
    "BatchedCopy",
    "CopyStats",
    "PreparedCopies",
    "copy_tensors",
    "problem_with_overlaps",
]

CopyItem = tuple[int, torch.Tensor, int]
"""Task id, tensor, rank of the other end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyStats:
    """Bytes that one run moved on this rank, and the time it took.

    Args:
        direct_bytes: Sent in place into tensors in peers' heaps.
        slot_bytes: Sent through slots.
        local_bytes: Copied between tensors of this rank.
        copy_ns: Spent moving bytes, and waiting for peers' bytes once every rank had come.
        total_ns: The whole run, with the wait for ranks that came later.
    """

    direct_bytes: int
    slot_bytes: int
    local_bytes: int
    copy_ns: int
    total_ns: int


class PreparedCopies:
    """Copies of this rank that a `BatchedCopy` can run any number of times.

    Made by `BatchedCopy.prepare`. Holds the tensors; a run copies what they then contain, and refuses
    where one has been moved or freed since this was made.
    """

    def __init__(
        self,
        engine: BatchedCopy,
        native: _host.PreparedCopies,
        problem: str | None,
        sends: Iterable[CopyItem],
        recvs: Iterable[CopyItem],
    ) -> None:
        from moe_comm import _host

        self._engine = engine
        self._native = native
        self._problem = problem
        received = list(recvs)
        self._items = [*sends, *received]
        self._tensors = [tensor for _, tensor, _ in self._items]
        self._table = TensorTable(self._tensors)
        self._written = _host.WrittenTensors(tensor for _, tensor, _ in received)

    @property
    def problem(self) -> str | None:
        """Problem of this rank's items, which every rank's run will raise; None if there is none."""
        return self._problem

    def _check_places(self) -> str | None:
        """Return the problem with the memory that the tensors lie in by now, or None."""
        if self._table.matches(self._tensors, has_dtensors=False):
            return None
        for task_id, tensor, _ in self._items:
            if (problem := problem_with_memory(tensor)) is not None:
                return f"task {task_id}: the tensor of shape {tuple(tensor.shape)} {problem}"
        return "a tensor has moved since its copies were prepared: prepare them again"


def problem_with_overlaps(
    sends: Sequence[tuple[int | None, torch.Tensor, int]],
    recvs: Sequence[tuple[int | None, torch.Tensor, int]],
    rank_idx: int,
) -> str | None:
    """Return the problem with the positions of this rank's sources and destinations in memory, or None.

    Peers write destinations while sources are still read, in no order that a rank could know.
    """

    def is_copy_to_itself(recv_idx: int, send_idx: int) -> bool:
        recv_task, destination, src_rank = recvs[recv_idx]
        send_task, source, dst_rank = sends[send_idx]
        is_local = src_rank == dst_rank == rank_idx and recv_task == send_task
        return is_local and is_same_place(destination, source)

    meeting = first_overlap(
        [tensor for _, tensor, _ in recvs], [tensor for _, tensor, _ in sends], is_copy_to_itself
    )
    if meeting is None:
        return None
    task_id, _, src_rank = recvs[meeting.written]
    other_task, _, other_rank = (sends if meeting.is_read else recvs)[meeting.other]
    if meeting.is_read:
        return (
            f"the destination of task {task_id} (from rank {src_rank}) and the source of task "
            f"{other_task} (to rank {other_rank}) share bytes"
        )
    return (
        f"the destinations of tasks {task_id} (from rank {src_rank}) and {other_task} (from rank "
        f"{other_rank}) share bytes"
    )


def _problem_with_items(sends: object, recvs: object, error: Exception) -> str:
    """Return the problem of items that could not even be looked at."""
    for name, items in (("sends", sends), ("recvs", recvs)):
        if not isinstance(items, list):
            return f"{name} must be items (task_id, tensor, peer_rank), got {shown(items)}"
    text = text_of(error).split("\n", 1)[0]
    if "(task_id, tensor, peer_rank)" not in text:
        text = f"items must be (task_id, tensor, peer_rank): {type(error).__name__}: {text}"
    return shortened(text)


def _reject_run(error: Exception, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Tell peers, who are in a run."""
    args[0].reject(text_of(error))


class BatchedCopy(Destroyable):
    """Copies between tensors of all ranks of a communicator, many in one call.

    A copy has two ends, on two ranks or one: a send and a receive with the same task id. Both have
    the same dtype and number of elements, and any strides: elements go in logical row-major order.
    Destinations in the receiver's heap (`Communicator.empty`) are written in place by the sender;
    others go through slots in the sender's heap, made when a run first needs them: once to all that
    receive the same tensor.

    Collective. Used by one thread at a time.

    Args:
        communicator: The ranks; its backend must be "host".
        slot_bytes: Bytes of one slot, a multiple of 64; None for what keeps all slots in the last-level
            cache. Equal on every rank.
        num_slots: Slots of a rank for each that receives from it, >= 1; None for 4. Equal on every rank.

    Raises:
        ValueError: The backend has no heap, or an argument breaks a rule above; on every rank.
        CapacityError: The heap of some rank is full; on every rank.
        PeerFailedError: A peer died or left.
        PeerTimeoutError: A peer did not arrive.

    Example:
        Rank 0 sends a column to rank 1, which receives it as a row:

            engine = BatchedCopy(communicator)
            sends = [(7, weight[:, 3], 1)] if communicator.rank_idx == 0 else []
            receives = [(7, row, 0)] if communicator.rank_idx == 1 else []
            engine.run(engine.prepare(sends, receives))
    """

    @gathers
    def __init__(
        self,
        communicator: Communicator,
        *,
        slot_bytes: int | None = None,
        num_slots: int | None = None,
    ) -> None:
        from moe_comm import _host

        native = communicator.require_native()
        self.communicator = communicator

        def check() -> str:
            if slot_bytes is not None:
                as_int("slot_bytes", slot_bytes, None, (1 << 63) - 1)
            if num_slots is not None:
                as_int("num_slots", num_slots, None, (1 << 31) - 1)
            return "a BatchedCopy"

        communicator.check_together(check)
        # Values below 1 are refused by the native part, on every rank alike; 0 is its default.
        self._native = _host.BatchedCopy.create(
            native,
            0 if slot_bytes is None else slot_bytes or -1,
            0 if num_slots is None else num_slots or -1,
        )
        self._is_destroyed = False
        communicator.adopt(self)

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot."""
        return self._native.slot_bytes

    @property
    def num_slots(self) -> int:
        """Slots from each rank to each other."""
        return self._native.num_slots

    def prepare(
        self, sends: Iterable[CopyItem], recvs: Iterable[CopyItem], *, are_apart: bool = False
    ) -> PreparedCopies:
        """Prepare the copies that this rank takes part in, once for any number of runs. Local.

        What is wrong with an item (a rank outside the communicator, a task id twice for one peer, a
        tensor outside CPU memory, a destination that shares bytes with itself or with another, more
        than 8 dimensions that cannot be merged, something that is no such item at all) is raised by the run, on every rank. So is a source
        that shares bytes with a destination, unless they are the two ends of one copy in the very
        same place, which changes nothing.

        Args:
            sends: `(task_id, tensor, rank that receives)`. Tensors may repeat or share memory.
            recvs: `(task_id, tensor, rank that sends)`. Strided destinations may interleave.
            are_apart: Whether the caller has just seen, by `problem_with_overlaps`, that they share no
                bytes.
        """
        try:
            sends, recvs = list(sends), list(recvs)
            native = self._native.prepare(sends, recvs)
            problem = native.problem or (
                None
                if are_apart
                else problem_with_overlaps(sends, recvs, self.communicator.rank_idx)
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, peers must hear of it
            native, problem = self._native.prepare([], []), _problem_with_items(sends, recvs, error)
        if problem:
            sends, recvs = [], []  # which no run will look at
        return PreparedCopies(self, native, problem or None, sends, recvs)

    @tells_peers(_reject_run)
    def run(
        self,
        prepared: PreparedCopies,
        *,
        are_in_place: bool = False,
        with_checksums: bool = False,
    ) -> CopyStats:
        """Copy. Collective, blocking; returns when everything has landed on this rank.

        Args:
            prepared: Copies that `prepare` returned.
            are_in_place: Whether the caller has just seen that no tensor has been moved or freed.
            with_checksums: Whether to hash sources while they are copied, for `PieceChecksums`. Local: other
                ranks need not.

        Raises:
            ValueError: Some rank's items are wrong, a task has one end only, or its ends differ in
                dtype or size: the same error on every rank. Nothing was written; the next run works.
            CapacityError: The heap of some rank cannot hold its slots, likewise.
            PeerFailedError: A peer died, left or gave up. Destinations are undefined until copied
                again; `Communicator.recover()` makes this usable among the living.
            PeerTimeoutError: A peer did not come, or stopped; likewise.
        """
        if not isinstance(prepared, PreparedCopies):
            self.reject(f"prepared must be PreparedCopies, got {shown(prepared)}")
        if prepared._engine is not self:
            self.reject("the copies were prepared by another BatchedCopy")
        problem = prepared.problem or (None if are_in_place else prepared._check_places())
        if problem is not None:
            self.reject(problem)
        try:
            stats = self._native.run(prepared._native, with_checksums)
        except (ValueError, CapacityError):
            raise  # nothing was written
        except BaseException:
            prepared._written.count()
            raise
        prepared._written.count()
        return CopyStats(**stats)

    def reject(self, message: str) -> NoReturn:
        """Call in place of `run` when this rank has nothing right to run. Collective.

        Raises:
            ValueError: `message`, with the rank, on every rank.
        """
        self._native.reject(as_utf8(message) or "gave up, without a reason")

    def destroy(self) -> None:
        """Give the memory back; peers that run afterwards get a ValueError. Local, idempotent."""
        if not self._is_destroyed:
            self._is_destroyed = True
            self._native.destroy()


def copy_tensors(sources: list[torch.Tensor], destinations: list[torch.Tensor]) -> None:
    """Copy tensors to others of this process, by as many threads as torch has. Local.

    Stores go past the cache where it would not hold what is copied. Counts as an operation in place.

    Args:
        sources: Tensors to read, on the CPU, of any strides.
        destinations: Tensors to write, of the same dtypes and shapes; they share no bytes with sources or
            each other.

    Raises:
        ValueError: Numbers, dtypes or bytes differ; nothing was written.
    """
    from moe_comm import _host

    _host.copy_tensors(sources, destinations, torch.get_num_threads())
