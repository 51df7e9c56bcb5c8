"""One communicator and its buffers per process group, for callers that only know their group."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.arguments import as_int, shown
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
        config = _config(num_experts, num_max_tokens_per_rank, expert_rank)
        return self._manager.get(config, key=key)

    def get_together(
        self,
        name: str,
        num_experts: int | None = None,
        *,
        num_max_tokens_per_rank: int | None = None,
        expert_rank: torch.Tensor | Sequence[int] | None = None,
        backend: str = "auto",
        num_local_experts: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> EpBuffer:
        """As `get`, for what all ranks make; mistakes of one are raised on all. Always collective.

        Args:
            name: What is made.
            num_experts: As in `get`; None for `num_local_experts` on every rank.
            num_max_tokens_per_rank: As in `get`.
            expert_rank: As in `get`.
            backend: As it was asked for.
            num_local_experts: Checked against the placement where both are given.
            check: Raises where another argument is wrong.

        Raises:
            ValueError: An argument of some rank is wrong, or those of two ranks differ.
            TypeError: An argument of some rank is of a wrong type.
        """
        config = None

        def state() -> str:
            nonlocal config
            check()
            self.check_backend(backend)
            if num_experts is not None:
                num_all = num_experts
            elif num_local_experts is not None:
                num_all = as_int("num_local_experts", num_local_experts, 1)
                num_all *= self.communicator.num_ranks
            else:
                raise ValueError("num_experts is needed, got None")
            config = _config(num_all, num_max_tokens_per_rank, expert_rank)
            placement = config.resolve_expert_rank(self.communicator.num_ranks)
            num_local = int((placement == self.communicator.rank_idx).sum())
            if num_local_experts not in (None, num_local):
                raise ValueError(
                    f"num_local_experts is {shown(num_local_experts)}, this rank has {num_local}"
                )
            return (
                f"{name}(num_experts={config.num_experts}, "
                f"num_max_tokens_per_rank={config.num_max_tokens_per_rank}, "
                f"expert_rank={placement.tolist()})"
            )

        try:
            self.communicator.check_together(state)
            assert config is not None
            return self._manager.get(config)
        except Exception:
            # Whoever keeps the error keeps this, on one rank alone: the next call must not find it.
            if not len(self._manager):
                self.destroy()
            raise

    def check_backend(self, backend: str) -> None:
        """Raise a ValueError where another backend is asked for than these buffers have."""
        had = self.communicator.backend
        if not isinstance(backend, str) or backend not in ("auto", had):
            raise ValueError(f"backend is {shown(backend)}, buffers of this group have {had!r}")

    def destroy(self) -> None:
        """Destroy the buffers and the communicator; idempotent."""
        with _lock:
            for known in (_held, _living):
                if known.get(id(self.group)) is self:
                    del known[id(self.group)]
        self._manager.destroy()
        self.communicator.destroy()


def _config(
    num_experts: int,
    num_max_tokens_per_rank: int | None,
    expert_rank: torch.Tensor | Sequence[int] | None,
) -> EpConfig:
    return EpConfig(
        num_experts=num_experts,
        num_topk=None,
        hidden=None,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        dtype=None,
        expert_rank=expert_rank,
    )


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
