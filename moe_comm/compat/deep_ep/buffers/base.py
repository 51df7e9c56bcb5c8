"""`deep_ep.buffers.base`."""

from __future__ import annotations

from moe_comm.compat.deep_ep.base_buffer import BufferBase

__all__ = ["BufferBase"]
