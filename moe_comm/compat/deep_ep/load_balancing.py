"""Weights and gradients of redundant experts, by a mapping as in DeepEP V2.5."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from moe_comm.arguments import check_kind, shown
from moe_comm.compat.deep_ep.allocator import get_num_tma_alignment
from moe_comm.compat.deep_ep.arguments import check_ints
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap, wait_for
from moe_comm.peers.agree import FirstError
from moe_comm.peers.communicator import Communicator
from moe_comm.replicas.copies import ReplicaCopies
from moe_comm.replicas.gradients import GradientReduction
from moe_comm.replicas.plan import ReplicaMove
from moe_comm.replicas.prefetch import Prefetch
from moe_comm.replicas.slots import SlotTensors
from moe_comm.tensors.memory import bytes_of, check_memory

Payload = torch.Tensor | Sequence[torch.Tensor]
Sharing = tuple[int, int, int, int]
"""Owner, its local expert, rank that has a copy, slot of the copy there."""


class LoadBalancing:
    """Implementation of `EPBuffer.lb_*`. Collective, all of it.

    Args:
        communicator: The ranks; its backend must be "host".
    """

    def __init__(self, communicator: Communicator) -> None:
        self.copies = ReplicaCopies(communicator)

    def prefetch(
        self,
        redundant: Payload,
        local: Payload,
        mapping: torch.Tensor,
        num_sms: int,
        previous_event: EventOverlap | EventHandle | None,
    ) -> EventOverlap:
        """See `EPBuffer.lb_prefetch_weights`."""
        stated: dict[str, str] = {}
        prefetch: Prefetch | None = None
        with FirstError() as first:
            _check_running(num_sms, previous_event)
            pairs = _pairs(redundant, local)
            parts = [
                [_as_bytes(f"{name}[{i}]", part) for name, part in zip(_WEIGHTS, pair, strict=True)]
                for i, pair in enumerate(pairs)
            ]
            slots, sharings = self._slots(parts, mapping, "weights of experts", stated)
            num_local = len(parts[0][0])
            moves = [
                ReplicaMove(0, owner, expert, rank, num_local + slot, is_empty=True)
                for owner, expert, rank, slot in sharings
            ]
            prefetch = Prefetch(self.copies, moves, slots, None)
        self.copies.agree("lb_prefetch_weights", first, stated)
        assert prefetch is not None
        while not prefetch.step():
            pass
        return EventOverlap(EventHandle())

    def reduce(
        self,
        redundant: torch.Tensor,
        local: torch.Tensor,
        mapping: torch.Tensor,
        num_sms: int,
        previous_event: EventOverlap | EventHandle | None,
    ) -> EventOverlap:
        """See `EPBuffer.lb_reduce_grads`."""
        stated: dict[str, str] = {}
        reduction: GradientReduction | None = None
        with FirstError() as first:
            _check_running(num_sms, previous_event)
            for name, given in zip(_GRADIENTS, (local, redundant), strict=True):
                check_kind(name, given, torch.Tensor)
                if given.dtype is not torch.float32 or given.dim() != 2:
                    raise ValueError(
                        f"{name} must be float32 [num_experts, hidden], got {given.dtype} of shape "
                        f"{tuple(given.shape)}"
                    )
                _as_bytes(name, given)
            slots, sharings = self._slots(
                [[local, redundant]], mapping, "gradients of experts", stated
            )
            held: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for owner, expert, rank, slot in sharings:
                place = owner, expert
                held.setdefault(place, [place]).append((rank, len(local) + slot))
            reduction = GradientReduction(
                self.copies, list(held.values()), slots, to_all=False, step_bytes=_STEP_BYTES
            )
        self.copies.agree("lb_reduce_grads", first, stated)
        assert reduction is not None
        reduction.run()
        return EventOverlap(EventHandle())

    def _slots(
        self,
        parts: list[list[torch.Tensor]],
        mapping: torch.Tensor,
        name: str,
        stated: dict[str, str],
    ) -> tuple[SlotTensors, list[Sharing]]:
        """Local experts and, behind them, slots of redundant ones; says what all ranks must have alike."""
        num_local, num_redundant = (len(part) for part in parts[0])
        sharings = _sharings(mapping, self.copies.communicator.num_ranks, num_local, num_redundant)
        slots = SlotTensors(parts, num_local + num_redundant, name)
        stated |= slots.stated(name)
        stated["number of local experts"] = str(num_local)
        stated |= {
            f"redundancy_mapping[{rank_idx}]": str(row)
            for rank_idx, row in enumerate(mapping.tolist())
        }
        return slots, sharings

    def destroy(self) -> None:
        """Give the memory back. Local, idempotent."""
        self.copies.destroy()


_WEIGHTS = ("expert_weights", "redundant_expert_weights")
_GRADIENTS = ("expert_grads", "redundant_expert_grads")
_STEP_BYTES = 64 << 20


def _check_running(num_sms: int, previous_event: EventOverlap | EventHandle | None) -> None:
    check_ints(0, num_sms=num_sms)
    wait_for(previous_event)


def _pairs(redundant: Payload, local: Payload) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Tensors of local experts, and those of redundant ones that get the same."""
    lists = [[given] if isinstance(given, torch.Tensor) else given for given in (local, redundant)]
    for name, given in zip(_WEIGHTS, lists, strict=True):
        if not isinstance(given, list | tuple) or not given:
            raise TypeError(f"{name} must be a tensor or a list of tensors, got {shown(given)}")
    if len(lists[0]) != len(lists[1]):
        raise ValueError(
            f"{_WEIGHTS[1]} must be as many as {_WEIGHTS[0]}, got {len(lists[1])} and {len(lists[0])}"
        )
    return list(zip(*lists, strict=True))


