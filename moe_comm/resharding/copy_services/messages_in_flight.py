"""Limits on what is under way between two ranks in one direction, for transports that send messages."""

from __future__ import annotations

__all__ = ["GLOO_MESSAGES", "GLOO_MESSAGE_BYTES", "NCCL_MESSAGES", "NCCL_MESSAGE_BYTES"]

GLOO_MESSAGES = 64
GLOO_MESSAGE_BYTES = 64 << 20

# Messages of one round are started as one group of NCCL operations.
NCCL_MESSAGES = 256
NCCL_MESSAGE_BYTES = 256 << 20
