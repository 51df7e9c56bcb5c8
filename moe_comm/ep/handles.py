"""Return values of calls: frozen handles, results and events."""

from __future__ import annotations

import dataclasses
from typing import TypeAlias

import torch

from moe_comm.ep.backends.base import CombineOutput, DispatchOutput, Operation, Plan
from moe_comm.ep.config import Capacity, Layout

__all__ = [
    "NO_LINK",
    "CombineResult",
    "CommEvent",
    "DispatchHandle",
    "DispatchResult",
    "WaitStatistics",
]


class CommEvent:
    """The end of an operation.

    `wait()` returns when the data is there (and the inputs may be overwritten), on a GPU for what comes
    behind it in the current stream, or raises what ended the operation; waiting again does the same.
    """

    __slots__ = ("_operation",)

    def __init__(self, operation: Operation[object]) -> None:
        self._operation = operation

    def wait(self) -> None:
        """Block until this rank has heard all others of the operation; raise what ended it.

        Releases the GIL.
        """
        self._operation.wait()

    def is_complete(self) -> bool:
        """Return whether `wait()` would not block."""
        return self._operation.is_complete()


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class WaitStatistics:
    """Time that one rank has waited for every rank on a buffer, over many operations.

    A rank that others wait for much, and that itself waits little, is the one that is slow.

    Args:
        wait_ns: int64 `[num_ranks]`: nanoseconds this rank waited for each rank.
        num_waits: int64 `[num_ranks]`: how many times; what was there at the first look is no wait.
    """

    wait_ns: torch.Tensor
    num_waits: torch.Tensor


with torch.inference_mode(mode=False):
    NO_LINK = torch.empty(0, device="cpu")
    """Link of dispatches without a gradient; never written, and never an output of autograd."""


@dataclasses.dataclass(slots=True, eq=False)
class DispatchHandle:
    """Record of a dispatch that combine and cached dispatch need.

    Valid for any number of later operations of the same buffer, in any order, until the buffer is
    destroyed. Holds places relative to a window, never an address. Made by a dispatch, never changed.

    Attributes:
        plan: Plan that says where the rows went; belongs to the backend.
        buffer_id: Id of the buffer that made it.
        generation: Generation of that buffer when it made it.
        link: float32 `[0]`. Carries no data; ties the backward of a combine to that of the dispatch, so
            that every rank runs both even where a caller skipped its experts.
    """

    plan: Plan
    buffer_id: int
    generation: int
    link: torch.Tensor = NO_LINK

    @property
    def layout(self) -> Layout:
        """Order of received rows."""
        return self.plan.layout

    @property
    def expert_alignment(self) -> int:
        """Rows per local expert are padded to a multiple of this."""
        return self.plan.expert_alignment

    @property
    def num_tokens(self) -> int:
        """Tokens this rank sent, T."""
        return self.plan.num_tokens

    @property
    def num_topk(self) -> int:
        """Choices per token of this rank, K."""
        return self.plan.num_topk

    @property
    def num_recv_tokens(self) -> int:
        """Rows of this rank's result, M, padding included."""
        return self.plan.num_recv_tokens

    @property
    def num_recv_topk(self) -> int:
        """Largest number of choices per token of all ranks."""
        return self.plan.num_recv_topk

    def dropped_choices(self) -> torch.Tensor:
        """Choices of this rank that a capacity or a mask dropped: bool `[num_tokens, num_topk]`."""
        tensors = self.plan.to_tensors()
        return (tensors.topk_idx >= 0) & ~tensors.is_kept()


Maker: TypeAlias = tuple[int, int]
"""Fields of a `DispatchHandle` that its plan does not have: buffer_id and generation."""


