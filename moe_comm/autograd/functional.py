"""The differentiable, compilable forms of dispatch and combine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from moe_comm.autograd import formulas, operators
from moe_comm.backends.base import Completed, Plan
from moe_comm.buffer import EpBuffer, resolve_buffer
from moe_comm.config import Layout
from moe_comm.handles import CommEvent, DispatchHandle

__all__ = ["DifferentiableDispatchResult", "TensorHandle", "combine", "dispatch"]

# The formulas around the operators, without a round trip through the dispatcher of torch: the same
# operators run, below autograd, so dispatch modes (selective checkpointing) see them all the same.
_eager_dispatch = functools.partial(formulas.dispatch, None)
_eager_combine = functools.partial(formulas.combine, None)


class TensorHandle(DispatchHandle):
    """A handle whose contents are tensors, so that it can live inside a compiled graph.

    `EpBuffer.combine` and `EpBuffer.empty_expert_output` take it like any other handle.

    Args:
        counts: int32 `[num_ranks, num_experts + num_ranks]`; see `PlanTensors`.
        slots: int64 `[num_tokens, num_slots]`; see `PlanTensors`.
        topk_idx: int64 `[num_tokens, num_topk]`.
        meta: int64 `[5]`: buffer id, generation, layout, expert alignment, received rows.
        link: float32 `[0]`. Carries no data; ties the backward of combine to that of dispatch, so that
            every rank runs both even where a caller skipped its experts.
    """

    counts: torch.Tensor
    slots: torch.Tensor
    topk_idx: torch.Tensor
    meta: torch.Tensor
    link: torch.Tensor

    def __init__(
        self,
        counts: torch.Tensor,
        slots: torch.Tensor,
        topk_idx: torch.Tensor,
        meta: torch.Tensor,
        link: torch.Tensor,
    ) -> None:
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "topk_idx", topk_idx)
        object.__setattr__(self, "meta", meta)
        object.__setattr__(self, "link", link)

    @property
    def buffer_id(self) -> int:
        """See `DispatchHandle`."""
        return int(self.meta[operators.META_BUFFER_ID])

    @property
    def generation(self) -> int:
        """See `DispatchHandle`."""
        return int(self.meta[operators.META_GENERATION])

    @property
    def layout(self) -> Layout:
        """See `DispatchHandle`."""
        return Layout(int(self.meta[operators.META_LAYOUT]))

    @property
    def expert_alignment(self) -> int:
        """See `DispatchHandle`."""
        return int(self.meta[operators.META_ALIGNMENT])

    @property
    def num_tokens(self) -> int:
        """See `DispatchHandle`."""
        return self.topk_idx.shape[0]

    @property
    def num_topk(self) -> int:
        """See `DispatchHandle`."""
        return self.topk_idx.shape[1]

    @property
    def num_recv_tokens(self) -> int:
        """See `DispatchHandle`."""
        return int(self.meta[operators.META_NUM_RECV_TOKENS])

    @functools.cached_property
    def plan(self) -> Plan:
        """See `DispatchHandle`."""
        return operators.local_handle(
            resolve_buffer(self.buffer_id), self.counts, self.slots, self.topk_idx, self.meta
        ).plan


@dataclasses.dataclass(frozen=True, eq=False)
class DifferentiableDispatchResult:
    """What a differentiable dispatch brought to this rank; attributes as in `DispatchResult`.

    Gradients flow through `x` and `topk_weights`.
    """

    x: torch.Tensor
    x_sf: None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    handle: TensorHandle

    @property
    def event(self) -> CommEvent:
        """End of the operation, which is over when the result is handed out."""
        return CommEvent(Completed(None))


def dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    buffer: EpBuffer,
    layout: Layout = Layout.EXPERT_MAJOR,
    expert_alignment: int = 1,
    quantization: None = None,
) -> DifferentiableDispatchResult:
    """Send each token to the ranks of its experts; differentiable in `x` and `topk_weights`.

    Collective, and so is its backward: every rank calls it in the same order, with gradients enabled
    on every rank or on none. Where gradients are enabled the backward runs on every rank that
    differentiates through `combine`, whatever its row count, whether or not its experts used the rows.

    Args:
        x: `[num_tokens, hidden]`, dtype of the configuration; any strides.
        topk_idx: int64 `[num_tokens, num_topk]`; -1 marks an unused choice.
        topk_weights: `[num_tokens, num_topk]`, or None; see `EpBuffer.dispatch`. Forwarded, not applied.
        buffer: May be destroyed only after the backward.
        layout: Order of received rows.
        expert_alignment: Rows per local expert are padded to a multiple of this.
        quantization: None; rows travel as they are.

    Returns:
        Attributes of `DispatchResult`. Under torch.compile the number of rows is an unbacked size.

    Raises:
        ValueError: See `EpBuffer.dispatch`; also the errors of the communication.
        TypeError: See `EpBuffer.dispatch`.

    Example:
        ```python
        result = moe_comm.dispatch(x, topk_idx, topk_weights, buffer=buffer)
        rows = torch._grouped_mm(result.x, weight, offs=result.expert_offsets[1:])
        y = moe_comm.combine(rows * result.topk_weights[:, None], result.handle, buffer=buffer)
        ```
    """
    if not (
        _is_operand(x)
        and _is_operand(topk_idx)
        and _is_operand(topk_weights, is_optional=True)
        and _is_layout(layout, expert_alignment)
        and quantization is None
    ):
        # An operator would refuse these on this rank alone; the buffer tells the peers.
        buffer.dispatch(
            x,
            topk_idx,
            topk_weights,
            layout=layout,
            expert_alignment=expert_alignment,
            quantization=quantization,
        )
        raise AssertionError("EpBuffer.dispatch took what the operator does not")
    run = operators.DISPATCH if torch.compiler.is_compiling() else _eager_dispatch
    sizes = [buffer.communicator.num_ranks, buffer.config.num_experts, buffer.num_local_experts]
    (
        rows,
        row_weights,
        local_topk_idx,
        num_tokens_per_expert,
        expert_offsets,
        counts,
        slots,
        sent_topk_idx,
        meta,
        link,
    ) = run(x, topk_idx, topk_weights, buffer.id_tensor, sizes, int(layout), expert_alignment)
    return DifferentiableDispatchResult(
        rows,
        None,
        local_topk_idx if layout is Layout.RANK_MAJOR else None,
        None if topk_weights is None else row_weights,
        num_tokens_per_expert,
        expert_offsets,
        TensorHandle(counts, slots, sent_topk_idx, meta, link),
    )


def combine(
    expert_out: torch.Tensor,
    handle: DispatchHandle,
    *,
    buffer: EpBuffer,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return expert outputs to their tokens and sum them; differentiable.

    Collective, and so is its backward: every rank calls it in the same order, with `topk_weights` on
    every rank or on none. A rank that received no rows passes its empty `[0, hidden]` output.

    Args:
        expert_out: `[num_recv_tokens, hidden]`; any strides. Not changed in place before the backward
            where `topk_weights` are given.
        handle: Of `dispatch`, or of `EpBuffer.dispatch` for rows that need no gradient.
        buffer: That made the handle.
        topk_weights: `[num_tokens, num_topk]`: each row is multiplied by its weight before it is
            added. EXPERT_MAJOR only.

    Returns:
        `[num_tokens, hidden]`, dtype of `expert_out`.

    Raises:
        ValueError: See `EpBuffer.combine`; also the errors of the communication.
        TypeError: See `EpBuffer.combine`.
    """
    if not (
        _is_operand(expert_out)
        and _is_operand(topk_weights, is_optional=True)
        and _is_handle(handle)
    ):
        # An operator would refuse these on this rank alone; the buffer tells the peers.
        buffer.combine(expert_out, handle, topk_weights=topk_weights)
        raise AssertionError("EpBuffer.combine took what the operator does not")
    if not isinstance(handle, TensorHandle):
        handle = _export(handle)
    run = operators.COMBINE if torch.compiler.is_compiling() else _eager_combine
    y: torch.Tensor = run(
        expert_out,
        topk_weights,
        buffer.id_tensor,
        handle.counts,
        handle.slots,
        handle.topk_idx,
        handle.meta,
        handle.link,
    )
    return y


def _is_operand(value: Any, *, is_optional: bool = False) -> bool:
    return isinstance(value, torch.Tensor) or (is_optional and value is None)


def _is_layout(layout: Any, expert_alignment: Any) -> bool:
    return isinstance(layout, Layout) and type(expert_alignment) is int


def _is_handle(handle: Any) -> bool:
    return isinstance(handle, DispatchHandle)


def _export(handle: DispatchHandle) -> TensorHandle:
    plan = handle.plan.to_tensors()
    meta = torch.tensor(
        [
            handle.buffer_id,
            handle.generation,
            handle.layout,
            handle.expert_alignment,
            handle.num_recv_tokens,
        ]
    )
    return TensorHandle(
        plan.counts, plan.slots, plan.topk_idx, meta, torch.empty(0, requires_grad=True)
    )
