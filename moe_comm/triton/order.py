"""Order of rows that one rank groups by expert; plain torch, on any device."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.triton.checks import check_tensor


@dataclasses.dataclass(frozen=True, eq=False)
class ExpertOrder:
    """Rows grouped by expert, each group starting at a multiple of the alignment.

    Args:
        positions: int64 `[T, K]`, the row of every choice, -1 for an unused one.
        expert_offsets: int32 `[num_experts + 1]`, padded starts, last is the padded total.
        num_tokens_per_expert: int64 `[num_experts]`, without padding.
    """

    positions: torch.Tensor
    expert_offsets: torch.Tensor
    num_tokens_per_expert: torch.Tensor


def order_by_expert(
    topk_idx: torch.Tensor,
    num_experts: int,
    *,
    expert_alignment: int = 1,
    expert_offsets: torch.Tensor | None = None,
) -> ExpertOrder:
    """Expert-major positions of choices, in order of (token, k) inside an expert.

    Does not wait for the device.

    Args:
        topk_idx: int64 `[T, K]`, ids in [-1, num_experts), not checked; -1 marks an unused choice.
        num_experts: Experts whose rows are grouped.
        expert_alignment: Rows per expert are padded to a multiple of this.
        expert_offsets: `[num_experts]` or more, where every expert starts, in place of the starts that
            follow from the counts.

    Example:
        `topk_idx = [[1, 0], [1, -1]]`, 2 experts, alignment 4: positions `[[4, 0], [5, -1]]`,
        offsets `[0, 4, 8]`.
    """
    check_tensor("topk_idx", topk_idx, 2)
    if topk_idx.dtype is not torch.int64:
        raise TypeError(f"topk_idx must be torch.int64, got {topk_idx.dtype}")
    if num_experts < 0 or expert_alignment < 1:
        raise ValueError(
            "num_experts must be >= 0 and expert_alignment >= 1, got "
            f"{num_experts} and {expert_alignment}"
        )
    # Unused choices are an expert of their own, behind all others.
    ids = torch.where(topk_idx < 0, num_experts, topk_idx).flatten()
    ascending, order = ids.sort(stable=True)
    bounds = torch.searchsorted(ascending, torch.arange(num_experts + 1, device=ids.device))
    num_tokens = bounds.diff()
    padded = (num_tokens + expert_alignment - 1) // expert_alignment * expert_alignment
    offsets = torch.nn.functional.pad(padded.cumsum(0), (1, 0))
    starts = offsets if expert_offsets is None else expert_offsets.to(torch.int64)
    ordinal = torch.arange(ids.numel(), device=ids.device) - bounds[ascending]
    positions = torch.empty_like(ids)
    # One more start, for unused choices, whatever the caller's offsets are.
    starts = torch.cat([starts[:num_experts], starts.new_zeros(1)])
    positions[order] = starts[ascending] + ordinal
    return ExpertOrder(
        positions=torch.where(topk_idx < 0, -1, positions.view(topk_idx.shape)),
        expert_offsets=offsets.to(torch.int32),
        num_tokens_per_expert=num_tokens,
    )
