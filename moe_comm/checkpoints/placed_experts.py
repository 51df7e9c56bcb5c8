"""Experts in the slots of a placement, as views of their whole tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from moe_comm.ep.placement import EMPTY_SLOT, Placement
from moe_comm.resharding.describe import intervals
from moe_comm.resharding.describe.checkpoint_views import CheckpointView
from moe_comm.resharding.describe.intervals import Interval


def placed_views(
    name: str, tensor: torch.Tensor, placement: Placement, rank_idx: int
) -> Iterator[CheckpointView]:
    """Yield what this rank's slots hold of the experts of a layer.

    Replicas of an expert hold the same: a save writes one of them, a load or a refit fills all.

    Args:
        name: Name of the tensor `[num_experts, ...]` that holds all experts; or, with "{expert}" in it, of
            each expert's own `[...]`.
        tensor: `[num_slots, ...]` of this rank; slots beyond those of the placement, and empty ones, are left
            out.
        placement: Placement that says which expert lies in which slot.
        rank_idx: This rank, of the placement.

    Raises:
        ValueError: The tensor has fewer slots than the placement has on this rank.
    """
    slots = placement.slots[rank_idx]
    if tensor.dim() < 1 or tensor.shape[0] < len(slots):
        raise ValueError(
            f"{name}: rank {rank_idx} has {len(slots)} slots of the placement, got a tensor of shape "
            f"{tuple(tensor.shape)}"
        )
    rest = tuple(tensor.shape[1:])
    inner = tuple(intervals.whole(size) for size in rest)
    for slot_idx, expert_idx in enumerate(slots):
        if expert_idx == EMPTY_SLOT:
            continue
        if "{expert}" in name:
            own = name.replace("{expert}", str(expert_idx))
            yield CheckpointView(own, rest, inner, tensor[slot_idx])
        else:
            shape, held = (placement.num_experts, *rest), (Interval(expert_idx, 0, 1),)
            yield CheckpointView(name, shape, (held, *inner), tensor[slot_idx : slot_idx + 1])
