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
from moe_comm.ep.autograd.quantized_rows import wrap_rows
from moe_comm.ep.buffer import EpBuffer, resolve_buffer
from moe_comm.ep.gradient_word import (
    LEAVES_DISPATCH,
    NEEDS_ANY,
    NEEDS_ROWS,
    NEEDS_WEIGHTS,
    REACHES_DISPATCH,
)
from moe_comm.ep.handles import NO_LINK, DispatchHandle, DispatchResult
from moe_comm.ep.validation import SUMMABLE
from moe_comm.tensors.quantization import Quantization
from moe_comm.tensors.torch_hooks import needs_dispatcher

# Nobody can look at what the ranks of a traced call say together: `dispatch_word` and
# `combine_word` then have this rank say all that can be needed, so that its own word is theirs.


def _below_autograd(operator: Any, keyset: DispatchKeySet | None, *args: Any) -> Any:
    with torch.no_grad(), _AutoDispatchBelowAutograd():
        if keyset is None:
            return operator(*args)
        return operator.redispatch(keyset & _after_autograd_keyset, *args)


class _Dispatch(Function):
    """Backward is an unweighted combine; the gradient of the weights is pulled with it.

    Outputs are x, link and, where there are any, topk_weights. What has no gradient goes around
    autograd: an output costs time.

    Kept are the buffer and the parts of the handle, both None where `handle` has it as tensors; shape
    and dtype of the rows, dtype of their weights; whether `source` is x; and `of_choices` of
    `dispatch_in_graph`. `source`: see `_source_of`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        outputs: tuple[torch.Tensor, ...],
        kept: tuple[Any, ...],
        handle: Sequence[torch.Tensor],
        word: int,
        source: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.kept = kept
        if handle:
            ctx.save_for_backward(*handle)
        ctx.materialize_grads = False  # what `set_materialize_grads` does, without a call
        if not word & NEEDS_ROWS:
            ctx.mark_non_differentiable(outputs[0])
        elif topk_weights is not None and not word & NEEDS_WEIGHTS:
            ctx.mark_non_differentiable(outputs[2])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_rows: torch.Tensor | None,
        _: torch.Tensor | None,
        grad_weights: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        buffer, parts, shape, dtype, weights_dtype, is_of_x, of_choices = ctx.kept
        tensors = ctx.saved_tensors
        rows = (*shape, dtype, weights_dtype)
        handle = None if parts is None else DispatchHandle(*parts)
        if handle is None or needs_dispatcher(grad_rows, grad_weights):
            if handle is not None:
                tensors = operators.tensors_of(handle)
            grad_x, grad_weights = operators.DISPATCH_BACKWARD(
                grad_rows, grad_weights, *tensors, *rows
            )
        else:
            grad_x, grad_weights = operators.dispatch_backward(
                buffer, handle, grad_rows, grad_weights, *rows
            )
        if not ctx.needs_input_grad[-1]:
            grad_weights = None
        elif of_choices is not None:
            grad_weights = of_choices(grad_weights)
        # Rows whose gradients combine cannot add have none.
        grad_x = grad_x if is_of_x and dtype in SUMMABLE else None
        return None, None, None, None, grad_x, grad_weights


class _Combine(Function):
    """Backward is a cached dispatch; where weights were applied, a weights-only combine after it.

    Kept are the buffer and the handle, both None where `handle` has it as tensors.
    """

    @staticmethod
    def forward(
        ctx: Any,
        sums: tuple[torch.Tensor],
        kept: tuple[EpBuffer | None, DispatchHandle | None],
        handle: Sequence[torch.Tensor],
        expert_out: torch.Tensor,
        topk_weights: torch.Tensor | None,
        link: torch.Tensor | None,
    ) -> tuple[torch.Tensor]:
        ctx.materialize_grads = False  # what `set_materialize_grads` does, without a call
        is_weighted = topk_weights is not None
        ctx.kept = (*kept, is_weighted, expert_out.shape, expert_out.dtype)
        if is_weighted:
            ctx.save_for_backward(expert_out, topk_weights, *handle)
        elif handle:
            ctx.save_for_backward(*handle)
        return sums  # a tuple, which autograd takes twice as fast as the tensor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        buffer, local, is_weighted, (num_rows, hidden), dtype = ctx.kept
        # Read once: where saved tensors are computed anew, they are handed out only once.
        saved = ctx.saved_tensors
        expert_out, topk_weights, *handle = saved if is_weighted else (None, None, *saved)
        if local is None or needs_dispatcher(grad_y):
            grad_expert_out, grad_weights = operators.COMBINE_BACKWARD(
                *(grad_y, expert_out, topk_weights, *(handle or operators.tensors_of(local))),
                *(num_rows, hidden, dtype),
            )
        else:
            grad_expert_out, grad_weights = operators.combine_backward(
                buffer, local, grad_y, expert_out, topk_weights, hidden, dtype
            )
        *_, needs_expert_out, needs_topk_weights, _ = ctx.needs_input_grad
        return (
            *(None, None, None),
            grad_expert_out if needs_expert_out else None,
            grad_weights if needs_topk_weights else None,
            # The link: the engine goes on to the dispatch whether or not its gradient is defined.
            None,
        )


# `Function.apply` looks at every argument for what functorch has left behind, which the operators
# and `has_torch_hooks` have done: past it, the node is made at once.
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
    if not word & NEEDS_ANY:
        return brought
    rows, weights, link, *others = brought
    outputs = (rows, link) if topk_weights is None else (rows, link, weights)
    weights_dtype = None if topk_weights is None else weights.dtype
    source = _source_of(x, topk_weights, anchor)
    kept = (None, None, rows.shape, rows.dtype, weights_dtype, source is x, None)
    rows, link, *has_weights = _Dispatch.apply(
        outputs, kept, others[3:7], word, source, topk_weights
    )  # type: ignore[no-untyped-call]
    return [rows, *(has_weights or [weights]), link, *others]


def _source_of(
    x: torch.Tensor, topk_weights: torch.Tensor | None, anchor: torch.Tensor | None
) -> torch.Tensor | None:
    """Return the tensor that, besides weights, makes a dispatch part of the graph: x, or the buffer's anchor.

    The anchor where neither needs a gradient on this rank. Autograd looks at each argument of a node.
    """
    if x.requires_grad:
        return x
    return None if topk_weights is not None and topk_weights.requires_grad else anchor


def dispatch_in_graph(
    result: DispatchResult,
    buffer: EpBuffer,
    x: torch.Tensor,
    topk_weights: torch.Tensor | None,
    quantization: Quantization | None = None,
    of_choices: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Give a dispatch of the buffer its gradient, where any of its ranks needs one.

    Args:
        result: Result of a dispatch without a cached handle; changed in place.
        buffer: Buffer that moved the rows.
        x: Rows of the dispatch.
        topk_weights: Tensor that the gradient of its weights goes to, or None.
        quantization: Quantization of rows that the dispatch has quantized, which become
            `QuantizedRows`; else None.
        of_choices: The gradient of `topk_weights` by that of the weights that travelled, float
            `[num_tokens, num_topk]`; None where those are the same.
    """
    output = result.arrived()
    word = output.gradients
    if not (word & NEEDS_ANY or quantization is not None):
        return
    arrived = output.x
    weights = None if topk_weights is None else output.topk_weights
    rows = arrived if quantization is None else x.new_empty_strided(arrived.shape, (0, 0))
    handle = None
    if word & NEEDS_ANY:
        assert result.maker is not None
        # Without the link: what a link comes from must not hold it.
        parts = (output.plan, *result.maker)
        link = NO_LINK.data  # a third of what an empty tensor costs
        outputs: tuple[torch.Tensor, ...] = (
            (rows, link) if weights is None else (rows, link, weights)
        )
        weights_dtype = None if weights is None else weights.dtype
        source = _source_of(x, topk_weights, buffer.gradient_anchor)
        kept = (buffer, parts, rows.shape, rows.dtype, weights_dtype, source is x, of_choices)
        outputs = _apply_dispatch(outputs, kept, (), word, source, topk_weights)
        rows = outputs[0]
        handle = DispatchHandle(*parts, outputs[1])
        if weights is not None:
            weights = outputs[2]
    if quantization is not None:
        assert output.x_sf is not None
        rows = wrap_rows(rows, arrived, output.x_sf, quantization)
    result.hand_out(rows, weights, handle)


