"""Configuration of a buffer: shapes, dtype and the rank of every expert."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Literal

import torch

from moe_comm.arguments import as_int, check_bool, check_kind
from moe_comm.ep import budget
from moe_comm.ep.limits import NUM_MAX_DECODED_TOKENS, ROW_BYTES_MULTIPLE, check_num_experts
from moe_comm.ep.operations_in_flight import NUM_MAX_IN_FLIGHT
from moe_comm.ep.placement import REPLICA_RULES, Placement, ReplicaRule
from moe_comm.tensors.quantization import Quantization

OnOverflow = Literal["grow", "drop", "raise"]
ON_OVERFLOW: tuple[OnOverflow, ...] = ("grow", "drop", "raise")
"""Actions of a `Capacity`, in the order in which `layout::OnOverflow` of csrc/layout/row.h counts them."""


class Layout(enum.IntEnum):
    """Order of received rows.

    `EXPERT_MAJOR`: one row per (token, k) with an id >= 0, grouped by local expert, each group
    starting at a multiple of `expert_alignment`, rows in order of (source rank, token, k).
    `RANK_MAJOR`: one row per (token, distinct destination rank), in order of (source rank, token).
    `LOW_LATENCY`: rows as in EXPERT_MAJOR, in a shape that does not depend on the routing: local
    expert e has rows `[e * n, (e + 1) * n)` with `n = num_ranks * num_max_tokens_per_rank`, of which
    the first `num_tokens_per_expert[e]` are filled, in order of (source rank, token, k), and the
    rest is undefined.
    """

    EXPERT_MAJOR = 0
    RANK_MAJOR = 1
    LOW_LATENCY = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capacity:
    """Limits on what a dispatch delivers, and what happens to what is beyond them.

    Which rows are beyond a limit follows from counts alone: first `num_rows_per_expert`, which keeps
    the first rows of an expert in (source rank, token, k) order whatever the number of ranks; then
    `num_rows`, which drops the rows whose padded place lies beyond it. A dropped row is skipped by
    combine; weights are not renormalized.

    Args:
        num_rows: Rows of this rank's result, exactly (what is not filled is zero, weights 0, ids
            -1), so that shapes do not depend on the routing. May differ between ranks; a multiple of
            the call's `expert_alignment`. None for as many rows as arrive.
        num_rows_per_expert: Most rows of one expert, over all ranks that send to it; equal on every
            rank. Not with "grow". None for no limit.
        on_overflow: "grow": the result has more rows than `num_rows` where more are needed, and
            nothing is dropped. "drop": what is beyond a limit is dropped and counted (not with
            `RANK_MAJOR`). "raise": CapacityError on every rank, before any row moves.

    Raises:
        ValueError: A limit is negative, both are None, or they do not go with `on_overflow`.
        TypeError: A limit is not an int.
    """

    num_rows: int | None = None
    num_rows_per_expert: int | None = None
    on_overflow: OnOverflow = "grow"

    def __post_init__(self) -> None:
        if self.on_overflow not in ON_OVERFLOW:
            raise ValueError(
                f'on_overflow must be "grow", "drop" or "raise", got {self.on_overflow!r}'
            )
        for name in ("num_rows", "num_rows_per_expert"):
            value = getattr(self, name)
            if value is not None:
                checked = as_int(name, value, 0)
                if checked is not value:
                    object.__setattr__(self, name, checked)
                if value >= 2**31:
                    raise ValueError(f"{name} must be below 2**31, got {value}")
        if self.num_rows is None and self.num_rows_per_expert is None:
            raise ValueError("a Capacity needs num_rows or num_rows_per_expert, got neither")
        if self.num_rows_per_expert is not None and self.on_overflow == "grow":
            raise ValueError(
                f'num_rows_per_expert = {self.num_rows_per_expert} needs on_overflow "drop" or '
                f'"raise", got "grow"'
            )


def numbers_of(capacity: Capacity | None) -> tuple[int, int, int]:
    """A capacity as csrc/layout has it: `num_rows`, `num_rows_per_expert` (-1 for none), what it does."""
    if capacity is None:
        return -1, -1, 0
    return (
        -1 if capacity.num_rows is None else capacity.num_rows,
        -1 if capacity.num_rows_per_expert is None else capacity.num_rows_per_expert,
        ON_OVERFLOW.index(capacity.on_overflow),
    )


def default_expert_rank(num_experts: int, num_ranks: int) -> torch.Tensor:
    """Contiguous blocks of experts whose sizes differ by at most one, the larger ones first.

    Returns:
        int32 `[num_experts]`, the rank of every expert.

    Example:
        7 experts on 3 ranks: `[0, 0, 0, 1, 1, 2, 2]`.
    """
    base, extra = divmod(num_experts, num_ranks)
    sizes = torch.tensor([base + (rank < extra) for rank in range(num_ranks)], device="cpu")
    return torch.repeat_interleave(torch.arange(num_ranks, dtype=torch.int32, device="cpu"), sizes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpConfig:
    """Shape of the exchange; equal on every rank of the communicator.

    Where a field may be None, every call brings its own value: the ranks agree on dtype and row size
    in the call, choices per token and tokens may even differ between them.

    Args:
        num_experts: Experts over all ranks, in [1, 65536].
        num_topk: Choices per token, >= 1, or None. Any number; there is no upper limit.
        hidden: Elements per row, or None; `hidden * dtype.itemsize` is a multiple of 16 bytes.
        num_max_tokens_per_rank: Most tokens one rank may pass to a call, or None, as where it is left
            out. `Layout.LOW_LATENCY` needs it.
        dtype: Element type of dispatched rows, or None. Any dtype can be dispatched (rows move as
            bytes); combine adds bfloat16, float16, float32 and float64.
        expert_rank: int32 `[num_experts]`, the rank of every expert, any number per rank including
            none; None for contiguous blocks (`default_expert_rank`). Local order is ascending id.
        placement: Slots of every rank and the experts in them, replicas included; not with `expert_rank`.
            `topk_idx` stays logical, and whatever goes by local expert goes by local slot.
        replica_rule: Rule that says which replica of an expert takes a row, with a `placement`.
            "balanced": from the counts that ranks exchange anyway, so that the largest number of
            rows of any rank is as small as the placement allows. "nearest": on the own rank, or
            else the own node. "hash": by the token's number, as vLLM. "given": `topk_idx` has slots
            of all ranks. See docs/replicas.md.
        num_max_in_flight: Asynchronous operations that may be in flight on the buffer, >= 2.
        num_low_latency_windows: Windows for rows of LOW_LATENCY that a buffer of GPUs has from its making
            on, as many as results are held at a time, and one more for rows that a combine has to copy
            in; see docs/gpu.md. None for 2 where `num_max_tokens_per_rank` is at most 1024, else 0. More
            than 0 need `num_max_tokens_per_rank`, `hidden` and `dtype`, which say how large they are.
            Further results get memory of their own. Nothing changes for ranks of CPUs.
        node_reduction: Whether rows are added on the node they lie on before they cross to their
            token's: one partial sum, rounded to the rows' dtype, crosses instead of every row, in
            combine and in the backward of dispatch. Sums have other bits, equal for equal layouts of
            ranks and nodes. Nothing changes where there is one node.
        rank_reduction: Whether the same is done on each rank, of ranks that share a node: of a token's
            rows on a rank, its own rank too, one sum crosses. Sums have other bits, equal for equal
            placements of experts. RANK_MAJOR has one row there, so that nothing changes. Worth it on
            GPUs where tokens choose about as many experts as there are ranks: see docs/gpu.md.

    Raises:
        ValueError: A size breaks a rule above; the message has the value. Or both reductions are
            asked for.
        TypeError: `dtype` is not a `torch.dtype`, or a reduction not a bool.
    """

    num_experts: int
    num_topk: int | None
    hidden: int | None
    num_max_tokens_per_rank: int | None = None
    dtype: torch.dtype | None = torch.bfloat16
    expert_rank: torch.Tensor | Sequence[int] | None = None
    placement: Placement | None = None
    replica_rule: ReplicaRule = "balanced"
    num_max_in_flight: int = NUM_MAX_IN_FLIGHT
    num_low_latency_windows: int | None = None
    node_reduction: bool = False
    rank_reduction: bool = False

    def __post_init__(self) -> None:
        for name, minimum, is_optional in (
            ("num_experts", 1, False),
            ("num_topk", 1, True),
            ("hidden", 1, True),
            ("num_max_tokens_per_rank", 0, True),
            ("num_max_in_flight", 2, False),
            ("num_low_latency_windows", 0, True),
        ):
            value = getattr(self, name)
            if value is not None or not is_optional:
                checked = as_int(name, value, minimum)
                if checked is not value:
                    object.__setattr__(self, name, checked)
        check_num_experts(self.num_experts)
        check_bool("node_reduction", self.node_reduction)
        check_bool("rank_reduction", self.rank_reduction)
        if self.node_reduction and self.rank_reduction:
            raise ValueError(
                "rows are added on their node or on their rank: node_reduction and rank_reduction "
                "must not both be True, got True and True"
            )
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype or None, got {self.dtype!r}")
        if (
            self.hidden is not None
            and self.dtype is not None
            and self.row_bytes % ROW_BYTES_MULTIPLE
        ):
            raise ValueError(
                f"a row must be a multiple of {ROW_BYTES_MULTIPLE} bytes, got hidden={self.hidden} "
                f"x {self.dtype.itemsize} bytes ({self.dtype}) = {self.row_bytes}"
            )
        sizes = (self.num_max_tokens_per_rank, self.hidden, self.dtype)
        if self.num_low_latency_windows and None in sizes:
            raise ValueError(
                "num_low_latency_windows needs num_max_tokens_per_rank, hidden and dtype, got "
                f"{self.num_low_latency_windows} with {sizes[0]}, {sizes[1]} and {sizes[2]}"
            )
        self._check_placement()
        if self.expert_rank is not None:
            placement = torch.as_tensor(self.expert_rank, device="cpu")
            if placement.dtype.is_floating_point or placement.dtype == torch.bool:
                raise TypeError(f"expert_rank must hold integers, got {placement.dtype}")
            if placement.shape != (self.num_experts,):
                raise ValueError(
                    f"expert_rank must have shape ({self.num_experts},), got {tuple(placement.shape)}"
                )
            # A private copy: the caller may go on to edit its own placement.
            frozen = placement.to(dtype=torch.int32, device="cpu", copy=True).contiguous()
            object.__setattr__(self, "expert_rank", frozen)

    def _check_placement(self) -> None:
        placement, rule = self.placement, self.replica_rule
        if rule not in REPLICA_RULES:
            raise ValueError(f"replica_rule must be one of {REPLICA_RULES}, got {rule!r}")
        check_kind("placement", placement, Placement, is_optional=True)
        if placement is None:
            if rule != "balanced":
                raise ValueError(f"replica_rule needs a placement, got {rule!r} and None")
            return
        if self.expert_rank is not None:
            raise ValueError("experts lie by expert_rank or by placement, got both")
        if placement.num_experts != self.num_experts:
            raise ValueError(
                f"placement must have num_experts = {self.num_experts}, got {placement.num_experts}"
            )
        check_num_experts(placement.num_slots)

    @property
    def num_slots(self) -> int:
        """Slots of all ranks; without a placement one for every expert."""
        return self.num_experts if self.placement is None else self.placement.num_slots

    @property
    def num_ids(self) -> int:
        """Ids that `topk_idx` chooses among."""
        return self.num_slots if self.replica_rule == "given" else self.num_experts

    @property
    def row_bytes(self) -> int:
        """Bytes of one dispatched row; 0 where every call brings its own."""
        if self.hidden is None or self.dtype is None:
            return 0
        return self.hidden * self.dtype.itemsize

    @property
    def rail_row_bytes(self) -> int:
        """Bytes of one row with the scale factors of any format; 0 where every call brings its own."""
        if self.row_bytes == 0:
            return 0
        assert self.hidden is not None
        return self.row_bytes + 4 * -(-self.hidden // 32)

    @property
    def num_windows_to_reserve(self) -> int:
        """`num_low_latency_windows`, resolved: buffers of more tokens are rarely for LOW_LATENCY."""
        if self.num_low_latency_windows is not None:
            return self.num_low_latency_windows
        num_tokens = self.num_max_tokens_per_rank
        return 2 if num_tokens is not None and num_tokens <= NUM_MAX_DECODED_TOKENS else 0

    def resolve_expert_rank(self, num_ranks: int) -> torch.Tensor:
        """The placement on a communicator of `num_ranks`, checked.

        Returns:
            int32 `[num_slots]`, the rank of every slot; without a `placement`, of every expert.

        Raises:
            ValueError: An expert lies on a rank outside `[0, num_ranks)`, or a `placement` is of another
                number of ranks.
        """
        if self.placement is not None:
            if self.placement.num_ranks != num_ranks:
                raise ValueError(
                    f"placement is of {self.placement.num_ranks} ranks, the communicator has {num_ranks}"
                )
            return torch.tensor(self.placement.slot_rank, dtype=torch.int32, device="cpu")
        if self.expert_rank is None:
            return default_expert_rank(self.num_experts, num_ranks)
        placement = torch.as_tensor(self.expert_rank, device="cpu")
        outside = (placement < 0) | (placement >= num_ranks)
        if bool(outside.any()):
            expert_idx = int(outside.nonzero()[0])
            raise ValueError(
                f"expert_rank[{expert_idx}] = {int(placement[expert_idx])} is not a rank of a "
                f"communicator of {num_ranks}"
            )
        return placement

    def window_sizes(
        self,
        num_ranks: int,
        *,
        expert_alignment: int = 1,
        imbalance: float = 1.0,
        worst_case: bool = False,
        layout: Layout = Layout.EXPERT_MAJOR,
        quantization: Quantization | None = None,
        capacity: Capacity | None = None,
        spans_devices: bool = False,
    ) -> budget.WindowSizes:
        """Bytes of every kind of window of the rank with most experts; see `heap_bytes`."""
        if self.num_topk is None or self.num_max_tokens_per_rank is None or self.row_bytes == 0:
            raise ValueError(
                "window sizes follow from num_topk, hidden, num_max_tokens_per_rank and dtype, got "
                f"{self.num_topk}, {self.hidden}, {self.num_max_tokens_per_rank} and {self.dtype}"
            )
        assert self.hidden is not None
        placement = self.resolve_expert_rank(num_ranks)
        dispatched_row_bytes, scales = quantized_sizes(self.hidden, quantization)
        return budget.window_sizes(
            num_ranks=num_ranks,
            num_tokens=self.num_max_tokens_per_rank,
            num_topk=self.num_topk,
            num_experts=self.num_slots,
            num_local_experts=int(torch.bincount(placement.to(torch.int64)).max()),
            row_bytes=self.row_bytes,
            weight_bytes=8 if self.dtype == torch.float64 else 4,
            depth=self.num_max_in_flight,
            expert_alignment=expert_alignment,
            imbalance=imbalance,
            worst_case=worst_case,
            layout=_LAYOUT_NAMES[layout],
            dispatched_row_bytes=dispatched_row_bytes,
            scales=scales,
            capacity_rows=None if capacity is None else capacity.num_rows,
            capacity_rows_per_expert=None if capacity is None else capacity.num_rows_per_expert,
            can_grow=capacity is not None and capacity.on_overflow == "grow",
            spans_devices=spans_devices,
            rank_reduction=self.rank_reduction,
            num_balanced_experts=self._num_balanced_experts,
        )

    def heap_bytes(
        self,
        num_ranks: int,
        *,
        num_live_windows: int = 2,
        num_live_expert_outputs: int = 1,
        num_live_sums: int = 1,
        expert_alignment: int = 1,
        imbalance: float = 1.0,
        worst_case: bool = False,
        layout: Layout = Layout.EXPERT_MAJOR,
        quantization: Quantization | None = None,
        capacity: Capacity | None = None,
        spans_devices: bool = False,
    ) -> int:
        """Heap of one rank with so many windows alive at once; for `Communicator.reserve`.

        Memory between nodes is no part of the heap; see `rail_region_bytes`.

        Args:
            num_ranks: Ranks of the communicator.
            num_live_windows: Dispatched windows held by tensors, counting the one being received.
            num_live_expert_outputs: Expert outputs held or copied in.
            num_live_sums: Sums of combines held.
            expert_alignment: As it will be passed to dispatch.
            imbalance: Rows of the busiest rank over the mean, >= 1.
            worst_case: Every token of every rank goes to one rank.
            layout: As it will be passed to dispatch. LOW_LATENCY has one size, whatever the routing.
            quantization: As it will be passed to dispatch; outputs and sums are not quantized.
            capacity: As it will be passed to dispatch.
            spans_devices: Ranks of one node lie on several GPUs.

        Raises:
            ValueError: A field that decides the size is None, or a capacity comes with LOW_LATENCY.
        """
        sizes = self.window_sizes(
            num_ranks,
            expert_alignment=expert_alignment,
            imbalance=imbalance,
            worst_case=worst_case,
            layout=layout,
            quantization=quantization,
            capacity=capacity,
            spans_devices=spans_devices,
        )
        return budget.live_heap_bytes(
            sizes,
            num_dispatched=num_live_windows,
            num_expert_outputs=num_live_expert_outputs,
            num_sums=num_live_sums,
        )

    def rail_region_bytes(self, num_ranks: int, num_local_ranks: int) -> int:
        """Return the bytes that a buffer of "nvshmem" (or "simt") takes on every rank beside the heap.

        Args:
            num_ranks: Ranks of the communicator.
            num_local_ranks: Ranks of a node; 0 bytes where that is all of them.

        Raises:
            ValueError: A field that decides the size is None, or nodes would have unequal ranks.
        """
        if self.num_topk is None or self.num_max_tokens_per_rank is None or self.row_bytes == 0:
            raise ValueError(
                "memory between nodes follows from num_topk, hidden, num_max_tokens_per_rank and "
                f"dtype, got {self.num_topk}, {self.hidden}, {self.num_max_tokens_per_rank} and "
                f"{self.dtype}"
            )
        return budget.rail_region_bytes(
            num_ranks=num_ranks,
            num_local_ranks=num_local_ranks,
            num_tokens=self.num_max_tokens_per_rank,
            num_topk=self.num_topk,
            num_experts=self.num_slots,
            row_bytes=self.rail_row_bytes,
            depth=self.num_max_in_flight,
            node_reduction=self.node_reduction,
            num_balanced_experts=self._num_balanced_experts,
        )

    @property
    def _num_balanced_experts(self) -> int:
        """Experts with several slots that are balanced, at most, whatever placement comes."""
        is_balanced = self.placement is not None and self.replica_rule == "balanced"
        return self.num_slots // 2 if is_balanced else 0


def num_places_per_expert(config: EpConfig, layout: Layout, num_ranks: int) -> int:
    """LOW_LATENCY: rows that every expert has, filled or not. Else 0.

    Args:
        config: Configuration of the buffer; says how many tokens a rank has at most if `layout` is
            LOW_LATENCY.
        layout: Layout of the call.
        num_ranks: Ranks of the communicator.
    """
    if layout is not Layout.LOW_LATENCY:
        return 0
    assert config.num_max_tokens_per_rank is not None  # checked before a backend is called
    return num_ranks * config.num_max_tokens_per_rank


_LAYOUT_NAMES: dict[Layout, budget.LayoutName] = {
    Layout.EXPERT_MAJOR: "expert_major",
    Layout.RANK_MAJOR: "rank_major",
    Layout.LOW_LATENCY: "low_latency",
}


def quantized_sizes(
    hidden: int, quantization: Quantization | None
) -> tuple[int | None, budget.ScaleSizes | None]:
    """Bytes of a quantized row and its scale factors; (None, None) for rows as they are."""
    if quantization is None:
        return None, None
    return quantization.row_bytes(hidden), budget.ScaleSizes(
        num_scales=quantization.num_scales(hidden),
        scale_bytes=quantization.sf_dtype.itemsize,
        is_column_major=quantization.is_column_major,
    )
