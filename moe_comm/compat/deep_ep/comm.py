"""`deep_ep.comm`: what DeepEP V2.5 asks of a buffer or a group."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from moe_comm.arguments import check_bool
from moe_comm.compat.deep_ep.arguments import ints_as_bools
from moe_comm.compat.deep_ep.bucket import BucketBuffer
from moe_comm.compat.deep_ep.elastic import get_logical_domain_size, get_physical_domain_size
from moe_comm.compat.deep_ep.elastic_calls import Group, meet
from moe_comm.compat.deep_ep.ep_buffer import EPBuffer
from moe_comm.peers.missed_calls import Telling

__all__ = [
    "NCCLCommHandle",
    "barrier",
    "destroy_all_managed_nccl_comm",
    "get_comm_stream",
    "get_logical_domain_size",
    "get_nccl_comm_handle",
    "get_physical_domain_size",
]

_handles: dict[Any, NCCLCommHandle] = {}


@ints_as_bools
def barrier(
    buffer: EPBuffer | BucketBuffer,
    wait_comm_stream: bool = True,
    with_cpu_sync: bool = False,
    sequential: bool = True,
    context_idx: int | None = None,
) -> None:
    """All ranks of a group of a buffer arrive. Collective.

    Args:
        buffer: Buffer of this rank.
        wait_comm_stream: No effect, like the next two.
        with_cpu_sync: See above.
        sequential: See above.
        context_idx: Index of the group, of those of a `BucketBuffer`; None for the first.
    """
    owners = buffer._owners if isinstance(buffer, BucketBuffer) else [buffer._owner]
    idx = 0 if context_idx is None else context_idx
    with Telling(owners[0].shared().communicator.reject):
        if type(idx) is not int or not 0 <= idx < len(owners):
            raise ValueError(
                f"context_idx must be None or in [0, {len(owners)}), the groups of the buffer; got "
                f"{context_idx}"
            )
    meet(
        owners[idx],
        wait_comm_stream=wait_comm_stream,
        with_cpu_sync=with_cpu_sync,
        sequential=sequential,
    )


def get_comm_stream(buffer: EPBuffer | BucketBuffer) -> torch.cuda.Stream | torch.cpu.Stream:
    """The stream of a buffer's calls; see `EPBuffer.get_comm_stream`."""
    return buffer.get_comm_stream()


class NCCLCommHandle:
    """The NCCL communicator that torch has for a group; rows of this package do not travel by it.

    Args:
        group: Process group, or None for the default one.

    Attributes:
        managed: False: it is torch's.
    """

    managed = False

    def __init__(self, group: Group) -> None:
        self._group = group

    def get(self) -> int:
        """The address of the `ncclComm_t`.

        Raises:
            ValueError: torch has none for the group: it is of another backend, has not been used yet, or
                this release of torch does not tell.
        """
        group: Any = dist.group.WORLD if self._group is None else self._group
        address = 0
        if isinstance(group, dist.ProcessGroup) and "cuda:nccl" in dist.get_backend_config(group):
            backend: Any = group._get_backend(torch.device("cuda"))
            address = int(getattr(backend, "_comm_ptr", int)())
        if not address:
            raise ValueError(
                f"torch has no NCCL communicator of {group}: buffers of this deep_ep need none, and make "
                "none"
            )
        return address


def get_nccl_comm_handle(group: Group, force_new_comm: bool = False) -> NCCLCommHandle:
    """The handle of a group, the same one each time. Local.

    Args:
        group: Process group, bootstrap, or None for the default process group.
        force_new_comm: False.

    Raises:
        NotImplementedError: `force_new_comm` is True.
    """
    check_bool("force_new_comm", force_new_comm)
    if force_new_comm:
        raise NotImplementedError(
            "force_new_comm must be False, this deep_ep makes no NCCL communicators; got True: "
            "torch.distributed.new_group of the same ranks has one of its own"
        )
    return _handles.setdefault(group, NCCLCommHandle(group))


def destroy_all_managed_nccl_comm() -> None:
    """Forget the handles of `get_nccl_comm_handle`; their communicators are torch's. Local, idempotent."""
    _handles.clear()
