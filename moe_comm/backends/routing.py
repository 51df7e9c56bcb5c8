"""Where every row goes: pure functions of choices and counts, equal on every rank.

All tensors are on the CPU. R ranks, E experts, T tokens of the rank in question, K choices a token.
"""

from __future__ import annotations

import dataclasses

import torch

from moe_comm import quantized
from moe_comm.backends.base import PlanTensors
from moe_comm.config import EpConfig, Layout

__all__ = [
    "SLOT_RANK_SHIFT",
    "NodeReduction",
    "Placement",
    "RowOrder",
    "Window",
    "arrange_scales",
    "as_bytes",
    "choice_slots",
    "count_choices",
    "decode_slots",
    "destination_mask",
    "expert_starts",
    "first_bad_expert_id",
    "local_topk_idx",
    "num_slots_per_token",
    "send_slots",
    "validate_plan_tensors",
    "window_of",
]

SLOT_RANK_SHIFT = 48
_ROW_MASK = (1 << SLOT_RANK_SHIFT) - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """Which rank has which expert, and as which of its own.

    Args:
        expert_rank: int64 `[E]`, the rank of every expert.
        num_ranks: R.
        local_expert_idx: int64 `[E]`, position of every expert among those of its rank.
    """

    expert_rank: torch.Tensor
    num_ranks: int
    local_expert_idx: torch.Tensor

    @classmethod
    def of(cls, expert_rank: torch.Tensor, num_ranks: int) -> Placement:
        """The placement that `EpConfig.resolve_expert_rank` describes.

        Example:
            `expert_rank = [1, 0, 1]`: `local_expert_idx = [0, 0, 1]`.
        """
        owner = expert_rank.to(torch.int64)
        local = torch.empty_like(owner)
        for rank_idx in range(num_ranks):
            mine = (owner == rank_idx).nonzero().flatten()
            local[mine] = torch.arange(mine.numel())
        return cls(expert_rank=owner, num_ranks=num_ranks, local_expert_idx=local)

    @property
    def num_experts(self) -> int:
        """E."""
        return self.expert_rank.numel()

    def experts_of(self, rank_idx: int) -> torch.Tensor:
        """Global ids of a rank's experts, ascending, int64."""
        return (self.expert_rank == rank_idx).nonzero().flatten()


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """What decides where a window's rows lie, besides counts.

    Args:
        layout: Order of received rows.
        expert_alignment: Rows per local expert are padded to a multiple of this.
        num_places_per_expert: LOW_LATENCY: rows that every expert has, filled or not; else 0.
    """

    layout: Layout
    expert_alignment: int = 1
    num_places_per_expert: int = 0

    @classmethod
    def of(
        cls, layout: Layout, expert_alignment: int, config: EpConfig, num_ranks: int
    ) -> RowOrder:
        """The order of a call on a buffer of that configuration."""
        if layout is not Layout.LOW_LATENCY:
            return cls(layout, expert_alignment)
        assert config.num_max_tokens_per_rank is not None  # checked before a backend is called
        return cls(layout, expert_alignment, num_ranks * config.num_max_tokens_per_rank)


@dataclasses.dataclass(frozen=True)
class NodeReduction:
    """Rows are added on the node they lie on before they cross; see `EpConfig.node_reduction`.

    Args:
        num_local_ranks: Ranks of a node; consecutive ones share it.
        own_node: Node of the rank that gets the sums.
    """

    num_local_ranks: int
    own_node: int

    def node_of(self, slots: torch.Tensor) -> torch.Tensor:
        """The node every slot lies on, below 0 for a slot of -1."""
        return (slots >> SLOT_RANK_SHIFT) // self.num_local_ranks


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """The rows one rank receives.

    Args:
        num_tokens_per_expert: int64 `[num_local_experts]`, kept choices of every local expert.
        expert_offsets: int32 `[num_local_experts + 1]`, padded starts, last is the padded total.
        num_recv_tokens: M, padding and the tail of a fixed number of rows included.
        num_filled_rows: M without that tail.
        source_rows: int64 `[number of rows that arrive]`, the window row of every arriving row, in order
            of (source rank, window row): the order in which a sender that sorts its rows by slot
            sends them.
        num_rows_per_source: int64 `[R]`, rows that arrive from every rank.
    """

    num_tokens_per_expert: torch.Tensor
    expert_offsets: torch.Tensor
    num_recv_tokens: int
    num_filled_rows: int
    source_rows: torch.Tensor
    num_rows_per_source: torch.Tensor


