"""Ranks of the experts, for backends that move rows in Python; csrc/layout computes the rest.

All tensors are on the CPU. E experts, K choices a token.
"""

from __future__ import annotations

import dataclasses

import torch

from moe_comm import _host
from moe_comm.ep import placement as placements
from moe_comm.ep.config import EpConfig, Layout, num_places_per_expert


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Rank of every expert, and its position among the experts of that rank.

    Args:
        native: As csrc/layout has it.
        expert_rank: int64 `[E]`, the rank of every expert.
        local_expert_idx: int64 `[E]`, position of every expert among those of its rank.
    """

    native: _host.layout.Placement
    expert_rank: torch.Tensor
    local_expert_idx: torch.Tensor

    @classmethod
    def of(cls, expert_rank: torch.Tensor, num_ranks: int) -> Placement:
        """The placement that `EpConfig.resolve_expert_rank` describes, int32 `[E]`.

        Example:
            `expert_rank = [1, 0, 1]`: `local_expert_idx = [0, 0, 1]`.
        """
        native = _host.layout.Placement(expert_rank.contiguous(), num_ranks)
        return cls(
            native=native,
            expert_rank=expert_rank.to(torch.int64),
            local_expert_idx=native.local_expert_idx().to(torch.int64),
        )

    @property
    def num_ranks(self) -> int:
        """Ranks."""
        return self.native.num_ranks

    @property
    def num_experts(self) -> int:
        """E."""
        return self.native.num_experts


def arrangement_of(
    layout: Layout, expert_alignment: int, config: EpConfig, num_ranks: int
) -> _host.layout.Arrangement:
    """Return the arrangement: all that, besides counts, decides where rows lie in windows of `config`."""
    return _host.layout.Arrangement(
        int(layout), expert_alignment, num_places_per_expert(config, layout, num_ranks)
    )


def replicas_of(
    placement: placements.Placement | None, num_local_ranks: int
) -> _host.layout.Replicas | None:
    """Return the replicas among which csrc/layout spreads rows, for nodes of consecutive ranks."""
    if placement is None:
        return None
    slots = torch.tensor(placement.slot_rank, dtype=torch.int32)
    return _host.layout.Replicas(
        [*placement.slot_expert],
        placement.num_experts,
        num_local_ranks,
        _host.layout.Placement(slots, placement.num_ranks),
    )


def local_topk_idx(
    topk_idx: torch.Tensor, rank_idx: torch.Tensor, placement: Placement
) -> torch.Tensor:
    """Choices as the expert ids of a rank, -1 where the choice is not on that rank.

    Args:
        topk_idx: int64 `[n, K]`.
        rank_idx: int64 `[n]`, the rank of every row.
        placement: Placement of the experts.
    """
    chosen = topk_idx.clamp(min=0)
    is_there = (topk_idx >= 0) & (placement.expert_rank[chosen] == rank_idx.unsqueeze(1))
    return torch.where(is_there, placement.local_expert_idx[chosen], -1)