def _as_bytes(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """uint8 `[experts, bytes of an expert]`, the same memory."""
    check_kind(name, tensor, torch.Tensor)
    if not tensor.dim() or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous [num_experts, ...] on the CPU, got shape {tuple(tensor.shape)}, "
            f"strides {tensor.stride()}, on {tensor.device}"
        )
    check_memory(name, tensor)
    num_bytes = math.prod(tensor.shape[1:]) * tensor.itemsize
    if num_bytes == 0 or num_bytes % get_num_tma_alignment():
        raise ValueError(
            f"{name} must have a multiple of {get_num_tma_alignment()} bytes an expert, got {num_bytes}"
        )
    return bytes_of(tensor.detach()).view(len(tensor), num_bytes)


def _sharings(
    mapping: torch.Tensor, num_ranks: int, num_local: int, num_redundant: int
) -> list[Sharing]:
    """Copies that a mapping asks for, in the order of its slots.

    Raises:
        ValueError: It has another dtype or shape, or a slot holds no expert of another rank.
        TypeError: It is no tensor.
    """
    check_kind("redundancy_mapping", mapping, torch.Tensor)
    shape = (num_ranks, num_redundant)
    if mapping.dtype is not torch.int32 or mapping.shape != shape or not mapping.is_contiguous():
        raise ValueError(
            f"redundancy_mapping must be contiguous int32 of shape {shape}, got {mapping.dtype} of shape "
            f"{tuple(mapping.shape)}, strides {mapping.stride()}"
        )
    found = []
    for rank_idx, row in enumerate(mapping.tolist()):
        for slot_idx, expert_idx in enumerate(row):
            if expert_idx == -1:
                continue
            if not 0 <= expert_idx < num_ranks * num_local:
                raise ValueError(
                    f"redundancy_mapping[{rank_idx}, {slot_idx}] must be in [-1, "
                    f"{num_ranks * num_local}), got {expert_idx}"
                )
            owner, local_idx = divmod(expert_idx, num_local)
            if owner == rank_idx:
                raise ValueError(
                    f"redundancy_mapping[{rank_idx}, {slot_idx}] must be an expert of another rank, got "
                    f"{expert_idx}, which rank {owner} owns"
                )
            found.append((owner, local_idx, rank_idx, slot_idx))
    return found
