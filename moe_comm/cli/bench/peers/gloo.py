"""The all-to-all of `torch.distributed` with Gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

__all__ = ["GlooTransport"]


class GlooTransport:
    """`all_to_all_single` over the default process group."""

    def exchange(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        recv_counts: Sequence[int],
        send_counts: Sequence[int],
    ) -> None:
        """Rows `[n, bytes]` to every rank and from every rank, in rank order."""
        dist.all_to_all_single(recv, send, list(recv_counts), list(send_counts))
