"""The differentiable, compilable forms of dispatch and combine."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NoReturn, cast

import torch

from moe_comm.ep.autograd import dynamo, formulas, operators
from moe_comm.ep.autograd.formulas import clone_of_inference
from moe_comm.ep.autograd.gradient_agreement import combine_word, dispatch_word
from moe_comm.ep.autograd.graph_forms import OperatorOutput, TensorHandle
from moe_comm.ep.backends.base import DispatchOutput
from moe_comm.ep.buffer import EpBuffer, rejects_unbound
from moe_comm.ep.call_options import DispatchOptions, check_options, encode_dispatch
from moe_comm.ep.config import Capacity, Layout
from moe_comm.ep.handles import NO_LINK, DispatchHandle, DispatchResult
from moe_comm.peers.missed_calls import Telling, keep
from moe_comm.tensors.quantization import Quantization
from moe_comm.tensors.torch_hooks import needs_dispatcher

# The formulas around the operators, without a round trip through the dispatcher of torch: the same
# operators run, below autograd, so dispatch modes (selective checkpointing) see them all the same.
_eager_dispatch = functools.partial(formulas.dispatch, None)
_eager_combine = functools.partial(formulas.combine, None)


@rejects_unbound("dispatch", lambda _, kwargs: kwargs.get("buffer"))
def dispatch(
    x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None = None,
    *,
    buffer: EpBuffer,
    layout: Layout = Layout.EXPERT_MAJOR,
    expert_alignment: int = 1,
    quantization: Quantization | None = None,
    capacity: Capacity | None = None,
) -> DispatchResult:
    """Send each token to the ranks of its experts; differentiable in `x` and `topk_weights`.

    Collective, and so is its backward: every rank calls it in the same order. Where any rank needs a
    gradient of it, the rows of every rank require one, and the backward runs on every rank that
    differentiates through `combine`, whatever its row count, whether or not its own x requires a
    gradient or its experts used the rows. A rank whose gradients are disabled makes that an error.

    Args:
        x: `[num_tokens, hidden]`, dtype of the configuration; any strides. Or `(data, sf)`, rows that
            are quantized already, which have no gradient; see `EpBuffer.dispatch`.
        topk_idx: int64 `[num_tokens, num_topk]`; -1 marks an unused choice.
        topk_weights: `[num_tokens, num_topk]`, or None; see `EpBuffer.dispatch`. Forwarded, not applied.
        buffer: May be destroyed only after the backward.
        layout: Order of received rows.
        expert_alignment: Rows per local expert are padded to a multiple of this.
        quantization: Rows are quantized on their way: the x of the result is `QuantizedRows` and its
            `x_sf` has the scale factors. The gradient is that of the rows before, in the dtype of x,
            and travels as such. None: rows travel as they are.
        capacity: Limits on what is delivered; see `EpBuffer.dispatch`. What is dropped has gradient 0.

    Returns:
        See `DispatchResult`. Under torch.compile the number of rows is an unbacked size, except where
        `LOW_LATENCY` or `capacity` ("drop" or "raise") fix it.

    Raises:
        ValueError: See `EpBuffer.dispatch`; also the errors of the communication. On every rank where
            some rank needs a gradient and another has gradients disabled.
        TypeError: See `EpBuffer.dispatch`.

    Example:
        ```python
        result = moe_comm.dispatch(x, topk_idx, topk_weights, buffer=buffer)
        rows = torch._grouped_mm(result.x, weight, offs=result.expert_offsets[1:])
        y = moe_comm.combine(rows * result.topk_weights[:, None], result.handle, buffer=buffer)
        ```
    """
    if not isinstance(buffer, EpBuffer):
        _refuse_buffer("dispatch", buffer)
    data: Any = x
    scales = None
    if isinstance(x, tuple) and len(x) == 2 and _is_operand(x[1]):
        data, scales = x
    is_traced = torch.compiler.is_compiling()
    word = dispatch_word(data, topk_weights, is_traced=is_traced)
    options = DispatchOptions.__new__(
        DispatchOptions, layout, expert_alignment, quantization, capacity, gradients=word
    )
    if (is_traced or needs_dispatcher(data, topk_idx, topk_weights, scales)) and (
        _is_operand(data)
        and _is_operand(topk_idx)
        and _is_operand(topk_weights, is_optional=True)
        and _are_options(options)
    ):
        return _by_operator(buffer, data, scales, topk_idx, topk_weights, options, is_traced)
    if getattr(topk_idx, "dtype", None) is torch.bool:
        text = f"topk_idx must be {torch.int64}, got {torch.bool}: a routing map is what EpBuffer takes"
        buffer.reject("dispatch", TypeError(text))
    # The buffer tells the peers what an operator would refuse on this rank alone.
    result = buffer.run_dispatch(x, topk_idx, topk_weights, None, options, True)
    if layout is Layout.LOW_LATENCY:
        operators.zero_unfilled(result)
    quantized_here = quantization if scales is None else None
    if word or quantized_here is not None:
        formulas.dispatch_in_graph(result, buffer, data, topk_weights, quantized_here)
    return _for_graphs(result) if dynamo.is_loaded() else result


def _by_operator(
    buffer: EpBuffer,
    x: torch.Tensor,
    x_sf: torch.Tensor | None,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor | None,
    options: DispatchOptions,
    is_traced: bool,
) -> DispatchResult:
    """A dispatch that a compiler traces or somebody watches: all that it brings comes as tensors."""
    anchor = buffer.gradient_anchor if options.gradients else None
    run = operators.DISPATCH if is_traced else _eager_dispatch
    brought = run(
        *(x, x_sf, topk_idx, topk_weights, buffer.id_tensor, _sizes(buffer)),
        *encode_dispatch(options),
        *(options.gradients, anchor),
    )
    rows, row_weights, link, local_topk_idx, num_tokens_per_expert, expert_offsets = brought[:6]
    further = brought[10:]
    limited = None
    if options.capacity is not None or options.layout is Layout.LOW_LATENCY:
        limited = (further[0], further[1])
        further = further[2:]
    handle = TensorHandle(brought[6], brought[7], brought[8], brought[9], link)
    parts = OperatorOutput(
        rows,
        further[1] if len(further) == 2 else None,
        further[0] if further else None,
        options.quantization,
        local_topk_idx if options.layout is Layout.RANK_MAJOR else None,
        None if topk_weights is None else row_weights,
        num_tokens_per_expert,
        expert_offsets,
        limited,
        handle,
    )
    output = cast("DispatchOutput", parts)
    return DispatchResult(output, output, options.capacity, handle=handle)


def _for_graphs(result: DispatchResult) -> DispatchResult:
    """Return a result in the form for a compiled graph, which takes it as tensors and cannot make them."""
    result.hand_out(result.x, result.topk_weights, _export(result.handle))
    return result


def _sizes(buffer: EpBuffer) -> list[int]:
    config = buffer.config
    return [
        buffer.communicator.num_ranks,
        config.num_slots,
        buffer.num_local_experts,
        config.num_topk or 0,
        config.num_max_tokens_per_rank or 0,
    ]


@rejects_unbound("combine", lambda _, kwargs: kwargs.get("buffer"))
def combine(
    expert_out: torch.Tensor,
    handle: DispatchHandle,
    *,
    buffer: EpBuffer,
    topk_weights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return expert outputs to their tokens and sum them; differentiable.

    Collective, and so is its backward: every rank calls it in the same order, with `topk_weights` on
    every rank or on none. Where any rank needs a gradient of it, its result requires one on every rank.
    A rank that received no rows passes its empty `[0, hidden]` output.

    Args:
        expert_out: `[num_recv_tokens, hidden]`; any strides. Not changed in place before the backward
            where `topk_weights` are given.
        handle: Handle from `dispatch`, or from `EpBuffer.dispatch` for rows that need no gradient.
        buffer: Buffer that made the handle.
        topk_weights: `[num_tokens, num_topk]`: each row is multiplied by its weight before it is
            added. EXPERT_MAJOR only.

    Returns:
        `[num_tokens, hidden]`, dtype of `expert_out`.

    Raises:
        ValueError: See `EpBuffer.combine`; also the errors of the communication. On every rank where
            some rank needs a gradient and another has gradients disabled, or others of them give
            `topk_weights` than all.
        TypeError: See `EpBuffer.combine`.
    """
    if not isinstance(buffer, EpBuffer):
        _refuse_buffer("combine", buffer)
    is_traced = torch.compiler.is_compiling()
    # Tensors of a handle may be of a subclass, as those of its dispatch are.
    parts = handle.tensors() if isinstance(handle, TensorHandle) else ()
    if not (
        (is_traced or needs_dispatcher(expert_out, topk_weights, *parts))
        and _is_operand(expert_out)
        and _is_operand(topk_weights, is_optional=True)
        and isinstance(handle, DispatchHandle)
    ):
        # The buffer tells the peers what an operator would refuse on this rank alone.
        local = handle.of_buffer(buffer) if isinstance(handle, TensorHandle) else handle
        link = handle.link if isinstance(handle, DispatchHandle) else NO_LINK
        word = combine_word(expert_out, topk_weights, link)
        sums, word = operators.combine_rows(buffer, expert_out, local, topk_weights, word)
        return formulas.combine_in_graph(sums, word, buffer, expert_out, topk_weights, local, link)
    link = handle.link
    word = combine_word(expert_out, topk_weights, link, is_traced=is_traced)
    if is_traced and word and not link.requires_grad:
        link = buffer.gradient_anchor
    if not isinstance(handle, TensorHandle):
        handle = _export(handle)
    tensors: Sequence[torch.Tensor] = handle.tensors()
    if word and not is_traced:
        if topk_weights is not None:
            # Peers run a backward whatever this rank's tensors are, and autograd saves none of inference.
            expert_out, topk_weights = map(clone_of_inference, (expert_out, topk_weights))
        tensors = [clone_of_inference(tensor) for tensor in tensors]
    run = operators.COMBINE if is_traced else _eager_combine
    y: torch.Tensor = run(*(expert_out, topk_weights, buffer.id_tensor, *tensors, link, word))[0]
    return y


def _refuse_buffer(operation: str, buffer: object) -> NoReturn:
    with Telling(keep, operation):
        raise TypeError(f"buffer must be an EpBuffer, got {type(buffer).__name__}")


def _is_operand(value: Any, *, is_optional: bool = False) -> bool:
    if isinstance(value, torch.Tensor):
        # PyTorch would ask the others for what the operators do not have.
        return value.layout is torch.strided and not value.is_meta
    return is_optional and value is None


def _are_options(options: DispatchOptions) -> bool:
    try:
        return check_options(options) == options
    except (TypeError, ValueError):
        return False


def _export(handle: DispatchHandle) -> TensorHandle:
    return TensorHandle(*operators.tensors_of(handle), handle.link, handle)
