"""Copies under Megatron's name `NVSHMEMCopyService`, made by `SymmetricCopyService`."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
import torch.distributed as dist

from moe_comm.errors import CommunicationError
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.copy_services.queued_copy_service import QueuedCopyService, check_either
from moe_comm.resharding.copy_services.symmetric_copy_service import (
    PreparedBatch,
    SymmetricCopyService,
)

__all__ = ["NVSHMEMCopyService"]


class NVSHMEMCopyService(QueuedCopyService):
    """Ranks of one machine copy through the symmetric heap; every transfer needs a task id.

    Differs from `SymmetricCopyService`, which makes the copies, in that and in when ranks connect:
    in the first `run()`, not where the service is made.

    Args:
        group: The ranks: a process group, a `Bootstrap` such as `RankThreads(n)[i]`, or None for the
            default group.
        communicator: A communicator that exists, instead; `close()` does not destroy it.
        slot_bytes: Bytes of one slot, equal on all ranks; None to choose.

    Raises:
        RuntimeError: There is no process group.
        ValueError: Both `group` and `communicator` are given.
    """

    requires_process_group_barrier = False
    takes_strided_tensors = True
    takes_bootstrap = True
    device_types = ("cpu",)

    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None = None,
        *,
        communicator: Communicator | None = None,
        slot_bytes: int | None = None,
    ) -> None:
        check_either(group, communicator)
        if group is None and communicator is None and not dist.is_initialized():
            raise RuntimeError(
                "torch.distributed must be initialized before NVSHMEMCopyService() is made "
                "without a communicator"
            )
        if group is None or isinstance(group, dist.ProcessGroup):
            super().__init__(group, communicator)
        else:
            super().__init__(ranks=group)
        self._group = group
        self._communicator = communicator
        self._slot_bytes = slot_bytes
        self._symmetric: SymmetricCopyService | None = None
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

    @property
    def communicator(self) -> Communicator | None:
        """The communicator of the ranks, once they have connected."""
        return None if self._symmetric is None else self._symmetric.communicator

    def run(self) -> None:
        """Execute everything submitted since the last `run()`; see `SymmetricCopyService.run`."""
        self.run_prepared(dataclasses.replace(self.prepare(), are_in_place=True))

    def prepare(self) -> PreparedBatch:
        """Take what was submitted, without running it. Collective where ranks have not connected."""
        return self._connect().prepare_batch(self._take())

    def run_prepared(self, prepared: PreparedBatch) -> None:
        """Run a batch, for the first time or again; see `SymmetricCopyService.run_prepared`."""
        self._connect().run_prepared(prepared)

    def abandon(self, reason: str) -> None:
        """Make the next `run()` of every other rank raise with `reason`."""
        self._take()
        with contextlib.suppress(ValueError, CommunicationError):
            self._connect().abandon(reason)

    def close(self) -> None:
        """Give the slots back. Idempotent."""
        self._is_closed = True
        if self._symmetric is not None:
            self._symmetric.close()
            self._symmetric = None

    def _connect(self) -> SymmetricCopyService:
        if self._is_closed:
            raise ValueError("the service has been closed")
        if self._symmetric is None:
            self._symmetric = SymmetricCopyService(
                self._group, self._communicator, slot_bytes=self._slot_bytes
            )
        return self._symmetric
