"""Exchange by routing map: rows arrive permuted by expert, and go back summed. Eager and differentiable.

What `fused_a2a.HybridEPDispatch` and the Megatron dispatcher share. Collective like the calls beneath.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, cast

import torch

from moe_comm.arguments import as_dense
from moe_comm.ep.autograd import formulas, operators
from moe_comm.ep.autograd.quantized_rows import QuantizedRows
from moe_comm.ep.backends.base import Plan
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.call_options import CombineOptions, DispatchOptions
from moe_comm.ep.config import Capacity, Layout
from moe_comm.ep.gradient_word import NEEDS_ANY
from moe_comm.ep.handles import CombineResult, DispatchHandle, DispatchResult
from moe_comm.ep.routing_map import dense_of_topk, list_choices
from moe_comm.peers.missed_calls import Telling
from moe_comm.tensors.quantization import Quantization
from moe_comm.tensors.torch_hooks import needs_dispatcher


class PermutedHandle(NamedTuple):
    """State of a dispatch that combine and the backward need; opaque, but for its last element.

    Args:
        buffer: Buffer that moved the rows.
        places: Handle of the dispatch, which says where they went.
        listed: int64 `[num_tokens, num_topk]`, the routing map of this rank as a list; None where the
            plan alone has it.
        probs_dtype: Dtype of the probabilities that travelled, or None.
        num_rows_in_full: Rows this rank would get without a budget, or None where there is none.
        overflow: int32 `[1]`: 1 where rows for this rank were dropped, else 0; without a budget the
            same tensor for all, not to be written to. Readers of the handles of others take the flag
            as the last element.
    """

    buffer: EpBuffer
    places: DispatchHandle
    listed: torch.Tensor | None
    probs_dtype: torch.dtype | None
    num_rows_in_full: int | None
    overflow: torch.Tensor

    @property
    def topk_idx(self) -> torch.Tensor:
        """int64 `[num_tokens, num_topk]`: the routing map of this rank as a list."""
        return _listed(self.listed, self.places.plan)

    @property
    def num_required_rows(self) -> int:
        """Rows this rank would get without a budget, padding included."""
        return (
            self.places.num_recv_tokens if self.num_rows_in_full is None else self.num_rows_in_full
        )


class PermutedRows(NamedTuple):
    """Rows that arrived, M of them.

    Args:
        hidden: `[M, hidden]`, local expert 0 first, rows of an expert in order of (source rank,
            token); a `QuantizedRows` of the dtype of x where they are quantized.
        sf: Scale factors of quantized rows, or None.
        probs: `[M]`, 0 in padding; None where none were sent.
        tokens_per_expert: int64 `[num_local_experts]` on the host, padding included.
        handle: Handle for combine.
    """

    hidden: torch.Tensor
    sf: torch.Tensor | None
    probs: torch.Tensor | None
    tokens_per_expert: torch.Tensor
    handle: PermutedHandle


class PermutedDispatch(NamedTuple):
    """A dispatch that may be in flight.

    Args:
        buffer: Buffer that moves the rows.
        result: Result that is arriving.
        listed: See `PermutedHandle`.
        quantization: Quantization of the rows, or None.
        probs_dtype: See `PermutedHandle`.
        has_budget: Whether rows may have been dropped.
    """

    buffer: EpBuffer
    result: DispatchResult
    listed: torch.Tensor | None
    quantization: Quantization | None
    probs_dtype: torch.dtype | None
    has_budget: bool

    def wait_differentiable(self, x: torch.Tensor, probs: torch.Tensor | None) -> PermutedRows:
        """The rows, with the gradients of what was sent, where any rank needs one.

        Args:
            x: As given to `start_dispatch`.
            probs: As given to `start_dispatch`.
        """
        buffer, result, listed, quantization, probs_dtype, has_budget = self
        if quantization is not None or result.gradients & NEEDS_ANY:
            self._put_in_graph(x, probs)
        num_in_full, overflow = None, _no_overflow()
        if has_budget:
            num_in_full = int(result.num_required_rows)
            overflow = _overflow_flag(bool(result.has_overflow))
        hidden = result.x
        # By hand: the constructors of named tuples take twice as long.
        handle = tuple.__new__(
            PermutedHandle,
            (buffer, result.handle, listed, probs_dtype, num_in_full, overflow),
        )
        return tuple.__new__(
            PermutedRows,
            (
                hidden,
                None if quantization is None else cast("QuantizedRows", hidden).sf,
                result.topk_weights,
                padded_tokens_per_expert(result),
                handle,
            ),
        )

    def _put_in_graph(self, x: torch.Tensor, probs: torch.Tensor | None) -> None:
        buffer, result, listed, quantization, probs_dtype, _ = self
        plan = result.plan  # and not the result, which will hold the graph

        def of_choices(gradient: torch.Tensor) -> torch.Tensor:
            assert probs_dtype is not None
            topk_idx = _listed(listed, plan)
            return dense_of_topk(gradient.to(probs_dtype), topk_idx, buffer.config.num_experts)

        formulas.dispatch_in_graph(result, buffer, x, probs, quantization, of_choices)


class PermutedCombine(NamedTuple):
    """A combine that may be in flight.

    Args:
        result: Result that comes back; if the sums are there already, they themselves and the word
            of all ranks on gradients.
        handle: Handle of the rows.
    """

    result: CombineResult | tuple[torch.Tensor, int]
    handle: PermutedHandle

    def wait_differentiable(self, rows: torch.Tensor) -> torch.Tensor:
        """The sums, with the gradient of `rows`, which were given to `start_combine`."""
        result, (buffer, places, *_) = self
        if isinstance(result, tuple):
            sums, word = result
        else:
            sums, word = result.x, result.gradients
        return formulas.combine_in_graph(sums, word, buffer, rows, None, places, places.link)


def start_dispatch(
    buffer: EpBuffer,
    x: torch.Tensor,
    routing_map: torch.Tensor,
    probs: torch.Tensor | None,
    *,
    expert_alignment: int = 1,
    num_rows: int | None = None,
    quantization: Quantization | None = None,
    async_op: bool = False,
    gradients: int = 0,
) -> PermutedDispatch:
    """Send every token to the experts of its row of the map.

    Args:
        buffer: Buffer for as many experts as the map has columns.
        x: `[num_tokens, hidden]`; any strides.
        routing_map: bool `[num_tokens, num_experts]`.
        probs: `[num_tokens, num_experts]`, or None; float64 travels as such where x is float64, every
            other dtype as float32.
        expert_alignment: Rows of every local expert are padded with zero rows to a multiple of this.
        num_rows: Rows of this rank's result, exactly, a multiple of `expert_alignment`; what does not
            fit is dropped. None for as many as arrive.
        quantization: Rows are quantized while they are written.
        async_op: Return while the rows are in flight; x must not be overwritten before the end.
        gradients: Word of this rank on gradients, for `wait_differentiable`; see
            `autograd.gradient_agreement.dispatch_word`.

    Raises:
        ValueError: Shapes do not fit, on every rank; see also `EpBuffer.dispatch`.
        TypeError: A dtype is wrong, on every rank.
    """
    listed = None
    with Telling(buffer.reject, "dispatch"):
        capacity = None
        if num_rows is not None:
            capacity = Capacity(num_rows=num_rows, on_overflow="drop")
        as_dense("routing_map", routing_map)
        if routing_map.dtype is not torch.bool:
            raise TypeError(f"routing_map must be torch.bool, got {routing_map.dtype}")
        choices, weights = routing_map, probs
        # The plan of a placement has slots, and not the columns of the map.
        if buffer.config.placement is not None or _is_seen(routing_map, probs):
            listed, weights = list_choices(buffer.config, x, routing_map, probs)
            choices = listed
    options = DispatchOptions.__new__(
        DispatchOptions,
        *(Layout.EXPERT_MAJOR, expert_alignment, quantization, capacity),
        async_op=async_op,
        gradients=gradients,
    )
    result = buffer.run_dispatch(x, choices, weights, None, options, takes_strides=True)
    probs_dtype = None if probs is None else probs.dtype
    return tuple.__new__(
        PermutedDispatch,
        (buffer, result, listed, quantization, probs_dtype, num_rows is not None),
    )


def padded_tokens_per_expert(result: DispatchResult) -> torch.Tensor:
    """int64 `[num_local_experts]` on the host: rows of every local expert, padding included."""
    if result.handle.expert_alignment == 1:
        counts = result.num_tokens_per_expert  # as they are, which is no work
        if counts.is_cpu:  # not where the dispatch was captured into a graph
            return counts
    return result.expert_offsets.to("cpu", torch.int64).diff()


def start_combine(
    rows: torch.Tensor, handle: PermutedHandle, *, async_op: bool = False, gradients: int = 0
) -> PermutedCombine:
    """Sum rows back to their tokens, in ascending order of expert, unweighted.

    Args:
        rows: `[M, hidden]`; any strides. Rows of padding are not read.
        handle: Handle of the dispatch that brought them.
        async_op: Return while the sums are in flight; rows must not be overwritten before the end.
        gradients: Word of this rank on gradients, for `wait_differentiable`; see
            `autograd.gradient_agreement.combine_word`.
    """
    buffer, places, *_ = handle
    if type(rows) is not torch.Tensor:
        with Telling(buffer.reject, "combine"):
            rows = _plain(rows)
    options = CombineOptions.__new__(CombineOptions, async_op=async_op, gradients=gradients)
    combined = buffer.run_combine(
        rows, places, None, None, None, options, as_sums=True, takes_strides=True
    )
    return PermutedCombine(
        combined if isinstance(combined, tuple) else CombineResult(combined), handle
    )


def gradient_of_dispatch(
    grad_rows: torch.Tensor, grad_probs: torch.Tensor | None, handle: PermutedHandle
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of x and of the dense probs; the latter None where none travelled."""
    buffer, places, _, probs_dtype, *_ = handle
    rows = _plain(grad_rows)
    num_rows, hidden = rows.shape
    weights_dtype = None
    if probs_dtype is not None:
        assert grad_probs is not None
        weights_dtype = grad_probs.dtype
    grad_x, pulled = operators.dispatch_backward(
        buffer, places, rows, grad_probs, num_rows, hidden, rows.dtype, weights_dtype
    )
    if probs_dtype is None:
        return grad_x, None
    return grad_x, dense_of_topk(pulled.to(probs_dtype), handle.topk_idx, buffer.config.num_experts)


