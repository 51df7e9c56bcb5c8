"""Plan of the layers that get another placement, from the loads of all: ranks make it alone and alike."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import torch

from moe_comm.ep.placement import EMPTY_SLOT, Placement
from moe_comm.ep.planner import fullest_rank, plan_placement


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacedLayer:
    """A layer as the planner sees it.

    Args:
        placement: Placement of its experts; every rank has equally many slots.
        bytes_per_expert: Bytes of one expert in all its tensors.
        loads: int64 `[num_experts]`, on the host.
        num_kept_slots: As in `plan_placement`.
    """

    placement: Placement
    bytes_per_expert: int
    loads: torch.Tensor
    num_kept_slots: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerMove:
    """Another placement of one layer, and what it is for.

    Args:
        layer_idx: Number of the layer.
        placement: The new one.
        experts: Experts that come to a rank which did not hold them, ascending.
        num_moves: Number of times that one comes to such a rank.
        moved_bytes: Bytes of these moves, over all ranks.
        mean_rows: Mean rows of a rank, in the window of loads that was planned from.
        rows_before: Rows of the fullest rank in that window, by the old placement, shared out as "balanced"
            does.
        rows_after: The same by the new placement.
    """

    layer_idx: int
    placement: Placement
    experts: tuple[int, ...]
    num_moves: int
    moved_bytes: int
    mean_rows: float
    rows_before: int
    rows_after: int

    def phase(self, name: str) -> str:
        """Description of this move, for errors."""
        return f"layer {self.layer_idx}, {name} of experts {[*self.experts]}"


def plan_moves(
    layers: Sequence[PlacedLayer],
    *,
    ranks_per_node: int | None = None,
    price_per_byte: float = 0.0,
    scatter: float = 0.3,
) -> list[LayerMove]:
    """Plan the changes, those layers first whose fullest rank loses most rows, then those of low number.

    Layers of equal shape are planned in one call. A layer without loads stays as it is.

    Args:
        layers: Layers in the order of their numbers.
        ranks_per_node: As in `plan_placement`.
        price_per_byte: As in `plan_placement`.
        scatter: As in `plan_placement`.
    """
    alike: dict[tuple[int, ...], list[int]] = collections.defaultdict(list)
    for layer_idx, layer in enumerate(layers):
        if int(layer.loads.sum()):
            placement = layer.placement
            num_bytes, num_kept = layer.bytes_per_expert, layer.num_kept_slots
            shape = placement.num_experts, placement.num_slots, num_bytes, num_kept
            alike[shape].append(layer_idx)
    moves = []
    for members in alike.values():
        first = layers[members[0]]
        plans = plan_placement(
            torch.stack([layers[layer_idx].loads for layer_idx in members]),
            first.placement.num_ranks,
            first.placement.num_slots // first.placement.num_ranks,
            ranks_per_node=ranks_per_node,
            present=[layers[layer_idx].placement for layer_idx in members],
            bytes_per_expert=first.bytes_per_expert,
            price_per_byte=price_per_byte,
            scatter=scatter,
            num_kept_slots=first.num_kept_slots,
        )
        moves += [
            _move_of(layer_idx, layers[layer_idx], plan)
            for layer_idx, plan in zip(members, plans, strict=True)
            if plan != layers[layer_idx].placement
        ]
    return sorted(moves, key=lambda move: (move.rows_after - move.rows_before, move.layer_idx))


def _move_of(layer_idx: int, layer: PlacedLayer, placement: Placement) -> LayerMove:
    coming = [
        expert_idx
        for old, new in zip(layer.placement.slots, placement.slots, strict=True)
        for expert_idx in {*new} - {*old} - {EMPTY_SLOT}
    ]
    return LayerMove(
        layer_idx=layer_idx,
        placement=placement,
        experts=tuple(sorted({*coming})),
        num_moves=len(coming),
        moved_bytes=len(coming) * layer.bytes_per_expert,
        mean_rows=int(layer.loads.sum()) / placement.num_ranks,
        rows_before=fullest_rank(layer.loads, layer.placement),
        rows_after=fullest_rank(layer.loads, placement),
    )
