"""The `torch.library` operators: schemas and kernels.

In an operator a handle is five tensors and a buffer is an int64 tensor with its id, so that a compiled
graph holds no Python object and one graph serves every layer, whichever buffer it owns. Kernels call
`EpBuffer`, which checks their input and tells the peers when it is wrong.

Operators that return several tensors return a list: inductor of torch 2.13 loses the unbacked size of
an effectful operator that returns a tuple.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from moe_comm.ep.autograd import fakes
from moe_comm.ep.autograd.dynamo import mark, untraced
from moe_comm.ep.autograd.inductor import keep_program_order
from moe_comm.ep.backends.base import PlanTensors
from moe_comm.ep.buffer import EpBuffer, resolve_buffer
from moe_comm.ep.call_options import CombineOptions, DispatchOptions, decode_dispatch
from moe_comm.ep.config import Layout
from moe_comm.ep.handles import CombineResult, DispatchHandle, DispatchResult
from moe_comm.ep.validation import SUMMABLE
from moe_comm.tensors.memory import as_resolved

# Layout of the `meta` tensor of a handle.
(
    META_BUFFER_ID,
    META_GENERATION,
    META_LAYOUT,
    META_ALIGNMENT,
    META_NUM_RECV_TOKENS,
    META_GRADIENTS,
    META_HASH,  # `PlanTensors.hash`
    META_ASKED,  # `PlanTensors.asked`, to the end
) = range(8)

_HANDLE = "Tensor counts, Tensor slots, Tensor topk_idx, Tensor meta"

library: Any = torch.library.Library("moe_comm", "DEF")  # type: ignore[no-untyped-call]

# x_sf: scale factors of rows that are quantized already. sizes: num_ranks, num_experts,
# num_local_experts, num_topk and num_max_tokens_per_rank (0 where not configured). options and
# capacity: as encoded in call_options.py. gradients: what this rank says, as in gradient_word.py.
# anchor: not read; requires a gradient where no other input may.
# -> x, topk_weights, link, topk_idx as received, num_tokens_per_expert, expert_offsets, then the
#    handle: counts, slots, topk_idx as sent, meta. A tensor that does not exist has 0 elements.
#    With a capacity and in LOW_LATENCY: num_dropped_per_expert and num_required_rows. With x_sf: the
#    scale factors. With a quantization of x: scale factors and data; the first output then has the
#    dtype of x, no memory and no values: it is there for its gradient.
library.define(
    "dispatch(Tensor x, Tensor? x_sf, Tensor topk_idx, Tensor? topk_weights, Tensor buffer_id, "
    "int[] sizes, int[] options, SymInt[] capacity, int gradients, Tensor? anchor) -> Tensor[]"
)
# Kernels and fakes of these three take what they do not name, a handle above all, as `*rest`.
# -> gradient of x, gradient of topk_weights (0 elements without row_weights).
library.define(
    "dispatch_backward(Tensor? grad_x, Tensor? grad_weights, "
    f"{_HANDLE}, SymInt num_recv_tokens, SymInt hidden, ScalarType dtype, "
    "ScalarType? weights_dtype) -> Tensor[]"
)
# link: not read; requires a gradient where no other input may. -> sums; where this rank says anything
# of gradients, also int64 [1], what all ranks say.
library.define(
    "combine(Tensor expert_out, Tensor? topk_weights, Tensor buffer_id, "
    f"{_HANDLE}, Tensor link, int gradients) -> Tensor[]"
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
    numbers = meta[:META_ASKED].tolist()
    buffer_id, generation, layout, expert_alignment, num_recv_tokens, _, plan_hash = numbers
    plan = PlanTensors(
        counts,
        slots,
        topk_idx,
        Layout(layout),
        expert_alignment,
        num_recv_tokens,
        meta[META_ASKED:],
        hash=plan_hash,
    )
    if buffer_id == buffer.buffer_id and generation == buffer.generation:
        return buffer.import_handle(plan)
    return DispatchHandle(plan, buffer_id, generation)


def _dispatch(
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    buffer_id: torch.Tensor,
    sizes: list[int],
    options: list[int],
    capacity: list[int],
    gradients: int,
    anchor: torch.Tensor | None,
) -> list[torch.Tensor]:
    named = decode_dispatch(options, capacity)._replace(gradients=gradients)
    buffer = resolve_buffer(int(buffer_id))
    result = dispatch_rows(buffer, x, x_sf, topk_idx, topk_weights, named)
    rows, scales, weights, ids = result.x, result.x_sf, result.topk_weights, result.topk_idx
    is_quantized_here = scales is not None and x_sf is None
    outputs = [
        x.new_empty_strided(rows.shape, (0, 0)) if is_quantized_here else rows,
        x.new_empty(0, dtype=torch.float32) if weights is None else weights,
        x.new_empty(0, dtype=torch.float32),
        topk_idx.new_empty(0) if ids is None else ids,
        result.num_tokens_per_expert,
        result.expert_offsets,
        *tensors_of(result.handle, result.gradients),
    ]
    if capacity or named.layout is Layout.LOW_LATENCY:
        outputs += [result.num_dropped_per_expert, result.num_required_rows]
    if scales is not None:
        outputs.append(scales)
        if is_quantized_here:
            outputs.append(rows)
    return outputs


def dispatch_rows(
    buffer: EpBuffer,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    options: DispatchOptions,
) -> DispatchResult:
    """Dispatch tensors of any strides, and leave no row undefined.

    Args:
        buffer: Buffer that dispatches.
        x: As in `EpBuffer.dispatch`.
        x_sf: Scale factors of rows that are quantized already, or None.
        topk_idx: As in `EpBuffer.dispatch`.
        topk_weights: As in `EpBuffer.dispatch`.
        options: Options of `EpBuffer.dispatch`.
    """
    rows = x if x_sf is None else (x, x_sf)
    result = buffer.run_dispatch(rows, topk_idx, topk_weights, None, options, True)
    if options.layout is Layout.LOW_LATENCY:
        zero_unfilled(result)
    return result


def zero_unfilled(result: DispatchResult) -> None:
    """Leave no row of a LOW_LATENCY dispatch undefined."""
    _zero_unfilled(result.num_tokens_per_expert, result.x, result.x_sf, result.topk_weights)


def tensors_of(
    handle: DispatchHandle, gradients: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A handle as operators take it; `gradients` is what the ranks of its dispatch said."""
    plan = handle.plan.to_tensors()
    # A number of an enumeration would be a hundred times as slow.
    layout = int(handle.layout)
    where = (handle.buffer_id, handle.generation, layout, handle.expert_alignment)
    numbers = (*where, handle.num_recv_tokens, gradients, plan.hash, *plan.asked.tolist())
    meta = torch.tensor(numbers, device="cpu")
    return plan.counts, plan.slots, plan.topk_idx, meta