def gradient_of_combine(grad_sums: torch.Tensor, handle: PermutedHandle) -> torch.Tensor:
    """Gradient of the rows: `[M, hidden]`, 0 in padding."""
    buffer, places, *_ = handle
    hidden, dtype = grad_sums.shape[1], grad_sums.dtype
    return operators.combine_backward(buffer, places, grad_sums, None, None, hidden, dtype)[0]


def check_no_transform() -> None:
    """Raise a ValueError inside a transform of torch.func."""
    if torch._C._are_functorch_transforms_active():
        raise ValueError("a transform of torch.func is active, in which no rank can call its peers")


def _is_seen(routing_map: torch.Tensor, probs: torch.Tensor | None) -> bool:
    """Return whether the operators that list the choices of a map may be looked at."""
    return torch.compiler.is_compiling() or needs_dispatcher(routing_map, probs)


def _listed(listed: torch.Tensor | None, plan: Plan) -> torch.Tensor:
    return plan.to_tensors().topk_idx if listed is None else listed


def _overflow_flag(is_set: bool) -> torch.Tensor:
    return torch.full((1,), is_set, dtype=torch.int32, device="cpu")


@functools.cache
def _no_overflow() -> torch.Tensor:
    """Return the unset flag of all dispatches without a budget: a tensor costs as much as its checks."""
    return _overflow_flag(False)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _plain(rows: torch.Tensor) -> torch.Tensor:
    """Return rows in the form that combine takes."""
    as_dense("rows", rows)
    rows = _detached(rows)
    if isinstance(rows, QuantizedRows):
        rows = rows.dequantize()
    return rows.contiguous()
