"""Choices of logical experts as slots, under rules that no count decides; see `replica_spec`."""

from __future__ import annotations

import torch

from moe_comm.ep.placement import EMPTY_SLOT, Placement, ReplicaRule

_HASH_FACTOR = 2654435769


class SlotTable:
    """The slots that a rank sends its rows to.

    Args:
        placement: Placement of the experts.
        rule: "nearest", "hash" or "given".
        rank_idx: This rank.
        num_local_ranks: Ranks of a node, consecutive ones.
        device: Device of the choices.

    Attributes:
        keeps_ids: Every id is the slot that it stands for, and all slots hold experts.
    """

    def __init__(
        self,
        placement: Placement,
        rule: ReplicaRule,
        rank_idx: int,
        num_local_ranks: int,
        device: torch.device,
    ) -> None:
        if rule == "given":
            of_ids: list[tuple[int, ...]] = [
                () if expert == EMPTY_SLOT else (slot,)
                for slot, expert in enumerate(placement.slot_expert)
            ]
        elif rule == "hash":
            of_ids = [*placement.slots_of_expert]
        else:
            of_ids = [
                (_nearest(placement, expert, rank_idx, num_local_ranks),)
                for expert in range(placement.num_experts)
            ]
        self.keeps_ids = of_ids == [(slot,) for slot in range(placement.num_slots)]
        self._noun = "a slot that holds an expert" if rule == "given" else "an expert id"
        self._num_slots = placement.num_slots
        most = max(map(len, of_ids))
        padded = [[*slots] + [EMPTY_SLOT] * (most - len(slots)) for slots in of_ids]
        self._slots = torch.tensor(padded, dtype=torch.int64, device=device)
        sizes = [max(1, len(slots)) for slots in of_ids]
        self._num_replicas = torch.tensor(sizes, dtype=torch.int64, device=device)

    def take(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """Choices as slots.

        Args:
            topk_idx: int64 `[T, K]`; -1 is no choice.

        Returns:
            int64 `[T, K]`, contiguous. On a device, which the host does not wait for, an id that is none
            becomes one that is no slot either, and the dispatch finds it.

        Raises:
            ValueError: An id is not that of an expert or slot; on the CPU only.
        """
        num_ids, most = self._slots.shape
        ids = topk_idx.clamp(0, num_ids - 1)
        if most == 1:
            slots = self._slots[:, 0][ids]
        else:
            tokens = torch.arange(topk_idx.shape[0], device=topk_idx.device).unsqueeze(1)
            hashed = tokens * _HASH_FACTOR & 0xFFFFFFFF
            slots = self._slots[ids, hashed % self._num_replicas[ids]]
        is_bad = (topk_idx != ids) | (slots == EMPTY_SLOT)
        is_bad &= topk_idx != -1
        if topk_idx.is_cpu and bool(is_bad.any()):
            token_idx, topk_pos = is_bad.nonzero()[0].tolist()
            raise ValueError(
                f"topk_idx[{token_idx}, {topk_pos}] = {int(topk_idx[token_idx, topk_pos])} is not "
                f"{self._noun} in [-1, {num_ids})"
            )
        slots = torch.where(is_bad, topk_idx.abs() + self._num_slots, slots)
        return slots.masked_fill_(topk_idx == -1, -1)


def _nearest(placement: Placement, expert: int, rank_idx: int, num_local_ranks: int) -> int:
    slots = placement.slots_of_expert[expert]
    for distance in (1, num_local_ranks):
        near = [
            slot for slot in slots if placement.slot_rank[slot] // distance == rank_idx // distance
        ]
        if near:
            return near[rank_idx % len(near)]
    return slots[rank_idx % len(slots)]
