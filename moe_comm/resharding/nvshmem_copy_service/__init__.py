"""Copies of bytes between PEs under the names of Megatron's NVSHMEM service.

`service` has what callers hold: `RemoteCopyService`, whose tasks are moved by `BatchedCopy`. `planning`,
`core` and `memory` have the parts of Megatron's pipeline for callers that use them alone: requests
become slots, slots get an iteration, and `PipelineExecutor` moves them. PEs are ranks of one
communicator. Has neither plans nor models.

Tensors are on the CPU, PEs on one machine; a CUDA device is refused. Slots have 256 MiB, and a task of more
than 1,000 times that raises ValueError. Streams and events are `HostStream` and `HostEvent`: every call has
done its work when it returns. `set_streams` takes 7 or 8, `set_events` 2 lists or 3.
`validation.generate_deterministic_data` repeats every 256 bytes and task ids, so that bytes displaced by 256
pass; `generate_mixed_data` does not, and `validate_received_data(..., pattern="mixed")` compares with it.
`PELogger` logs as `moe_comm.pe_<N>`, to files only where `logs_dir` is given.

Knows: copy_services.
"""

from typing import NoReturn

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
    GPUExecutionPlanner,
    TaskSegmenter,
    WorkloadPacker,
)
from moe_comm.resharding.nvshmem_copy_service.service import RemoteCopyService

__all__ = [
    "CommunicationScheduler",
    "DoubleBufferManager",
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

_GONE = {
    "FullDuplexScheduler": "take CommunicationScheduler, or RemoteCopyService, which needs no schedule",
    "agreement": "RemoteCopyService compares both ends of all tasks itself",
    "compat": "patch nvshmem4py where it is imported; nothing here imports it",
}


def __getattr__(name: str) -> NoReturn:
    """Say what to write for a name that is gone."""
    if name in _GONE:
        # `from ... import` would replace an AttributeError by a text without the hint.
        raise ImportError(f"{__name__} has no {name}: {_GONE[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
