"""The differentiable, compilable forms of dispatch and combine."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from moe_comm import missed_calls
from moe_comm.autograd import formulas, operators
from moe_comm.autograd.agreement import combine_word, dispatch_word, is_cut_from
from moe_comm.autograd.options import encode_capacity, encode_quantization
from moe_comm.autograd.quantized_rows import wrap_rows
from moe_comm.backends.base import Completed, Plan
from moe_comm.buffer import EpBuffer, rejects_unbound, resolve_buffer
from moe_comm.config import Capacity, Layout
from moe_comm.handles import CommEvent, DispatchHandle
from moe_comm.quantization import Quantization

__all__ = ["DifferentiableDispatchResult", "TensorHandle", "combine", "dispatch"]

# The formulas around the operators, without a round trip through the dispatcher of torch: the same
# operators run, below autograd, so dispatch modes (selective checkpointing) see them all the same.
_eager_dispatch = functools.partial(formulas.dispatch, None)
_eager_combine = functools.partial(formulas.combine, None)


class TensorHandle(DispatchHandle):
    """A handle whose contents are tensors, so that it can live inside a compiled graph.

    `EpBuffer.combine` and `EpBuffer.empty_expert_output` take it like any other handle.

    Args:
        counts: int32 `[num_ranks, num_experts + num_ranks + 2]`; see `PlanTensors`.
        slots: int64 `[num_tokens, num_slots]`; see `PlanTensors`.
        topk_idx: int64 `[num_tokens, num_topk]`.
        meta: int64 `[6]`: buffer id, generation, layout, expert alignment, received rows, and what the
            ranks said of gradients.
        link: float32 `[0]`. Carries no data; ties the backward of combine to that of dispatch, so that
            every rank runs both even where a caller skipped its experts.
        local: The handle that the tensors stand for, where this process has it.
    """

    counts: torch.Tensor
    slots: torch.Tensor
    topk_idx: torch.Tensor
    meta: torch.Tensor
    link: torch.Tensor
    local: DispatchHandle | None

    def __init__(
        self,
        counts: torch.Tensor,
        slots: torch.Tensor,
        topk_idx: torch.Tensor,
        meta: torch.Tensor,
        link: torch.Tensor,
        local: DispatchHandle | None = None,
    ) -> None:
        object.__setattr__(self, "counts", counts)
        object.__setattr__(self, "slots", slots)
        object.__setattr__(self, "topk_idx", topk_idx)
        object.__setattr__(self, "meta", meta)
        object.__setattr__(self, "link", link)
        object.__setattr__(self, "local", local)

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

    @property
    def num_recv_topk(self) -> int:
        """See `DispatchHandle`."""
        return operators.num_recv_topk(self.counts)

    @functools.cached_property
    def plan(self) -> Plan:
        """See `DispatchHandle`."""
        return self.of_buffer(resolve_buffer(self.buffer_id)).plan

    def of_buffer(self, buffer: EpBuffer) -> DispatchHandle:
        """As `buffer` takes it; see `operators.local_handle`."""
        if self.local is not None:
            return self.local
        return operators.local_handle(buffer, *self.tensors())

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """As operators take it."""
        return self.counts, self.slots, self.topk_idx, self.meta


@dataclasses.dataclass(frozen=True, eq=False)
class DifferentiableDispatchResult:
    """What a differentiable dispatch brought to this rank; attributes as in `DispatchResult`.

    Gradients flow through `x` and `topk_weights`. LOW_LATENCY rows that nothing was sent to are zero.
    """

    rows: torch.Tensor  # x, or where it was quantised here: what its gradient flows to
    data: torch.Tensor | None
    x_sf: torch.Tensor | None
    quantization: Quantization | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    limited: tuple[torch.Tensor, torch.Tensor] | None
    handle: TensorHandle

    @property
    def x(self) -> torch.Tensor:
        """Rows; `QuantizedRows` where they were quantised in this dispatch."""
        if self.data is None:
            return self.rows
        kept: torch.Tensor | None = self.__dict__.get("_x")
        if kept is not None:
            return kept
        assert self.x_sf is not None
        assert self.quantization is not None
        x = wrap_rows(self.rows, self.data, self.x_sf, self.quantization)
        if not torch.compiler.is_compiling():
            # Never in a compiled region: what it keeps here would become an output of its graph.
            self.__dict__["_x"] = x
        return x

    @property
    def num_dropped_per_expert(self) -> torch.Tensor:
        """See `DispatchResult`."""
        if self.limited is None:
            return torch.zeros_like(self.num_tokens_per_expert)
        return self.limited[0]

    @property
    def num_required_rows(self) -> torch.Tensor:
        """See `DispatchResult`; an int64 tensor without dimensions."""
        if self.limited is None:
            return self.handle.meta[operators.META_NUM_RECV_TOKENS]
        return self.limited[1][0]

    @property
    def has_overflow(self) -> torch.Tensor:
        """See `DispatchResult`; a bool tensor without dimensions."""
        if self.limited is None:
            return torch.zeros((), dtype=torch.bool, device="cpu")
        return self.limited[1][1] != 0

    @property
    def event(self) -> CommEvent:
        """End of the operation, which is over when the result is handed out."""
        return CommEvent(Completed(None))


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
) -> DifferentiableDispatchResult:
    """Send each token to the ranks of its experts; differentiable in `x` and `topk_weights`.

    Collective, and so is its backward: every rank calls it in the same order. Where any rank needs a
    gradient of it, the rows of every rank require one, and the backward runs on every rank that
    differentiates through `combine`, whatever its row count, whether or not its own x requires a
    gradient or its experts used the rows. A rank whose gradients are disabled makes that an error.

    Args:
        x: `[num_tokens, hidden]`, dtype of the configuration; any strides. Or `(data, sf)`, rows that
            are quantised already, which have no gradient; see `EpBuffer.dispatch`.
        topk_idx: int64 `[num_tokens, num_topk]`; -1 marks an unused choice.
        topk_weights: `[num_tokens, num_topk]`, or None; see `EpBuffer.dispatch`. Forwarded, not applied.
        buffer: May be destroyed only after the backward.
        layout: Order of received rows.
        expert_alignment: Rows per local expert are padded to a multiple of this.
        quantization: Rows are quantised on their way: the x of the result is `QuantizedRows` and its
            `x_sf` has the scale factors. The gradient is that of the rows before, in the dtype of x,
            and travels as such. None: rows travel as they are.
        capacity: Limits on what is delivered; see `EpBuffer.dispatch`. What is dropped has gradient 0.

    Returns:
        Attributes of `DispatchResult`. Under torch.compile the number of rows is an unbacked size,
        except where `LOW_LATENCY` or `capacity` ("drop" or "raise") fix it.

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
    _check_buffer("dispatch", buffer)
    data: Any = x
    scales = None
    if isinstance(x, tuple) and len(x) == 2 and _is_operand(x[1]):
        data, scales = x
    if not (
        _is_operand(data)
        and _is_operand(topk_idx)
        and _is_operand(topk_weights, is_optional=True)
        and _is_layout(layout, expert_alignment)
        and (quantization is None or isinstance(quantization, Quantization))
        and (capacity is None or isinstance(capacity, Capacity))
    ):
        # An operator would refuse these on this rank alone; the buffer tells the peers.
        buffer.dispatch(
            x,
            topk_idx,
            topk_weights,
            layout=layout,
            expert_alignment=expert_alignment,
            quantization=quantization,
            capacity=capacity,
        )
        raise AssertionError("EpBuffer.dispatch took what the operator does not")
    is_traced = torch.compiler.is_compiling()
    word = dispatch_word(data, topk_weights, is_traced=is_traced)
    anchor = buffer.gradient_anchor if word else None
    local = None
    if is_traced or formulas.is_watched(data, topk_weights, scales, topk_idx):
        run = operators.DISPATCH if is_traced else _eager_dispatch
        brought = run(
            *(data, scales, topk_idx, topk_weights, buffer.id_tensor, _sizes(buffer)),
            *(int(layout), expert_alignment),
            *(encode_quantization(quantization), encode_capacity(capacity), word, anchor),
        )
    else:
        brought, local = formulas.dispatch_unwatched(
            *(buffer, data, scales, topk_idx, topk_weights, layout, expert_alignment),
            *(quantization, capacity, word, anchor),
        )
    rows, row_weights, link, local_topk_idx, num_tokens_per_expert, expert_offsets = brought[:6]
    further = brought[10:]
    limited = None
    if capacity is not None or layout is Layout.LOW_LATENCY:
        limited = (further[0], further[1])
        further = further[2:]
    return DifferentiableDispatchResult(
        rows,
        further[1] if len(further) == 2 else None,
        further[0] if further else None,
        quantization,
        local_topk_idx if layout is Layout.RANK_MAJOR else None,
        None if topk_weights is None else row_weights,
        num_tokens_per_expert,
        expert_offsets,
        limited,
        TensorHandle(brought[6], brought[7], brought[8], brought[9], link, local),
    )


