"""Small batches for dispatchers of inference frameworks, and what a layer of identities gives."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_comm.ep.group_buffers import group_buffers
from moe_comm.testing import RankContext

NUM_EXPERTS, NUM_TOPK, HIDDEN, MOST_TOKENS = 4, 2, 128, 8
NUM_BATCHES = 2


def batch_input(rank_idx: int, batch_idx: int, num_tokens: int = 5) -> Any:
    draw = torch.Generator().manual_seed(10 * rank_idx + batch_idx)
    return types.SimpleNamespace(
        x=torch.randn(num_tokens, HIDDEN, generator=draw).bfloat16(),
        topk_ids=torch.rand(num_tokens, NUM_EXPERTS, generator=draw).argsort(1)[:, :NUM_TOPK],
        topk_weights=torch.rand(num_tokens, NUM_TOPK, generator=draw),
    )


def identity_sum(given: Any) -> torch.Tensor:
    """Output of a layer whose experts return their input."""
    return given.x.float() * given.topk_weights.sum(1, keepdim=True)


Phase = Callable[[int], None]
Batches = tuple[Sequence[Phase], list[torch.Tensor]]


def run_in_flight(
    context: RankContext, make: Callable[[RankContext], Batches], is_begun: threading.Event
) -> list[float]:
    """Rank 0 begins every batch before rank 1 enters the first: beginning must not wait.

    Args:
        context: A thread.
        make: Returns three phases, each to be called with the number of a batch, and the sums that the
            last one leaves.
        is_begun: Set when rank 0 has begun.

    Returns:
        The largest error of every batch.
    """
    buffers = group_buffers(context.group)
    (first, *others), sums = make(context)
    if context.rank_idx != 0:
        assert is_begun.wait(60)
    for idx in range(NUM_BATCHES):
        first(idx)
    is_begun.set()
    for phase in others:
        for idx in range(NUM_BATCHES):
            phase(idx)
    errors = [
        float((sums[idx].float() - identity_sum(batch_input(context.rank_idx, idx))).abs().max())
        for idx in range(NUM_BATCHES)
    ]
    buffers.destroy()
    return errors
