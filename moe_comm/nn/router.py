"""Router: the choice of the experts that a token goes to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn


class Routing(NamedTuple):
    """The experts of every token, and their weights.

    Fields: topk_idx int64 `[..., num_topk]`; topk_weights float32 `[..., num_topk]`.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @classmethod
    def cat(cls, parts: Sequence[Routing]) -> Routing:
        """Routings of tokens one after the other."""
        return cls(
            torch.cat([part.topk_idx for part in parts]),
            torch.cat([part.topk_weights for part in parts]),
        )


class TopKRouter(nn.Module):
    """Softmax over a linear score of every expert, in float32; the best `num_topk` are chosen.

    In float32 under `torch.autocast`, too.

    Args:
        hidden: Elements of a token.
        num_experts: Experts over all ranks.
        num_topk: Choices per token.
        is_normalized: The weights of a token's choices are divided by their sum.
        seed: Seed of the first parameters, which are the same on every rank.
    """

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        num_topk: int,
        *,
        is_normalized: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= num_topk <= num_experts:
            raise ValueError(f"num_topk must be in [1, {num_experts}], got {num_topk}")
        self.num_topk = num_topk
        self.is_normalized = is_normalized
        draw = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(num_experts, hidden, generator=draw) * hidden**-0.5)

    def forward(self, hidden: torch.Tensor, balance: torch.Tensor | None = None) -> Routing:
        """Choose.

        Args:
            hidden: `[..., hidden]`, any float dtype.
            balance: `[num_experts]`, added to the scores for the choice only: raised for experts that
                get few tokens, it evens out the load without a loss of its own.
        """
        with torch.autocast(hidden.device.type, enabled=False):
            scores = torch.softmax(nn.functional.linear(hidden.float(), self.weight.float()), -1)
        ranking = scores.detach()
        if balance is not None:
            ranking = ranking + balance
        topk_idx = ranking.topk(self.num_topk).indices
        topk_weights = scores.gather(-1, topk_idx)
        if self.is_normalized:
            topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
        return Routing(topk_idx, topk_weights)
