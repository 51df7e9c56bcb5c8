"""`deep_ep.buffers.elastic`."""

from __future__ import annotations

from moe_comm.compat.deep_ep.elastic import ElasticBuffer, EPHandle

__all__ = ["EPHandle", "ElasticBuffer"]
