"""One communicator and its buffers per process group, for callers that only know their group."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.bootstrap import Bootstrap
from moe_comm.buffer import EpBuffer
from moe_comm.buffer_manager import BufferManager
from moe_comm.communicator import Communicator
from moe_comm.config import EpConfig

__all__ = ["GroupBuffers", "group_buffers"]

_lock = threading.Lock()
_living: weakref.WeakValueDictionary[int, GroupBuffers] = weakref.WeakValueDictionary()


class GroupBuffers:
    """The communicator of a group and its buffers, which take whatever each call brings.

    Lives as long as somebody holds it. Use `group_buffers` to share it with everybody else who
    works on the same group.

    Args:
        group: Process group, bootstrap, or None; see `Communicator`.
        backend: As in `Communicator`.
    """

    def __init__(
        self, group: dist.ProcessGroup | Bootstrap | None, *, backend: str = "auto"
    ) -> None:
        self.group = group  # its id is the key under which this object is found
        self.communicator = Communicator(group, backend=backend)
        self._manager = BufferManager(self.communicator)

    def get(
        self,
        num_experts: int,
        *,
        num_max_tokens_per_rank: int | None = None,
        expert_rank: torch.Tensor | None = None,
        key: object = None,
    ) -> EpBuffer:
        """The buffer for so many experts, made on first use; collective where it is made.

        Args:
            num_experts: Over all ranks.
            num_max_tokens_per_rank: For `Layout.LOW_LATENCY`; None for any.
            expert_rank: As in `EpConfig`.
            key: Distinguishes buffers of one configuration.
        """
        config = EpConfig(
            num_experts=num_experts,
            num_topk=None,
            hidden=None,
            num_max_tokens_per_rank=num_max_tokens_per_rank,
            dtype=None,
            expert_rank=expert_rank,
        )
        return self._manager.get(config, key=key)

    def destroy(self) -> None:
        """Destroy the buffers and the communicator; idempotent."""
        with _lock:
            if _living.get(id(self.group)) is self:
                del _living[id(self.group)]
        self._manager.destroy()
        self.communicator.destroy()


def _living_of(key: Any) -> GroupBuffers | None:
    with _lock:
        found = _living.get(id(key))
    return found if found is not None and found.group is key else None


def group_buffers(
    group: dist.ProcessGroup | Bootstrap | None = None, *, backend: str = "auto"
) -> GroupBuffers:
    """The shared buffers of a group, made on first use; collective where they are made.

    Ranks that hold theirs alike find them alike: garbage is collected before they count as held, which
    takes up to a second of a large process, for each layer that is set up.

    Args:
        group: Process group, bootstrap, or None for the default process group.
        backend: For the first use; see `Communicator`.
    """
    key: Any = group
    if key is None and dist.is_available() and dist.is_initialized():
        key = dist.group.WORLD
    if _living_of(key) is not None:
        # Cycles that nobody reaches may still hold it on this rank and no longer on another, which
        # would wait for this one to make another.
        gc.collect()
    found = _living_of(key)
    if found is not None:
        return found
    made = GroupBuffers(key, backend=backend)
    with _lock:
        _living[id(key)] = made
    return made
