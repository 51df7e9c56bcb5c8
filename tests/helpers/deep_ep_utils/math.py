"""Arithmetic that DeepEP's test programs import, beside what the package offers of it."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from moe_comm.compat.deep_ep.utils.math import (
    align,
    calc_diff,
    ceil_div,
    per_token_cast_back,
    per_token_cast_to_fp8,
)

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "create_grouped_scores",
    "hash_tensor",
    "hash_tensors",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]


def safe_div(a: float, b: float) -> float:
    """`a / b`, and 0 for 0 / 0.

    Raises:
        ZeroDivisionError: b is 0 and a is not.
    """
    return 0 if a == 0 and b == 0 else a / b


def count_bytes(*tensors: Any) -> int:
    """Bytes of the elements of tensors, also in tuples and lists of them; None has none."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _flat(tensors))


def hash_tensor(t: torch.Tensor) -> int:
    """Sum of a tensor's bytes read as int32; its last dimension has a multiple of four bytes."""
    return int(t.view(torch.int32).sum())


def hash_tensors(*tensors: Any) -> int:
    """Exclusive or of the hashes of tensors, also in tuples and lists of them; None has none."""
    return functools.reduce(operator.xor, map(hash_tensor, _flat(tensors)), 0)


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Leave every number of a row once, descending, and -1 behind them.

    Args:
        x: int64 `[n, K]`, below `num_slots`; negative numbers are left out.
        num_slots: Upper limit of the numbers.
    """
    is_there = torch.zeros(len(x), num_slots + 1, dtype=torch.bool)
    is_there.scatter_(1, x.masked_fill(x < 0, num_slots), True)
    numbers = torch.where(is_there[:, :num_slots], torch.arange(num_slots), -1)
    num_kept = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :num_kept] = numbers.sort(dim=1, descending=True).values[:, :num_kept]


def create_grouped_scores(
    scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int
) -> torch.Tensor:
    """Scores of the experts of chosen groups, 0 elsewhere.

    Args:
        scores: `[N, E]`.
        group_idx: int64 `[N, G]`, the groups of every token.
        num_groups: Groups of E / num_groups neighboring experts.
    """
    is_chosen = torch.zeros(len(scores), num_groups, dtype=torch.bool).scatter_(1, group_idx, True)
    return scores * is_chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def _flat(tensors: Iterable[Any]) -> Iterator[torch.Tensor]:
    for each in tensors:
        if isinstance(each, tuple | list):
            yield from _flat(each)
        elif each is not None:
            yield each
