"""Backward formulas of the operators.

What a formula runs depends only on what is equal on every rank: whether topk_weights were given, the
layout, and whether any rank needs a gradient. Row counts, `needs_input_grad` and missing gradients
change no collective operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKeySet, _after_autograd_keyset, _AutoDispatchBelowAutograd
from torch.autograd.function import once_differentiable

from moe_comm.autograd import operators
from moe_comm.autograd.agreement import is_differentiated, needs_rows, needs_weights
from moe_comm.buffer import EpBuffer, resolve_buffer
from moe_comm.config import Capacity, Layout
from moe_comm.handles import CombineResult, DispatchHandle
from moe_comm.quantization import Quantization
from moe_comm.validation import SUMMABLE

__all__ = ["combine", "combine_unwatched", "dispatch", "dispatch_unwatched", "is_watched"]


# Where a call is traced, nobody can look at what its ranks say together: `dispatch_word` and
# `combine_word` then have this rank say all that can be needed, so that its own word is theirs.


def _below_autograd(operator: Any, keyset: DispatchKeySet | None, *args: Any) -> Any:
    with torch.no_grad(), _AutoDispatchBelowAutograd():
        if keyset is None:
            return operator(*args)
        return operator.redispatch(keyset & _after_autograd_keyset, *args)


class _Dispatch(torch.autograd.Function):
    """Backward is an unweighted combine; the gradient of the weights is pulled with it.

    Outputs are x, topk_weights and link. What has no gradient goes around autograd: an output costs
    time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        brought: list[torch.Tensor],
        local: DispatchHandle | None,
        word: int,
        anchor: torch.Tensor | None,
        x: torch.Tensor,
        topk_weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        rows, weights, link, *others = brought
        ctx.local = local
        ctx.save_for_backward(*others[3:7])  # the handle
        ctx.set_materialize_grads(False)
        without_gradient = []
        if not needs_rows(word):
            without_gradient.append(rows)
        if not needs_weights(word):
            without_gradient.append(weights)
        ctx.mark_non_differentiable(*without_gradient)
        ctx.num_recv_tokens, ctx.hidden = rows.shape
        ctx.dtype = rows.dtype
        ctx.weights_dtype = None if topk_weights is None else weights.dtype
        return rows, weights, link

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        counts, slots, topk_idx, meta = ctx.saved_tensors
        shape = (ctx.num_recv_tokens, ctx.hidden, ctx.dtype, ctx.weights_dtype)
        local = ctx.local
        if local is None or is_watched(grads[0], grads[1]):
            grad_x, grad_weights = operators.DISPATCH_BACKWARD(
                *(grads[0], grads[1], counts, slots, topk_idx, meta), *shape
            )
        else:
            buffer = resolve_buffer(local.buffer_id)
            grad_x, grad_weights = operators.dispatch_backward(
                buffer, local, slots, grads[0], grads[1], *shape
            )
        *_, needs_x, needs_topk_weights = ctx.needs_input_grad
        return (
            *(None, None, None, None),
            # Rows whose gradients combine cannot add have none.
            grad_x if needs_x and ctx.dtype in SUMMABLE else None,
            grad_weights if needs_topk_weights else None,
        )


class _Combine(torch.autograd.Function):
    """Backward is a cached dispatch; where weights were applied, a weights-only combine after it."""

    @staticmethod
    def forward(
        ctx: Any,
        brought: list[torch.Tensor],
        local: DispatchHandle | None,
        expert_out: torch.Tensor,
        topk_weights: torch.Tensor | None,
        link: torch.Tensor,
        *handle: torch.Tensor,
    ) -> torch.Tensor:
        ctx.local = local
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *handle, *((expert_out, topk_weights) if topk_weights is not None else ())
        )
        ctx.num_recv_tokens, ctx.hidden = expert_out.shape
        ctx.dtype = expert_out.dtype
        return brought[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        counts, slots, topk_idx, meta, *weighted = ctx.saved_tensors
        expert_out, topk_weights = weighted or (None, None)
        local = ctx.local
        if local is None or is_watched(grad_y):
            grad_expert_out, grad_weights = operators.COMBINE_BACKWARD(
                *(grad_y, expert_out, topk_weights),
                *(counts, slots, topk_idx, meta),
                *(ctx.num_recv_tokens, ctx.hidden, ctx.dtype),
            )
        else:
            grad_expert_out, grad_weights = operators.combine_backward(
                resolve_buffer(local.buffer_id),
                local,
                counts,
                slots,
                grad_y,
                expert_out,
                topk_weights,
                ctx.hidden,
                ctx.dtype,
            )
        _, _, needs_expert_out, needs_topk_weights, *_ = ctx.needs_input_grad
        return (
            *(None, None),
            grad_expert_out if needs_expert_out else None,
            grad_weights if needs_topk_weights else None,
            # The link: the engine goes on to the dispatch whether or not its gradient is defined.
            None,
            *(None, None, None, None),
        )


_PLAIN_OR_NONE = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def _no_one_knows(_: bool) -> bool:
    return True


# Since torch 2.7; before it, there may always be hooks.
_saved_tensors_hooks: Callable[[bool], object] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", _no_one_knows
)
_apply_dispatch: Callable[..., tuple[torch.Tensor, ...]] = _Dispatch.apply
_apply_combine: Callable[..., torch.Tensor] = _Combine.apply


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
    rows, weights, link = _apply_dispatch(brought, None, word, anchor, x, topk_weights)
    return [rows, weights, link, *brought[3:]]


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
) -> tuple[list[torch.Tensor], DispatchHandle]:
    """What the operator returns with its gradient, and the handle, where nobody sees operators."""
    with torch.no_grad():
        brought, result = operators.dispatch_rows(
            *(buffer, x, x_sf, topk_idx, topk_weights, layout, expert_alignment),
            *(quantization, capacity, word),
        )
    local = result.handle
    word = result.gradients if word else 0
    if is_differentiated(word):
        brought[:3] = _apply_dispatch(brought, local, word, anchor, x, topk_weights)
    return brought, local


def combine_unwatched(
    buffer: EpBuffer,
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor | None,
    local: DispatchHandle,
    handle: tuple[torch.Tensor, ...],
    link: torch.Tensor,
    word: int,
) -> torch.Tensor:
    """The sums with their gradient, where nobody sees operators; `handle` stands for `local`."""
    with torch.no_grad():
        combined = operators.combine_rows(buffer, expert_out, local, topk_weights, word)
    if not isinstance(combined, CombineResult):
        return combined
    if not is_differentiated(combined.gradients):
        return combined.x
    return _apply_combine([combined.x], local, expert_out, topk_weights, link, *handle)


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
    return [_apply_combine(brought, None, expert_out, topk_weights, link, *handle), *brought[1:]]


operators.library.impl("dispatch", dispatch, "Autograd", with_keyset=True)
operators.library.impl("combine", combine, "Autograd", with_keyset=True)
