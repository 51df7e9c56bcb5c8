"""`deep_ep.comm`: what DeepEP V2.5 asks of a buffer or a group."""

from __future__ import annotations

import torch

from moe_comm.compat.deep_ep.elastic import get_logical_domain_size, get_physical_domain_size
from moe_comm.compat.deep_ep.ep_buffer import EPBuffer

__all__ = ["barrier", "get_comm_stream", "get_logical_domain_size", "get_physical_domain_size"]


def barrier(
    buffer: EPBuffer,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """`EPBuffer.barrier`. Collective.

    Args:
        buffer: Of this rank.
        wait_comm_stream: No effect, like the next two.
        with_cpu_sync: See above.
        sequential: See above.
        context_idx: None or 0: a buffer has one group.
    """
    if context_idx not in (None, 0):
        error = ValueError(
            f"context_idx must be None or 0, a buffer has one group; got {context_idx}"
        )
        buffer._owner.shared().communicator.reject(error)
    buffer.barrier(wait_comm_stream, with_cpu_sync, sequential)


def get_comm_stream(buffer: EPBuffer) -> torch.cuda.Stream | torch.cpu.Stream:
    """The stream of a buffer's calls; see `EPBuffer.get_comm_stream`."""
    return buffer.get_comm_stream()
