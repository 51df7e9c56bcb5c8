"""Module that `import deep_ep` gives after `moe_comm.compat.install("deep_ep")`.

DeepEP's interfaces: `Buffer`, `HybridEPBuffer`, the dispatch and combine of `ElasticBuffer` and
`EPBuffer`, and the collectives of `BucketBuffer`.
"""

from __future__ import annotations

from moe_comm._version import __version__
from moe_comm.compat.deep_ep import comm
from moe_comm.compat.deep_ep.allocator import (
    BufferAllocator,
    get_num_allocation_alignment,
    get_num_rdma_alignment,
    get_num_tma_alignment,
)
from moe_comm.compat.deep_ep.base_buffer import BufferBase
from moe_comm.compat.deep_ep.bucket import BucketBuffer, BucketSession
from moe_comm.compat.deep_ep.buffer import Buffer
from moe_comm.compat.deep_ep.buffers.engram import EngramBuffer
from moe_comm.compat.deep_ep.buffers.pp import PPBuffer
from moe_comm.compat.deep_ep.comm import destroy_all_managed_nccl_comm
from moe_comm.compat.deep_ep.config import Config, topk_idx_t
from moe_comm.compat.deep_ep.elastic import (
    ElasticBuffer,
    EPHandle,
    get_logical_domain_size,
    get_physical_domain_size,
)
from moe_comm.compat.deep_ep.ep_buffer import EPBuffer
from moe_comm.compat.deep_ep.hybrid_config import HybridEpConfigInstance
from moe_comm.compat.deep_ep.hybrid_ep_buffer import HybridEPBuffer
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap

__all__ = [
    "BucketBuffer",
    "BucketSession",
    "Buffer",
    "BufferAllocator",
    "BufferBase",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EngramBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "HybridEpConfigInstance",
    "PPBuffer",
    "__version__",
    "comm",
    "destroy_all_managed_nccl_comm",
    "get_logical_domain_size",
    "get_num_allocation_alignment",
    "get_num_rdma_alignment",
    "get_num_tma_alignment",
    "get_physical_domain_size",
    "topk_idx_t",
]
