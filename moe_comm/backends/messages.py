"""What every backend says when ranks disagree or one of them was given bad input.

A call is described by one line of text that has everything ranks must agree on; backends compare that
line, or its hash, and print it when it differs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from moe_comm.backends.base import PlanTensors
from moe_comm.config import EpConfig, Layout

__all__ = [
    "bad_expert_id",
    "call_hash",
    "calls_differ",
    "config_differs",
    "describe_combine",
    "describe_config",
    "describe_dispatch",
    "describe_dispatch_cached",
    "peer_rejected",
]


def bad_expert_id(
    rank_idx: int, token_idx: int, topk_pos: int, value: int, num_experts: int
) -> ValueError:
    """For every rank, when one chose an expert that does not exist."""
    return ValueError(
        f"rank {rank_idx}: topk_idx[{token_idx}, {topk_pos}] = {value} is not an expert id in "
        f"[-1, {num_experts})"
    )


def peer_rejected(rank_idx: int, error: Exception) -> Exception:
    """For the peers of a rank whose own call raised `error`: the same type, naming that rank.

    A type whose constructor does not take a message alone becomes its nearest base that does.
    """
    text = str(error)
    prefix = f"rank {rank_idx}: "
    message = text if text.startswith(prefix) else prefix + text
    for kind in type(error).__mro__:
        if not issubclass(kind, Exception):
            break
        try:
            return kind(message)
        except TypeError:
            continue
    return RuntimeError(message)


def calls_differ(calls: Sequence[str]) -> ValueError | None:
    """For every rank, when the calls that met are not the same; None when they are."""
    for rank_idx, call in enumerate(calls):
        if call != calls[0]:
            return ValueError(f"{calls[0]} on rank 0 met {call} on rank {rank_idx}")
    return None


def call_hash(call: str) -> int:
    """63 bits that tell calls apart, for backends that exchange numbers only."""
    return int.from_bytes(hashlib.sha256(call.encode()).digest()[:8], "little") >> 1


def describe_dispatch(
    x: torch.Tensor, topk_weights: torch.Tensor | None, layout: Layout, expert_alignment: int
) -> str:
    """What ranks must agree on in a dispatch."""
    return (
        f"dispatch({_rows(x)}, {_option('topk_weights', topk_weights)}, layout={layout.name}, "
        f"expert_alignment={expert_alignment})"
    )


def describe_dispatch_cached(
    x: torch.Tensor, topk_weights: torch.Tensor | None, plan: PlanTensors
) -> str:
    """What ranks must agree on in a cached dispatch."""
    return f"dispatch({_rows(x)}, {_option('topk_weights', topk_weights)}, {_handle(plan)})"


def describe_combine(
    x: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    row_weights: torch.Tensor | None,
    plan: PlanTensors,
) -> str:
    """What ranks must agree on in a combine."""
    return (
        f"combine({_rows(x)}, {_option('topk_weights', topk_weights)}, "
        f"{_option('row_weights', row_weights)}, {_handle(plan)})"
    )


def describe_config(config: EpConfig, num_ranks: int) -> dict[str, str]:
    """Every field of a configuration as text, the placement resolved."""
    placement = ",".join(str(int(rank)) for rank in config.resolve_expert_rank(num_ranks))
    return {
        "num_experts": str(config.num_experts),
        "num_topk": str(config.num_topk),
        "hidden": str(config.hidden),
        "num_max_tokens_per_rank": str(config.num_max_tokens_per_rank),
        "dtype": str(config.dtype),
        "num_max_in_flight": str(config.num_max_in_flight),
        "expert_rank": f"[{placement}]",
    }


def config_differs(fields: Sequence[dict[str, str]]) -> ValueError | None:
    """For every rank, when configurations differ: the first field that does, with both values."""
    for rank_idx, other in enumerate(fields):
        for name, value in fields[0].items():
            if other[name] != value:
                return ValueError(
                    f"EpConfig must be equal on every rank: {name} = {value} on rank 0 but "
                    f"{other[name]} on rank {rank_idx}"
                )
    return None


def _rows(x: torch.Tensor | None) -> str:
    return "x=None" if x is None else f"x=[*, {x.shape[1]}] {x.dtype}"


def _option(name: str, value: torch.Tensor | None) -> str:
    return f"{name}={'None' if value is None else value.dtype}"


def _handle(plan: PlanTensors) -> str:
    # Equal on every rank, because every rank holds the whole count matrix.
    digest = hashlib.sha256(plan.counts.contiguous().numpy().tobytes()).hexdigest()[:8]
    return (
        f"handle of {plan.layout.name} dispatch {digest}, expert_alignment={plan.expert_alignment}"
    )
