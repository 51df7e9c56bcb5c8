"""Interface between an `EpBuffer` and a backend: the seam under which host, collective and reference live.

`EpBuffer` has validated every tensor before it calls a backend (dtype, device, shape, contiguity,
handle), so a backend checks only what needs the peers: expert ids, agreement between ranks, room.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
from typing import NoReturn, Protocol, TypeVar

import torch

from moe_comm.ep.call_options import CombineOptions, DispatchOptions
from moe_comm.ep.config import EpConfig, Layout
from moe_comm.ep.placement import Placement
from moe_comm.tensors import arithmetic
from moe_comm.tensors.quantization import Quantization

__all__ = [
    "Backend",
    "CombineOutput",
    "DispatchOutput",
    "Ended",
    "Operation",
    "Plan",
    "PlanTensors",
    "most_topk",
]

OutputT_co = TypeVar("OutputT_co", covariant=True)
EndedT = TypeVar("EndedT", bound="Ended")


class Operation(Protocol[OutputT_co]):
    """An operation that may still be in flight.

    Attributes:
        early: Output of an operation that is not asynchronous, for the caller's stream. For any
            other, an output whose x, x_sf and topk_weights are there already, though their rows may
            not have arrived, or None where shapes are not known before the end.
    """

    @property
    def early(self) -> OutputT_co | None:
        """See the attributes of the class."""

    def wait(self) -> OutputT_co:
        """Block until it ended and this rank has heard all others.

        Returns its output or raises what ended it, the same every time.
        """

    def is_complete(self) -> bool:
        """Return whether `wait()` would return or raise at once."""


class Ended:
    """An `Operation` that ended before it was handed out, and is its own output."""

    @property
    def early(self: EndedT) -> EndedT:
        """Itself."""
        return self

    def wait(self: EndedT) -> EndedT:
        """Itself, at once."""
        return self

    def is_complete(self) -> bool:
        """Always true."""
        return True


class Plan(Protocol):
    """Places that rows went to, kept by a handle; valid for any number of later epochs of its buffer.

    What a plan consists of is `PlanTensors`. Backends keep it as it suits them: as that, with what
    follows from it, or in native memory.
    """

    @property
    def num_tokens(self) -> int:
        """Tokens this rank dispatched."""

    @property
    def num_topk(self) -> int:
        """Choices per token of this rank."""

    @property
    def num_recv_tokens(self) -> int:
        """Rows of this rank's result, padding included."""

    @property
    def num_recv_topk(self) -> int:
        """Largest number of choices per token of all ranks."""

    @property
    def layout(self) -> Layout:
        """Order of received rows."""

    @property
    def expert_alignment(self) -> int:
        """Rows per local expert are padded to a multiple of this."""

    def total_choices(self, waits: bool) -> torch.Tensor | None:
        """Choices of every slot, by all ranks, without dropped ones: int64 `[num_slots]` on the host.

        Args:
            waits: Wait until the host knows them, and raise what ended the dispatch; else None where it
                does not yet.
        """

    def to_tensors(self) -> PlanTensors:
        """The plan as tensors that own their memory."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlanTensors:
    """A plan as plain tensors, in the form every backend and `torch.library` operator shares.

    Args:
        counts: int32 `[num_ranks, num_experts + num_ranks + 2]`; row r is what rank r sends and was
            kept: its choices of every expert; its tokens bound for every distinct rank (EXPERT_MAJOR
            and LOW_LATENCY: 0 where it sends no row there; of balanced replicas, rows may be counted
            for tokens); then the number of rows of rank r's
            result where a capacity fixed it, else -1; then its choices per token.
        slots: int64 `[num_tokens, num_slots]`, where this rank's rows went: `rank << 48 | row`, or -1
            (not a choice, or dropped). EXPERT_MAJOR and LOW_LATENCY: `num_slots = num_topk`, entry k
            belongs to choice k. RANK_MAJOR: `num_slots = min(num_topk, num_ranks)`, destination ranks
            ascending, -1 at the end.
        topk_idx: int64 `[num_tokens, num_topk]`, the caller's choices (a private copy), of slots where
            there is a placement.
        layout: Order of received rows.
        expert_alignment: Rows per local expert are padded to a multiple of this.
        num_recv_tokens: Rows of this rank's result, padding included.
        asked: int64 `[1 + num_local_experts]`: rows that this rank's result would have, padding
            included, and choices of every local expert, if no capacity and no mask dropped any.
        hash: Hash by which ranks compare handles, 0 for that of its counts.
    """

    counts: torch.Tensor
    slots: torch.Tensor
    topk_idx: torch.Tensor
    layout: Layout
    expert_alignment: int
    num_recv_tokens: int
    asked: torch.Tensor
    hash: int = dataclasses.field(default=0, kw_only=True)

    @property
    def num_tokens(self) -> int:
        """Tokens this rank dispatched."""
        return self.topk_idx.shape[0]

    @property
    def num_topk(self) -> int:
        """Choices per token of this rank."""
        return self.topk_idx.shape[1]

    @property
    def num_recv_topk(self) -> int:
        """Largest number of choices per token of all ranks."""
        return most_topk(self.counts)

    @property
    def sent_choices(self) -> torch.Tensor:
        """int32 `[num_ranks, num_experts]`: kept choices of every rank, of every expert."""
        return self.counts[:, : -len(self.counts) - 2]

    @property
    def sent_tokens(self) -> torch.Tensor:
        """int32 `[num_ranks, num_ranks]`: tokens of every rank for every rank; see `counts`."""
        return self.counts[:, -len(self.counts) - 2 : -2]

    def total_choices(self, waits: bool) -> torch.Tensor:
        """Return the choices of every slot, see `Plan.total_choices`; known from the beginning."""
        return self.sent_choices.sum(0, dtype=torch.int64)

    def is_kept(self) -> torch.Tensor:
        """Choices whose rows were sent: bool `[num_tokens, num_topk]`."""
        is_used = self.topk_idx >= 0
        # RANK_MAJOR drops nothing, and has slots by rank.
        return is_used if self.layout is Layout.RANK_MAJOR else is_used & (self.slots >= 0)

    def to_tensors(self) -> PlanTensors:
        """A copy."""
        return PlanTensors(
            counts=self.counts.clone(),
            slots=self.slots.clone(),
            topk_idx=self.topk_idx.clone(),
            layout=self.layout,
            expert_alignment=self.expert_alignment,
            num_recv_tokens=self.num_recv_tokens,
            asked=self.asked.clone(),
            hash=self.hash,
        )


def most_topk(counts: torch.Tensor) -> int:
    """Largest number of choices per token of all ranks, from `PlanTensors.counts`."""
    return int(counts[:, -1].max())


@dataclasses.dataclass(frozen=True, eq=False)
class DispatchOutput(Ended):
    """Tensors that a dispatch brought. M rows; see `DispatchResult` for the meaning of each tensor.

    An `Operation` itself, one that has ended.

    Args:
        x: `[M, hidden]`.
        x_sf: Scale factors `[M, num_scales]` of quantized rows, LOW_LATENCY:
            `[num_local_experts, M / num_local_experts, num_scales]`; else None.
        topk_idx: None (EXPERT_MAJOR, LOW_LATENCY and cached dispatch) or int64 `[M, num_topk]`
            (RANK_MAJOR), num_topk being the largest of all ranks.
        topk_weights: None when none were sent; else `[M]`, RANK_MAJOR: `[M, num_topk]`.
        num_tokens_per_expert: int64 `[num_local_experts]`, kept choices, CPU.
        num_dropped_per_expert: int64 `[num_local_experts]`, choices of every local expert that a
            capacity or a mask dropped, CPU; in a cached dispatch those of the first.
        num_required_rows: Rows this rank's result would need to drop nothing, padding included; from a
            graph int64 without dimensions.
        expert_offsets: int32 `[num_local_experts + 1]`, padded starts, last is the padded total.
        wait_ns: int64 `[num_ranks]`, nanoseconds this rank waited for each rank; zeros where the
            backend cannot tell.
        plan: Plan for the handle.
        status: See `DispatchResult.status`.
        gradients: Word of all ranks on gradients, united; see `moe_comm.ep.gradient_word`.
    """

    x: torch.Tensor
    x_sf: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    num_tokens_per_expert: torch.Tensor
    num_dropped_per_expert: torch.Tensor
    num_required_rows: int | torch.Tensor
    expert_offsets: torch.Tensor
    wait_ns: torch.Tensor
    plan: Plan
    status: torch.Tensor | None = None
    gradients: int = 0


@dataclasses.dataclass(frozen=True, eq=False)
class CombineOutput(Ended):
    """Tensors that a combine brought back. An `Operation` itself, one that has ended.

    Args:
        x: `[num_tokens, hidden]` sums, or None when only weights were pulled.
        topk_weights: `[num_tokens, num_topk]`, the pulled `row_weights`, 0 where a choice is -1 or
            was dropped; None when none were given.
        wait_ns: As in `DispatchOutput`.
        gradients: As in `DispatchOutput`.
    """

    x: torch.Tensor | None
    topk_weights: torch.Tensor | None
    wait_ns: torch.Tensor
    gradients: int = 0


class Backend(abc.ABC):
    """The operations of one `EpBuffer` on one kind of machine.

    Every method but `empty_expert_output`, `weighted_gradient`, `import_plan` and `destroy` is
    collective: every rank of the communicator calls it, in the same order. What one rank finds
    wrong is raised on every rank, as the same exception type, naming that rank.

    Args:
        communicator: Owner of the peers.
        config: Equal on every rank; the constructor verifies that and raises ValueError with both
            values on every rank where it is not so.
    """

    name: str
    # True where these options of `EpConfig` take effect; else a buffer with them is refused.
    has_node_reduction = False
    has_rank_reduction = False
    # True where `balance_replicas` takes effect; else "balanced" is refused.
    has_balanced_replicas = False

    def __init_subclass__(cls) -> None:
        for method, options in (
            (cls.dispatch, DispatchOptions),
            (cls.dispatch_cached, DispatchOptions),
            (cls.combine, CombineOptions),
        ):
            parameters = inspect.signature(method).parameters
            for name in options._fields:
                if name in parameters:
                    raise TypeError(
                        f"{method.__qualname__} takes one {options.__name__} as its last argument, "
                        f"got a keyword for each option: read options.{name}"
                    )

    def __init__(self, communicator: object, config: EpConfig) -> None:
        self.communicator = communicator
        self.config = config

    def can_quantize(self, quantization: Quantization) -> bool:
        """Return whether rows can be quantized so in a dispatch; quantized rows travel in any format."""
        return quantization.is_e4m3

    @abc.abstractmethod
    def dispatch(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        """Send rows.

        Args:
            x: `[num_tokens, hidden]`; any dtype where not quantized here.
            x_sf: `[num_tokens, num_scales]`, any strides, where x is quantized already: both travel
                as they are.
            topk_idx: `[num_tokens, num_topk]`.
            topk_weights: `[num_tokens, num_topk]` or None.
            options: Options of the dispatch.
        """

    def dispatch_unchecked(
        self,
        x: object,
        topk_idx: object,
        topk_weights: object,
        plan: Plan | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput] | None:
        """Run a dispatch of arguments that nobody has checked, where a glance shows that they are right.

        For decode steps, which take longer to check one by one than their rows take to travel.
        `topk_idx` may be a routing map, bool `[num_tokens, num_experts]`; `topk_weights` has then a
        number for each of its places, or is None.

        Args:
            x: As in `EpBuffer.dispatch`, as are the next two.
            topk_idx: None with a plan.
            topk_weights: Weights of the choices, or None.
            plan: Plan of a cached dispatch, made by this backend, or None.
            options: As the caller gave them, of any types.

        Returns:
            None, where nothing has been done: rules decide, and word what is wrong.
        """
        return None

    @abc.abstractmethod
    def dispatch_cached(
        self,
        x: torch.Tensor,
        x_sf: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        options: DispatchOptions,
    ) -> Operation[DispatchOutput]:
        """Send rows to the places of an earlier dispatch; another dtype or hidden size is allowed."""

    @abc.abstractmethod
    def combine(
        self,
        x: torch.Tensor | None,
        plan: Plan,
        topk_weights: torch.Tensor | None,
        row_weights: torch.Tensor | None,
        out: torch.Tensor | None,
        options: CombineOptions,
    ) -> Operation[CombineOutput]:
        """Sum rows back to their tokens, and pull one weight per row or choice back with them.

        Args:
            x: `[M, hidden]` rows of this rank's experts, or None to pull only weights.
            plan: Plan of the dispatch that brought the rows.
            topk_weights: `[num_tokens, num_topk]`, applied while adding (not RANK_MAJOR), or None.
            row_weights: `[M]` (EXPERT_MAJOR, LOW_LATENCY) or `[M, num_topk]` (RANK_MAJOR), pulled to
                `[num_tokens, num_topk]`, or None.
            out: `[num_tokens, hidden]` to write the sums to, or None.
            options: Options of the combine.
        """

    def combine_unchecked(
        self,
        x: object,
        plan: Plan,
        topk_weights: object,
        row_weights: object,
        out: object,
        options: CombineOptions,
        as_sums: bool,
    ) -> Operation[CombineOutput] | tuple[torch.Tensor, int] | None:
        """Run a combine as `dispatch_unchecked` runs a dispatch.

        Args:
            x: As in `EpBuffer.combine`, as are the others.
            plan: Plan of this backend.
            topk_weights: Applied while adding, or None.
            row_weights: Pulled, or None.
            out: Tensor to write the sums to, or None.
            options: As the caller gave them, of any types.
            as_sums: Return the sums and what all ranks say of gradients, where it is not asynchronous, with
                no more around them: a decode step sees what an object costs.
        """
        return None

    def weighted_gradient(
        self, gradient: torch.Tensor, expert_out: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        """Backward of weights applied in combine, on the expert's rank; local.

        Writes `weights[:, None] * gradient` into `gradient` in place (one rounding) and returns the
        dot products `<gradient, expert_out>` of every row, added element i into lane i mod 32 in
        ascending i, then the lanes pairwise 16, 8, 4, 2, 1, in float32 (float64 rows: float64).

        Args:
            gradient: `[M, hidden]`, overwritten.
            expert_out: `[M, hidden]`.
            weights: `[M]`.

        Returns:
            `[M]`, dtype of `weights`.
        """
        dots = arithmetic.dot_rows(gradient, expert_out, weights.dtype)
        gradient.copy_(arithmetic.scale_rows(gradient, weights))
        return dots

    @abc.abstractmethod
    def empty_expert_output(self, plan: Plan, hidden: int, dtype: torch.dtype) -> torch.Tensor:
        """`[M, hidden]` uninitialized, where combine can read it in place if the backend can."""

    @abc.abstractmethod
    def import_plan(self, tensors: PlanTensors) -> Plan:
        """The plan that `to_tensors` of a plan of this backend gave."""

    @abc.abstractmethod
    def reject(self, operation: str, error: Exception) -> NoReturn:
        """Take part in one operation with bad input: tell the peers, then raise `error`.

        Every peer in the matching call raises an exception of the same type whose message names this
        rank. Sends no rows; consumes the epoch; the buffer stays usable.
        """

    def balance_replicas(self, placement: Placement | None) -> None:
        """Have later dispatches take logical experts, and give their rows to replicas as "balanced" says.

        Local. Their outputs and plans are as those of a dispatch of slots, which is what they take where
        there are no replicas to balance.

        Args:
            placement: Placement with as many slots a rank as the configuration's; None to take slots.
        """
        raise NotImplementedError(f"the {self.name} backend has no balanced replicas")

    def wait_statistics(self) -> tuple[list[int], list[int]]:
        """Return nanoseconds that this rank has waited for each rank since the buffer was made, and how often.

        Local, from any thread. Empty lists where the backend cannot tell.
        """
        return [], []

    def internode_bytes(self) -> tuple[int, int]:
        """Bytes of messages between nodes so far: out of this rank, and into it.

        Raises:
            ValueError: The backend does not count them.
        """
        raise ValueError(f"the {self.name} backend does not count bytes between nodes")

    @abc.abstractmethod
    def destroy(self) -> None:
        """Release what the buffer holds. Local, idempotent; tensors handed out stay valid."""
