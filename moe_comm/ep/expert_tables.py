"""Tables of physical experts, as engines keep them, and the placements that they describe."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from moe_comm.arguments import as_int, check_kind
from moe_comm.ep.placement import EMPTY_SLOT, Placement, first_missing


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertTables:
    """Logical expert of every physical one, in all layers, and the reverse: SGLang's and vLLM's form.

    Taken as the engines' builders make them: any integer dtype, on any device, or lists. Physical experts are
    numbered rank by rank. The reverse map may leave out replicas, as a rank of SGLang does that only uses the
    nearest: what lies where is what `physical_to_logical_map` says.

    Args:
        physical_to_logical_map: Integers `[layers, P]`: the logical expert of every physical one, -1 for an
            empty slot.
        logical_to_all_physical_map: Integers `[layers, num_experts, X]`: physical experts of every logical
            one, then -1 (vLLM: `logical_to_physical_map`). None: all of them, ascending.
        logical_replica_count: Integers `[layers, num_experts]`: how many of these there are (SGLang:
            `logical_to_all_physical_map_num_valid`). None: counted.
        num_experts: Logical experts, where no map says it; None for one more than the largest id.

    Attributes:
        physical_to_logical_map, logical_to_all_physical_map, logical_replica_count: int64, on the CPU.

    Raises:
        ValueError: A shape does not fit, an id is out of range, an expert has no slot, or the tables contradict
            each other; the message names layer and expert.
        TypeError: A table does not hold integers.
    """

    physical_to_logical_map: torch.Tensor
    logical_to_all_physical_map: torch.Tensor
    logical_replica_count: torch.Tensor

    def __init__(
        self,
        physical_to_logical_map: torch.Tensor | Sequence[Sequence[int]],
        logical_to_all_physical_map: torch.Tensor | Sequence[Any] | None = None,
        logical_replica_count: torch.Tensor | Sequence[Sequence[int]] | None = None,
        *,
        num_experts: int | None = None,
    ) -> None:
        physical = _as_table("physical_to_logical_map", physical_to_logical_map, 2)
        given = logical_to_all_physical_map
        listed = None if given is None else _as_table("logical_to_all_physical_map", given, 3)
        if num_experts is None:
            num_experts = int(physical.max()) + 1 if listed is None else listed.shape[1]
        num_experts = as_int("num_experts", num_experts, 1)
        _check_ids("physical_to_logical_map", physical, num_experts)
        for layer_idx, of_layer in enumerate(physical.tolist()):
            missing = first_missing(of_layer, num_experts)
            if missing is not None:
                raise ValueError(f"layer {layer_idx}: expert {missing} has no physical expert")
        found = _reverse(physical, num_experts)
        if listed is None:
            listed = found
        else:
            self._check_listed(listed, physical, num_experts)
        counts = (listed != EMPTY_SLOT).sum(-1)
        if logical_replica_count is not None:
            said = _as_table("logical_replica_count", logical_replica_count, 2)
            if said.shape != counts.shape:
                raise ValueError(
                    f"logical_replica_count must have the shape {tuple(counts.shape)}, got {tuple(said.shape)}"
                )
            for layer_idx, expert_idx in (said != counts).nonzero().tolist():
                raise ValueError(
                    f"layer {layer_idx}: expert {expert_idx} has {counts[layer_idx, expert_idx]} physical "
                    f"experts, logical_replica_count says {said[layer_idx, expert_idx]}"
                )
        object.__setattr__(self, "physical_to_logical_map", physical)
        object.__setattr__(self, "logical_to_all_physical_map", listed)
        object.__setattr__(self, "logical_replica_count", counts)

    @staticmethod
    def _check_listed(listed: torch.Tensor, physical: torch.Tensor, num_experts: int) -> None:
        num_layers, num_physical = physical.shape
        if listed.shape[:2] != (num_layers, num_experts):
            raise ValueError(
                f"logical_to_all_physical_map must have the shape ({num_layers}, {num_experts}, X), got "
                f"{tuple(listed.shape)}"
            )
        _check_ids("logical_to_all_physical_map", listed, num_physical)
        is_used = listed != EMPTY_SLOT
        # -1 at the end alone: engines take the first so many.
        is_torn = (is_used[..., 1:] & ~is_used[..., :-1]).any(-1) | ~is_used.any(-1)
        for layer_idx, expert_idx in is_torn.nonzero().tolist():
            raise ValueError(
                f"layer {layer_idx}: the physical experts of expert {expert_idx} must be one or more, then -1, "
                f"got {listed[layer_idx, expert_idx].tolist()}"
            )
        held = physical.gather(1, listed.clamp_min(0).flatten(1)).view(listed.shape)
        experts = torch.arange(num_experts)[:, None]
        for layer_idx, expert_idx, place in (is_used & (held != experts)).nonzero().tolist():
            slot = int(listed[layer_idx, expert_idx, place])
            raise ValueError(
                f"layer {layer_idx}: logical_to_all_physical_map has physical expert {slot} for expert "
                f"{expert_idx}, physical_to_logical_map has expert {physical[layer_idx, slot]} there"
            )

    @classmethod
    def of_placements(
        cls,
        placements: Sequence[Placement],
        *,
        num_max_replicas: int | None = None,
        fills_empty_slots: bool = False,
    ) -> ExpertTables:
        """The tables of placements, for an engine.

        Args:
            placements: Placement of every layer; alike in experts and slots.
            num_max_replicas: Columns of `logical_to_all_physical_map`: P for SGLang, one more than the redundant
                experts for vLLM. None for as many as an expert has at most.
            fills_empty_slots: Have empty slots hold an expert of their rank once more, for engines that have
                none, as SGLang. `placements` makes empty ones of them again.

        Raises:
            ValueError: There are no placements, they differ in experts or slots, there are more replicas than
                columns, or a rank that has no expert has an empty slot to be filled.
            TypeError: Something is no `Placement`.
        """
        if not placements:
            raise ValueError("placements must hold one for every layer, got none")
        rows = []
        for layer_idx, placement in enumerate(placements):
            check_kind(f"placements[{layer_idx}]", placement, Placement)
            shapes = [(p.num_experts, [*map(len, p.slots)]) for p in (placements[0], placement)]
            if shapes[0] != shapes[1] or len({*shapes[1][1]}) != 1:
                raise ValueError(
                    f"placements must have the same experts and the same number of slots on all ranks: layer 0 has "
                    f"{shapes[0]}, layer {layer_idx} has {shapes[1]}"
                )
            row: list[int] = []
            for rank_idx, of_rank in enumerate(placement.slots):
                held = [*of_rank]
                if fills_empty_slots and EMPTY_SLOT in held:
                    filler = next((expert for expert in held if expert != EMPTY_SLOT), None)
                    if filler is None:
                        raise ValueError(
                            f"layer {layer_idx}: rank {rank_idx} has no expert to fill its slots with"
                        )
                    held = [filler if expert == EMPTY_SLOT else expert for expert in held]
                row += held
            rows.append(row)
        physical = torch.tensor(rows)
        num_experts = placements[0].num_experts
        tables = cls(physical, num_experts=num_experts)
        if num_max_replicas is None:
            return tables
        listed = tables.logical_to_all_physical_map
        num_more = as_int("num_max_replicas", num_max_replicas, 1) - listed.shape[2]
        if num_more < 0:
            raise ValueError(
                f"num_max_replicas must be >= {listed.shape[2]}, what an expert has, got {num_max_replicas}"
            )
        padded = torch.nn.functional.pad(listed, (0, num_more), value=EMPTY_SLOT)
        return cls(physical, padded)

    def placements(self, num_ranks: int) -> list[Placement]:
        """The placement of every layer; see `Placement.of_table`.

        Args:
            num_ranks: Ranks, >= 1, which divide P.
        """
        num_experts = self.logical_replica_count.shape[1]
        return [
            Placement.of_table(of_layer, num_ranks, num_experts)
            for of_layer in self.physical_to_logical_map
        ]


def _as_table(name: str, given: torch.Tensor | Sequence[Any], num_dims: int) -> torch.Tensor:
    table = torch.as_tensor(given, device="cpu")
    if table.dtype.is_floating_point or table.dtype.is_complex or table.dtype == torch.bool:
        raise TypeError(f"{name} must hold integers, got {table.dtype}")
    if table.dim() != num_dims or not table.numel():
        raise ValueError(
            f"{name} must have {num_dims} dimensions and no empty one, got shape {tuple(table.shape)}"
        )
    return table.to(torch.int64, copy=True)


def _check_ids(name: str, table: torch.Tensor, end: int) -> None:
    for place in ((table < EMPTY_SLOT) | (table >= end)).nonzero().tolist():
        raise ValueError(
            f"{name}[{', '.join(map(str, place))}] must be in [-1, {end}), got {table[tuple(place)]}"
        )


def _reverse(physical: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Physical experts of every logical one, ascending, -1 at the end: `[layers, num_experts, X]`."""
    is_of = physical[:, None, :] == torch.arange(num_experts)[:, None]
    most = max(int(is_of.sum(-1).max()), 1)
    slots = torch.arange(physical.shape[1]).expand(is_of.shape)
    ranked = slots.masked_fill(~is_of, physical.shape[1]).sort(-1).values[..., :most]
    return ranked.masked_fill(ranked == physical.shape[1], EMPTY_SLOT)