def _zero_unfilled(num_filled: torch.Tensor, *per_row: torch.Tensor | None) -> None:
    """Zero the rows of LOW_LATENCY that nothing was sent to.

    An expert computes on all rows, and the gradient of its weights is a sum over all rows: what is
    undefined must not reach it.

    Args:
        num_filled: int64 `[num_local_experts]`.
        per_row: `[M, ...]` or `[num_local_experts, M // num_local_experts, ...]`.
    """
    num_experts = num_filled.shape[0]
    for tensor in per_row:
        if tensor is None or tensor.numel() == 0:
            continue
        by_expert = tensor if tensor.dim() == 3 else tensor.view(num_experts, -1, *tensor.shape[1:])
        if by_expert.dtype.itemsize == 1:
            by_expert = by_expert.view(torch.uint8)
        for expert_idx, num_rows in enumerate(num_filled.tolist()):
            by_expert[expert_idx, num_rows:].zero_()


def _local(*handle: torch.Tensor) -> tuple[EpBuffer, DispatchHandle]:
    """The buffer that the tensors of a handle name, and the handle."""
    buffer = resolve_buffer(int(handle[-1][META_BUFFER_ID]))
    return buffer, local_handle(buffer, *handle)


def _dispatch_backward(
    grad_x: torch.Tensor | None, grad_weights: torch.Tensor | None, *rest: Any
) -> list[torch.Tensor]:
    *handle, num_recv_tokens, hidden, dtype, weights_dtype = rest
    return dispatch_backward(
        *_local(*handle), grad_x, grad_weights, num_recv_tokens, hidden, dtype, weights_dtype
    )


