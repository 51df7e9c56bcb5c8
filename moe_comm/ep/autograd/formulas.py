"""Backward formulas of the operators.

What a formula runs depends only on what is equal on every rank: whether topk_weights were given, the
layout, and whether any rank needs a gradient. Row counts, `needs_input_grad` and missing gradients
change no collective operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DispatchKeySet, _after_autograd_keyset, _AutoDispatchBelowAutograd
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moe_comm.ep.autograd import operators
from moe_comm.ep.autograd.agreement import is_differentiated, needs_rows, needs_weights
from moe_comm.ep.autograd.quantized_rows import wrap_rows
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import Capacity, Layout
from moe_comm.ep.handles import CombineResult, DispatchHandle, DispatchResult, new_link
from moe_comm.ep.validation import SUMMABLE
from moe_comm.tensors.quantization import Quantization

__all__ = ["combine", "combine_unwatched", "dispatch", "dispatch_unwatched", "is_watched"]


# Where a call is traced, nobody can look at what its ranks say together: `dispatch_word` and
# `combine_word` then have this rank say all that can be needed, so that its own word is theirs.


def _below_autograd(operator: Any, keyset: DispatchKeySet | None, *args: Any) -> Any:
    with torch.no_grad(), _AutoDispatchBelowAutograd():
        if keyset is None:
            return operator(*args)
        return operator.redispatch(keyset & _after_autograd_keyset, *args)


def _keep(
    ctx: Any,
    buffer: EpBuffer | None,
    handle: DispatchHandle | Sequence[torch.Tensor],
    weighted: tuple[torch.Tensor, ...] = (),
) -> None:
    """For the backward: what weights were applied to, the buffer, and the handle.

    Where nobody sees operators the two are kept as they are, else the handle as tensors.
    """
    ctx.buffer = buffer
    if isinstance(handle, DispatchHandle):
        ctx.local = handle
    else:
        ctx.local = None
        weighted = (*weighted, *handle)
    if weighted:
        ctx.save_for_backward(*weighted)


class _Dispatch(Function):
    """Backward is an unweighted combine; the gradient of the weights is pulled with it.

    Outputs are x, link and, where there are any, topk_weights. What has no gradient goes around
    autograd: an output costs time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        outputs: tuple[torch.Tensor, ...],
        buffer: EpBuffer | None,
        handle: DispatchHandle | Sequence[torch.Tensor],
        word: int,
        anchor: torch.Tensor | None,
        x: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        rows = outputs[0]
        _keep(ctx, buffer, handle)
        ctx.set_materialize_grads(False)
        if not needs_rows(word):
            ctx.mark_non_differentiable(rows)
        elif topk_weights is not None and not needs_weights(word):
            ctx.mark_non_differentiable(outputs[2])
        weights_dtype = None if topk_weights is None else outputs[2].dtype
        ctx.rows = rows.shape, rows.dtype, weights_dtype
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_rows: torch.Tensor | None,
        _: torch.Tensor | None,
        grad_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        local = ctx.local
        handle = ctx.saved_tensors
        shape, dtype, weights_dtype = ctx.rows
        rows = (*shape, dtype, weights_dtype)
        if local is None or is_watched(grad_rows, grad_weights):
            grad_x, grad_weights = operators.DISPATCH_BACKWARD(
                *(grad_rows, grad_weights, *(handle or operators.tensors_of(local))), *rows
            )
        else:
            grad_x, grad_weights = operators.dispatch_backward(
                ctx.buffer, local, grad_rows, grad_weights, *rows
            )
        *_, needs_x, needs_topk_weights = ctx.needs_input_grad
        return (
            *(None, None, None, None, None),
            # Rows whose gradients combine cannot add have none.
            grad_x if needs_x and dtype in SUMMABLE else None,
            grad_weights if needs_topk_weights else None,
        )


class _Combine(Function):
    """Backward is a cached dispatch; where weights were applied, a weights-only combine after it."""

    @staticmethod
    def forward(
        ctx: Any,
        sums: tuple[torch.Tensor],
        buffer: EpBuffer | None,
        handle: DispatchHandle | Sequence[torch.Tensor],
        expert_out: torch.Tensor,
        topk_weights: torch.Tensor | None,
        link: torch.Tensor,
    ) -> tuple[torch.Tensor]:
        ctx.set_materialize_grads(False)
        weighted = () if topk_weights is None else (expert_out, topk_weights)
        _keep(ctx, buffer, handle, weighted)
        ctx.rows = weighted != (), expert_out.shape, expert_out.dtype
        return sums  # a tuple, which autograd takes twice as fast as the tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        local = ctx.local
        # Read once: where saved tensors are computed anew, they are handed out only once.
        saved = ctx.saved_tensors
        is_weighted, (num_rows, hidden), dtype = ctx.rows
        expert_out, topk_weights, *handle = saved if is_weighted else (None, None, *saved)
        if local is None or is_watched(grad_y):
            grad_expert_out, grad_weights = operators.COMBINE_BACKWARD(
                *(grad_y, expert_out, topk_weights, *(handle or operators.tensors_of(local))),
                *(num_rows, hidden, dtype),
            )
        else:
            grad_expert_out, grad_weights = operators.combine_backward(
                ctx.buffer,
                local,
                grad_y,
                expert_out,
                topk_weights,
                hidden,
                dtype,
            )
        *_, needs_expert_out, needs_topk_weights, _ = ctx.needs_input_grad
        return (
            *(None, None, None),
            grad_expert_out if needs_expert_out else None,
            grad_weights if needs_topk_weights else None,
            # The link: the engine goes on to the dispatch whether or not its gradient is defined.
            None,
        )


