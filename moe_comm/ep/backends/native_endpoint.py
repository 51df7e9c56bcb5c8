"""Interface of this package's extension modules to backends: endpoints and their operations."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from moe_comm.ep.call_options import CombineOptions, DispatchOptions

if TYPE_CHECKING:
    from moe_comm import _host


class EndpointPlan(Protocol):
    """A plan as the endpoint that made it has it."""

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """num_tokens, num_topk, num_recv_tokens, num_recv_topk."""

    def total_choices(self, waits: bool) -> torch.Tensor | None:
        """Return `Plan.total_choices`; empty for a captured dispatch, which the host does not count."""

    @property
    def expert_alignment(self) -> int:
        """Rows per local expert are padded to a multiple of this."""

    @property
    def layout(self) -> int:
        """Number of a `Layout`."""


class PendingNative(Protocol):
    """An operation that may still be in flight."""

    def is_complete(self) -> bool:
        """Return whether it has ended, well or not."""

    def judge(self) -> None:
        """Block until it has ended and the host has heard all ranks; raises what ended it."""


class SubmittedDispatch(PendingNative, Protocol):
    """A dispatch; its tensors are made at every call."""

    def plan(self) -> EndpointPlan:
        """Blocks until the end, raises what ended it."""

    def x(self) -> torch.Tensor:
        """Rows, of the type that `scales` gave, or bytes where DLPack cannot name their dtype."""

    def x_sf(self) -> torch.Tensor | None:
        """Scale factors as `DispatchResult.x_sf`, of the type that `scales` gave, or None."""

    def topk_idx(self) -> torch.Tensor | None:
        """int64 `[M, num_topk]` of RANK_MAJOR rows, else None."""

    def topk_weights(self) -> torch.Tensor | None:
        """`[M]`, RANK_MAJOR: `[M, num_topk]`; None where none were sent."""

    def num_tokens_per_expert(self) -> torch.Tensor:
        """int64 `[num_local_experts]`; blocks until all ranks were heard."""

    def num_dropped_per_expert(self) -> torch.Tensor:
        """int64 `[num_local_experts]`; blocks until all ranks were heard."""

    def num_required_rows(self) -> int:
        """Rows of this rank without a capacity; blocks until all ranks were heard."""

    def wait_ns(self) -> torch.Tensor:
        """int64 `[num_ranks]`: nanoseconds this rank waited for each rank."""

    def expert_offsets(self) -> torch.Tensor:
        """int32 `[num_local_experts + 1]`, padded starts."""

    def status(self) -> torch.Tensor | None:
        """int32 `[2]` of a dispatch that was captured, else None."""

    def gradients(self) -> int:
        """Return the words of all ranks on gradients, united."""


Brought: TypeAlias = tuple[
    EndpointPlan, torch.Tensor, torch.Tensor | None, torch.Tensor | None, int
]
"""Results of a dispatch: plan, x, topk_weights, num_tokens_per_expert (of a map, else None), gradients."""


class SubmittedCombine(PendingNative, Protocol):
    """A combine; its tensors are made at every call."""

    def result(self) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        """(sums or None, pulled weights or None, what all ranks say of gradients) at the end."""

    def wait_ns(self) -> torch.Tensor:
        """int64 `[num_ranks]`: nanoseconds this rank waited for each rank."""


class NativeEndpoint(Protocol):
    """One buffer of one rank, as every extension module has it."""

    @property
    def buffer_number(self) -> int:
        """Equal on every rank."""

    def dispatch(
        self,
        x: object,
        x_sf: torch.Tensor | None,
        topk_idx: object,
        topk_weights: object,
        plan: EndpointPlan | None,
        scales: tuple[int, ...] | None,
        options: DispatchOptions,
        row_type: int | None,
    ) -> tuple[SubmittedDispatch, Brought | None] | None:
        """Uncached with `topk_idx`, which may be a routing map, else to the places of `plan`.

        What the options say of quantization is read from `scales`, its native form; all else from the
        options, by name. Where arguments have passed every rule, `row_type` is the number of the dtype
        of x. None: a glance at them must suffice, and nothing is returned where it does not. What a
        caller with a backward looks at comes along.
        """

    def combine(
        self,
        x: object,
        plan: EndpointPlan,
        topk_weights: object,
        row_weights: object,
        out: object,
        options: CombineOptions,
        dtype: int | None,
        as_sums: bool,
    ) -> SubmittedCombine | tuple[torch.Tensor, int] | None:
        """Sums, pulled weights or both; `dtype` as the `row_type` of a dispatch.

        With `as_sums`, where it is not asynchronous: the sums, and what all ranks say of gradients.
        """

    def can_quantize(self, code: int) -> bool:
        """Return whether rows can be quantized as `native_scales.quantization_code` says."""

    def reject(self, operation: str, message: str, is_type_error: bool) -> None:
        """Raises what every rank raises."""

    def empty_rows(
        self, plan: EndpointPlan, hidden: int, row_bytes: int, dtype: int
    ) -> torch.Tensor:
        """A window for the rows of a plan."""

    def weighted_gradient(
        self,
        gradient: torch.Tensor,
        expert_out: torch.Tensor,
        weights: torch.Tensor,
        dots: torch.Tensor,
        dtype: int,
    ) -> None:
        """Scale `gradient` by `weights` in place, write the dot products of its rows to `dots`."""

    def export_plan(
        self, plan: EndpointPlan
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """(counts, slots, topk_idx, asked, hash)."""

    def import_plan(
        self,
        counts: torch.Tensor,
        topk_idx: torch.Tensor,
        asked: torch.Tensor,
        layout: int,
        expert_alignment: int,
        plan_hash: int,
    ) -> EndpointPlan:
        """A plan of its tensors, which lie in host memory."""

    def wait_statistics(self) -> tuple[list[int], list[int]]:
        """Return nanoseconds waited for each rank, and how often."""

    def enable_trace(self) -> None:
        """Record phases from now on."""

    def take_trace(self) -> list[tuple[int, str, str, int, int, int]]:
        """Records since the last call."""

    def balance_replicas(
        self, slot_expert: list[int] | None, num_experts: int, num_local_ranks: int
    ) -> None:
        """Do as `Backend.balance_replicas`.

        Args:
            slot_expert: The expert in every slot of all ranks, -1 for an empty one; None where choices
                are slots.
            num_experts: Number of experts whose ids choices are.
            num_local_ranks: Ranks of a node, consecutive ones.
        """

    def destroy(self) -> None:
        """Tell peers, and give back what the endpoint holds."""


class NativeGroupOwner(Protocol):
    """Interface that these backends need of a communicator."""

    rank_idx: int
    num_ranks: int
    num_local_ranks: int
    device: torch.device

    def require_native(self) -> _host.Group:
        """The native group; ValueError without one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Arguments that an endpoint is made from.

    Args:
        group: The communicator's native part.
        num_experts: Experts of the buffer.
        num_max_tokens: Most tokens of one rank; -1 for any.
        expert_rank: Rank of every expert.
        depth: Operations in flight.
        num_low_latency_windows: See `EpConfig`.
        node_reduction: See `EpConfig`.
        rank_reduction: See `EpConfig`.
        balances_replicas: Whether `NativeEndpoint.balance_replicas` may be told of a placement.
        agreed: Values that must be equal on every rank, as (name, value).
        num_max_topk: Choices of a token; 0 for any.
        max_row_bytes: Most bytes of a row with its scale factors; 0 for any.
        hidden: Elements of a row; 0 for any.
        row_type: Dtype of rows as a number (`native_dtypes`); 0 for any.
    """

    group: _host.Group
    num_experts: int
    num_max_tokens: int
    expert_rank: list[int]
    depth: int
    num_low_latency_windows: int
    node_reduction: bool
    rank_reduction: bool
    balances_replicas: bool
    agreed: list[tuple[str, str]]
    num_max_topk: int = 0
    max_row_bytes: int = 0
    hidden: int = 0
    row_type: int = 0
