"""Router scores by which one rank gets more tokens than the others."""

from __future__ import annotations

import torch

_NUM_BISECTIONS = 20
_LARGEST_FACTOR = 100.0
_LEAST_CHOSEN_SCORE = 0.95


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> torch.Tensor:
    """Scores whose top-k sends `ratio` times as many tokens to rank 0 as to the mean of the others.

    A token counts once for a rank, however many of its experts are there. Random; local.

    Args:
        num_tokens: N.
        num_experts: E, a multiple of `num_ranks`.
        num_ranks: R.
        num_topk: K.
        ratio: Ratio of the tokens, at least 1.
        precise: Whether all other ranks get equally many, and every token goes to equally many
            ranks, which is not how routers choose. Else experts of rank 0 are merely liked better.

    Returns:
        float32 `[N, E]`.

    Raises:
        ValueError: The experts of so few ranks as the ratio allows are not `num_topk`, or `ratio` is below 1.
    """
    if ratio < 1:
        raise ValueError(f"ratio must be at least 1, got {ratio}")
    if not precise:
        factor = (
            1.0 if ratio == 1 else _factor_for(num_tokens, num_experts, num_ranks, num_topk, ratio)
        )
        return _skewed_to_rank_0(num_tokens, num_experts, num_ranks, factor)
    in_rank = _ranks_of_tokens(num_tokens, num_experts // num_ranks, num_ranks, num_topk, ratio)
    chosen = _experts_in(in_rank, num_experts // num_ranks, num_topk)
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    low = scores * (_LEAST_CHOSEN_SCORE - 0.05)
    return torch.where(chosen, _LEAST_CHOSEN_SCORE + scores * (1 - _LEAST_CHOSEN_SCORE), low)


def _skewed_to_rank_0(
    num_tokens: int, num_experts: int, num_ranks: int, factor: float
) -> torch.Tensor:
    scores = torch.rand(num_tokens, num_experts, dtype=torch.float32)
    scores[:, : num_experts // num_ranks] *= factor
    return scores


def _factor_for(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> float:
    """Factor by which it gets better, found by bisection on scores like those that will be made."""
    low, high = 1.0, _LARGEST_FACTOR
    for _ in range(_NUM_BISECTIONS):
        factor = (low + high) / 2
        scores = _skewed_to_rank_0(num_tokens, num_experts, num_ranks, factor)
        rank_idx = scores.topk(num_topk).indices // (num_experts // num_ranks)
        in_rank = torch.zeros(num_tokens, num_ranks, dtype=torch.bool).scatter_(1, rank_idx, True)
        first, *others = in_rank.sum(0).tolist()
        if first * len(others) > sum(others) * ratio:
            high = factor
        else:
            low = factor
    return low


def _ranks_of_tokens(
    num_tokens: int, num_local_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> torch.Tensor:
    """Ranks of tokens, bool `[N, R]`, with equally many ranks for every token."""
    num_others = num_ranks - 1
    # Rank 0 can have all tokens and no more, which limits how many ranks a token has.
    num_chosen = min(num_topk, num_ranks, int(num_others / ratio) + 1)
    if num_chosen * num_local_experts < num_topk:
        raise ValueError(
            f"{num_chosen} ranks of {num_local_experts} experts are too few for num_topk = {num_topk}; "
            f"ratio = {ratio} allows no more of {num_ranks}"
        )
    in_rank = torch.zeros(num_tokens, num_ranks, dtype=torch.bool)
    share = ratio * num_chosen / (ratio + num_others)
    in_rank[torch.randperm(num_tokens)[: round(num_tokens * share)], 0] = True
    # Others are dealt in turn: neighbors in the turn differ, and all get equally many.
    num_left = num_chosen - in_rank[:, 0].to(torch.int64)
    token_idx = torch.repeat_interleave(torch.arange(num_tokens), num_left)
    turn = torch.randperm(num_others) + 1 if num_others else torch.zeros(1, dtype=torch.int64)
    in_rank[token_idx, turn[torch.arange(len(token_idx)) % len(turn)]] = True
    return in_rank[torch.randperm(num_tokens)]


def _experts_in(in_rank: torch.Tensor, num_local_experts: int, num_topk: int) -> torch.Tensor:
    """Choices, bool `[N, E]`, K of a token, in each of its ranks as equally many as can be."""
    num_tokens, num_ranks = in_rank.shape
    num_chosen = in_rank.sum(1, keepdim=True)
    position = in_rank.cumsum(1) - 1
    quota = num_topk // num_chosen + (position < num_topk % num_chosen)
    order = torch.rand(num_tokens, num_ranks, num_local_experts, dtype=torch.float32).argsort(-1)
    place = order.argsort(-1)
    return ((place < quota[:, :, None]) & in_rank[:, :, None]).flatten(1)
