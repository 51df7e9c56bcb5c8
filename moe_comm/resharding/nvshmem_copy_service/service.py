"""Copies of bytes between the PEs of a group: planned once, run any number of times."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version

from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator import Communicator
from moe_comm.resharding.nvshmem_copy_service import agreement
from moe_comm.resharding.nvshmem_copy_service.core.gpu_resource_manager import GPUResourceManager
from moe_comm.resharding.nvshmem_copy_service.core.kernel_launcher import KernelLauncher
from moe_comm.resharding.nvshmem_copy_service.core.pipeline_executor import PipelineExecutor
from moe_comm.resharding.nvshmem_copy_service.logger import PELogger
from moe_comm.resharding.nvshmem_copy_service.memory.double_buffer_manager import (
    DoubleBufferManager,
)
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    IterationSchedule,
    ReceiveRequest,
    ScheduledBatch,
    SendRequest,
    WorkloadGroup,
    WorkloadSummary,
)
from moe_comm.resharding.nvshmem_copy_service.planning.communication_scheduler import (
    BatchKey,
    CommunicationScheduler,
    FullDuplexScheduler,
)
from moe_comm.resharding.nvshmem_copy_service.planning.exchange import CommunicatorExchange
from moe_comm.resharding.nvshmem_copy_service.planning.gpu_execution_planner import (
    GPUExecutionPlanner,
)
from moe_comm.resharding.nvshmem_copy_service.planning.task_segmenter import TaskSegmenter
from moe_comm.resharding.nvshmem_copy_service.planning.workload_packer import WorkloadPacker
from moe_comm.tensors.memory import check_memory, problem_with_memory

__all__ = ["DEFAULT_SLOT_BYTES", "RemoteCopyService"]

DEFAULT_SLOT_BYTES = 1024 * 1024
"""A slot that stays in the cache between the PE that fills it and the one that empties it."""


class RemoteCopyService:
    """Registers sends and receives, agrees with all PEs on a schedule, and runs it.

    `init`, `schedule`, `run` and `abandon` are collective over the group: every PE calls the same
    of them, except that one may call `abandon` where others call `schedule` or `run`.

    Args:
        group: Its ranks are the PEs; None for the default group.
        communicator: Over which to talk, in place of one made of `group`; it is not destroyed.
        slot_bytes: Of each of this PE's four slots; equal on all PEs. None for 1 MiB.
        full_duplex: Let a PE send and receive in one iteration.
        packing: "first_fit" or "next_fit", see `WorkloadPacker`.
        alignment: Of every task in its slot; copies of aligned tensors then stay aligned.
        device: "cpu".
        logs_dir: Where every PE writes `pe_<N>.log`; None for ordinary logging only.

    Raises:
        ValueError: An argument breaks a rule above.

    Example:
        ```python
        service = RemoteCopyService(communicator=comm)
        service.init()
        if service.my_pe == 0:
            service.register_send(7, weights, 0, weights.nbytes, dest_pe=1)
        if service.my_pe == 1:
            service.register_receive(7, target, 0, target.nbytes, src_pe=0)
        service.schedule()
        service.run()
        ```
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None = None,
        *,
        communicator: Communicator | None = None,
        slot_bytes: int | None = None,
        full_duplex: bool = True,
        packing: str = "first_fit",
        alignment: int = 16,
        device: str | torch.device = "cpu",
        logs_dir: str | Path | None = None,
    ) -> None:
        if group is not None and communicator is not None:
            raise ValueError(
                f"group and communicator both say who the PEs are, got {group} and {communicator}"
            )
        slot_bytes = DEFAULT_SLOT_BYTES if slot_bytes is None else slot_bytes
        self.gpu_resources = GPUResourceManager(device, communicator)
        self.buffer_manager = DoubleBufferManager(slot_bytes)
        self.kernel_launcher = KernelLauncher(device=device)
        self.pipeline_executor: PipelineExecutor | None = None
        self.task_segmenter = TaskSegmenter(slot_bytes)
        self.workload_packer = WorkloadPacker(slot_bytes, packing=packing, alignment=alignment)
        self.comm_scheduler = FullDuplexScheduler() if full_duplex else CommunicationScheduler()
        self.gpu_planner = GPUExecutionPlanner(alignment=alignment, device=device)
        self.send_requests: list[SendRequest] = []
        self.receive_requests: list[ReceiveRequest] = []
        self.iter_schedules: list[IterationSchedule] | None = None
        self.num_iterations = 0
        self._settings = f"slots of {slot_bytes} bytes, full_duplex={full_duplex}, packing={packing!r}, alignment={alignment}"
        self._group = group
        self._logs_dir = logs_dir
        self._exchange: CommunicatorExchange | None = None
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
        """Where tensors live."""
        return self.gpu_resources.device

    @property
    def initialized(self) -> bool:
        """Whether `init` was called."""
        return self.gpu_resources.initialized

    def init(self, log_level: str = "INFO") -> None:
        """Connect and make the slots. Collective; does nothing when initialized.

        Args:
            log_level: Least level that is logged.

        Raises:
            RuntimeError: The device cannot be used.
            ValueError: Ranks ask for different slots, or the communicator has no heap.
            CapacityError: A rank's heap cannot hold its slots.
        """
        if self.initialized:
            return
        self.gpu_resources.init(self._group)
        try:
            self._init_parts(log_level)
        except BaseException:
            self.finalize()
            raise

    def _init_parts(self, log_level: str) -> None:
        resources = self.gpu_resources
        communicator = resources.communicator
        assert communicator is not None
        PELogger.init(self.my_pe, log_level, self._logs_dir)
        self._exchange = CommunicatorExchange(communicator)
        self.buffer_manager.communicator = communicator
        self.buffer_manager.allocate()
        self.kernel_launcher.communicator = communicator
        self.kernel_launcher.load_kernels()
        self.kernel_launcher.set_streams(resources.pack_stream, resources.unpack_stream)
        self.pipeline_executor = PipelineExecutor(
            self.kernel_launcher,
            self.buffer_manager,
            self.my_pe,
            producer_stream=resources.current_stream,
        )
        self.pipeline_executor.set_streams(
            resources.pack_stream,
            resources.unpack_stream,
            resources.send_stream,
            resources.copy_stream,
            resources.torch_pack_stream_wrapper,
            resources.torch_unpack_stream_wrapper,
            resources.torch_send_stream_wrapper,
            resources.torch_copy_stream_wrapper,
        )
        self.pipeline_executor.set_events(*resources.create_events())
        PELogger.info("PE %d of %d, %s", self.my_pe, self.n_pes, self._settings)

    def register_send(
        self, task_id: int, src_tensor: Any, src_pos: int, size: int, dest_pe: int
    ) -> None:
        """Have `dest_pe` receive bytes of this PE. Local.

        Args:
            task_id: Equal on both ends, >= 0, used once for each pair of PEs.
            src_tensor: Contiguous tensor, or the address of memory that outlives the runs.
            src_pos: First byte.
            size: Bytes.
            dest_pe: Receiver; may be this PE.

        Raises:
            RuntimeError: Not initialized.
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

    def schedule(self, *, are_ends_alike: bool = False) -> None:
        """Agree on who sends what when, for what is registered now. Collective.

        Args:
            are_ends_alike: Whether PEs have compared the two ends of all transfers already.

        Raises:
            RuntimeError: Not initialized.
            ValueError: On every PE, when on any of them a task has no partner, another size at its
                partner, comes twice, or is too large; or a PE called something else.
            PeerFailedError: A PE died or left.
            PeerTimeoutError: A PE did not call.
        """
        exchange = self._require_exchange()
        self.iter_schedules = None
        problem: str | None = None
        sends: list[SendRequest] = []
        receives: list[ReceiveRequest] = []
        try:
            sends, receives = self._segments()
            self._places = self._tensors_at()
            problem = self._problem_with_places()
        except ValueError as error:
            problem = str(error)
        agreement.agree(exchange, "schedule", self._settings, problem)
        workloads = self.workload_packer.pack_workloads(sends, self.n_pes)
        batches, summaries = self.comm_scheduler.build_schedule(
            workloads, self.my_pe, self.n_pes, group=exchange
        )
        if not are_ends_alike:
            problem = agreement.unmatched_tasks(
                self.my_pe,
                self.send_requests,
                self.receive_requests,
                summaries,
                self.task_segmenter,
            )
        iter_schedules = []
        if problem is None:
            iter_schedules = self._prepare_iter_schedules(batches, workloads, summaries)
            try:
                self.gpu_planner.create_gpu_plans(
                    iter_schedules,
                    [self.buffer_manager.get_send_slot(idx) for idx in range(2)],
                    [self.buffer_manager.get_recv_slot(idx) for idx in range(2)],
                    receives,
                )
            except (TypeError, ValueError) as error:
                problem = str(error)
        agreement.agree(exchange, "schedule", self._settings, problem)
        self.num_iterations = self.comm_scheduler.num_iterations
        self._num_schedules += 1
        self.iter_schedules = iter_schedules
        PELogger.info(
            "%d sends and %d receives in %d iterations",
            len(sends),
            len(receives),
            self.num_iterations,
        )

    def run(self) -> None:
        """Move everything, as last scheduled, from what the tensors hold now. Collective.

        Returns when this PE has received everything and may overwrite what it sent.

        Raises:
            RuntimeError: Not initialized, or not scheduled.
            ValueError: A PE called something else or gave up, on every PE; nothing was moved.
            PeerFailedError: A PE died, left or gave up; tensors to be received are undefined.
            PeerTimeoutError: A PE did not call or does not get on.
        """
        exchange = self._require_exchange()
        if self.iter_schedules is None or self.pipeline_executor is None:
            raise RuntimeError("Must call schedule() before run()")
        signals = self.buffer_manager.signals
        # After a run that failed ranks differ in how far they came.
        signals.epoch = agreement.agree(
            exchange,
            f"run {self._num_schedules}",
            self._settings,
            self._problem_with_places(),
            signals.epoch,
        )
        try:
            self.pipeline_executor.execute_pipeline(self.iter_schedules, self.num_iterations)
            self.pipeline_executor.process_self_moves(self.send_requests, self.receive_requests)
        finally:
            # Bytes were written where torch does not see it.
            written = [request.dest_tensor for request in self.receive_requests]
            increment_version([each for each in written if isinstance(each, torch.Tensor)])

    def abandon(self, reason: str) -> None:
        """Take no part in the next `schedule` or `run`: it raises ValueError on every PE that calls it.

        Collective with that call. What was registered is dropped.

        Args:
            reason: What the others are told.
        """
        exchange = self._require_exchange()
        self.clear_requests()
        agreement.abandon(exchange, reason)

    def clear_requests(self) -> None:
        """Forget what was registered, and the schedule. Local."""
        self.send_requests = []
        self.receive_requests = []
        self.iter_schedules = None
        self.num_iterations = 0
        self._places = []

    def finalize(self) -> None:
        """Give the slots back and leave. Local; idempotent.

        A PE whose last `run` has returned waits for nobody: what it gave away has arrived.
        """
        self.clear_requests()
        self.buffer_manager.free()
        self.buffer_manager.communicator = None
        self.kernel_launcher.communicator = None
        self.pipeline_executor = None
        self._exchange = None
        self.gpu_resources.finalize()
        PELogger.shutdown()

    def _require_exchange(self) -> CommunicatorExchange:
        if self._exchange is None:
            raise RuntimeError("RemoteCopyService not initialized")
        return self._exchange

    def _check_request(
        self, role: str, task_id: int, tensor: Any, position: int, size: int, pe: int
    ) -> None:
        self._require_exchange()
        if not 0 <= pe < self.n_pes:
            raise ValueError(f"task {task_id}: {role} PE must be in [0, {self.n_pes}), got {pe}")
        if task_id < 0:
            raise ValueError(f"task_id must be >= 0, got {task_id}")
        if position < 0 or size < 0:
            raise ValueError(
                f"task {task_id}: position and size must be >= 0, got {position} and {size}"
            )
        if not isinstance(tensor, torch.Tensor):
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

    def _tensors_at(self) -> list[tuple[int, torch.Tensor, int]]:
        """Task ids, tensors and their addresses, of what is registered as tensors."""
        registered: list[tuple[int, Any]] = [
            *((request.task_id, request.src_tensor) for request in self.send_requests),
            *((request.task_id, request.dest_tensor) for request in self.receive_requests),
        ]
        return [
            (task_id, tensor, tensor.data_ptr())
            for task_id, tensor in registered
            if isinstance(tensor, torch.Tensor)
        ]

    def _problem_with_places(self) -> str | None:
        """What keeps this PE from running with the addresses that were scheduled, or None."""
        for task_id, tensor, address in self._places:
            if (problem := problem_with_memory(tensor)) is not None:
                return f"task {task_id}: the tensor {problem}"
            if tensor.data_ptr() != address:
                return (
                    f"task {task_id}: the tensor was scheduled at 0x{address:x}, it is at "
                    f"0x{tensor.data_ptr():x}: call schedule() again"
                )
        return None

    def _segments(self) -> tuple[list[SendRequest], list[ReceiveRequest]]:
        """What is registered, cut to fit into slots, less what stays on this PE."""
        sends = [
            segment
            for request in self.send_requests
            if request.dest_pe != self.my_pe
            for segment in self.task_segmenter.segment_send_request(request)
        ]
        receives = [
            segment
            for request in self.receive_requests
            if request.src_pe != self.my_pe
            for segment in self.task_segmenter.segment_receive_request(request)
        ]
        agreement.check_unique("to", ((send.dest_pe, send.task_id) for send in sends))
        agreement.check_unique("from", ((recv.src_pe, recv.task_id) for recv in receives))
        agreement.check_unique("to", _local_tasks(self.send_requests, self.my_pe))
        agreement.check_unique("from", _local_tasks(self.receive_requests, self.my_pe))
        return sends, receives

    def _prepare_iter_schedules(
        self,
        batches: dict[int, list[ScheduledBatch]],
        workloads: dict[int, list[WorkloadGroup]],
        summaries: dict[BatchKey, WorkloadSummary],
    ) -> list[IterationSchedule]:
        """What this PE does in every iteration."""
        schedules = [
            IterationSchedule(send=None, recv=None)
            for _ in range(self.comm_scheduler.num_iterations)
        ]
        for iteration, iteration_batches in batches.items():
            for batch in iteration_batches:
                if batch.src_pe == self.my_pe:
                    batch.tasks = workloads[batch.dest_pe][batch.batch_index].tasks
                    schedules[iteration]["send"] = batch
                else:
                    batch.tasks_summary = summaries[batch.src_pe, self.my_pe, batch.batch_index]
                    schedules[iteration]["recv"] = batch
        return schedules


def _local_tasks(
    requests: Iterable[SendRequest] | Iterable[ReceiveRequest], my_pe: int
) -> Iterable[tuple[int, int]]:
    """(PE, task id) of what stays on this PE."""
    for request in requests:
        pe = request.dest_pe if isinstance(request, SendRequest) else request.src_pe
        if pe == my_pe:
            yield pe, request.task_id
