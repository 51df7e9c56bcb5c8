"""The `torch.library` operators: schemas, kernels and fakes.

In an operator a handle is five tensors and a buffer is an int64 tensor with its id, so that a compiled
graph holds no Python object and one graph serves every layer, whichever buffer it owns. Kernels call
`EpBuffer`, which checks their input and tells the peers when it is wrong.

Operators that return several tensors return a list: inductor of torch 2.13 loses the unbacked size of
an effectful operator that returns a tuple.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from moe_comm.autograd.inductor import keep_program_order
from moe_comm.backends.base import PlanTensors
from moe_comm.buffer import EpBuffer, resolve_buffer
from moe_comm.config import Layout
from moe_comm.handles import CombineResult, DispatchHandle

__all__ = [
    "COMBINE",
    "COMBINE_BACKWARD",
    "DISPATCH",
    "DISPATCH_BACKWARD",
    "NUM_META",
    "SAVED_OPERATORS",
    "library",
    "local_handle",
]

# Layout of the `meta` tensor of a handle.
META_BUFFER_ID, META_GENERATION, META_LAYOUT, META_ALIGNMENT, META_NUM_RECV_TOKENS = range(5)
NUM_META = 5

_HANDLE = "Tensor counts, Tensor slots, Tensor topk_idx, Tensor meta"

library: Any = torch.library.Library("moe_comm", "DEF")  # type: ignore[no-untyped-call]

# sizes: num_ranks, num_experts, num_local_experts.
# -> x, topk_weights, topk_idx as received, num_tokens_per_expert, expert_offsets, then the handle:
#    counts, slots, topk_idx as sent, meta, link. A tensor that does not exist has 0 elements.
library.define(
    "dispatch(Tensor x, Tensor topk_idx, Tensor? topk_weights, Tensor buffer_id, int[] sizes, "
    "int layout, int expert_alignment) -> Tensor[]"
)
# -> gradient of x, gradient of topk_weights (0 elements without row_weights).
library.define(
    "dispatch_backward(Tensor? grad_x, Tensor? grad_weights, "
    f"{_HANDLE}, SymInt num_recv_tokens, SymInt hidden, ScalarType dtype, "
    "ScalarType? weights_dtype) -> Tensor[]"
)
library.define(
    "combine(Tensor expert_out, Tensor? topk_weights, Tensor buffer_id, "
    f"{_HANDLE}, Tensor link) -> Tensor"
)
# -> gradient of expert_out, gradient of topk_weights (0 elements where none were applied).
library.define(
    "combine_backward(Tensor? grad_y, Tensor? expert_out, Tensor? topk_weights, "
    f"{_HANDLE}, SymInt num_recv_tokens, SymInt hidden, ScalarType dtype) -> Tensor[]"
)


def local_handle(
    buffer: EpBuffer,
    counts: torch.Tensor,
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    meta: torch.Tensor,
) -> DispatchHandle:
    """The handle that the tensors stand for, as `buffer` takes it.

    A handle of another buffer or an earlier generation comes out as such, for `buffer` to refuse it
    together with its peers.
    """
    buffer_id, generation, layout, expert_alignment, num_recv_tokens = meta.tolist()
    if buffer_id == buffer.buffer_id and generation == buffer.generation:
        return buffer.import_handle(
            PlanTensors(counts, slots, topk_idx, Layout(layout), expert_alignment)
        )
    return DispatchHandle(
        buffer_id=buffer_id,
        generation=generation,
        layout=Layout(layout),
        expert_alignment=expert_alignment,
        num_tokens=topk_idx.shape[0],
        num_topk=topk_idx.shape[1],
        num_recv_tokens=num_recv_tokens,
        plan=_ForeignPlan(topk_idx.shape[0], num_recv_tokens),
    )


@dataclasses.dataclass(frozen=True)
class _ForeignPlan:
    """Plan of a handle that this process can no longer use."""

    num_tokens: int
    num_recv_tokens: int

    def to_tensors(self) -> PlanTensors:
        raise ValueError(
            "this handle is of another buffer, or of an earlier generation of its buffer"
        )


def _dispatch(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer_id: torch.Tensor,
    sizes: list[int],
    layout: int,
    expert_alignment: int,
) -> list[torch.Tensor]:
    buffer = resolve_buffer(int(buffer_id))
    result = buffer.dispatch(
        x.contiguous(),
        topk_idx.contiguous(),
        None if topk_weights is None else topk_weights.contiguous(),
        layout=Layout(layout),
        expert_alignment=expert_alignment,
    )
    rows, weights, ids = result.x, result.topk_weights, result.topk_idx
    plan = result.plan.to_tensors()
    meta = [buffer.buffer_id, buffer.generation, layout, expert_alignment, rows.shape[0]]
    return [
        rows,
        x.new_empty(0, dtype=torch.float32) if weights is None else weights,
        topk_idx.new_empty(0) if ids is None else ids,
        result.num_tokens_per_expert,
        result.expert_offsets,
        plan.counts,
        plan.slots,
        plan.topk_idx,
        torch.tensor(meta),
        x.new_empty(0, dtype=torch.float32),
    ]


def _dispatch_fake(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer_id: torch.Tensor,
    sizes: list[int],
    layout: int,
    expert_alignment: int,
) -> list[torch.Tensor]:
    num_ranks, num_experts, num_local_experts = sizes
    num_tokens, num_topk = topk_idx.shape
    num_recv_tokens = torch.library.get_ctx().new_dynamic_size()
    by_rank = layout == Layout.RANK_MAJOR
    num_slots = min(num_topk, num_ranks) if by_rank else num_topk
    weights = x.new_empty(0, dtype=torch.float32)
    if topk_weights is not None:
        weights = topk_weights.new_empty(
            (num_recv_tokens, num_topk) if by_rank else (num_recv_tokens,)
        )
    return [
        x.new_empty(num_recv_tokens, x.shape[1]),
        weights,
        topk_idx.new_empty((num_recv_tokens, num_topk) if by_rank else (0,)),
        buffer_id.new_empty(num_local_experts),
        topk_idx.new_empty(num_local_experts + 1, dtype=torch.int32),
        topk_idx.new_empty((num_ranks, num_experts + num_ranks), dtype=torch.int32),
        topk_idx.new_empty((num_tokens, num_slots)),
        topk_idx.new_empty((num_tokens, num_topk)),
        buffer_id.new_empty(NUM_META),
        x.new_empty(0, dtype=torch.float32),
    ]


def _dispatch_backward(
    grad_x: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
    counts: torch.Tensor,
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    meta: torch.Tensor,
    num_recv_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    buffer = resolve_buffer(int(meta[META_BUFFER_ID]))
    handle = local_handle(buffer, counts, slots, topk_idx, meta)
    if grad_x is None:
        # Peers read the rows of this rank whether or not it used them.
        grad_x = buffer.empty_expert_output(handle, hidden=hidden, dtype=dtype).zero_()
    row_weights = None
    if weights_dtype is not None:
        by_rank = handle.layout is Layout.RANK_MAJOR
        row_weights = (
            slots.new_zeros(
                (num_recv_tokens, *((topk_idx.shape[1],) if by_rank else ())), dtype=weights_dtype
            )
            if grad_weights is None
            else grad_weights.contiguous()
        )
    pulled = buffer.combine(grad_x.contiguous(), handle, row_weights=row_weights)
    if isinstance(pulled, CombineResult):
        assert pulled.topk_weights is not None
        return [pulled.x, pulled.topk_weights]
    return [pulled, slots.new_empty(0, dtype=torch.float32)]


def _dispatch_backward_fake(
    grad_x: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
    counts: torch.Tensor,
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    meta: torch.Tensor,
    num_recv_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    weights = (
        slots.new_empty(0, dtype=torch.float32)
        if weights_dtype is None
        else slots.new_empty(topk_idx.shape, dtype=weights_dtype)
    )
    return [slots.new_empty((slots.shape[0], hidden), dtype=dtype), weights]


def _combine(
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer_id: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    meta: torch.Tensor,
    link: torch.Tensor,
) -> torch.Tensor:
    buffer = resolve_buffer(int(buffer_id))
    return buffer.combine(
        expert_out.contiguous(),
        local_handle(buffer, counts, slots, topk_idx, meta),
        topk_weights=None if topk_weights is None else topk_weights.contiguous(),
    )


def _combine_fake(
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer_id: torch.Tensor,
    counts: torch.Tensor,
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    meta: torch.Tensor,
    link: torch.Tensor,
) -> torch.Tensor:
    return expert_out.new_empty((slots.shape[0], expert_out.shape[1]))


def _combine_backward(
    grad_y: torch.Tensor | None,
    expert_out: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    counts: torch.Tensor,
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    meta: torch.Tensor,
    num_recv_tokens: int,
    hidden: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    buffer = resolve_buffer(int(meta[META_BUFFER_ID]))
    handle = local_handle(buffer, counts, slots, topk_idx, meta)
    if grad_y is None:
        grad_y = slots.new_zeros((slots.shape[0], hidden), dtype=dtype)
    if topk_weights is None:
        rows = buffer.dispatch(grad_y.contiguous(), None, handle=handle).x
        return [rows, slots.new_empty(0, dtype=torch.float32)]
    assert expert_out is not None
    arrived = buffer.dispatch(grad_y.contiguous(), None, topk_weights.contiguous(), handle=handle)
    assert arrived.topk_weights is not None
    dots = buffer.weighted_gradient(arrived.x, expert_out.contiguous(), arrived.topk_weights)
    pulled = buffer.combine(None, handle, row_weights=dots)
    assert isinstance(pulled, CombineResult)
    assert pulled.topk_weights is not None
    return [arrived.x, pulled.topk_weights]


def _combine_backward_fake(
    grad_y: torch.Tensor | None,
    expert_out: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    counts: torch.Tensor,
    slots: torch.Tensor,
    topk_idx: torch.Tensor,
    meta: torch.Tensor,
    num_recv_tokens: int,
    hidden: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    weights = (
        slots.new_empty(0, dtype=torch.float32)
        if topk_weights is None
        else topk_weights.new_empty(topk_weights.shape)
    )
    return [slots.new_empty((num_recv_tokens, hidden), dtype=dtype), weights]


def _fake_with_order(fake: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fake)
    def ordered(*args: Any) -> Any:
        keep_program_order(_OPERATORS)
        return fake(*args)

    return ordered


for _name, _kernel, _fake in (
    ("dispatch", _dispatch, _dispatch_fake),
    ("dispatch_backward", _dispatch_backward, _dispatch_backward_fake),
    ("combine", _combine, _combine_fake),
    ("combine_backward", _combine_backward, _combine_backward_fake),
):
    # Every device: EpBuffer refuses the ones it cannot serve, on every rank.
    library.impl(_name, _kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_comm::{_name}", _fake_with_order(_fake), lib=library)

DISPATCH = torch.ops.moe_comm.dispatch.default
DISPATCH_BACKWARD = torch.ops.moe_comm.dispatch_backward.default
COMBINE = torch.ops.moe_comm.combine.default
COMBINE_BACKWARD = torch.ops.moe_comm.combine_backward.default

_OPERATORS = (DISPATCH, DISPATCH_BACKWARD, COMBINE, COMBINE_BACKWARD)
for _operator in _OPERATORS:
    # Kept in program order and never removed by the compiler, forward and backward: a rank that skips
    # or swaps a collective operation leaves its peers waiting.
    _register_effectful_op(_operator, _EffectType.ORDERED)

SAVED_OPERATORS = (DISPATCH, COMBINE)
