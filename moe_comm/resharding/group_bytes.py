"""Bytes between the ranks of a process group."""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["all_gather_bytes"]


def all_gather_bytes(group: dist.ProcessGroup, device: torch.device, payload: bytes) -> list[bytes]:
    """Every rank's payload, all equally long, in rank order. Collective.

    Calls methods of the group itself, which the default group need not know.

    Args:
        group: The ranks.
        device: Whose memory the group moves.
        payload: This rank's.
    """
    mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    gathered = torch.empty(group.size(), len(payload), dtype=torch.uint8, device=device)
    group.allgather([list(gathered)], [mine]).wait()
    return [row.numpy().tobytes() for row in gathered.cpu()]