_PLAIN_OR_NONE = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def _no_one_knows(_: bool) -> bool:
    return True


# Torch 2.7 cannot tell: there may always be hooks.
_saved_tensors_hooks: Callable[[bool], object] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", _no_one_knows
)
# `Function.apply` looks at every argument for what functorch has left behind, which the operators
# and `is_watched` have done: past it, the node is made at once.
_apply_dispatch: Callable[..., tuple[torch.Tensor, ...]] = super(Function, _Dispatch).apply
_apply_combine: Callable[..., tuple[torch.Tensor]] = super(Function, _Combine).apply


def dispatch(keyset: DispatchKeySet | None, *args: Any) -> list[torch.Tensor]:
    """The operator with its gradient; `keyset` is None outside the dispatcher of torch."""
    brought: list[torch.Tensor] = _below_autograd(operators.DISPATCH, keyset, *args)
    x, _, _, topk_weights, *_, word, anchor = args
    if not word or not torch.is_grad_enabled():
        return brought
    if keyset is None:
        word = brought[9][operators.META_GRADIENTS].item()
    if not is_differentiated(word):
        return brought
    rows, weights, link, *others = brought
    outputs = (rows, link) if topk_weights is None else (rows, link, weights)
    rows, link, *has_weights = _Dispatch.apply(
        outputs, None, others[3:7], word, anchor, x, topk_weights
    )  # type: ignore[no-untyped-call]
    return [rows, *(has_weights or [weights]), link, *others]


def dispatch_unwatched(
    buffer: EpBuffer,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    layout: Layout,
    expert_alignment: int,
    quantization: Quantization | None,
    capacity: Capacity | None,
    word: int,
    anchor: torch.Tensor | None,
) -> DispatchResult:
    """The result with its gradient, where nobody sees operators."""
    result = operators.dispatch_rows(
        buffer,
        x,
        x_sf,
        topk_idx,
        topk_weights,
        layout,
        expert_alignment,
        quantization,
        capacity,
        word,
    )
    output = result.arrived()
    said = output.gradients if word else 0
    is_quantized_here = quantization is not None and x_sf is None
    is_in_graph = is_differentiated(said)
    if not (is_in_graph or is_quantized_here):
        return result
    arrived, weights, handle = output.x, output.topk_weights, result.handle
    rows = x.new_empty_strided(arrived.shape, (0, 0)) if is_quantized_here else arrived
    if is_in_graph:
        brought = (rows, new_link()) if weights is None else (rows, new_link(), weights)
        outputs = _apply_dispatch(brought, buffer, handle, said, anchor, x, topk_weights)
        rows = outputs[0]
        handle = handle.linked(outputs[1])
        if weights is not None:
            weights = outputs[2]
    if is_quantized_here:
        assert output.x_sf is not None
        assert quantization is not None
        rows = wrap_rows(rows, arrived, output.x_sf, quantization)
    result.hand_out(rows, weights, handle)
    return result


def combine_unwatched(
    buffer: EpBuffer,
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor | None,
    handle: DispatchHandle,
    link: torch.Tensor,
    word: int,
) -> torch.Tensor:
    """The sums with their gradient, where nobody sees operators."""
    combined = operators.combine_rows(buffer, expert_out, handle, topk_weights, word)
    if not isinstance(combined, CombineResult):
        return combined
    arrived = combined.arrived()
    sums = arrived.x
    assert sums is not None
    if not is_differentiated(arrived.gradients):
        return sums
    return _apply_combine((sums,), buffer, handle, expert_out, topk_weights, link)[0]


def is_watched(
    rows: torch.Tensor | None,
    weights: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
    topk_idx: torch.Tensor | None = None,
) -> bool:
    """Whether anybody may look at operators, who then have to be called as such.

    They are for compilers, for modes and subclasses of tensors (selective checkpointing is one), for
    profilers, and for hooks on what autograd saves, which a handle that is no tensor would go
    around. A call through them costs more than a small exchange.
    """
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or _saved_tensors_hooks(False) is not None
        or type(rows) not in _PLAIN_OR_NONE
        or type(weights) not in _PLAIN_OR_NONE
        or type(scales) not in _PLAIN_OR_NONE
        or type(topk_idx) not in _PLAIN_OR_NONE
    )


def combine(keyset: DispatchKeySet | None, *args: Any) -> list[torch.Tensor]:
    """The operator with its gradient; `keyset` is None outside the dispatcher of torch."""
    brought: list[torch.Tensor] = _below_autograd(operators.COMBINE, keyset, *args)
    expert_out, topk_weights, _, *handle, link, word = args
    if not word or not torch.is_grad_enabled():
        return brought
    if keyset is None:
        word = brought[1].item()
    if not is_differentiated(word):
        return brought
    (y,) = _Combine.apply((brought[0],), None, handle, expert_out, topk_weights, link)  # type: ignore[no-untyped-call]
    return [y, *brought[1:]]


operators.library.impl("dispatch", dispatch, "Autograd", with_keyset=True)
operators.library.impl("combine", combine, "Autograd", with_keyset=True)
