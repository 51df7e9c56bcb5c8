"""The transport of a reshard plan: batched point-to-point copies."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.peers.bootstrap import check_process_of

__all__ = ["CopyService", "RecvOp", "SendOp", "match_local_ops_by_task_id"]


@dataclasses.dataclass
class SendOp:
    """One tensor to be sent. `dest_rank` is a rank of the service's group."""

    task_id: int | None
    tensor: torch.Tensor
    dest_rank: int


@dataclasses.dataclass
class RecvOp:
    """One tensor to be received. `src_rank` is a rank of the service's group."""

    task_id: int | None
    tensor: torch.Tensor
    src_rank: int


class CopyService(abc.ABC):
    """Moves a batch of tensors between the ranks of a group: the pieces of a plan, or what you submit.

    Every rank submits its sends and receives, then all call `run()`, those with nothing to copy too; a rank
    that cannot calls `abandon()` instead, or its peers wait. The two ends of a transfer carry the same
    `task_id`, of which one exists between two ranks in one direction. Ranks are ranks of `group`.

    The services of this package move any dtype, any strides on both ends, scalars and empty tensors; shapes
    may differ where the number of elements is equal, which go in row-major order. They copy after the
    streams on which CUDA tensors were submitted, and count what they write as an operation of torch in
    place does (`Tensor._version`), after a failure that may have written as well. Task ids, sizes and
    dtypes of both ends are compared before anything is written. A ValueError with both values on every rank
    are: a copy without partner or whose ends differ, a task id that comes twice, a rank outside the group, a
    tensor that cannot be moved (sparse, quantized, a DTensor, a lazily conjugated one), one whose storage was
    freed or cut, and destinations that share memory with themselves or, where contiguous, with each other.
    The service goes on with the next batch.

    A mistake that `submit_send` or `submit_recv` can see raises at once and spoils the batch: `run()` raises
    the same again, or the rank goes its own way with `abandon()`. A source must not change, and must not
    overlap a destination of the same batch, until `run()` has returned.

    Args:
        group: A process group; None for the default group.

    Example:
        service = SymmetricCopyService()          # on every rank of the default group
        try:
            if service.rank == 0:
                service.submit_send(weight[:, :128], dest_rank=1, task_id=7)
            if service.rank == 1:
                service.submit_recv(shard, src_rank=0, task_id=7)
        except Exception as error:
            service.abandon(str(error))           # run() of every other rank raises it, with this rank's number
            raise
        service.run()
        service.close()
    """

    # True where `execute_reshard_plan` must hold a barrier after `run()`.
    requires_process_group_barrier = True
    # True where both ends may be strided views; otherwise the executor hands over contiguous tensors.
    takes_strided_tensors = False
    # True where the group of the constructor may be a `Bootstrap`, too.
    takes_bootstrap = False

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if group is not None and not hasattr(group, "rank"):
            # `dist.new_group` returns a number to processes that are not members.
            raise ValueError(
                f"group must be a process group that has this process as a member, got {group!r}"
            )
        check_process_of(group, type(self).__name__)
        self.group = group
        self.rank = group.rank() if group is not None else dist.get_rank()
        self.world_size = group.size() if group is not None else dist.get_world_size()

    @abc.abstractmethod
    def submit_send(
        self, src_tensor: torch.Tensor, dest_rank: int, task_id: int | None = None
    ) -> None:
        """Register `src_tensor` to be sent to `dest_rank` by the next `run()`."""

    @abc.abstractmethod
    def submit_recv(
        self, dest_tensor: torch.Tensor, src_rank: int, task_id: int | None = None
    ) -> None:
        """Register `dest_tensor` to be received from `src_rank` by the next `run()`."""

    @abc.abstractmethod
    def run(self) -> None:
        """Execute everything submitted since the last `run()`. Collective over the group.

        Raises:
            ValueError: Only while no destination has been written, on any rank.
        """

    def abandon(self, reason: str) -> None:
        """Take no part in the next `run()` of the group; what was submitted is dropped.

        For a rank that fails between the first submission and `run()`: a service whose peers would
        wait makes their `run()` raise with `reason`. Raises nothing itself, so that the caller can
        raise its own error; returns once the peers know.

        Args:
            reason: Reason in one line.
        """
        return

    def close(self) -> None:
        """Release what the service holds. Idempotent."""
        return


def match_local_ops_by_task_id(
    local_sends: Sequence[Any], local_recvs: Sequence[Any], backend_name: str, rank: int
) -> list[tuple[Any, Any]]:
    """Pair the sends and receives of one rank with itself.

    Args:
        local_sends: Objects with a `task_id`.
        local_recvs: Objects with a `task_id`.
        backend_name: Name of the backend, for error messages.
        rank: This rank, for error messages.

    Returns:
        `(send, recv)` pairs in the order of `local_recvs`.

    Raises:
        RuntimeError: An operation has no task id, comes twice, or has no partner.
    """
    where = f"{backend_name} copy service, rank {rank}"
    for op in (*local_sends, *local_recvs):
        if op.task_id is None:
            raise RuntimeError(f"{where}: a copy within one rank requires a task_id")
    sends = {op.task_id: op for op in local_sends}
    recvs = {op.task_id: op for op in local_recvs}
    if len(sends) < len(local_sends) or len(recvs) < len(local_recvs):
        raise RuntimeError(
            f"{where}: unmatched local ops: {len(local_sends)} sends have {len(sends)} task ids, "
            f"{len(local_recvs)} receives have {len(recvs)}"
        )
    if len(sends) != len(recvs):
        odd = sorted(sends.keys() ^ recvs.keys())
        raise RuntimeError(
            f"{where}: unmatched local ops: {len(sends)} sends, {len(recvs)} receives; without a "
            f"partner: task ids {odd[:8]}"
        )
    for task_id in recvs:
        if task_id not in sends:
            raise RuntimeError(f"{where}: missing local send for task id {task_id}")
    return [(sends[op.task_id], op) for op in local_recvs]
