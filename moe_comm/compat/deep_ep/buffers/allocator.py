"""`deep_ep.buffers.allocator`."""

from __future__ import annotations

from moe_comm.compat.deep_ep.allocator import BufferAllocator

__all__ = ["BufferAllocator"]
