"""One communicator and its buffers per group and device, for callers that only know their group."""

from __future__ import annotations

import atexit
import dataclasses
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from moe_comm.arguments import as_int, shown
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.buffer_manager import BufferManager
from moe_comm.ep.config import EpConfig
from moe_comm.ep.placement import Placement, ReplicaRule
from moe_comm.peers.agree import first_line, make_together
from moe_comm.peers.bootstrap import Bootstrap, bootstrap_for, group_behind
from moe_comm.peers.communicator import Communicator
from moe_comm.peers.missed_calls import keeps_unbound

__all__ = ["Device", "GroupBuffers", "group_buffers", "is_alive", "release_all"]

Device = str | torch.device | None

_lock = threading.Lock()
# Both by group and kind of device, in the order in which they were made, which ranks share.
# Of process groups, until they are destroyed: all ranks do that together. What layers hold is no
# measure, as a cycle may keep a layer on one rank that another has collected.
_held: dict[tuple[int, str], GroupBuffers] = {}
# Buffers of bootstraps, whose end nobody sees.
_living: weakref.WeakValueDictionary[tuple[int, str], GroupBuffers] = weakref.WeakValueDictionary()


def release_all() -> None:
    """Keep nothing any longer for process groups. Every rank of each does so at the same point."""
    with _lock:
        _held.clear()


# A process group may have threads, which have to end while Python still runs.
atexit.register(release_all)


