"""Copies between PEs by a pipeline of pack, send and unpack over slots of the symmetric heap."""

from moe_comm.resharding.nvshmem_copy_service import nvshmem_types
from moe_comm.resharding.nvshmem_copy_service.core import (
    GPUResourceManager,
    KernelLauncher,
    PipelineExecutor,
)
from moe_comm.resharding.nvshmem_copy_service.memory import (
    DoubleBufferManager,
    TensorPointerExtractor,
)
from moe_comm.resharding.nvshmem_copy_service.planning import (
    CommunicationScheduler,
    FullDuplexScheduler,
    GPUExecutionPlanner,
    TaskSegmenter,
    WorkloadPacker,
)
from moe_comm.resharding.nvshmem_copy_service.service import RemoteCopyService

__all__ = [
    "CommunicationScheduler",
    "DoubleBufferManager",
    "FullDuplexScheduler",
    "GPUExecutionPlanner",
    "GPUResourceManager",
    "KernelLauncher",
    "PipelineExecutor",
    "RemoteCopyService",
    "TaskSegmenter",
    "TensorPointerExtractor",
    "WorkloadPacker",
    "nvshmem_types",
]
