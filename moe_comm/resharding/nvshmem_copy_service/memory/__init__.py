"""Slots and addresses."""

from moe_comm.resharding.nvshmem_copy_service.memory.double_buffer_manager import (
    DoubleBufferManager,
)
from moe_comm.resharding.nvshmem_copy_service.memory.tensor_pointer_utils import (
    TensorPointerExtractor,
)

__all__ = ["DoubleBufferManager", "TensorPointerExtractor"]
