"""What `import deep_ep` gives after `moe_comm.compat.install("deep_ep")`.

DeepEP's interfaces: `Buffer`, `HybridEPBuffer`, and the dispatch and combine of `ElasticBuffer` and
`EPBuffer`.
"""

from __future__ import annotations

from moe_comm._version import __version__
from moe_comm.compat.deep_ep import comm
from moe_comm.compat.deep_ep.base_buffer import BufferBase
from moe_comm.compat.deep_ep.buffer import Buffer
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
    "Buffer",
    "BufferBase",
    "Config",
    "EPBuffer",
    "EPHandle",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "HybridEPBuffer",
    "HybridEpConfigInstance",
    "__version__",
    "comm",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "topk_idx_t",
]
