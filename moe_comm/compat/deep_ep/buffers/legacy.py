"""`deep_ep.buffers.legacy`."""

from __future__ import annotations

from moe_comm.compat.deep_ep.buffer import Buffer

__all__ = ["Buffer"]
