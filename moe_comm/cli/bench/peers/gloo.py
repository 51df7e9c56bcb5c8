"""The all-to-all of `torch.distributed` with Gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def exchange_by_gloo(
    recv: torch.Tensor, send: torch.Tensor, recv_counts: Sequence[int], send_counts: Sequence[int]
) -> None:
    """`all_to_all_single` over the default process group, see `Transport`."""
    dist.all_to_all_single(recv, send, list(recv_counts), list(send_counts))
