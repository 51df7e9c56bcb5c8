"""Configurations of buffers."""

from __future__ import annotations

from typing import Any

from moe_comm import EpConfig


def ep_config(
    num_experts: int,
    num_topk: int | None,
    hidden: int | None,
    num_max_tokens_per_rank: int | None,
    **options: Any,
) -> EpConfig:
    """`EpConfig` of the four numbers that all tests give, and more by name."""
    return EpConfig(
        num_experts=num_experts,
        num_topk=num_topk,
        hidden=hidden,
        num_max_tokens_per_rank=num_max_tokens_per_rank,
        **options,
    )
