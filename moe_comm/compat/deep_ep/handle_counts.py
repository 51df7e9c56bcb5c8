"""Counts, channels and prefix sums as DeepEP's handles hold them. Plain torch on one rank's data."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.ep import config
from moe_comm.ep.backends.base import PlanTensors


@dataclasses.dataclass(frozen=True)
class Layout:
    """Destinations of the tokens of one rank.

    Args:
        num_tokens_per_rank: int32 `[num_ranks]`; a token counts once per rank.
        num_tokens_per_expert: int32 `[num_experts]`.
        is_token_in_rank: bool `[num_tokens, num_ranks]`.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


def dispatch_layout(topk_idx: torch.Tensor, expert_rank: torch.Tensor, num_ranks: int) -> Layout:
    """The layout of choices.

    Args:
        topk_idx: int64 `[num_tokens, num_topk]`, -1 marks an unused choice.
        expert_rank: int32 `[num_experts]`, the rank of every expert.
        num_ranks: Ranks.

    Raises:
        ValueError: An id is outside `[-1, num_experts)`; the first is named.
    """
    num_experts = expert_rank.numel()
    if topk_idx.numel():
        lowest, highest = torch.aminmax(topk_idx)
        if int(lowest) < -1 or int(highest) >= num_experts:
            bad = int(lowest) if int(lowest) < -1 else int(highest)
            raise ValueError(f"topk_idx must be in [-1, {num_experts}), got {bad}")
    # Unused choices fall into a bin of their own, which is cut off.
    bins = torch.where(topk_idx < 0, num_experts, topk_idx)
    counts = torch.bincount(bins.flatten(), minlength=num_experts + 1)[:num_experts]
    is_in_rank, _ = tokens_in_ranks(topk_idx, expert_rank, num_ranks)
    return Layout(
        num_tokens_per_rank=is_in_rank.sum(0, dtype=torch.int32),
        num_tokens_per_expert=counts.to(torch.int32),
        is_token_in_rank=is_in_rank,
    )


