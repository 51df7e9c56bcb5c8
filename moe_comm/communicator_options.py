"""What a communicator is told beside its ranks; a communicator that replaces it is told the same."""

from __future__ import annotations

import dataclasses

import torch

__all__ = ["CommunicatorOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunicatorOptions:
    """Arguments of `Communicator` of the same names, which explains them."""

    stall_timeout_s: float
    arrival_timeout_s: float
    max_heap_bytes: int | None
    num_threads: int | None
    with_huge_pages: bool
    num_sms: int | None

    def problem(self, device: torch.device) -> str | None:
        """What is wrong with them for rows on `device`, or None."""
        for name in ("stall_timeout_s", "arrival_timeout_s"):
            if not getattr(self, name) > 0.0:
                return f"{name} must be > 0, got {getattr(self, name)}"
        if self.max_heap_bytes is not None and self.max_heap_bytes <= 0:
            return f"max_heap_bytes must be > 0, got {self.max_heap_bytes}"
        if self.num_threads is not None and self.num_threads < 1:
            return f"num_threads must be >= 1, got {self.num_threads}"
        if self.num_sms is not None and device.type == "cpu":
            return f"num_sms is for a GPU, got {self.num_sms} with device {device}"
        if self.num_sms is not None and self.num_sms < 1:
            return f"num_sms must be >= 1, got {self.num_sms}"
        return None
