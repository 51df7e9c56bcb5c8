"""Copies over a Gloo group: any machine, any tensor, bytes through host memory."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from moe_comm.resharding.copy_services.distributed_copy_service import (
    DistributedCopyService,
    Message,
)

__all__ = ["GlooCopyService"]

MAX_MESSAGES = 64
MAX_MESSAGE_BYTES = 64 << 20


class GlooCopyService(DistributedCopyService):
    """Point-to-point messages of a CPU process group.

    Contiguous CPU tensors are sent and received where they are; others, and CUDA tensors, go
    through a buffer in (pinned) host memory, at most 64 MiB or one tensor per pair at a time.

    Args:
        group: A process group with a CPU backend, of which this process is a member; it may be one
            that is not derived from the default group. None makes a Gloo group of the default
            group's ranks (collective), which `close()` destroys.

    Raises:
        ValueError: The group moves no CPU tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._own_group: dist.ProcessGroup | None = None
        if group is None:
            self._own_group = dist.new_group(backend="gloo")
        wire_group = group if group is not None else self._own_group
        assert wire_group is not None
        if torch.device("cpu") not in wire_group._device_types:
            raise ValueError(
                "GlooCopyService needs a group that moves CPU tensors, got one for "
                f"{[str(device) for device in wire_group._device_types]}"
            )
        stream = (
            torch.cuda.Stream()  # type: ignore[no-untyped-call]
            if torch.cuda.is_available()
            else None
        )
        super().__init__(
            group,
            wire_group,
            stream,
            max_messages=MAX_MESSAGES,
            max_message_bytes=MAX_MESSAGE_BYTES,
        )

    def close(self) -> None:
        """Destroy the group that the service made for itself. Idempotent."""
        if self._own_group is not None:
            # Destroying the default group has destroyed this one as well: a ValueError.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(self._own_group)
            self._own_group = None

    def _all_gather(self, payload: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        gathered = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._wire_group.allgather([gathered], [mine]).wait()
        return [item.numpy().tobytes() for item in gathered]

    def _is_on_wire_device(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def _empty_on_wire_device(self, num_bytes: int) -> torch.Tensor:
        # Copies between pinned memory and a device run beside each other.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def _before_sending(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _start(self, sends: Sequence[Message], recvs: Sequence[Message]) -> list[dist.Work]:
        # The methods of a process group count ranks in the group itself; dist.isend would look them
        # up among those of the default group, where a group of several worlds is not known.
        group = self._wire_group
        return [
            *(group.send([buffer], peer, 0) for buffer, peer in sends),
            *(group.recv([buffer], peer, 0) for buffer, peer in recvs),
        ]
