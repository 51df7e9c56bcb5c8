"""`deep_ep_cpp`: names that clients take from the compiled module of DeepEP's first interface.

Installed with `deep_ep`. Not here: the `Buffer` of that module, which `deep_ep.Buffer` wraps.
"""

from __future__ import annotations

from moe_comm.compat.deep_ep.buffer import Buffer as _Buffer
from moe_comm.compat.deep_ep.config import Config, low_latency_rdma_size_hint, topk_idx_t
from moe_comm.compat.deep_ep.utils.event import EventHandle

__all__ = [
    "Config",
    "EventHandle",
    "get_low_latency_rdma_size_hint",
    "is_sm90_compiled",
    "topk_idx_t",
]

get_low_latency_rdma_size_hint = low_latency_rdma_size_hint
is_sm90_compiled = _Buffer.is_sm90_compiled
