"""`deep_ep.buffers.bucket`."""

from __future__ import annotations

from moe_comm.compat.deep_ep.bucket import BucketBuffer, BucketSession

__all__ = ["BucketBuffer", "BucketSession"]
