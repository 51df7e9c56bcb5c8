"""Types that the parts of the copy pipeline pass to each other."""

from __future__ import annotations

import dataclasses
from typing import Any, TypedDict

import torch

__all__ = [
    "MAX_SEGMENT_SIZE",
    "MAX_TASKS_PER_BATCH",
    "CopyPlan",
    "IterationSchedule",
    "ReceiveRequest",
    "ScheduledBatch",
    "SendRequest",
    "TransferMetadata",
    "WorkloadGroup",
    "WorkloadSummary",
]

MAX_SEGMENT_SIZE = 256 * 1024 * 1024
"""Bytes of one slot where nothing else is said."""

MAX_TASKS_PER_BATCH = 10000

CopyPlan = tuple[Any, Any, Any, int]
"""(source addresses, destination addresses, sizes, number of chunks); int64 vectors."""


@dataclasses.dataclass
class SendRequest:
    """Bytes of this PE that `dest_pe` receives.

    Args:
        task_id: Id that is equal on both ends, >= 0.
        src_tensor: A tensor, an array with an address, or an address.
        src_pos: First byte.
        size: Bytes.
        dest_pe: Rank in the service's group.
    """

    task_id: int
    src_tensor: Any
    src_pos: int
    size: int
    dest_pe: int


@dataclasses.dataclass
class ReceiveRequest:
    """Bytes of this PE that `src_pe` sends; fields as in `SendRequest`."""

    task_id: int
    dest_tensor: Any
    dest_pos: int
    size: int
    src_pe: int


@dataclasses.dataclass
class WorkloadGroup:
    """Tasks that travel to one PE in one slot of `total_size` bytes, one after the other."""

    dest_pe: int
    tasks: list[SendRequest] = dataclasses.field(default_factory=list)
    total_size: int = 0


@dataclasses.dataclass
class WorkloadSummary:
    """Contents of a batch, as its receiver must know them."""

    total_size: int
    task_ids: list[int]
    task_sizes: list[int]


@dataclasses.dataclass
class ScheduledBatch:
    """One slot's worth on its way from `src_pe` to `dest_pe`.

    Args:
        src_pe: Sender.
        dest_pe: Receiver.
        batch_index: Number among the batches of this pair of PEs.
        iteration: Iteration in which it travels; -1 before it is scheduled.
        gpu_plan: Copies that pack it (at its sender) or unpack it (at its receiver); None for none.
        tasks: Send requests in the order of their bytes, at its sender.
        total_size: Bytes of the slot.
        tasks_summary: Summary of the tasks, at its receiver.
    """

    src_pe: int
    dest_pe: int
    batch_index: int
    iteration: int
    gpu_plan: CopyPlan | None = None
    tasks: list[SendRequest] = dataclasses.field(default_factory=list)
    total_size: int = 0
    tasks_summary: WorkloadSummary | None = None


class IterationSchedule(TypedDict):
    """Batches that one PE sends and receives in one iteration."""

    send: ScheduledBatch | None
    recv: ScheduledBatch | None


@dataclasses.dataclass
class TransferMetadata:
    """Addresses and sizes of a batch as vectors."""

    ptrs: torch.Tensor
    sizes: torch.Tensor
    num_tasks: int
    total_size: int