class GroupBuffers:
    """The communicator of a group for a device, and its buffers, which take whatever each call brings.

    `group_buffers` makes it, and shares it with everybody else who works on the same group.

    Args:
        group: Process group, bootstrap, or None.
        communicator: Communicator of that group.
        is_given: Whether a caller made the communicator, and will destroy it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | Bootstrap | None,
        communicator: Communicator,
        *,
        is_given: bool,
    ) -> None:
        self.group = group  # its id is in the key under which this object is found
        self.communicator = communicator
        self.is_given = is_given
        self._key = (id(group), communicator.device.type)
        self._manager = BufferManager(communicator)
        # By an object of every rank, that has no buffer yet.
        self.is_adopted = is_given

    def is_current(self) -> bool:
        """Return whether `group_buffers` would find it again: it is neither destroyed nor let go."""
        found = _held.get(self._key) or _living.get(self._key)
        return found is self and not self.communicator.is_destroyed

    @property
    def device(self) -> torch.device:
        """Device of the tensors that its buffers move."""
        return self.communicator.device

    def check_device(self, device: torch.device) -> None:
        """Raise a ValueError where the group has buffers on another GPU of this rank."""
        known = _known(self.group).get(device.type)
        if known is not None and device.index not in (None, known.device.index):
            raise ValueError(
                f"a group has buffers on one device of a kind: these are on {known.device}, the "
                f"tensors on {device}"
            )

    def check_together(self, check: Callable[[], str]) -> None:
        """Check like `Communicator.check_together`, for ranks that may not agree on the device either.

        All ranks meet through the communicator of the group that was made first.
        """
        self._first().communicator.check_together(check)

    def for_device(self, device: torch.device, check: Callable[[], str]) -> GroupBuffers:
        """The group's buffers on the device of a first call, on which all ranks agree. Collective.

        Args:
            device: Device of the tensors of that call.
            check: As in `Communicator.check_together`; what it says names the kind of the device.

        Raises:
            ValueError: `check` raises on some rank, ranks differ, or the group has buffers on another GPU
                of some rank; on every rank.
        """

        def checked() -> str:
            said = check()
            self.check_device(device)
            return said

        self.check_together(checked)
        return group_buffers(self.group, device=device)

    def reject(self, error: Exception) -> NoReturn:
        """Raise `error` on every rank, in place of a `check_together` that peers enter."""
        self._first().communicator.reject(error)

    def _first(self) -> GroupBuffers:
        return next(iter(_known(self.group).values()), self)

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
            num_experts: Experts over all ranks.
            num_max_tokens_per_rank: Most tokens of a rank, for `Layout.LOW_LATENCY`; None for any.
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
        num_local_experts: int | None = None,
        check: Callable[[], Placement | None] = lambda: None,
        replica_rule: ReplicaRule = "balanced",
        key: object = None,
    ) -> EpBuffer:
        """Give a buffer like `get`, made by all ranks; mistakes of one are raised on all. Always collective.

        Args:
            name: Name of the class or function that asks, with which ranks compare what they make.
            num_experts: As in `get`; None for `num_local_experts` on every rank.
            num_max_tokens_per_rank: As in `get`.
            expert_rank: As in `get`.
            num_local_experts: Checked against the placement where both are given; a slot of it counts as one.
            check: Raises where another argument is wrong. Returns the placement for `EpConfig`, whose experts
                count in place of `num_experts`, or None.
            replica_rule: As in `EpConfig`; not looked at without a placement.
            key: As in `get`.

        Raises:
            ValueError: An argument of some rank is wrong, or those of two ranks differ.
            TypeError: An argument of some rank is of a wrong type.
        """
        config = None

        def state() -> str:
            nonlocal config
            slots = check()
            if slots is not None:
                num_all = slots.num_experts
            elif num_experts is not None:
                num_all = num_experts
            elif num_local_experts is not None:
                num_all = as_int("num_local_experts", num_local_experts, 1)
                num_all *= self.communicator.num_ranks
            else:
                raise ValueError("num_experts is needed, got None")
            config = _config(num_all, num_max_tokens_per_rank, expert_rank)
            if slots is not None:
                config = dataclasses.replace(config, placement=slots, replica_rule=replica_rule)
            placement = config.resolve_expert_rank(self.communicator.num_ranks)
            num_local = int((placement == self.communicator.rank_idx).sum())
            if num_local_experts not in (None, num_local):
                raise ValueError(
                    f"num_local_experts is {shown(num_local_experts)}, this rank has {num_local}"
                )
            return (
                f"{name}(num_experts={config.num_experts}, "
                f"num_max_tokens_per_rank={config.num_max_tokens_per_rank}, "
                f"expert_rank={placement.tolist()}, replica_rule={config.replica_rule!r}, "
                f"slots={None if slots is None else slots.slots}) on {self.device.type}"
            )

        try:
            self.check_together(state)
            assert config is not None
            return self._manager.get(config, key=key)
        except Exception:
            _forget_unused(self.group, self)
            raise

    def destroy(self) -> None:
        """Destroy the buffers, and the communicator unless it was given; idempotent."""
        with _lock:
            for known in (_held, _living):
                if known.get(self._key) is self:
                    del known[self._key]
        self._manager.destroy()
        if not self.is_given:
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
    """Return whether a process group has not been destroyed."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):
        return False
    return True


def _device_for(group: Any) -> str:
    """Return the device of the tensors of a group, as docs/gpu.md says it for callers."""
    # A group that reaches GPUs by Gloo alone is one of CPU ranks on a machine with GPUs.
    is_of_gpus = (
        isinstance(group, dist.ProcessGroup)
        and is_alive(group)
        and "cuda:nccl" in dist.get_backend_config(group)
    )
    return "cuda" if is_of_gpus else "cpu"


def _known(group: Any) -> dict[str, GroupBuffers]:
    """The living of a group by kind of device, in the order in which they were made."""
    with _lock:
        for key, held in list(_held.items()):
            if held.communicator.is_destroyed or not is_alive(held.group):  # type: ignore[arg-type]
                del _held[key]
        found = [*_held.items(), *_living.items()]
    return {
        kind: each
        for (_, kind), each in found
        if each.group is group and not each.communicator.is_destroyed
    }