def combine_in_graph(
    sums: torch.Tensor,
    word: int,
    buffer: EpBuffer,
    expert_out: torch.Tensor,
    topk_weights: torch.Tensor | None,
    handle: DispatchHandle,
    link: torch.Tensor,
) -> torch.Tensor:
    """Sums with their gradient, where any rank needs one.

    Args:
        sums: Result of a combine of the buffer.
        word: Word of the combine's ranks on gradients, united.
        buffer: Buffer that added the rows.
        expert_out: Rows of the combine.
        topk_weights: Weights of the combine, or None.
        handle: Handle of the buffer.
        link: Link of the dispatch.
    """
    if not word & NEEDS_ANY:
        return sums
    node = link.grad_fn
    # Autograd looks at each argument of a node, and these rows come from the dispatch by themselves.
    is_tied = node is not None and expert_out.grad_fn is node
    tie = None if is_tied else tie_of(word, link, buffer)
    if topk_weights is not None:
        # Peers run a backward whatever this rank's tensors are, and autograd saves none of inference.
        expert_out, topk_weights = clone_of_inference(expert_out), clone_of_inference(topk_weights)
    return _apply_combine((sums,), (buffer, handle), (), expert_out, topk_weights, tie)[0]


def tie_of(word: int, link: torch.Tensor, buffer: EpBuffer) -> torch.Tensor:
    """Return the tensor that a combine's backward goes on to: its dispatch's link, or the end of the graph.

    Args:
        word: Word of the combine's ranks on gradients, united.
        link: Link of the dispatch.
        buffer: Buffer of both.
    """
    is_cut = word & (REACHES_DISPATCH | LEAVES_DISPATCH) == LEAVES_DISPATCH
    return buffer.gradient_anchor if is_cut or not link.requires_grad else link


def clone_of_inference(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy that autograd saves where it was made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def combine(keyset: DispatchKeySet | None, *args: Any) -> list[torch.Tensor]:
    """The operator with its gradient; `keyset` is None outside the dispatcher of torch."""
    brought: list[torch.Tensor] = _below_autograd(operators.COMBINE, keyset, *args)
    expert_out, topk_weights, _, *handle, link, word = args
    if not word or not torch.is_grad_enabled():
        return brought
    if keyset is None:
        word = int(brought[1])
        link = tie_of(word, link, resolve_buffer(int(args[2])))
    if not word & NEEDS_ANY:
        return brought
    (y,) = _Combine.apply((brought[0],), (None, None), handle, expert_out, topk_weights, link)  # type: ignore[no-untyped-call]
    return [y, *brought[1:]]


operators.library.impl("dispatch", dispatch, "Autograd", with_keyset=True)
operators.library.impl("combine", combine, "Autograd", with_keyset=True)