def _sizes(buffer: EpBuffer) -> list[int]:
    config = buffer.config
    return [
        buffer.communicator.num_ranks,
        config.num_experts,
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
        handle: Of `dispatch`, or of `EpBuffer.dispatch` for rows that need no gradient.
        buffer: That made the handle.
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
    _check_buffer("combine", buffer)
    if not (
        _is_operand(expert_out)
        and _is_operand(topk_weights, is_optional=True)
        and _is_handle(handle)
    ):
        # An operator would refuse these on this rank alone; the buffer tells the peers.
        buffer.combine(expert_out, handle, topk_weights=topk_weights)
        raise AssertionError("EpBuffer.combine took what the operator does not")
    is_traced = torch.compiler.is_compiling()
    is_watched = is_traced or formulas.is_watched(expert_out, topk_weights)
    if not isinstance(handle, TensorHandle):
        handle = _export(handle)
    link = handle.link
    word = combine_word(expert_out, topk_weights, link, is_traced=is_traced)
    if word and (
        not link.requires_grad or (not is_traced and is_cut_from(expert_out, link.grad_fn))
    ):
        link = buffer.gradient_anchor
    if word and not is_traced:
        # Peers run a backward whatever this rank's tensors are, and autograd saves none of inference.
        if handle.counts.is_inference():
            handle = _outside_inference(handle)
        if topk_weights is not None:
            expert_out, topk_weights = map(_clone_of_inference, (expert_out, topk_weights))
    if not is_watched:
        return formulas.combine_unwatched(
            buffer, expert_out, topk_weights, handle.of_buffer(buffer), handle.tensors(), link, word
        )
    run = operators.COMBINE if is_traced else _eager_combine
    y: torch.Tensor = run(
        *(expert_out, topk_weights, buffer.id_tensor, *handle.tensors(), link, word)
    )[0]
    return y


def _check_buffer(operation: str, buffer: Any) -> None:
    if not isinstance(buffer, EpBuffer):
        error = TypeError(f"buffer must be an EpBuffer, got {type(buffer).__name__}")
        missed_calls.keep(operation, error)
        raise error


def _is_operand(value: Any, *, is_optional: bool = False) -> bool:
    if isinstance(value, torch.Tensor):
        # Of the others, PyTorch would ask for what the operators do not have.
        return value.layout is torch.strided and not value.is_meta
    return is_optional and value is None


def _is_layout(layout: Any, expert_alignment: Any) -> bool:
    return isinstance(layout, Layout) and type(expert_alignment) is int


def _is_handle(handle: Any) -> bool:
    return isinstance(handle, DispatchHandle)


def _clone_of_inference(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.is_inference() else tensor


def _outside_inference(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(
        _clone_of_inference(handle.counts),
        _clone_of_inference(handle.slots),
        _clone_of_inference(handle.topk_idx),
        _clone_of_inference(handle.meta),
        handle.link,
        handle.local,
    )


def _export(handle: DispatchHandle) -> TensorHandle:
    plan = handle.plan.to_tensors()
    meta = operators.meta_of(handle, 0)
    link = torch.empty(0, device="cpu")
    return TensorHandle(plan.counts, plan.slots, plan.topk_idx, meta, link, handle)
