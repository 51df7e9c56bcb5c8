"""Queries of a process group itself: bytes of its ranks, its timeout, and the ranks of its errors."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import default_pg_timeout

from moe_comm.errors import (
    CommunicationError,
    PeerFailedError,
    PeerTimeoutError,
    has_timed_out,
)

__all__ = ["all_gather_bytes", "failure_of", "lost_ranks", "reduce_in_place", "timeout_of"]

# No message of this package has it.
_PROBE_TAG = (1 << 31) - 1
# Not every backend averages.
_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}
_CLOSED = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")


def all_gather_bytes(group: dist.ProcessGroup, device: torch.device, payload: bytes) -> list[bytes]:
    """Every rank's payload, all equally long, in rank order. Collective.

    Calls methods of the group itself, which the default group need not know.

    Args:
        group: The ranks.
        device: Device whose memory the group moves.
        payload: This rank's.
    """
    mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)
    gathered = torch.empty(group.size(), len(payload), dtype=torch.uint8, device=device)
    group.allgather([list(gathered)], [mine]).wait()
    return [row.numpy().tobytes() for row in gathered.cpu()]


def reduce_in_place(tensor: torch.Tensor, op: str, group: dist.ProcessGroup) -> None:
    """Reduce a contiguous tensor over all ranks of `group`, in its own dtype. Collective.

    Args:
        tensor: Tensor of one shape on all ranks.
        op: One of `mesh_layouts.REDUCTIONS`.
        group: The ranks.
    """
    if tensor.numel() == 0:
        return
    dist.all_reduce(tensor, op=_REDUCE_OPS[op], group=group)
    if op == "avg":
        tensor /= group.size()


def timeout_of(group: dist.ProcessGroup) -> dt.timedelta:
    """Return the time that an operation of a group may take, as its backend has it now."""
    for device in group._device_types:
        options = getattr(group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if isinstance(timeout, dt.timedelta):
            return timeout
    return default_pg_timeout


def lost_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Ranks whose connection to this one was closed; only for a group that failed.

    Gloo alone can be asked: it refuses a message of such a rank at once. What it does not refuse is
    never sent, so the group must not be used any more.
    """
    cpu = torch.device("cpu")
    if cpu not in group._device_types or group._get_backend(cpu).name() != "gloo":
        return ()
    lost = []
    for peer in range(group.size()):
        if peer == group.rank():
            continue
        try:
            group.recv([torch.empty(1, dtype=torch.uint8)], peer, _PROBE_TAG)
        except RuntimeError as error:
            if any(word in str(error) for word in _CLOSED):
                lost.append(peer)
    return tuple(lost)


def failure_of(
    group: dist.ProcessGroup | None,
    what: str,
    error: BaseException,
    peers: Sequence[int] = (),
    *,
    operation: str = "reshard",
    phase: str = "data",
) -> CommunicationError:
    """The exception that an error of an operation over `group` becomes.

    Args:
        group: Group that is not to be used any more; None if it is not known.
        what: Beginning of the message.
        error: Error of torch.distributed.
        peers: Ranks that the operation was waiting for, where they are known.
        operation: Operation that the exception names.
        phase: Phase that the exception names.

    Returns:
        `PeerFailedError` with the ranks whose connections were closed, else `PeerTimeoutError` with
        `peers` where a limit ran out, else `CommunicationError` with `peers`.
    """
    lost = () if group is None else lost_ranks(group)
    kind: type[CommunicationError] = CommunicationError
    text = str(error).split("\n", 1)[0]
    ranks = tuple(peers)
    if lost:
        kind, ranks = PeerFailedError, lost
        text = f"connection closed by ranks {list(lost)}: {text}"
    elif has_timed_out(error):
        kind = PeerTimeoutError
    if ranks and not lost:
        text = f"with ranks {list(ranks)}: {text}"
    return kind(f"{what}: {text}", ranks=ranks, operation=operation, phase=phase)
