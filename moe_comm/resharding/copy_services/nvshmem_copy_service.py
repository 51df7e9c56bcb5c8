"""Copies by the pipeline of `RemoteCopyService`, behind the surface of a copy service."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from moe_comm.errors import CommunicationError
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.copy_services.base import RecvOp, SendOp
from moe_comm.resharding.copy_services.queued_copy_service import (
    Batch,
    QueuedCopyService,
    check_either,
    copy_pair,
)
from moe_comm.resharding.nvshmem_copy_service.service import RemoteCopyService

__all__ = ["NVSHMEMCopyService"]

_SAME, _OTHER = b"same", b"other"

OpKey: TypeAlias = "tuple[bool, int, int | None, int, torch.Size, tuple[int, ...], torch.dtype]"


@dataclasses.dataclass
class _Schedule:
    """What was last scheduled.

    Args:
        key: The requests it was made for.
        staged: For operations on tensors that are not contiguous, the contiguous tensors that take
            their place, by position among the requests.
    """

    key: tuple[OpKey, ...]
    staged: dict[int, torch.Tensor]


class NVSHMEMCopyService(QueuedCopyService):
    """Copies packed into slots that a pipeline fills, moves and empties.

    Every transfer needs a task id. The ranks connect in the first `run()`. A schedule is used again
    when every rank submits what it submitted the last time: the same ids, peers, shapes and
    addresses. Tensors that are not contiguous go through a copy, which is kept with the schedule.

    Args:
        group: The ranks: a process group, a `Bootstrap` such as `RankThreads(n)[i]`, or None for the
            default group.
        communicator: A communicator that exists, instead; `close()` does not destroy it.
        slot_bytes: Of each of the four slots of a rank, equal on all ranks; None to choose.

    Raises:
        RuntimeError: There is no process group.
        ValueError: Both `group` and `communicator` are given.
    """

    # The pipeline orders every slot by signals between its two ranks: when `run()` returns, all that
    # this rank receives is there and all that it sends has been read.
    requires_process_group_barrier = False
    takes_strided_tensors = True
    device_types = ("cpu",)

    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None = None,
        *,
        communicator: Communicator | None = None,
        slot_bytes: int | None = None,
    ) -> None:
        check_either(group, communicator)
        if group is None or isinstance(group, dist.ProcessGroup):
            if communicator is None and not dist.is_initialized():
                raise RuntimeError(
                    "torch.distributed must be initialized before NVSHMEMCopyService() is made "
                    "without a communicator"
                )
            super().__init__(group, communicator)
        else:
            super().__init__(ranks=group)
        self._ranks = group
        self._communicator = communicator
        self._owns_communicator = communicator is None
        self._slot_bytes = slot_bytes
        self._remote: RemoteCopyService | None = None
        self._schedule: _Schedule | None = None
        self._is_closed = False

    def _check(
        self, tensor: torch.Tensor, rank_name: str, rank_idx: int, task_id: int | None
    ) -> int | None:
        if task_id is None:
            self._refuse(
                RuntimeError(
                    "NVSHMEMCopyService requires a task_id for every transfer, got task_id=None"
                )
            )
        return super()._check(tensor, rank_name, rank_idx, task_id)

    def run(self) -> None:
        """Execute everything submitted since the last `run()`. Collective over the group.

        Raises:
            ValueError: A rank's input is bad or two ends disagree; on every rank, before any data
                moves. The service stays usable.
            CapacityError: The heap of some rank cannot hold its slots; likewise.
            PeerFailedError: A peer died or left.
            PeerTimeoutError: A peer did not arrive or stopped.
        """
        remote = self._connect()
        batch = self._take()
        pairs = self._pairs_within(batch)
        ops = self._remote_ops(batch)
        key = tuple(_key(op) for op in ops)
        schedule = self._schedule
        # Until this has gone through, the schedule is not that of the pipeline.
        self._schedule = None
        if schedule is None or schedule.key != key or batch.problem is not None:
            schedule = None
        if not self._all_have_the_same(schedule is not None):
            self._agree(batch)
            schedule = _register(remote, key, ops)
            remote.schedule(are_ends_alike=True)
        assert schedule is not None
        with torch.no_grad():
            for position, staged in schedule.staged.items():
                op = ops[position]
                if isinstance(op, SendOp):
                    copy_pair(op.tensor, staged)
            try:
                remote.run()
            except ValueError:
                raise  # nothing was written
            except BaseException:
                self._count_writes(ops, schedule)
                raise
            self._count_writes(ops, schedule)
            for position, staged in schedule.staged.items():
                op = ops[position]
                if isinstance(op, RecvOp):
                    copy_pair(staged, op.tensor)
            for send, recv in pairs:
                copy_pair(send.tensor, recv.tensor)
        self._schedule = schedule

    @staticmethod
    def _count_writes(ops: Sequence[SendOp | RecvOp], schedule: _Schedule) -> None:
        """Count what the pipeline wrote by address as writes to its tensors."""
        increment_version(
            [
                op.tensor
                for position, op in enumerate(ops)
                if isinstance(op, RecvOp) and position not in schedule.staged
            ]
        )

    def abandon(self, reason: str) -> None:
        """Make the next `run()` of every other rank raise with `reason`."""
        batch = self._take()
        batch.problem = reason
        self._schedule = None
        with contextlib.suppress(ValueError, CommunicationError):
            self._connect()
            self._all_have_the_same(False)
            self._agree(batch)

    def close(self) -> None:
        """Give the slots back. Idempotent."""
        self._is_closed = True
        self._schedule = None
        if self._remote is not None:
            self._remote.finalize()
            self._remote = None
        if self._owns_communicator and self._communicator is not None:
            self._communicator.destroy()
            self._communicator = None

    def _connect(self) -> RemoteCopyService:
        if self._is_closed:
            raise ValueError("the service has been closed")
        if self._remote is None:
            if self._communicator is None:
                self._communicator = Communicator(self._ranks)
            remote = RemoteCopyService(communicator=self._communicator, slot_bytes=self._slot_bytes)
            remote.init()
            self._remote = remote
        return self._remote

    @property
    def wire(self) -> Communicator | None:
        """The communicator of the ranks, once they have connected."""
        return None if self._remote is None else self._communicator

    def _gather(self, payload: bytes) -> list[bytes]:
        assert self._communicator is not None
        return self._communicator.all_gather(payload)

    def _all_have_the_same(self, is_same: bool) -> bool:
        return all(said == _SAME for said in self._gather(_SAME if is_same else _OTHER))

    def _remote_ops(self, batch: Batch) -> list[SendOp | RecvOp]:
        is_remote = [rank_idx != self.rank for rank_idx in range(self.world_size)]
        return [
            *(op for ops in itertools.compress(batch.sends, is_remote) for op in ops),
            *(op for ops in itertools.compress(batch.recvs, is_remote) for op in ops),
        ]


def _key(op: SendOp | RecvOp) -> OpKey:
    tensor = op.tensor
    is_send = isinstance(op, SendOp)
    peer_rank = op.dest_rank if isinstance(op, SendOp) else op.src_rank
    return (
        is_send,
        peer_rank,
        op.task_id,
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
    )


def _register(
    remote: RemoteCopyService, key: tuple[OpKey, ...], ops: Sequence[SendOp | RecvOp]
) -> _Schedule:
    """Give all requests to the pipeline, by address: it must not keep the tensors alive."""
    remote.clear_requests()
    staged: dict[int, torch.Tensor] = {}
    for position, op in enumerate(ops):
        tensor = op.tensor
        if not tensor.is_contiguous():
            tensor = torch.empty(tensor.shape, dtype=tensor.dtype)
            staged[position] = tensor
        num_bytes = tensor.numel() * tensor.element_size()
        assert op.task_id is not None
        if isinstance(op, SendOp):
            remote.register_send(op.task_id, tensor.data_ptr(), 0, num_bytes, op.dest_rank)
        else:
            remote.register_receive(op.task_id, tensor.data_ptr(), 0, num_bytes, op.src_rank)
    return _Schedule(key, staged)
