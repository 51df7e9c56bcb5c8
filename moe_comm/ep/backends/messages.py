"""Texts of everything that ranks must agree on in a buffer and in a call.

A call is described by one line of text that has everything ranks must agree on; backends compare that
line, or its hash, and print it when it differs. csrc/ops/agreement.cpp has the same words.
"""

from __future__ import annotations

import hashlib

import torch

from moe_comm.ep.backends.base import PlanTensors
from moe_comm.ep.call_options import DispatchOptions, describe_options
from moe_comm.ep.config import EpConfig
from moe_comm.tensors.quantization import Quantization


def call_hash(call: str) -> int:
    """63 bits that tell calls apart, for backends that exchange numbers only."""
    return int.from_bytes(hashlib.sha256(call.encode()).digest()[:8], "little") >> 1


def describe_dispatch(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    options: DispatchOptions,
) -> str:
    """Describe what ranks must agree on in a dispatch. The rows that a capacity allows are each rank's own.

    Example:
        `dispatch(EXPERT_MAJOR, expert_alignment=8, bfloat16 rows of 4096 bytes, float32 weights)`
    """
    described = describe_options(DispatchOptions).items()
    said = [option.words(getattr(options, name)) for name, option in described if option.words]
    rows = _rows(x) + _scales(x_sf, options.quantization)
    # The first two say where rows go.
    return _call("dispatch", *said[:2], rows, _weights(topk_weights), *said[2:])


def describe_dispatch_cached(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    plan: PlanTensors,
    quantization: Quantization | None,
) -> str:
    """Describe what ranks must agree on in a cached dispatch."""
    rows = _rows(x) + _scales(x_sf, quantization)
    return _call("cached dispatch", *_places(plan), rows, _weights(topk_weights), _handle(plan))


def describe_combine(
    x: torch.Tensor | None, row_weights: torch.Tensor | None, plan: PlanTensors
) -> str:
    """Describe what ranks must agree on in a combine. Weights applied while adding are each rank's own."""
    return _call("combine", *_places(plan), _rows(x), _weights(row_weights), _handle(plan))


def describe_config(config: EpConfig, backend: str, expert_rank: torch.Tensor) -> dict[str, str]:
    """Describe what ranks must agree on in a buffer: the backend and every field, as text.

    Args:
        config: Configuration of the buffer.
        backend: Its name.
        expert_rank: The placement, resolved.
    """
    return {
        "backend": backend,
        "num_experts": str(config.num_experts),
        "num_topk": str(config.num_topk),
        "hidden": str(config.hidden),
        "num_max_tokens_per_rank": str(config.num_max_tokens_per_rank),
        "dtype": str(config.dtype),
        "num_max_in_flight": str(config.num_max_in_flight),
        "num_low_latency_windows": str(config.num_low_latency_windows),
        "node_reduction": str(config.node_reduction),
        "rank_reduction": str(config.rank_reduction),
        # A placement says where experts lie, and in which slots.
        "placement": str(None if config.placement is None else config.placement.slots),
        "expert_rank": str(expert_rank.tolist() if config.placement is None else None),
        "replica_rule": config.replica_rule,
    }


def _call(operation: str, *said: str) -> str:
    return f"{operation}({', '.join(filter(None, said))})"


def _places(plan: PlanTensors) -> list[str]:
    return [
        option.words(getattr(plan, name))
        for name, option in describe_options(DispatchOptions).items()
        if option.words and hasattr(plan, name)
    ]


def _rows(x: torch.Tensor | None) -> str:
    if x is None:
        return ""
    return f"{_short(x.dtype)} rows of {x.shape[1] * x.element_size()} bytes"


def _scales(x_sf: torch.Tensor | None, quantization: Quantization | None) -> str:
    order = (
        " in columns" if quantization is not None and quantization.is_column_major else " in rows"
    )
    if x_sf is not None:
        return f", {x_sf.shape[1]} scale factors of {x_sf.element_size()} bytes{order}"
    if quantization is None:
        return ""
    assert quantization.scale_format is not None
    return (
        f" to be quantized to {quantization.format.name} with {quantization.scale_format.name} "
        f"scale factors{order}"
    )


def _weights(weights: torch.Tensor | None) -> str:
    return "no weights" if weights is None else f"{_short(weights.dtype)} weights"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _handle(plan: PlanTensors) -> str:
    # Equal on every rank, because every rank holds the whole count matrix.
    return f"handle {hashlib.sha256(plan.counts.contiguous().numpy().tobytes()).hexdigest()[:8]}"
