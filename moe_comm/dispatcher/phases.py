"""Two phases of a dispatch and a combine: begin, and take what came."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.arguments import as_dense
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import Layout
from moe_comm.ep.handles import CombineResult, DispatchHandle, DispatchResult
from moe_comm.peers.missed_calls import Telling
from moe_comm.tensors.quantization import Quantization


@dataclasses.dataclass(frozen=True, eq=False)
class PendingDispatch:
    """A dispatch under way.

    Args:
        result: Result of the buffer's dispatch.
        inputs: Kept alive, because the operation reads them until it ends.
    """

    result: DispatchResult
    inputs: tuple[object, ...]

    def wait(self) -> DispatchResult:
        """Wait for the dispatch and return its result; its data may be read."""
        self.result.event.wait()
        return self.result


@dataclasses.dataclass(frozen=True, eq=False)
class PendingCombine:
    """A combine under way; see `PendingDispatch`."""

    result: CombineResult
    inputs: tuple[object, ...]

    def wait(self) -> torch.Tensor:
        """The sums."""
        self.result.event.wait()
        return self.result.x


def begin_dispatch(
    buffer: EpBuffer,
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    *,
    layout: Layout,
    expert_alignment: int = 1,
    quantization: Quantization | None = None,
) -> PendingDispatch:
    """Begin a dispatch of rows in any strides, without gradient. Collective; see `EpBuffer.dispatch`."""
    with Telling(buffer.reject, "dispatch"):
        if not isinstance(topk_idx, torch.Tensor):
            raise TypeError(f"topk_idx must be a tensor, got {type(topk_idx).__name__}")
        if topk_idx.is_floating_point() or topk_idx.is_complex():
            raise TypeError(f"topk_idx must be integers, got {topk_idx.dtype}")
        rows = x if isinstance(x, tuple) else _plain("x", x)
        choices = topk_idx.to(torch.int64).contiguous()
        weights = None if topk_weights is None else _plain("topk_weights", topk_weights).float()
    result = buffer.dispatch(
        rows,
        choices,
        weights,
        layout=layout,
        expert_alignment=expert_alignment,
        quantization=quantization,
        async_op=True,
    )
    return PendingDispatch(result, (rows, choices, weights))


def begin_combine(
    buffer: EpBuffer,
    expert_out: torch.Tensor,
    handle: DispatchHandle,
    *,
    topk_weights: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> PendingCombine:
    """Begin a combine of rows in any strides, without gradient. Collective; see `EpBuffer.combine`."""
    with Telling(buffer.reject, "combine"):
        rows = _plain("expert_out", expert_out)
        weights = None if topk_weights is None else _plain("topk_weights", topk_weights).float()
    result = buffer.combine(rows, handle, topk_weights=weights, out=out, async_op=True)
    assert isinstance(result, CombineResult)
    return PendingCombine(result, (rows, weights, out))


def _plain(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, without a gradient."""
    as_dense(name, tensor)
    return tensor.detach().contiguous()


def by_expert(rows: torch.Tensor, num_local_experts: int) -> torch.Tensor:
    """Low-latency rows `[num_local_experts * n, hidden]` as `[num_local_experts, n, hidden]`."""
    num_places = rows.shape[0] // max(1, num_local_experts)
    return rows.view(num_local_experts, num_places, rows.shape[1])
