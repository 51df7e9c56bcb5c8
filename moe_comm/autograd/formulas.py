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

__all__: list[str] = []

# Rows whose gradients combine can add.
_DIFFERENTIABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class _Dispatch(torch.autograd.Function):
    """Backward is an unweighted combine; the gradient of the weights is pulled with it."""

    @staticmethod
    def forward(
        ctx: Any, keyset: DispatchKeySet, anchor: torch.Tensor | None, *args: Any
    ) -> tuple[torch.Tensor, ...]:
        with _AutoDispatchBelowAutograd():
            output = operators.DISPATCH.redispatch(keyset & _after_autograd_keyset, *args)
        x, weights, *others, _link = output
        ctx.set_materialize_grads(False)
        # needs_input_grad: keyset, anchor, x, topk_idx, topk_weights, ...
        without_gradient = others
        if not ctx.needs_input_grad[2] or x.dtype not in _DIFFERENTIABLE:
            without_gradient = [x, *without_gradient]
        if not ctx.needs_input_grad[4]:
            without_gradient = [weights, *without_gradient]
        ctx.mark_non_differentiable(*without_gradient)
        ctx.save_for_backward(*others[-4:])
        ctx.num_recv_tokens, ctx.hidden = x.shape
        ctx.dtype = x.dtype
        ctx.weights_dtype = None if args[2] is None else weights.dtype
        return tuple(output)

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
        _, _, needs_x, _, needs_weights, *_ = ctx.needs_input_grad
        return (
            None,
            None,
            grad_x if needs_x else None,
            None,
            grad_weights if needs_weights else None,
            None,
            None,
            None,
            None,
        )


class _Combine(torch.autograd.Function):
    """Backward is a cached dispatch; where weights were applied, a weights-only combine after it."""

    @staticmethod
    def forward(ctx: Any, keyset: DispatchKeySet, *args: Any) -> torch.Tensor:
        with _AutoDispatchBelowAutograd():
            y: torch.Tensor = operators.COMBINE.redispatch(keyset & _after_autograd_keyset, *args)
        expert_out, topk_weights, _, counts, slots, topk_idx, meta, _ = args
        ctx.set_materialize_grads(False)
        ctx.is_weighted = topk_weights is not None
        ctx.save_for_backward(
            counts, slots, topk_idx, meta, *((expert_out, topk_weights) if ctx.is_weighted else ())
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
            grad_y,
            expert_out,
            topk_weights,
            counts,
            slots,
            topk_idx,
            meta,
            ctx.num_recv_tokens,
            ctx.hidden,
            ctx.dtype,
        )
        _, needs_expert_out, needs_weights, *_ = ctx.needs_input_grad
        return (
            None,
            grad_expert_out if needs_expert_out else None,
            grad_weights if needs_weights else None,
            None,
            None,
            None,
            None,
            None,
            slots.new_empty(0, dtype=torch.float32),
        )


_apply_dispatch: Callable[..., tuple[torch.Tensor, ...]] = _Dispatch.apply
_apply_combine: Callable[..., torch.Tensor] = _Combine.apply


def _dispatch(keyset: DispatchKeySet, *args: Any) -> list[torch.Tensor]:
    if not torch.is_grad_enabled():
        with _AutoDispatchBelowAutograd():
            output: list[torch.Tensor] = operators.DISPATCH.redispatch(
                keyset & _after_autograd_keyset, *args
            )
        return output
    x, _, topk_weights, *_ = args
    anchor = None
    if not (x.requires_grad or (topk_weights is not None and topk_weights.requires_grad)):
        # Peers may need gradients where this rank does not: the link has a gradient on every rank.
        anchor = torch.empty(0, requires_grad=True)
    return list(_apply_dispatch(keyset, anchor, *args))


def _combine(keyset: DispatchKeySet, *args: Any) -> torch.Tensor:
    if torch.is_grad_enabled():
        return _apply_combine(keyset, *args)
    with _AutoDispatchBelowAutograd():
        y: torch.Tensor = operators.COMBINE.redispatch(keyset & _after_autograd_keyset, *args)
    return y


operators.library.impl("dispatch", _dispatch, "Autograd", with_keyset=True)
operators.library.impl("combine", _combine, "Autograd", with_keyset=True)