def first_bad_expert_id(topk_idx: torch.Tensor, num_experts: int) -> tuple[int, int, int] | None:
    """(token, choice, value) of the first entry outside `[-1, num_experts)`, or None."""
    bad = (topk_idx < -1) | (topk_idx >= num_experts)
    if not bool(bad.any()):
        return None
    token_idx, topk_pos = (int(i) for i in bad.nonzero()[0])
    return token_idx, topk_pos, int(topk_idx[token_idx, topk_pos])


def destination_mask(topk_idx: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Whether a token has a choice on a rank: bool `[T, R]`."""
    num_ranks = placement.num_ranks
    owner = _choice_rank(topk_idx, placement)
    # Unused choices mark a column of their own, which is cut off.
    mask = torch.zeros(topk_idx.shape[0], num_ranks + 1, dtype=torch.bool)
    mask.scatter_(1, torch.where(owner < 0, num_ranks, owner), True)
    return mask[:, :num_ranks]


def count_choices(topk_idx: torch.Tensor, placement: Placement) -> torch.Tensor:
    """What a rank asks for: choices of every expert, then tokens for every distinct rank.

    Returns:
        int32 `[E + R]`.

    Example:
        2 ranks, 4 experts, `topk_idx = [[0, 1], [3, -1]]`: `[1, 1, 0, 1, 1, 1]`.
    """
    chosen = topk_idx[topk_idx >= 0]
    choices = torch.bincount(chosen, minlength=placement.num_experts)
    tokens = destination_mask(topk_idx, placement).sum(dim=0)
    return torch.cat([choices, tokens]).to(torch.int32)


def expert_starts(
    counts: torch.Tensor, placement: Placement, order: RowOrder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where every expert's rows begin in the window of its rank, and how many they are with padding.

    Args:
        counts: Integers, `[R, E]` or wider: kept choices of every expert first.
        placement: Of the experts.
        order: LOW_LATENCY: of its places, else of padded experts.

    Returns:
        Two int64 `[E]`.

    Example:
        2 experts on one rank, 3 and 5 rows, alignment 4: starts `[0, 4]`, padded `[4, 8]`.
    """
    if order.layout is Layout.LOW_LATENCY:
        places = torch.full_like(placement.local_expert_idx, order.num_places_per_expert)
        return placement.local_expert_idx * order.num_places_per_expert, places
    total = counts[:, : placement.num_experts].to(torch.int64).sum(dim=0)
    alignment = order.expert_alignment
    padded = (total + alignment - 1) // alignment * alignment
    starts = torch.zeros_like(padded)
    for rank_idx in range(placement.num_ranks):
        mine = placement.experts_of(rank_idx)
        starts[mine] = padded[mine].cumsum(0) - padded[mine]
    return starts, padded


def window_of(rank_idx: int, counts: torch.Tensor, placement: Placement, order: RowOrder) -> Window:
    """The rows that a rank receives, from the count matrix alone.

    Args:
        rank_idx: The receiving rank.
        counts: int32 `[R, E + R + 2]`, see `PlanTensors`.
        placement: Of the experts.
        order: Of the rows.
    """
    num_experts = placement.num_experts
    mine = placement.experts_of(rank_idx)
    starts, padded = expert_starts(counts, placement, order)
    from_source = counts[:, mine].to(torch.int64)
    offsets = torch.cat([starts[mine], padded[mine].sum().reshape(1)])
    if order.layout is Layout.RANK_MAJOR:
        num_rows_per_source = counts[:, num_experts + rank_idx].to(torch.int64)
        num_filled_rows = int(num_rows_per_source.sum())
        source_rows = torch.arange(num_filled_rows)
    else:
        first_rows = starts[mine] + from_source.cumsum(0) - from_source
        source_rows = _concatenated_ranges(first_rows.flatten(), from_source.flatten())
        num_rows_per_source = from_source.sum(dim=1)
        num_filled_rows = int(offsets[-1])
    fixed = int(counts[rank_idx, num_experts + placement.num_ranks])
    return Window(
        num_tokens_per_expert=from_source.sum(dim=0),
        expert_offsets=offsets.to(torch.int32),
        num_recv_tokens=num_filled_rows if fixed < 0 else fixed,
        num_filled_rows=num_filled_rows,
        source_rows=source_rows,
        num_rows_per_source=num_rows_per_source,
    )


def num_slots_per_token(num_topk: int, num_ranks: int, layout: Layout) -> int:
    """Columns of a plan's `slots`."""
    return min(num_topk, num_ranks) if layout is Layout.RANK_MAJOR else num_topk


def send_slots(
    rank_idx: int,
    topk_idx: torch.Tensor,
    counts: torch.Tensor,
    placement: Placement,
    order: RowOrder,
) -> torch.Tensor:
    """Where the rows of a rank go. Of its choices of an expert, the first that `counts` has are kept.

    Args:
        rank_idx: The sending rank.
        topk_idx: int64 `[T, K]`, its choices.
        counts: int32 `[R, E + R + 2]`, see `PlanTensors`.
        placement: Of the experts.
        order: Of the rows.

    Returns:
        int64 `[T, num_slots]`, see `PlanTensors.slots`.

    Example:
        2 ranks, 2 experts, `topk_idx = [[1], [0]]` on rank 0 and `[[1], [1]]` on rank 1: the slots of
        rank 1 are `[[1 << 48 | 1], [1 << 48 | 2]]`.
    """
    num_experts = placement.num_experts
    if order.layout is not Layout.RANK_MAJOR:
        starts, _ = expert_starts(counts, placement, order)
        before = counts[:rank_idx, :num_experts].to(torch.int64).sum(dim=0)
        chosen = topk_idx.clamp(min=0)
        ordinal = _ordinal_among_equals(topk_idx)
        slot = (
            placement.expert_rank[chosen] << SLOT_RANK_SHIFT | (starts + before)[chosen] + ordinal
        )
        is_kept = (topk_idx >= 0) & (ordinal < counts[rank_idx, :num_experts][chosen])
        return torch.where(is_kept, slot, -1)
    mask = destination_mask(topk_idx, placement)
    to_rank = slice(num_experts, num_experts + placement.num_ranks)
    before = counts[:rank_idx, to_rank].to(torch.int64).sum(dim=0)
    row = before + mask.to(torch.int64).cumsum(0) - 1
    slot = torch.arange(placement.num_ranks) << SLOT_RANK_SHIFT | row
    # Absent ranks sort behind every slot, so that what is left is ascending with -1 at the end.
    absent = torch.iinfo(torch.int64).max
    ascending = torch.where(mask, slot, absent).sort(dim=1).values
    num_slots = num_slots_per_token(topk_idx.shape[1], placement.num_ranks, order.layout)
    ascending = ascending[:, :num_slots]
    return torch.where(ascending == absent, -1, ascending)


def decode_slots(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rank and window row of every slot; both -1 where the slot is -1."""
    return slots >> SLOT_RANK_SHIFT, torch.where(slots < 0, -1, slots & _ROW_MASK)


def choice_slots(plan: PlanTensors, placement: Placement) -> torch.Tensor:
    """The slot that holds every choice: int64 `[T, K]`, -1 where the choice is unused or was dropped.

    RANK_MAJOR: choices on one rank share a slot. Else: `plan.slots`.
    """
    if plan.layout is not Layout.RANK_MAJOR:
        return plan.slots
    by_rank = torch.full((plan.slots.shape[0], placement.num_ranks + 1), -1, dtype=torch.int64)
    slot_rank, _ = decode_slots(plan.slots)
    last = placement.num_ranks
    by_rank.scatter_(1, torch.where(slot_rank < 0, last, slot_rank), plan.slots)
    owner = _choice_rank(plan.topk_idx, placement)
    return by_rank.gather(1, torch.where(owner < 0, last, owner))


def local_topk_idx(topk_idx: torch.Tensor, rank_idx: int, placement: Placement) -> torch.Tensor:
    """Choices as a rank's own expert ids, -1 where the choice is not on that rank."""
    local = placement.local_expert_idx[topk_idx.clamp(min=0)]
    return torch.where(_choice_rank(topk_idx, placement) == rank_idx, local, -1)


def validate_plan_tensors(plan: PlanTensors, placement: Placement) -> None:
    """Raise ValueError where the tensors of a plan do not fit each other or the placement."""
    num_tokens, num_topk = plan.topk_idx.shape
    expected = {
        "counts": (placement.num_ranks, placement.num_experts + placement.num_ranks + 2),
        "slots": (num_tokens, num_slots_per_token(num_topk, placement.num_ranks, plan.layout)),
    }
    for name, shape in expected.items():
        got = tuple(getattr(plan, name).shape)
        if got != shape:
            raise ValueError(f"{name} of a plan must have shape {shape}, got {got}")


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8 `[N, row_bytes]`; `rows` is contiguous."""
    row_bytes = rows.shape[1] * rows.element_size()
    # By way of one dimension: a column of one element may have any stride, which a view refuses.
    flat = rows.detach().as_strided((rows.numel(),), (1,))
    return flat.view(torch.uint8).view(rows.shape[0], row_bytes)


def arrange_scales(
    scales: torch.Tensor, order: RowOrder, num_local_experts: int, *, is_column_major: bool
) -> torch.Tensor:
    """What `x_sf` is, from arrived row-major `[M, num_scales]`.

    Returns:
        `[M, num_scales]`; LOW_LATENCY: `[num_local_experts, num_places_per_expert, num_scales]`.
    """
    if order.layout is Layout.LOW_LATENCY:
        by_expert = scales.view(num_local_experts, order.num_places_per_expert, scales.shape[1])
        return by_expert.mT.contiguous().mT if is_column_major else by_expert
    return quantized.column_major(scales) if is_column_major else scales


def _choice_rank(topk_idx: torch.Tensor, placement: Placement) -> torch.Tensor:
    """int64 `[T, K]`, -1 for an unused choice."""
    return torch.where(topk_idx < 0, -1, placement.expert_rank[topk_idx.clamp(min=0)])


def _ordinal_among_equals(topk_idx: torch.Tensor) -> torch.Tensor:
    """How many earlier entries, in order of (token, choice), are equal to each entry."""
    ids = topk_idx.flatten()
    ordered, order = ids.sort(stable=True)
    ordinal = torch.empty_like(ids)
    # A left binary search finds the first of each run of equal ids.
    ordinal[order] = torch.arange(ids.numel()) - torch.searchsorted(ordered, ordered)
    return ordinal.reshape(topk_idx.shape)


def _concatenated_ranges(starts: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """`[starts[0], starts[0] + 1, ..., starts[1], ...]`, `lengths[i]` numbers of each."""
    first_position = lengths.cumsum(0) - lengths
    shift = torch.repeat_interleave(starts - first_position, lengths)
    return torch.arange(shift.numel()) + shift