def tokens_in_ranks(
    topk_idx: torch.Tensor, expert_rank: torch.Tensor, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the ranks that every token goes to.

    Args:
        topk_idx: int64 `[num_tokens, num_topk]`, -1 marks an unused choice.
        expert_rank: int32 `[num_experts]`, the rank of every expert.
        num_ranks: Ranks.

    Returns:
        bool `[num_tokens, num_ranks]`, and the ranks of the choices: int64 `[num_tokens, num_topk]`,
        `num_ranks` where a choice is not used.
    """
    # Unused choices fall into a bin of their own, which is cut off; -1 reads the last.
    rank_of_bin = torch.cat([expert_rank.to(topk_idx), torch.tensor([num_ranks])])
    rank_of_choice = rank_of_bin[topk_idx]
    is_in_rank = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool)
    is_in_rank.scatter_(1, rank_of_choice, True)
    return is_in_rank[:, :num_ranks].contiguous(), rank_of_choice


def last_choices(
    topk_idx: torch.Tensor, expert_rank: torch.Tensor, num_ranks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the choice by which a token goes to each of its ranks: the last of those that lead there.

    Args:
        topk_idx: int64 `[num_tokens, num_topk]`, -1 marks an unused choice.
        expert_rank: int32 `[num_experts]`, the rank of every expert.
        num_ranks: Ranks.

    Returns:
        int64 `[num_tokens, num_topk]` twice, -1 at all other choices: the rank, and the place of the
        token among those that go to this rank.
    """
    is_in_rank, rank_of_choice = tokens_in_ranks(topk_idx, expert_rank, num_ranks)
    is_same = rank_of_choice[:, :, None] == rank_of_choice[:, None, :]
    is_last = ~is_same.triu(1).any(dim=2) & (rank_of_choice < num_ranks)
    place = (is_in_rank.cumsum(0) - 1).gather(1, rank_of_choice.clamp_max(num_ranks - 1))
    return rank_of_choice.masked_fill(~is_last, -1), place.masked_fill(~is_last, -1)


def send_channels(
    is_token_in_rank: torch.Tensor, num_channels: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places of sent tokens in channels, which are ranges of ceil(num_tokens / num_channels) tokens.

    Args:
        is_token_in_rank: bool `[num_tokens, num_ranks]`.
        num_channels: Channels.

    Returns:
        int32 `[num_ranks, num_channels]`: tokens sent to a rank up to and including a channel; int32
        `[num_tokens, num_ranks]`: which of its channel's tokens to a rank a token is, or -1.
    """
    num_tokens, num_ranks = is_token_in_rank.shape
    before = torch.zeros(num_tokens + 1, num_ranks, dtype=torch.int32)
    torch.cumsum(is_token_in_rank, 0, dtype=torch.int32, out=before[1:])
    per_channel = max(-(-num_tokens // num_channels), 1)
    bounds = (torch.arange(num_channels + 1) * per_channel).clamp(max=num_tokens)
    at_bounds = before[bounds]
    channel_of_token = torch.arange(num_tokens) // per_channel
    place = before[:-1] - at_bounds[channel_of_token]
    return at_bounds[1:].T.contiguous(), place.masked_fill_(~is_token_in_rank, -1)


def rows_on_ranks(
    is_token_in_rank: torch.Tensor, sent_tokens: torch.Tensor, rank_idx: int
) -> torch.Tensor:
    """int64 `[num_tokens, num_ranks]`: the row of every token on every rank of RANK_MAJOR, or -1.

    Args:
        is_token_in_rank: bool `[num_tokens, num_ranks]`, of this rank.
        sent_tokens: Integers `[num_ranks, num_ranks]`, tokens from every rank to every other.
        rank_idx: This rank.
    """
    sent = sent_tokens.to(torch.int64)
    first = (sent.cumsum(0) - sent)[rank_idx]
    return (is_token_in_rank.cumsum(0) - 1 + first).masked_fill_(~is_token_in_rank, -1)


def received_choices(
    plan: PlanTensors, expert_rank: torch.Tensor, rank_idx: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices that every rank sent of this rank's experts.

    Args:
        plan: Plan of the dispatch.
        expert_rank: int32 `[num_experts]`, the rank of every expert.
        rank_idx: This rank.

    Returns:
        int64 `[num_local_experts]`, ids of the experts; int64 `[num_local_experts, num_ranks]`.
    """
    mine = (expert_rank == rank_idx).nonzero().flatten()
    return mine, plan.sent_choices[:, mine].T.to(torch.int64)


def row_sources(plan: PlanTensors, expert_rank: torch.Tensor, rank_idx: int) -> torch.Tensor:
    """int64 `[M]`: the rank every received row came from, -1 for padding.

    Args:
        plan: Plan of a dispatch in RANK_MAJOR or EXPERT_MAJOR.
        expert_rank: int32 `[num_experts]`, the rank of every expert.
        rank_idx: This rank.
    """
    num_ranks = plan.sent_tokens.shape[0]
    if plan.layout is config.Layout.RANK_MAJOR:
        lengths = plan.sent_tokens[:, rank_idx].to(torch.int64)
        rank_of_part = torch.arange(num_ranks)
    else:
        mine, per_expert = received_choices(plan, expert_rank, rank_idx)
        padding = -per_expert.sum(1, keepdim=True) % plan.expert_alignment
        lengths = torch.cat([per_expert, padding], dim=1).flatten()
        rank_of_part = torch.cat([torch.arange(num_ranks), torch.tensor([-1])]).repeat(len(mine))
    filled = torch.repeat_interleave(rank_of_part, lengths)[: plan.num_recv_tokens]
    sources = torch.full((plan.num_recv_tokens,), -1, dtype=torch.int64)
    sources[: len(filled)] = filled
    return sources


def recv_channel_prefix_matrix(
    sources: torch.Tensor,
    recv_src_idx: torch.Tensor,
    src_num_tokens: torch.Tensor,
    num_ranks: int,
    num_channels: int,
) -> torch.Tensor:
    """int32 `[num_ranks, num_channels]`: where a channel of a source begins in the source's rows.

    Args:
        sources: int64 `[num_rows]`, the rank every row came from.
        recv_src_idx: int32 `[num_rows]`, index of every row on its source.
        src_num_tokens: int32 `[num_rows]`, tokens of the row's source.
        num_ranks: Ranks.
        num_channels: Channels.
    """
    per_channel = (src_num_tokens.to(torch.int64) + num_channels - 1) // num_channels
    place = sources * num_channels + recv_src_idx.to(torch.int64) // per_channel.clamp(min=1)
    counts = torch.bincount(place, minlength=num_ranks * num_channels)
    counts = counts.view(num_ranks, num_channels)
    return (counts.cumsum(1) - counts).to(torch.int32)


def packed_layout_range(counts: torch.Tensor) -> torch.Tensor:
    """`begin << 32 | count` of the rows of every source, int64 of the same shape.

    Args:
        counts: int64 `[num_local_experts, num_ranks]`; rows lie in rank order.
    """
    begin = counts.cumsum(1) - counts
    return begin << 32 | counts
