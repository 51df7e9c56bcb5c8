"""Copies between PEs by a pipeline of pack, send and unpack over slots of the symmetric heap.

The folders and names are those of Megatron's service: `service` is what callers hold, `planning` makes
batches of what they have registered, `core` runs them, `memory` has the slots. PEs are ranks of one
communicator. Has neither plans nor models.

Knows: nothing else.
"""

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
