"""Owner of buffers: one per configuration of a communicator."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import EpConfig
from moe_comm.peers.communicator import Communicator


class BufferManager:
    """Owns the buffers of one communicator, one per configuration, so that layers can share them.

    Collective where it makes or destroys a buffer: every rank asks for the same configurations in
    the same order.

    Args:
        communicator: Owner of the peers.
    """

    def __init__(self, communicator: Communicator) -> None:
        self.communicator = communicator
        self._buffers: dict[tuple[object, ...], EpBuffer] = {}

    def get(self, config: EpConfig, *, key: object = None) -> EpBuffer:
        """The buffer for `config`, made on first use.

        Args:
            config: Two configurations of equal values share a buffer.
            key: Distinguishes buffers of one configuration, such as operations in flight together.
        """
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
        if config.expert_rank is not None:
            values["expert_rank"] = tuple(
                torch.as_tensor(config.expert_rank, device="cpu").tolist()
            )
        identity = (*values.values(), key)
        found = self._buffers.get(identity)
        if found is None or found.is_destroyed:
            self._buffers[identity] = EpBuffer(self.communicator, config)
        return self._buffers[identity]

    def __len__(self) -> int:
        return len(self._buffers)

    def destroy(self) -> None:
        """Destroy every buffer; idempotent."""
        for buffer in self._buffers.values():
            buffer.destroy()
        self._buffers.clear()
