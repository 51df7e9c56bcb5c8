"""One communicator and its buffers per process group, for callers that only know their group."""

from __future__ import annotations

import atexit
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

__all__ = ["GroupBuffers", "group_buffers", "is_alive", "let_go"]

_lock = threading.Lock()
# Of process groups, until they are destroyed: all ranks do that together. What layers hold is no
# measure, as a cycle may keep a layer on one rank that another has collected.
_held: dict[int, GroupBuffers] = {}
# Of bootstraps, whose end nobody sees.
_living: weakref.WeakValueDictionary[int, GroupBuffers] = weakref.WeakValueDictionary()


def let_go() -> None:
    """Keep nothing any longer for process groups. Every rank of each does so at the same point."""
    with _lock:
        _held.clear()


# A process group may have threads, which have to end while Python still runs.
atexit.register(let_go)


class GroupBuffers:
    """The communicator of a group and its buffers, which take whatever each call brings.

    Use `group_buffers` to share it with everybody else who works on the same group.

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
            for known in (_held, _living):
                if known.get(id(self.group)) is self:
                    del known[id(self.group)]
        self._manager.destroy()
        self.communicator.destroy()


def is_alive(group: dist.ProcessGroup) -> bool:
    """Whether a process group has not been destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return False
    return True


def _known(key: Any) -> GroupBuffers | None:
    with _lock:
        for group_id, held in list(_held.items()):
            if held.communicator.is_destroyed or not is_alive(held.group):  # type: ignore[arg-type]
                del _held[group_id]
        found = _held.get(id(key)) or _living.get(id(key))
    if found is None or found.group is not key or found.communicator.is_destroyed:
        return None
    return found


def group_buffers(
    group: dist.ProcessGroup | Bootstrap | None = None, *, backend: str = "auto"
) -> GroupBuffers:
    """The shared buffers of a group, made on first use; collective where they are made.

    Those of a process group are kept until it, or their communicator, is destroyed. Those of a
    bootstrap are kept as long as somebody holds them: hold them alike on every rank.

    Args:
        group: Process group, bootstrap, or None for the default process group.
        backend: For the first use; see `Communicator`.
    """
    key: Any = group
    if key is None and dist.is_available() and dist.is_initialized():
        key = dist.group.WORLD
    found = _known(key)
    if found is not None:
        return found
    made = GroupBuffers(key, backend=backend)
    with _lock:
        known = _held if isinstance(key, dist.ProcessGroup) else _living
        known[id(key)] = made
    return made
