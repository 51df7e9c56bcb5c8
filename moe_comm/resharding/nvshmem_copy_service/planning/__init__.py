"""From requests to what every PE copies and sends in every iteration."""

from moe_comm.resharding.nvshmem_copy_service.planning.communication_scheduler import (
    CommunicationScheduler,
)
from moe_comm.resharding.nvshmem_copy_service.planning.gpu_execution_planner import (
    GPUExecutionPlanner,
)
from moe_comm.resharding.nvshmem_copy_service.planning.task_segmenter import TaskSegmenter
from moe_comm.resharding.nvshmem_copy_service.planning.workload_packer import WorkloadPacker

__all__ = [
    "CommunicationScheduler",
    "GPUExecutionPlanner",
    "TaskSegmenter",
    "WorkloadPacker",
]
