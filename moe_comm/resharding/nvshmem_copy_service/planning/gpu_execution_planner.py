"""The copies that pack and unpack each batch, as vectors of addresses and sizes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_comm.resharding.nvshmem_copy_service.logger import PELogger
from moe_comm.resharding.nvshmem_copy_service.memory.tensor_pointer_utils import (
    TensorPointerExtractor,
)
from moe_comm.resharding.nvshmem_copy_service.nvshmem_types import (
    CopyPlan,
    IterationSchedule,
    ReceiveRequest,
    ScheduledBatch,
)
from moe_comm.resharding.nvshmem_copy_service.planning.task_segmenter import name_of_task

__all__ = ["GPUExecutionPlanner"]


class GPUExecutionPlanner:
    """Builds the copies of every iteration.

    Args:
        chunk_bytes: Most bytes of one copy.
        device: Device where the vectors live.
        on_unmatched: Effect of a task without a receive request: "raise", or "skip" (it is logged, and its
            bytes stay in the slot).
    """

    def __init__(
        self,
        chunk_bytes: int = 128 * 1024,
        *,
        device: str | torch.device = "cpu",
        on_unmatched: str = "raise",
    ) -> None:
        if on_unmatched not in ("raise", "skip"):
            raise ValueError(f'on_unmatched must be "raise" or "skip", got {on_unmatched!r}')
        if chunk_bytes < 1:
            raise ValueError(f"chunk_bytes must be >= 1, got {chunk_bytes}")
        self.CHUNK_SIZE = chunk_bytes
        self.device = torch.device(device)
        self.on_unmatched = on_unmatched
        self._pointer = TensorPointerExtractor.get_pointer

    def create_gpu_plans(
        self,
        iter_schedules: Sequence[IterationSchedule],
        send_slots: Sequence[torch.Tensor],
        recv_slots: Sequence[torch.Tensor],
        receive_requests: Sequence[ReceiveRequest],
    ) -> None:
        """Set `gpu_plan` of every batch of `iter_schedules`. Local.

        Args:
            iter_schedules: Batches that this PE sends and receives in each iteration.
            send_slots: Slots that batches are packed into, by parity of the iteration.
            recv_slots: Slots that batches are unpacked from.
            receive_requests: Segments included, after segmentation.

        Raises:
            ValueError: A batch holds tasks that nobody receives, or of another size; it names them.
        """
        requests: dict[tuple[int, int], ReceiveRequest] = {
            (request.src_pe, request.task_id): request for request in receive_requests
        }
        for iteration, schedule in enumerate(iter_schedules):
            sent, received = schedule["send"], schedule["recv"]
            if sent is not None:
                sent.gpu_plan = self._plan_kernel_args(
                    [self._pointer(task.src_tensor) for task in sent.tasks],
                    [task.src_pos for task in sent.tasks],
                    [task.size for task in sent.tasks],
                    is_pack=True,
                    buffer_base=send_slots[iteration % 2].data_ptr(),
                )
            if received is not None:
                received.gpu_plan = self._plan_unpack(
                    iteration, received, requests, recv_slots[iteration % 2].data_ptr()
                )

    def _plan_unpack(
        self,
        iteration: int,
        batch: ScheduledBatch,
        requests: dict[tuple[int, int], ReceiveRequest],
        buffer_base: int,
    ) -> CopyPlan | None:
        summary = batch.tasks_summary
        if summary is None:
            raise ValueError(
                f"iteration {iteration}: the batch from PE {batch.src_pe} has no tasks_summary"
            )
        found = [requests.get((batch.src_pe, task_id)) for task_id in summary.task_ids]
        unmatched = [
            name_of_task(task_id)
            for task_id, request in zip(summary.task_ids, found, strict=True)
            if request is None
        ]
        if unmatched:
            message = (
                f"iteration {iteration}: no receive request for {len(unmatched)} tasks from PE "
                f"{batch.src_pe}: {', '.join(unmatched[:8])}"
            )
            if self.on_unmatched == "raise":
                raise ValueError(message)
            PELogger.error("%s", message)
        ptrs: list[int | None] = []
        for request, size in zip(found, summary.task_sizes, strict=True):
            if request is not None and request.size != size:
                raise ValueError(
                    f"iteration {iteration}: PE {batch.src_pe} sends {size} bytes as task "
                    f"{name_of_task(request.task_id)}, {request.size} are to be received"
                )
            ptrs.append(None if request is None else self._pointer(request.dest_tensor))
        positions = [0 if request is None else request.dest_pos for request in found]
        return self._plan_kernel_args(
            ptrs, positions, summary.task_sizes, is_pack=False, buffer_base=buffer_base
        )

    def _plan_kernel_args(
        self,
        ptrs: Sequence[int | None],
        positions: Sequence[int],
        sizes: Sequence[int],
        is_pack: bool,
        buffer_base: int,
    ) -> CopyPlan | None:
        """Copies between tasks and the slot at `buffer_base`, one task after the other.

        Args:
            ptrs: Address of each task's tensor; None for one that has its place and is not copied.
            positions: First byte in each tensor.
            sizes: Bytes.
            is_pack: Whether copies go into the slot, otherwise out of it.
            buffer_base: Address of the slot.

        Returns:
            None when there is nothing to copy.

        Example:
            Tasks of 5, 6 and 7 bytes lie at 0, 5 and 11.
        """
        own: list[int] = []
        slot: list[int] = []
        num_bytes: list[int] = []
        begin = 0
        for ptr, position, size in zip(ptrs, positions, sizes, strict=True):
            if ptr is not None:
                for offset in range(0, size, self.CHUNK_SIZE):
                    own.append(ptr + position + offset)
                    slot.append(buffer_base + begin + offset)
                    num_bytes.append(min(self.CHUNK_SIZE, size - offset))
            begin += size
        if not num_bytes:
            return None
        src, dst = (own, slot) if is_pack else (slot, own)
        vectors = [
            torch.tensor(values, dtype=torch.int64, device=self.device)
            for values in (src, dst, num_bytes)
        ]
        return vectors[0], vectors[1], vectors[2], len(num_bytes)
