"""Results that `ElasticBuffer` must give, from every rank's input: slow, plain, and free of its code."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.compat.deep_ep.combining import Bias
from moe_comm.compat.deep_ep.rows import Rows
from tests.helpers.deep_ep_utils.envs import get_global_seed


def dispatch(
    x: Rows,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Rows, torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Rows of this rank by (source rank, token), one per token. Collective on the default group.

    Args:
        x: `[N, H]`, or a pair with scales `[N, S]`.
        topk_idx: `[N, K]`; -1 marks an unused choice.
        topk_weights: `[N, K]`, or None.
        num_max_tokens_per_rank: Most tokens of a rank.
        num_experts: E, a multiple of the ranks.

    Returns:
        recv_x, like x; recv_topk_idx `[M, K]`, local ids, -1 elsewhere; recv_topk_weights `[M, K]`, also
        of choices that are elsewhere, or None; int32 `[M]`, source rank * num_max_tokens_per_rank +
        token; int32 `[R]`, rows from every rank.
    """
    num_ranks = dist.get_world_size()
    num_local_experts = num_experts // num_ranks
    first = dist.get_rank() * num_local_experts
    given: list[Any] = [None] * num_ranks
    parts = x if isinstance(x, tuple) else (x,)
    # Tensors of FP8 can be pickled, but not read again.
    as_bytes = [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts]
    dist.all_gather_object(given, (as_bytes, topk_idx, topk_weights))
    columns: list[list[torch.Tensor]] = []
    counts = []
    for source, (sent, choices, weights) in enumerate(given):
        is_here = (choices >= first) & (choices < first + num_local_experts)
        token_idx = is_here.any(dim=1).nonzero().flatten()
        local = torch.where(is_here, choices - first, -1)
        tensors = [*sent, local, *([] if weights is None else [weights])]
        index = (token_idx + source * num_max_tokens_per_rank).to(torch.int32)
        columns.append([*(tensor[token_idx] for tensor in tensors), index])
        counts.append(len(token_idx))
    joined = [torch.cat(column) for column in zip(*columns, strict=True)]
    rows = [row.view(part.dtype) for row, part in zip(joined, parts, strict=False)]
    return (
        (rows[0], rows[1]) if isinstance(x, tuple) else rows[0],
        joined[len(parts)],
        None if topk_weights is None else joined[len(parts) + 1],
        joined[-1],
        torch.tensor(counts, dtype=torch.int32),
    )


def generate_pre_combine_data(
    src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """Outputs of experts that every rank can make for itself: a wave of its own for every choice.

    Args:
        src_token_global_idx: `[n]`, source rank * num_max_tokens_per_rank + token.
        num_max_tokens_per_rank: Most tokens of a rank.
        num_topk: K.
        hidden: H.

    Returns:
        bfloat16 `[n, K, H]`.
    """
    num_waves = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    wave = src_token_global_idx[:, None].to(torch.int64) * num_topk + torch.arange(num_topk)
    # A prime factor sets neighbors far apart.
    step = ((wave * 104_729) % num_waves + 1).to(torch.float32) / num_waves
    position = torch.arange(1, hidden + 1, dtype=torch.float32)
    phase = math.sin(get_global_seed())
    return torch.sin(step[:, :, None] * position + phase).to(torch.bfloat16)


def ordered_accumulate(
    data: torch.Tensor, initial_value: torch.Tensor | None = None
) -> torch.Tensor:
    """Choices added one by one in float32, rounded once.

    Args:
        data: `[n, K, H]`.
        initial_value: `[n, H]` to begin with, or None for 0.

    Returns:
        `[n, H]` of data's dtype.
    """
    num_rows, num_topk, hidden = data.shape
    total = torch.zeros(num_rows, hidden, dtype=torch.float32)
    if initial_value is not None:
        total = initial_value.to(torch.float32).clone()
    for k in range(num_topk):
        total += data[:, k].float()
    return total.to(data.dtype)


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Bias,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> torch.Tensor:
    """The sums that a combine must give for the outputs of all choices of this rank's tokens. Local.

    Args:
        y: `[N, K, H]`, zero at unused choices.
        topk_idx: `[N, K]`.
        num_scaleout_ranks: Domains.
        num_scaleup_ranks: Ranks of a domain.
        num_experts: E, a multiple of the ranks.
        bias: None, `[N, H]` or a pair, added first.
        reduce_in_local: Choices on one rank are added and rounded before they are sent.
        reduce_in_scaleup: And what comes from one domain once more.

    Returns:
        `[N, H]` of y's dtype.
    """
    num_local_experts = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    if reduce_in_local:
        y = _reduced(y, topk_idx // num_local_experts)
    if reduce_in_scaleup:
        y = _reduced(y, topk_idx // (num_local_experts * num_scaleup_ranks))
    biases = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
    total = None
    for each in biases:
        total = each.float() if total is None else total + each.float()
    return ordered_accumulate(y, total)


def _reduced(y: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Choices of one group added in order, rounded, at the place of the last of them; 0 elsewhere."""
    num_topk = group.shape[1]
    is_same = group[:, :, None] == group[:, None, :]
    last = (is_same * torch.arange(num_topk)).amax(dim=2)
    total = torch.zeros(y.shape, dtype=torch.float32)
    token_idx = torch.arange(len(y))
    for k in range(num_topk):
        total[token_idx, last[:, k]] += y[:, k].float()
    return total.to(y.dtype)
