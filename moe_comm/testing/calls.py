"""Calls of a backend with the arguments of a case."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm.ep.backends.base import Backend, CombineOutput, DispatchOutput, Operation, Plan
from moe_comm.ep.call_options import CombineOptions, CopyOut, DispatchOptions
from moe_comm.tensors.quantization import Quantization
from moe_comm.testing.cases import Case, RankInput


def dispatch(
    backend: Backend,
    case: Case,
    rank_idx: int,
    mine: RankInput,
    *,
    has_weights: bool = True,
    copy_out: CopyOut = "auto",
    async_op: bool = False,
    **changes: Any,
) -> Operation[DispatchOutput]:
    """Dispatch a rank's input; `changes` replace tensors of `Backend.dispatch`, or options."""
    tensors: dict[str, Any] = {
        "x": mine.x,
        "x_sf": mine.x_sf,
        "topk_idx": mine.topk_idx,
        "topk_weights": mine.topk_weights if has_weights else None,
    }
    tensors |= {name: changes.pop(name) for name in tensors.keys() & changes}
    options = DispatchOptions(
        layout=case.layout,
        expert_alignment=case.expert_alignment,
        quantization=case.quantization,
        capacity=case.capacity_of(rank_idx),
        masked_ranks=case.masked_by(rank_idx),
        copy_out=copy_out,
        async_op=async_op,
    )
    return backend.dispatch(**tensors, options=options._replace(**changes))


def dispatch_cached(
    backend: Backend,
    x: torch.Tensor,
    plan: Plan,
    topk_weights: torch.Tensor | None = None,
    *,
    x_sf: torch.Tensor | None = None,
    quantization: Quantization | None = None,
    copy_out: CopyOut = "auto",
    gradients: int = 0,
) -> DispatchOutput:
    """Dispatch to the places of a plan, and wait."""
    return backend.dispatch_cached(
        x,
        x_sf,
        plan,
        topk_weights,
        DispatchOptions(quantization=quantization, copy_out=copy_out, gradients=gradients),
    ).wait()


def combine(
    backend: Backend,
    x: torch.Tensor | None,
    plan: Plan,
    topk_weights: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    copy_out: CopyOut = "auto",
    async_op: bool = False,
    gradients: int = 0,
) -> Operation[CombineOutput]:
    """Combine; with nothing but rows unless said otherwise."""
    return backend.combine(
        x,
        plan,
        topk_weights,
        row_weights,
        out,
        CombineOptions(copy_out, async_op, gradients),
    )