def _forget_unused(group: Any, *further: GroupBuffers) -> None:
    """Destroy what a failed call leaves of a group, on every rank alike, whichever call it made.

    A caller that keeps the error keeps a communicator, on one rank alone: the next call must not find it.
    """
    for each in {id(each): each for each in (*_known(group).values(), *further)}.values():
        if not each.is_adopted and not len(each._manager):
            each.destroy()


@keeps_unbound
def group_buffers(
    group: dist.ProcessGroup | Bootstrap | Communicator | None = None,
    *,
    device: Device = None,
) -> GroupBuffers:
    """The shared buffers of a group on a device, made on first use; collective where they are made.

    Those of a process group are kept until it, or their communicator, is destroyed. Those of a
    bootstrap are kept as long as somebody holds them: hold them alike on every rank.

    Args:
        group: Process group, bootstrap, or None for the default process group; or a communicator of
            one, over which everything that knows that group alone then works.
        device: Device of the tensors, a GPU by number or "cuda" for the current one. None: that of
            the first communicator that was given for the group; else the current GPU if the group
            has NCCL; else the CPU.

    Raises:
        ValueError: The group has buffers on another GPU of this rank, or over another communicator, or some
            ranks ask for something else than others; on every rank.

    Example:
        ```python
        held = group_buffers(Communicator(group, backend="simt"))
        layer = MoELayer(512, 1024, 64, 4, group=group)  # on the emulator
        ```
    """
    given = group if isinstance(group, Communicator) else None
    key: Any = group if given is None else group_behind(given.bootstrap)
    if key is None and dist.is_available() and dist.is_initialized():
        key = dist.group.WORLD
    known = _known(key)
    first = next(iter(known.values()), None)
    problem: Exception | None = None
    stated = ""
    try:
        wanted = _wanted_device(key, given, device, known)
        found = known.get(wanted.type)
        if found is not None:
            _check_found(found, given, wanted)
            return found
        stated = f"buffers of a group on {wanted.type}"
        if given is not None:
            stated += f" over a communicator of backend {given.backend!r}"
    except (RuntimeError, TypeError, ValueError) as error:
        problem = error
    try:
        _agree_on(first, key, problem, stated)
        made = GroupBuffers(key, given or Communicator(key, wanted), is_given=given is not None)
    except Exception:
        _forget_unused(key)
        raise
    finally:
        # Or this frame, which it has passed, would keep it.
        del problem
    with _lock:
        kept = _held if isinstance(key, dist.ProcessGroup) else _living
        kept[made._key] = made
    return made


def _wanted_device(
    group: Any, given: Communicator | None, device: Device, known: dict[str, GroupBuffers]
) -> torch.device:
    """Return the device of the tensors of a call of `group_buffers`."""
    if given is None:
        if device is None:
            over_given = (each.device for each in known.values() if each.is_given)
            device = next(over_given, None) or _device_for(group)
        return torch.device(device)
    if given.is_destroyed:
        raise ValueError(given.end_text)
    if device is not None and torch.device(device) != given.device:
        raise ValueError(f"device is {shown(device)}, the communicator's is {given.device}")
    return given.device


def _check_found(found: GroupBuffers, given: Communicator | None, wanted: torch.device) -> None:
    found.check_device(wanted)
    if given is not None and found.communicator is not given:
        raise ValueError(
            f"a group has buffers over one communicator for a kind of device: these are over another one, "
            f"of backend {found.communicator.backend!r}, the one given is of {given.backend!r}"
        )


def _agree_on(
    first: GroupBuffers | None, group: Any, problem: Exception | None, stated: str
) -> None:
    """Raise on every rank what is wrong on any, and that ranks ask for different buffers. Collective."""
    if first is None:  # and so no communicator to tell peers through
        told = None if problem is None else first_line(problem)
        make_together(bootstrap_for(group).all_gather, told, stated)
    elif problem is not None:
        first.communicator.reject(problem)
    else:
        # Peers that have what they ask for are in another exchange of this communicator.
        first.communicator.check_together(lambda: stated)
