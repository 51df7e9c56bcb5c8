"""An MoE layer for tests of autograd and torch.compile, and what it asks of its buffer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import moe_comm
from moe_comm import EpBuffer, Layout


class MoeLayer(torch.nn.Module):
    """Router, dispatch, two-layer experts by grouped GEMM, combine, residual; no host reads.

    Args:
        buffer: bfloat16.
        weighted_by: "dispatch" (weights travel with the rows) or "combine" (applied in combine).
        router: "softmax"; "linear": without exp(); "detached": linear, no gradient into x from the
            router and no residual, so that no two roundings of a gradient can be fused.
    """

    def __init__(
        self, buffer: EpBuffer, *, weighted_by: str = "combine", router: str = "softmax"
    ) -> None:
        super().__init__()
        config = buffer.config
        self.buffer = buffer
        self.weighted_by = weighted_by
        self.router = router
        generator = torch.Generator().manual_seed(7)
        shapes = {
            "gate": (config.num_experts, config.hidden),
            "up": (config.num_experts, config.hidden, 2 * config.hidden),
            "down": (config.num_experts, 2 * config.hidden, config.hidden),
        }
        weights = {
            name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()
        }
        local = buffer.expert_rank == buffer.communicator.rank_idx
        self.gate = torch.nn.Parameter(weights["gate"])
        self.up = torch.nn.Parameter(weights["up"][local].to(config.dtype))
        self.down = torch.nn.Parameter(weights["down"][local].to(config.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_tokens, hidden]` to the same."""
        is_detached = self.router == "detached"
        scores = (x.detach() if is_detached else x).float() @ self.gate.t()
        if self.router == "softmax":
            scores = torch.softmax(scores, -1)
        topk_weights, topk_idx = torch.topk(scores, self.buffer.config.num_topk)
        by_dispatch = self.weighted_by == "dispatch"
        result = moe_comm.dispatch(
            x,
            topk_idx,
            topk_weights if by_dispatch else None,
            buffer=self.buffer,
            expert_alignment=8,
        )
        ends = result.expert_offsets[1:]
        rows = torch._grouped_mm(result.x, self.up, offs=ends).relu()
        rows = torch._grouped_mm(rows, self.down, offs=ends)
        if by_dispatch:
            rows = (rows * result.topk_weights[:, None]).to(x.dtype)
        y = moe_comm.combine(
            rows,
            result.handle,
            buffer=self.buffer,
            topk_weights=None if by_dispatch else topk_weights,
        )
        return y if is_detached else x + y


def forward_backward(
    function: Any, layer: torch.nn.Module, x: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Output and every gradient of `function(x)`, whose parameters are those of `layer`."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = function(x)
    y.float().square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **gradients}


def assert_same_bits(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Every tensor equal, bit for bit."""
    assert actual.keys() == expected.keys()
    different = [
        f"{name}: {(actual[name].double() - expected[name].double()).abs().max()}"
        for name in expected
        if not torch.equal(
            actual[name].contiguous().view(torch.uint8),
            expected[name].contiguous().view(torch.uint8),
        )
    ]
    assert different == []


@contextmanager
def recorded_operations(*buffers: EpBuffer) -> Iterator[list[str]]:
    """Operations of `buffers` inside the block, in order: what this rank asks of its peers."""
    operations: list[str] = []

    def recorded(method: Any, name: Any) -> Any:
        def record(*args: Any, **kwargs: Any) -> Any:
            operations.append(name(*args))
            return method(*args, **kwargs)

        return record

    def dispatch_name(_x: Any, _topk_idx: Any, _topk_weights: Any, handle: Any, *_: Any) -> str:
        return "dispatch" if handle is None else "cached dispatch"

    def combine_name(rows: Any, *_: Any) -> str:
        return "combine" if rows is not None else "combine weights"

    with pytest.MonkeyPatch.context() as patch:
        for buffer in buffers:
            patch.setattr(buffer, "run_dispatch", recorded(buffer.run_dispatch, dispatch_name))
            patch.setattr(buffer, "run_combine", recorded(buffer.run_combine, combine_name))
        yield operations


def expert_scale(
    rows: torch.Tensor, result: Any, buffer: EpBuffer, layout: Layout, scale: torch.Tensor
) -> torch.Tensor:
    """A nonlinear expert: sin(row * scale[expert]), summed over the row's own experts, weighted.

    Args:
        rows: `[M, hidden]`, the dispatched rows.
        result: Result of the dispatch; its weights are applied if there are some.
        buffer: Buffer that dispatched.
        layout: Layout of the rows.
        scale: `[num_experts]`, by global id.
    """
    local = scale[buffer.expert_rank == buffer.communicator.rank_idx]
    if layout is not Layout.RANK_MAJOR:
        sizes = result.expert_offsets.diff()
        if layout is Layout.LOW_LATENCY:
            sizes = torch.full_like(sizes, len(rows) // max(len(local), 1))
        out = torch.sin(rows * torch.repeat_interleave(local, sizes)[:, None])
        return out if result.topk_weights is None else out * result.topk_weights[:, None]
    out = torch.zeros_like(rows)
    for topk_pos in range(result.topk_idx.shape[1]):
        expert_idx = result.topk_idx[:, topk_pos]
        is_local = (expert_idx >= 0).to(rows.dtype)
        weights = is_local if result.topk_weights is None else result.topk_weights[:, topk_pos]
        factor = local[expert_idx.clamp(min=0)] if len(local) else torch.zeros(len(rows))
        out = out + torch.sin(rows * factor[:, None]) * weights[:, None]
    return out


def filled(result: Any, buffer: EpBuffer) -> torch.Tensor:
    """bool `[M]`: LOW_LATENCY rows that something was sent to."""
    num_places = buffer.communicator.num_ranks * buffer.config.num_max_tokens_per_rank
    return (torch.arange(num_places) < result.num_tokens_per_expert[:, None]).flatten()
