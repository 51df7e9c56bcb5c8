"""`deep_ep.buffers.ep`."""

from __future__ import annotations

from moe_comm.compat.deep_ep.elastic_rows import EPHandle
from moe_comm.compat.deep_ep.ep_buffer import EPBuffer

__all__ = ["EPBuffer", "EPHandle"]
