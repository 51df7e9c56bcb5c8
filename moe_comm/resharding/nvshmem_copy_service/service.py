"""Copies of bytes between the PEs of a group: compared once, run any number of times."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.peers.agree import raise_together, raise_unequal
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator import Communicator
from moe_comm.peers.gather_objects import gather_objects
from moe_comm.resharding.copy_services.symmetric_copy_service import (
    PreparedBatch,
    SymmetricCopyService,
)
from moe_comm.resharding.nvshmem_copy_service.core.gpu_resource_manager import GPUResourceManager
from moe_comm.resharding.nvshmem_copy_service.logger import PELogger
from moe_comm.resharding.nvshmem_copy_service.memory.tensor_pointer_utils import (
    TensorPointerExtractor,
    bytes_at,
)
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import ReceiveRequest, SendRequest
from moe_comm.tensors.memory import check_memory, problem_with_memory

__all__ = ["RemoteCopyService"]


class RemoteCopyService:
    """Registers sends and receives, compares them with those of all PEs, and moves them.

    `init`, `schedule`, `run` and `abandon` are collective over the group: every PE calls the same
    of them, except that one may call `abandon` where others call `schedule` or `run`.

    Args:
        group: Group whose ranks are the PEs; None for the default group.
        communicator: Communicator to talk over, in place of one made of `group`; it is not destroyed.
        slot_bytes: Bytes of a slot, see `BatchedCopy`; equal on all PEs. None to choose.
        device: "cpu".
        logs_dir: Folder where every PE writes `pe_<N>.log`; None for ordinary logging only.

    Raises:
        TypeError: Another option is given.
        ValueError: Both `group` and `communicator` are given.

    Example:
        service = RemoteCopyService(communicator=comm)
        service.init()
        if service.my_pe == 0:
            service.register_send(7, weights, 0, weights.nbytes, dest_pe=1)
        if service.my_pe == 1:
            service.register_receive(7, target, 0, target.nbytes, src_pe=0)
        service.schedule()
        service.run()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None = None,
        *,
        communicator: Communicator | None = None,
        slot_bytes: int | None = None,
        device: str | torch.device = "cpu",
        logs_dir: str | Path | None = None,
        **others: object,
    ) -> None:
        if others:
            raise TypeError(
                f"RemoteCopyService() takes no {', '.join(sorted(others))}: it packs and orders no "
                "batches (full_duplex, packing and alignment are to be left out)"
            )
        if group is not None and communicator is not None:
            raise ValueError(
                f"group and communicator both say who the PEs are, got {group} and {communicator}"
            )
        self.gpu_resources = GPUResourceManager(device, communicator)
        self.send_requests: list[SendRequest] = []
        self.receive_requests: list[ReceiveRequest] = []
        self._group = group
        self._slot_bytes = slot_bytes
        self._logs_dir = logs_dir
        self._copies: SymmetricCopyService | None = None
        self._prepared: PreparedBatch | None = None
        self._num_schedules = 0
        self._places: list[tuple[int, torch.Tensor, int]] = []

    @property
    def my_pe(self) -> int:
        """This PE, -1 before `init`."""
        return self.gpu_resources.my_pe

    @property
    def n_pes(self) -> int:
        """PEs of the group, -1 before `init`."""
        return self.gpu_resources.n_pes

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.gpu_resources.device

    @property
    def initialized(self) -> bool:
        """Return whether `init` was called."""
        return self.gpu_resources.initialized

    def init(self, log_level: str = "INFO") -> None:
        """Connect. Collective; does nothing when initialized.

        Args:
            log_level: Least level that is logged.

        Raises:
            RuntimeError: The device cannot be used.
            ValueError: PEs ask for different slots, or the communicator has no heap.
        """
        if self.initialized:
            return
        resources = self.gpu_resources
        resources.init(self._group)
        try:
            PELogger.init(self.my_pe, log_level, self._logs_dir)
            assert resources.communicator is not None
            self._copies = SymmetricCopyService(
                communicator=resources.communicator, slot_bytes=self._slot_bytes
            )
        except BaseException:
            self.finalize()
            raise
        PELogger.info("PE %d of %d", self.my_pe, self.n_pes)

    def register_send(
        self, task_id: int, src_tensor: Any, src_pos: int, size: int, dest_pe: int
    ) -> None:
        """Have `dest_pe` receive bytes of this PE. Local.

        Args:
            task_id: Id that is equal on both ends, >= 0, used once for each pair of PEs.
            src_tensor: Contiguous tensor, array, or the address of memory that outlives the runs.
            src_pos: First byte.
            size: Bytes.
            dest_pe: Receiver; may be this PE.

        Raises:
            RuntimeError: Not initialized.
            TypeError: `src_tensor` is none of these.
            ValueError: A rule above is broken; a caller that gives up tells its peers by `abandon`.
        """
        self._check_request("destination", task_id, src_tensor, src_pos, size, dest_pe)
        self.send_requests.append(SendRequest(task_id, src_tensor, src_pos, size, dest_pe))

    def register_receive(
        self, task_id: int, dest_tensor: Any, dest_pos: int, size: int, src_pe: int
    ) -> None:
        """Receive bytes of `src_pe`. Local. Arguments and errors as in `register_send`."""
        self._check_request("source", task_id, dest_tensor, dest_pos, size, src_pe)
        self.receive_requests.append(ReceiveRequest(task_id, dest_tensor, dest_pos, size, src_pe))

    def schedule(self) -> None:
        """Compare what is registered now with what all PEs have registered. Collective.

        Raises:
            RuntimeError: Not initialized.
            ValueError: A task of some PE has no partner, has another size at its partner or comes twice,
                destinations share bytes, or a PE called something else; on every PE.
            PeerFailedError: A PE died or left.
            PeerTimeoutError: A PE did not call.
        """
        copies = self._require_copies()
        self._prepared = None
        registered = [
            *((request.task_id, request.src_tensor) for request in self.send_requests),
            *((request.task_id, request.dest_tensor) for request in self.receive_requests),
        ]
        self._places = [
            (task_id, tensor, tensor.data_ptr())
            for task_id, tensor in registered
            if isinstance(tensor, torch.Tensor)
        ]
        self._agree("schedule", self._problem_with_places())
        # The comparison tells every PE what a submission refuses.
        with contextlib.suppress(TypeError, ValueError):
            for send in self.send_requests:
                data = bytes_at(send.src_tensor, send.src_pos, send.size)
                copies.submit_send(data, send.dest_pe, send.task_id)
            for recv in self.receive_requests:
                data = bytes_at(recv.dest_tensor, recv.dest_pos, recv.size)
                copies.submit_recv(data, recv.src_pe, recv.task_id)
        self._prepared = copies.prepare_compared()
        self._num_schedules += 1
        PELogger.info("%d sends, %d receives", len(self.send_requests), len(self.receive_requests))

    def run(self) -> None:
        """Move everything, as last scheduled, from what the tensors hold now. Collective.

        Returns when this PE has received everything and may overwrite what it sent.

        Raises:
            RuntimeError: Not initialized, or not scheduled.
            ValueError: A PE called something else or gave up, or a tensor was moved or freed; on every
                PE, nothing was moved.
            CapacityError: The heap of some PE cannot hold its slots; likewise.
            PeerFailedError: A PE died or left; tensors to be received are undefined.
            PeerTimeoutError: A PE did not call or does not get on.
        """
        copies = self._require_copies()
        if self._prepared is None:
            raise RuntimeError("Must call schedule() before run()")
        self._agree(f"run {self._num_schedules}", self._problem_with_places())
        copies.run_prepared(self._prepared)

    def abandon(self, reason: str) -> None:
        """Take no part in the next `schedule` or `run`: it raises ValueError on every PE that calls it.

        Collective with that call. What was registered is dropped.

        Args:
            reason: Reason that the others are told.
        """
        self._require_copies()
        self.clear_requests()
        self._tell("abandon", f"gave up: {reason}")

    def clear_requests(self) -> None:
        """Forget what was registered, and the schedule. Local."""
        self.send_requests = []
        self.receive_requests = []
        self._prepared = None
        self._places = []

    def finalize(self) -> None:
        """Give the slots back and leave. Local; idempotent.

        A PE whose last `run` has returned waits for nobody: what it gave away has arrived.
        """
        self.clear_requests()
        if self._copies is not None:
            self._copies.close()
            self._copies = None
        self.gpu_resources.finalize()
        PELogger.shutdown()

    def _require_copies(self) -> SymmetricCopyService:
        if self._copies is None:
            raise RuntimeError("RemoteCopyService not initialized")
        return self._copies

    def _check_request(
        self, role: str, task_id: int, tensor: Any, position: int, size: int, pe: int
    ) -> None:
        self._require_copies()
        if not 0 <= pe < self.n_pes:
            raise ValueError(f"task {task_id}: {role} PE must be in [0, {self.n_pes}), got {pe}")
        if task_id < 0:
            raise ValueError(f"task_id must be >= 0, got {task_id}")
        if position < 0 or size < 0:
            raise ValueError(
                f"task {task_id}: position and size must be >= 0, got {position} and {size}"
            )
        if not isinstance(tensor, torch.Tensor):
            TensorPointerExtractor.get_pointer(tensor)
            return
        if tensor.device.type != self.device.type:
            raise ValueError(
                f"task {task_id}: tensors are on {self.device}, got one on {tensor.device}"
            )
        if not tensor.is_contiguous():
            raise ValueError(
                f"task {task_id}: the tensor must be contiguous, got shape {tuple(tensor.shape)} "
                f"with strides {tensor.stride()}"
            )
        num_bytes = tensor.numel() * tensor.element_size()
        if position + size > num_bytes:
            raise ValueError(
                f"task {task_id}: bytes [{position}, {position + size}) of a tensor of {num_bytes}"
            )
        check_memory(f"task {task_id}: the tensor", tensor)

    def _problem_with_places(self) -> str | None:
        """Return what keeps this PE from running with the addresses that were scheduled, or None."""
        for task_id, tensor, address in self._places:
            if (problem := problem_with_memory(tensor)) is not None:
                return f"task {task_id}: the tensor {problem}"
            if tensor.data_ptr() != address:
                return (
                    f"task {task_id}: the tensor was scheduled at 0x{address:x}, it is at "
                    f"0x{tensor.data_ptr():x}: call schedule() again"
                )
        return None

    def _tell(self, call: str, problem: str | None) -> list[Any]:
        copies = self._require_copies()
        return gather_objects(copies.communicator.all_gather, (call, problem))

    def _agree(self, call: str, problem: str | None) -> None:
        """Raise on every PE what is wrong on any, or that PEs are in different calls. Collective."""
        said = self._tell(call, problem)
        for pe, item in enumerate(said):
            if item is None:
                raise ValueError(
                    f"rank {pe} has failed: a service includes every rank of its group"
                )
        raise_together(problem for _, problem in said)
        raise_unequal("ranks are in different calls", [its_call for its_call, _ in said])
