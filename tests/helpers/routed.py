"""Routing maps, and what a dispatch by routing map must bring, computed token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch


@dataclasses.dataclass(frozen=True)
class Batch:
    """Inputs of one rank.

    Args:
        x: `[num_tokens, hidden]`.
        routing_map: bool `[num_tokens, num_experts]`.
        probs: `[num_tokens, num_experts]`, 0 outside the map.
    """

    x: torch.Tensor
    routing_map: torch.Tensor
    probs: torch.Tensor


def make_batches(
    num_tokens: Sequence[int],
    num_experts: int,
    num_topk: int | None,
    *,
    hidden: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> list[Batch]:
    """Batches of all ranks; small integers and powers of two, so that every sum is exact.

    Args:
        num_tokens: Number of tokens of every rank.
        num_experts: Number of experts over all ranks.
        num_topk: Experts of a token; None for any number, 0 included.
        hidden: Elements of a row.
        dtype: Type of x.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for num in num_tokens:
        x = torch.randint(-8, 9, (num, hidden), generator=generator).to(dtype)
        if num_topk is None:
            routing_map = torch.rand(num, num_experts, generator=generator) < 0.4
        else:
            order = torch.rand(num, num_experts, generator=generator).argsort(1)[:, :num_topk]
            routing_map = torch.zeros(num, num_experts, dtype=torch.bool).scatter_(1, order, True)
        probs = 2.0 ** torch.randint(-3, 1, (num, num_experts), generator=generator)
        batches.append(Batch(x, routing_map, probs * routing_map))
    return batches


def expected_rows(
    batches: Sequence[Batch], experts: Sequence[int], alignment: int
) -> list[tuple[int, int, int] | None]:
    """(rank, token, expert) of every row of the rank that has `experts`; None is padding."""
    rows: list[tuple[int, int, int] | None] = []
    for expert in experts:
        for rank_idx, batch in enumerate(batches):
            tokens = batch.routing_map[:, expert].nonzero().flatten().tolist()
            rows += [(rank_idx, token, expert) for token in tokens]
        rows += [None] * (-len(rows) % alignment)
    return rows


def expected_counts(batches: Sequence[Batch], experts: Sequence[int], alignment: int) -> list[int]:
    """Rows of every expert, padding included."""
    counts = [sum(int(b.routing_map[:, expert].sum()) for b in batches) for expert in experts]
    return [count + -count % alignment for count in counts]