class DispatchResult:
    """Result of a dispatch on this rank; M rows, K choices per token.

    With `async_op=True` the first look at an attribute waits until its shape is known (LOW_LATENCY: x,
    x_sf and topk_weights are there at once), and `event` must be waited for before the data is read
    or the inputs are overwritten. `moe_comm.dispatch` returns when the rows are there; gradients then
    flow through `x` and `topk_weights`, and LOW_LATENCY rows that nothing was sent to are zero.
    """

    __slots__ = (
        "_capacity",
        "_event",
        "_handle",
        "_operation",
        "_output",
        "_topk_weights",
        "_x",
        "maker",
    )

    def __init__(
        self,
        operation: Operation[DispatchOutput],
        output: DispatchOutput | None,
        capacity: Capacity | None = None,
        *,
        maker: Maker | None = None,
        handle: DispatchHandle | None = None,
    ) -> None:
        self._operation = operation
        self._output = output  # of an operation that was not asynchronous
        self._capacity = capacity
        self.maker = maker  # for a handle, where there is none yet
        self._handle = handle
        self._event: CommEvent | None = None
        self._x: torch.Tensor | None = None
        self._topk_weights: torch.Tensor | None = None

    def arrived(self) -> DispatchOutput:
        """Return the output that the backend has brought, when it is there."""
        if self._output is None:
            self._output = self._operation.wait()
        return self._output

    def _early(self) -> DispatchOutput:
        """Output for attributes that may be read before the rows have arrived."""
        if self._output is not None:
            return self._output
        early = self._operation.early
        return self.arrived() if early is None else early

    def hand_out(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor | None,
        handle: DispatchHandle | None = None,
    ) -> None:
        """Replace the rows, their weights and, if given, the handle by those that others have made of them."""
        self._x = x
        self._topk_weights = topk_weights
        if handle is not None:
            self._handle = handle

    @property
    def event(self) -> CommEvent:
        """End of the operation."""
        if self._event is None:
            self._event = CommEvent(self._operation)
        return self._event

    @property
    def x(self) -> torch.Tensor:
        """Rows `[M, hidden]`.

        EXPERT_MAJOR: rows of local expert e are
        `x[expert_offsets[e]:expert_offsets[e] + num_tokens_per_expert[e]]`; padding is zero.
        LOW_LATENCY: M is `num_local_experts * num_ranks * num_max_tokens_per_rank`. Rows that
        `moe_comm.dispatch` has quantized are `QuantizedRows`.
        """
        return self._early().x if self._x is None else self._x

    @property
    def x_sf(self) -> torch.Tensor | None:
        """Scale factors `[M, num_scales]` of quantized rows (see `Quantization`); else None.

        LOW_LATENCY: `[num_local_experts, M / num_local_experts, num_scales]`.
        """
        return self._early().x_sf

    @property
    def topk_idx(self) -> torch.Tensor | None:
        """None (EXPERT_MAJOR), or int64 `[M, K]` local expert ids, -1 elsewhere (RANK_MAJOR).

        K is the largest of all ranks where they chose different numbers.
        """
        return self.arrived().topk_idx

    @property
    def topk_weights(self) -> torch.Tensor | None:
        """None if none were given; float64 where float64 was given, else float32.

        EXPERT_MAJOR: `[M]`, 0 in padding. RANK_MAJOR: `[M, K]`, 0 where the choice is not local.
        """
        return self._early().topk_weights if self._topk_weights is None else self._topk_weights

    @property
    def num_tokens_per_expert(self) -> torch.Tensor:
        """int64 `[num_local_experts]` on the host: choices of every local expert.

        Without padding and without what was dropped.
        """
        return self.arrived().num_tokens_per_expert

    @property
    def num_dropped_per_expert(self) -> torch.Tensor:
        """int64 `[num_local_experts]` on the host: choices that were dropped.

        Of every local expert, by a capacity or a masked rank; with a handle, by those of its dispatch.
        """
        return self.arrived().num_dropped_per_expert

    @property
    def num_required_rows(self) -> torch.Tensor:
        """int64 without dimensions, on the host: rows that this rank would get without a capacity."""
        number = self.arrived().num_required_rows
        return number if isinstance(number, torch.Tensor) else torch.tensor(number, device="cpu")

    @property
    def has_overflow(self) -> torch.Tensor:
        """Return whether rows for this rank were dropped, or its capacity had to grow.

        A bool without dimensions, on the host.
        """
        output = self.arrived()
        has_dropped = output.num_dropped_per_expert.any()
        most_rows = None if self._capacity is None else self._capacity.num_rows
        if most_rows is None:
            return has_dropped
        return has_dropped | (self.num_required_rows > most_rows)

    @property
    def status(self) -> torch.Tensor | None:
        """None, or int32 `[2]` on the device where the dispatch was captured into a graph.

        How the last replay ended (0 well; nothing moved where an input was bad, 1, where `capacity`
        says to raise, 2, or where ranks make more choices than this one, 3; 4 where a peer failed),
        and how many choices of this rank's experts were dropped. Then `num_tokens_per_expert` is on
        the device too, and the host knows neither `num_dropped_per_expert` nor `num_required_rows`
        nor `has_overflow`.
        """
        return self.arrived().status

    @property
    def wait_ns(self) -> torch.Tensor:
        """int64 `[num_ranks]`: nanoseconds this rank waited for each rank in the operation.

        Zeros where the backend cannot tell, and in compiled code.
        """
        return self.arrived().wait_ns

    @property
    def gradients(self) -> int:
        """Words of the ranks on gradients, united; see `EpBuffer.dispatch`."""
        return self.arrived().gradients

    @property
    def expert_offsets(self) -> torch.Tensor:
        """int32 `[num_local_experts + 1]` on x's device: padded starts of local experts.

        RANK_MAJOR: where the experts would start after a local permute with the same alignment.
        """
        return self.arrived().expert_offsets

    @property
    def plan(self) -> Plan:
        """Places of the rows; belongs to the backend. `handle` has it too."""
        return self.arrived().plan

    @property
    def handle(self) -> DispatchHandle:
        """Handle for `combine` and cached `dispatch`."""
        if self._handle is None:
            assert self.maker is not None
            self._handle = DispatchHandle(self.arrived().plan, *self.maker)
        return self._handle


class CombineResult:
    """Result of a combine; `event` must be waited for before `x` is read."""

    __slots__ = ("_event", "_operation", "_output")

    def __init__(
        self, operation: Operation[CombineOutput], output: CombineOutput | None = None
    ) -> None:
        self._operation = operation
        self._output = output  # of an operation that was not asynchronous
        self._event: CommEvent | None = None

    @property
    def event(self) -> CommEvent:
        """End of the operation."""
        if self._event is None:
            self._event = CommEvent(self._operation)
        return self._event

    def arrived(self) -> CombineOutput:
        """Return the output that the backend has brought, when it is there."""
        return self._operation.wait() if self._output is None else self._output

    @property
    def x(self) -> torch.Tensor:
        """Sums `[num_tokens, hidden]`.

        Raises:
            ValueError: The combine pulled weights only.
        """
        x = self.arrived().x
        if x is None:
            raise ValueError("this combine pulled weights only, it has no sums")
        return x

    @property
    def topk_weights(self) -> torch.Tensor | None:
        """`[num_tokens, num_topk]`, the pulled `row_weights`, or None."""
        return self.arrived().topk_weights

    @property
    def wait_ns(self) -> torch.Tensor:
        """int64 `[num_ranks]`: nanoseconds this rank waited for each rank in the operation."""
        return self.arrived().wait_ns

    @property
    def gradients(self) -> int:
        """Words of the ranks on gradients, united; see `EpBuffer.combine`."""
        return self.arrived().gradients
