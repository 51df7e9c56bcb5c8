"""Transports of reshard plans: over the symmetric heap, Gloo, NCCL and the NVSHMEM pipeline."""

from moe_comm.resharding.copy_services.base import (
    CopyService,
    RecvOp,
    SendOp,
    match_local_ops_by_task_id,
)
from moe_comm.resharding.copy_services.gloo_copy_service import GlooCopyService
from moe_comm.resharding.copy_services.nccl_copy_service import NCCLCopyService
from moe_comm.resharding.copy_services.nvshmem_copy_service import NVSHMEMCopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService

__all__ = [
    "CopyService",
    "GlooCopyService",
    "NCCLCopyService",
    "NVSHMEMCopyService",
    "RecvOp",
    "SendOp",
    "SymmetricCopyService",
    "match_local_ops_by_task_id",
]
