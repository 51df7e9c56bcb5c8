"""Backward formulas of the operators.

What a formula runs depends only on what is equal on every rank: whether topk_weights were given, and
the layout. Row counts, `needs_input_grad` and missing gradients change no collective operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C import DispatchKeySet, _after_autograd_keyset, _AutoDispatchBelowAutograd
from torch.autograd.function import once_differentiable

from moe_comm.autograd import operators
from moe_comm.validation import SUMMABLE

__all__ = ["combine", "dispatch"]


def _below_autograd(operator: Any, keyset: DispatchKeySet | None, *args: Any) -> Any:
    with _AutoDispatchBelowAutograd():
        if keyset is None:
            return operator(*args)
        return operator.redispatch(keyset & _after_autograd_keyset, *args)


class _Dispatch(torch.autograd.Function):
    """Backward is an unweighted combine; the gradient of the weights is pulled with it.

    Outputs are x, topk_weights and link. What has no gradient goes around autograd, into `others`:
    an output costs time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        others: list[torch.Tensor],
        anchor: torch.Tensor | None,
        keyset: DispatchKeySet | None,
        *args: Any,
    ) -> tuple[torch.Tensor, ...]:
        rows, weights, link, *integers = _below_autograd(operators.DISPATCH, keyset, *args)
        others.extend(integers)
        ctx.save_for_backward(*integers[3:7])  # the handle
        ctx.set_materialize_grads(False)
        # needs_input_grad: others, anchor, keyset, x, x_sf, topk_idx, topk_weights, ...
        # Rows whose gradients combine cannot add have none.
        needs_x = ctx.needs_input_grad[3] and rows.dtype in SUMMABLE
        ctx.needs = (needs_x, ctx.needs_input_grad[6])
        without_gradient = []
        if not needs_x:
            without_gradient.append(rows)
        if not ctx.needs[1]:
            without_gradient.append(weights)
        ctx.mark_non_differentiable(*without_gradient)
        ctx.num_recv_tokens, ctx.hidden = rows.shape
        ctx.dtype = rows.dtype
        ctx.weights_dtype = None if args[3] is None else weights.dtype
        return rows, weights, link

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_x, grad_weights = operators.DISPATCH_BACKWARD(
            grads[0],
            grads[1],
            *ctx.saved_tensors,
            ctx.num_recv_tokens,
            ctx.hidden,
            ctx.dtype,
            ctx.weights_dtype,
        )
        needs_x, needs_weights = ctx.needs
        return (
            *(None, None, None),
            grad_x if needs_x else None,
            *(None, None),
            grad_weights if needs_weights else None,
            *(None, None, None, None, None, None),
        )


class _Combine(torch.autograd.Function):
    """Backward is a cached dispatch; where weights were applied, a weights-only combine after it."""

    @staticmethod
    def forward(ctx: Any, keyset: DispatchKeySet | None, *args: Any) -> torch.Tensor:
        y: torch.Tensor = _below_autograd(operators.COMBINE, keyset, *args)
        expert_out, topk_weights, _, counts, slots, topk_idx, meta, _ = args
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(
            *(counts, slots, topk_idx, meta),
            *((expert_out, topk_weights) if topk_weights is not None else ()),
        )
        ctx.num_recv_tokens, ctx.hidden = expert_out.shape
        ctx.dtype = expert_out.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        counts, slots, topk_idx, meta, *weighted = ctx.saved_tensors
        expert_out, topk_weights = weighted or (None, None)
        grad_expert_out, grad_weights = operators.COMBINE_BACKWARD(
            *(grad_y, expert_out, topk_weights),
            *(counts, slots, topk_idx, meta),
            *(ctx.num_recv_tokens, ctx.hidden, ctx.dtype),
        )
        _, needs_expert_out, needs_weights, *_ = ctx.needs_input_grad
        return (
            None,
            grad_expert_out if needs_expert_out else None,
            grad_weights if needs_weights else None,
            # The link too: the engine goes on to the dispatch whether or not its gradient is defined.
            *(None, None, None, None, None, None),
        )


_apply_dispatch: Callable[..., tuple[torch.Tensor, ...]] = _Dispatch.apply
_apply_combine: Callable[..., torch.Tensor] = _Combine.apply


def dispatch(keyset: DispatchKeySet | None, *args: Any) -> list[torch.Tensor]:
    """The operator with its gradient; `keyset` is None outside the dispatcher of torch."""
    if not torch.is_grad_enabled():
        output: list[torch.Tensor] = _below_autograd(operators.DISPATCH, keyset, *args)
        return output
    x, _, _, topk_weights, *_ = args
    anchor = None
    if not (x.requires_grad or (topk_weights is not None and topk_weights.requires_grad)):
        # Peers may need gradients where this rank does not: the link has a gradient on every rank.
        anchor = torch.empty(0, requires_grad=True)
    others: list[torch.Tensor] = []
    rows, weights, link = _apply_dispatch(others, anchor, keyset, *args)
    return [rows, weights, link, *others]


def combine(keyset: DispatchKeySet | None, *args: Any) -> torch.Tensor:
    """The operator with its gradient; `keyset` is None outside the dispatcher of torch."""
    if torch.is_grad_enabled():
        return _apply_combine(keyset, *args)
    y: torch.Tensor = _below_autograd(operators.COMBINE, keyset, *args)
    return y


operators.library.impl("dispatch", dispatch, "Autograd", with_keyset=True)
operators.library.impl("combine", combine, "Autograd", with_keyset=True)
