"""Transports of reshard plans: over the symmetric heap, Gloo and NCCL.

`base` is what execution asks of a transport; `queued_copy_service` is what all have in common: copies
are submitted, checked, put in order, and compared with those of the peers (`matched_transfers`) before any byte
moves. A service then only moves them: by `batched_copy` over the heap, of which `changed_blocks` hashes pieces, or by messages of a
`process_group`. Has ranks and tensors, and neither plans nor models.

Knows: describe.
"""

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
