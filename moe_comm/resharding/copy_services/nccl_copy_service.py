"""Copies over an NCCL group: from device to device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_comm.resharding.copy_services.distributed_copy_service import (
    DistributedCopyService,
    Message,
)
from moe_comm.resharding.copy_services.messages_in_flight import (
    NCCL_MESSAGE_BYTES,
    NCCL_MESSAGES,
)

__all__ = ["NCCLCopyService"]


class NCCLCopyService(DistributedCopyService):
    """Grouped point-to-point messages of an NCCL process group.

    Moves CUDA tensors of the device that was current when it was made, on a stream of its own that
    waits for the streams on which tensors were submitted; the stream on which `run()` is called
    waits for it. The host does not wait for the data: what fails on the device is NCCL's own to report; an
    error that torch raises becomes a CommunicationError. What is not contiguous goes through at most 256 MiB or
    one tensor per pair and direction, and 256 messages are in flight there. Transfers without task ids are
    matched as by Gloo's service.

    Args:
        group: An NCCL process group of which this process is a member; None for the default group.

    Raises:
        RuntimeError: There is no CUDA device.
    """

    device_types = ("cuda",)

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not torch.cuda.is_available():
            raise RuntimeError(
                "NCCLCopyService needs a CUDA device and this process has none; GlooCopyService and "
                "SymmetricCopyService move CPU tensors"
            )
        wire_group = group if group is not None else dist.group.WORLD
        assert wire_group is not None
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        super().__init__(
            group,
            wire_group,
            stream.device,
            stream,
            max_messages=NCCL_MESSAGES,
            max_message_bytes=NCCL_MESSAGE_BYTES,
        )

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[dist.Work]:
        operations = [
            *((dist.isend, buffer, peer) for buffer, peer in sends),
            *((dist.irecv, buffer, peer) for buffer, peer in recvs),
        ]
        if not operations:
            return []
        # `group_peer` counts ranks in the group; `peer` would be a rank of the default group.
        works: list[dist.Work] = dist.batch_isend_irecv(
            [
                dist.P2POp(operation, buffer, group=self._wire_group, group_peer=peer)
                for operation, buffer, peer in operations
            ]
        )
        return works