def dispatch_backward(
    buffer: EpBuffer,
    handle: DispatchHandle,
    grad_x: torch.Tensor | None,
    grad_weights: torch.Tensor | None,
    num_recv_tokens: int,
    hidden: int,
    dtype: torch.dtype,
    weights_dtype: torch.dtype | None,
) -> list[torch.Tensor]:
    """Return the gradients of x and of topk_weights, for `moe_comm::dispatch_backward`."""
    device = buffer.communicator.device
    row_weights = None
    if weights_dtype is not None:
        by_rank = handle.layout is Layout.RANK_MAJOR
        row_weights = (
            torch.zeros(
                (num_recv_tokens, *((handle.num_recv_topk,) if by_rank else ())),
                dtype=weights_dtype,
                device=device,
            )
            if grad_weights is None
            else as_resolved(grad_weights)
        )
    if dtype not in SUMMABLE:
        # Rows without a gradient, on every rank.
        sums = torch.zeros((handle.num_tokens, hidden), dtype=dtype, device=device)
        if row_weights is None:
            return [sums, torch.empty(0, device=device)]
        pulled = buffer.combine(None, handle, row_weights=row_weights)
        assert isinstance(pulled, CombineResult)
        assert pulled.topk_weights is not None
        return [sums, pulled.topk_weights]
    if grad_x is None:
        # Peers read the rows of this rank whether or not it used them.
        grad_x = buffer.empty_expert_output(handle, hidden=hidden, dtype=dtype).zero_()
    pulled = buffer.combine(as_resolved(grad_x), handle, row_weights=row_weights)
    if isinstance(pulled, CombineResult):
        assert pulled.topk_weights is not None
        return [pulled.x, pulled.topk_weights]
    return [pulled, torch.empty(0, device=device)]


def _combine(
    expert_out: torch.Tensor, topk_weights: torch.Tensor | None, buffer_id: torch.Tensor, *rest: Any
) -> list[torch.Tensor]:
    *tensors, _, gradients = rest
    buffer = resolve_buffer(int(buffer_id))
    handle = local_handle(buffer, *tensors)
    sums, united = combine_rows(buffer, expert_out, handle, topk_weights, gradients)
    return [sums, torch.tensor([united], device="cpu")] if gradients else [sums]


def combine_rows(
    buffer: EpBuffer,
    expert_out: torch.Tensor,
    handle: DispatchHandle,
    topk_weights: torch.Tensor | None,
    gradients: int,
) -> tuple[torch.Tensor, int]:
    """The sums of `EpBuffer.combine` for tensors of any strides, and what all ranks say of gradients."""
    options = CombineOptions.__new__(CombineOptions, gradients=gradients)
    combined = buffer.run_combine(expert_out, handle, topk_weights, None, None, options, True, True)
    assert isinstance(combined, tuple)
    return combined


def _combine_backward(
    grad_y: torch.Tensor | None,
    expert_out: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    *rest: Any,
) -> list[torch.Tensor]:
    *handle, _, hidden, dtype = rest  # the number of rows is for the fake
    return combine_backward(*_local(*handle), grad_y, expert_out, topk_weights, hidden, dtype)


def combine_backward(
    buffer: EpBuffer,
    handle: DispatchHandle,
    grad_y: torch.Tensor | None,
    expert_out: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    hidden: int,
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return the gradients of expert_out and of topk_weights, for `moe_comm::combine_backward`."""
    device = buffer.communicator.device
    if grad_y is None:
        grad_y = torch.zeros((handle.num_tokens, hidden), dtype=dtype, device=device)
    is_low_latency = handle.layout is Layout.LOW_LATENCY
    if topk_weights is None:
        arrived = buffer.dispatch(as_resolved(grad_y), None, handle=handle)
        if is_low_latency:
            _zero_unfilled(arrived.num_tokens_per_expert, arrived.x)
        return [arrived.x, torch.empty(0, device=device)]
    assert expert_out is not None
    arrived = buffer.dispatch(as_resolved(grad_y), None, as_resolved(topk_weights), handle=handle)
    assert arrived.topk_weights is not None
    dots = buffer.weighted_gradient(arrived.x, as_resolved(expert_out), arrived.topk_weights)
    if is_low_latency:
        _zero_unfilled(arrived.num_tokens_per_expert, arrived.x)
    pulled = buffer.combine(None, handle, row_weights=dots)
    assert isinstance(pulled, CombineResult)
    assert pulled.topk_weights is not None
    return [arrived.x, pulled.topk_weights]


def _fake_with_compiler(fake: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fake)
    def prepared(*args: Any) -> Any:
        keep_program_order(_OPERATORS)
        mark()
        return fake(*args)

    return prepared


for _name, _kernel, _fake in (
    ("dispatch", _dispatch, fakes.dispatch),
    ("dispatch_backward", _dispatch_backward, fakes.dispatch_backward),
    ("combine", _combine, fakes.combine),
    ("combine_backward", _combine_backward, fakes.combine_backward),
):
    # Every device: EpBuffer refuses the ones it cannot serve, on every rank.
    library.impl(_name, untraced(_kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"moe_comm::{_name}", _fake_with_compiler(_fake), lib=library)

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
