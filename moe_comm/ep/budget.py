"""Bytes a configuration needs before anything is allocated.

What a window or a control area takes is what csrc/layout says it takes; here is how many rows and
windows there will be. R ranks, T tokens a rank, K choices a token, E experts; M rows received by
the rank that receives most.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Literal

from moe_comm.ep.operations_in_flight import NUM_MAX_IN_FLIGHT

if TYPE_CHECKING:
    from moe_comm import _host

LayoutName = Literal["expert_major", "rank_major", "low_latency"]

CACHE_LINE_BYTES = 64
HUGE_PAGE_BYTES = 2 << 20
# By the number that csrc/layout has for them.
_LAYOUT_NAMES: tuple[LayoutName, ...] = ("expert_major", "rank_major", "low_latency")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaleSizes:
    """Scale factors of quantized rows.

    Args:
        num_scales: Per row.
        scale_bytes: Bytes of one.
        is_column_major: Factors of one block lie next to each other for successive rows.
    """

    num_scales: int
    scale_bytes: int
    is_column_major: bool = False


def expected_recv_rows(
    num_tokens: int,
    num_topk: int,
    *,
    imbalance: float = 1.0,
    num_local_experts: int = 0,
    expert_alignment: int = 1,
) -> int:
    """M when every choice is used: `ceil(T * K * imbalance)` rows and the padding of every expert.

    Args:
        num_tokens: T.
        num_topk: K.
        imbalance: Rows of the busiest rank over the mean, >= 1.
        num_local_experts: Experts of the rank that has most.
        expert_alignment: Rows per local expert are padded to a multiple of this; at most
            `expert_alignment - 1` more rows per expert.

    Example:
        4096 tokens, top-8, balanced, 8 experts with alignment 16: `4096 * 8 + 8 * 15 = 32888`.
    """
    if imbalance < 1.0:
        raise ValueError(f"imbalance must be >= 1.0, got {imbalance}")
    num_rows = math.ceil(num_tokens * num_topk * imbalance)
    return num_rows + num_local_experts * (expert_alignment - 1)


def worst_case_recv_rows(
    num_ranks: int,
    num_tokens: int,
    num_topk: int,
    *,
    num_local_experts: int,
    expert_alignment: int = 1,
) -> int:
    """M when every token of every rank chooses as many experts of one rank as it can.

    A router's choices are distinct, so a token sends at most `min(K, num_local_experts)` rows there.

    Example:
        8 ranks, 4096 tokens, top-8, 8 experts a rank: `8 * 4096 * 8 = 262144`.
    """
    num_rows = num_ranks * num_tokens * min(num_topk, num_local_experts)
    return num_rows + num_local_experts * (expert_alignment - 1)


def rank_major_recv_rows(
    num_ranks: int,
    num_tokens: int,
    num_topk: int,
    *,
    imbalance: float = 1.0,
    worst_case: bool = False,
) -> int:
    """M of RANK_MAJOR: a token has one row on each of at most `min(K, R)` ranks.

    `ceil(T * min(K, R) * imbalance)`, never more than all tokens, `R * T`, which is the worst case.

    Example:
        8 ranks, 4096 tokens, top-2: 8192. Top-8: 32768, every token of every rank.
    """
    num_all = num_ranks * num_tokens
    if worst_case:
        return num_all
    spread = min(num_topk, num_ranks)
    return min(num_all, expected_recv_rows(num_tokens, spread, imbalance=imbalance))


def low_latency_recv_rows(num_ranks: int, num_tokens: int, num_local_experts: int) -> int:
    """M of LOW_LATENCY: a place for every token of every rank at each local expert.

    Example:
        8 ranks, 128 tokens, 8 experts a rank: `8 * 8 * 128 = 8192`.
    """
    return num_local_experts * num_ranks * num_tokens


def limited_recv_rows(
    num_rows: int,
    *,
    capacity_rows: int | None = None,
    capacity_rows_per_expert: int | None = None,
    can_grow: bool = False,
    num_local_experts: int = 0,
    expert_alignment: int = 1,
) -> int:
    """M where a capacity limits it.

    Args:
        num_rows: Rows without a capacity.
        capacity_rows: `Capacity.num_rows`: M is exactly this, or at least this if it can grow.
        capacity_rows_per_expert: `Capacity.num_rows_per_expert`.
        can_grow: Capacities of `on_overflow="grow"`.
        num_local_experts: Experts of the rank that has most.
        expert_alignment: Rows per local expert are padded to a multiple of this.

    Example:
        40000 rows, at most 1000 for each of 8 experts, alignment 16: `8 * 1008 = 8064`.
    """
    for name, value in (
        ("capacity_rows", capacity_rows),
        ("capacity_rows_per_expert", capacity_rows_per_expert),
    ):
        if value is not None and value < 0:
            raise ValueError(f"{name} must be >= 0, got {value}")
    if capacity_rows_per_expert is not None:
        padded = _round_up(capacity_rows_per_expert, expert_alignment)
        num_rows = min(num_rows, num_local_experts * padded)
    if capacity_rows is not None:
        num_rows = max(num_rows, capacity_rows) if can_grow else capacity_rows
    return num_rows


def scale_region_bytes(
    num_rows: int, scales: ScaleSizes | None, *, num_rows_per_expert: int | None = None
) -> int:
    """Scale factors of a dispatched window.

    Args:
        num_rows: M.
        scales: None for rows that are not quantized.
        num_rows_per_expert: Places of one expert (LOW_LATENCY), else None: there, column-major factors
            lie together for each expert and columns are not padded.

    Example:
        3 rows of 2 factors of 4 bytes: 24; column-major: columns of 4, `2 * 4 * 4 = 32`.
    """
    return _sizes().scale_region_bytes(
        *_places(num_rows, "expert_major", num_rows_per_expert), *_scale_arguments(scales)
    )


def receive_window_bytes(
    num_rows: int,
    row_bytes: int,
    weight_bytes: int = 0,
    *,
    scales: ScaleSizes | None = None,
    layout: LayoutName = "expert_major",
    num_topk: int = 1,
    num_rows_per_expert: int | None = None,
    spans_devices: bool = False,
) -> int:
    """The window of a dispatch: rows, scale factors, weights, ids, each from a new cache line.

    Args:
        num_rows: M.
        row_bytes: Bytes of a row as it is dispatched.
        weight_bytes: Bytes of a weight; 0 without weights.
        scales: Sizes of the scale factors of quantized rows, or None.
        layout: RANK_MAJOR has K weights and K int64 ids a row, the others one weight and no ids.
        num_topk: K; for RANK_MAJOR.
        num_rows_per_expert: See `scale_region_bytes`.
        spans_devices: Ranks of one node lie on several GPUs: but for RANK_MAJOR, 4 bytes a row say whose
            copy it is.
    """
    num_bytes = _sizes().receive_window_bytes(
        *_places(num_rows, layout, num_rows_per_expert),
        row_bytes,
        *_scale_arguments(scales),
        weight_bytes,
        num_topk,
        spans_devices,
    )
    return _round_up(num_bytes, CACHE_LINE_BYTES)


def round_window_bytes(num_bytes: int) -> int:
    """Return the bytes that a window of `num_bytes` occupies in the heap."""
    return _sizes().window_bytes(num_bytes)


def rank_sums_bytes(
    num_tokens: int, num_topk: int, num_rows: int, row_bytes: int, number_bytes: int = 4
) -> int:
    """Return the bytes that a rank offers in a combine with `rank_reduction` on GPUs: a request, and sums.

    Args:
        num_tokens: T.
        num_topk: K.
        num_rows: M.
        row_bytes: Bytes of a row that is added.
        number_bytes: Bytes of the type that rows are added in: 4, or 8 for float64.

    Example:
        3 tokens of 2 choices, 5 rows of 32 bytes: two times 48 bytes of slots and 24 of weights, each in 64,
        64 to say how many, 160 of sums: 416.
    """
    return _sizes().rank_sums_bytes(
        num_tokens=num_tokens,
        num_slots=num_topk,
        number_bytes=number_bytes,
        num_rows=num_rows,
        row_bytes=row_bytes,
    )


def workspace_bytes(num_ranks: int, num_experts: int, depth: int) -> int:
    """Control area of one buffer on one rank.

    Args:
        num_ranks: R.
        num_experts: E.
        depth: Entries of its ring, `EpConfig.num_max_in_flight`.
    """
    return _sizes().workspace_bytes(num_ranks, num_experts, depth)


def count_row_bytes(num_ranks: int, num_experts: int, *, is_cached: bool = False) -> int:
    """Return the bytes that a rank sends every other at the start of an operation, without padding.

    Args:
        num_ranks: R.
        num_experts: E.
        is_cached: Nothing is counted: cached dispatch and combine.

    Example:
        64 ranks, 256 experts: `144 + 4 * (256 + 64 + 2) = 1432`; cached: 144.
    """
    sizes = _sizes()
    num_counts = 0 if is_cached else sizes.num_counts(num_ranks, num_experts)
    return sizes.ROW_HEADER_BYTES + 4 * num_counts


def rail_region_bytes(
    *,
    num_ranks: int,
    num_local_ranks: int,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    row_bytes: int,
    depth: int = NUM_MAX_IN_FLIGHT,
    node_reduction: bool = False,
    num_balanced_experts: int = 0,
) -> int:
    """Memory between nodes of one buffer on one rank, with backend "nvshmem" or "simt".

    For each other node, two areas of the same size, for what is sent and what comes: each holds all
    rows of a dispatch with their slots, ids and weights, or the requests of a combine and 64 chunks
    of replies (a row for each slot, or one for each token with `node_reduction`), and at least
    256 KiB. Besides, the rows of the exchange, with the sets of tokens of balanced replicas, and a signal for
    every chunk.

    Args:
        num_ranks: R.
        num_local_ranks: Ranks of a node.
        num_tokens: T, `EpConfig.num_max_tokens_per_rank`.
        num_topk: K.
        num_experts: E.
        row_bytes: `EpConfig.rail_row_bytes`.
        depth: `EpConfig.num_max_in_flight`.
        node_reduction: As in `EpConfig`.
        num_balanced_experts: See `window_sizes`.

    Example:
        16 ranks, 8 a node, 4096 tokens, top-8, 256 experts, bfloat16, hidden 7168: an area has 512
        chunks of 8 rows, each 14336 + 896 bytes of row and scale factors and 192 of slots, ids and
        weights: 16 + 8 * 15424 = 123408 bytes a chunk, 63184896 an area, and 126384704 in all.
    """
    if not 1 <= num_local_ranks <= num_ranks or num_ranks % num_local_ranks != 0:
        raise ValueError(
            f"num_local_ranks must divide the number of ranks, got {num_local_ranks} and {num_ranks}"
        )
    if num_ranks == num_local_ranks:
        return 0
    return _sizes().rail_region_bytes(
        num_ranks=num_ranks,
        num_local_ranks=num_local_ranks,
        num_experts=num_experts,
        depth=depth,
        num_max_tokens=num_tokens,
        num_max_topk=num_topk,
        max_row_bytes=row_bytes,
        node_reduction=node_reduction,
        num_max_shared=num_balanced_experts,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSizes:
    """Bytes of every kind of window of one rank, as they occupy the heap.

    Args:
        num_recv_rows: M.
        dispatched: Received rows with their scale factors, weights and ids.
        gradients: The same of a backward, whose rows are not quantized.
        expert_output: Rows of the experts, written in place or copied in.
        sums: Sums of a combine, with `rank_reduction` also those that its rank made for others.
        control: Workspace of the buffer and control block of the rank, and choices that peers read.
    """

    num_recv_rows: int
    dispatched: int
    gradients: int
    expert_output: int
    sums: int
    control: int


def window_sizes(
    *,
    num_ranks: int,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    num_local_experts: int,
    row_bytes: int,
    weight_bytes: int = 4,
    depth: int = NUM_MAX_IN_FLIGHT,
    expert_alignment: int = 1,
    imbalance: float = 1.0,
    worst_case: bool = False,
    layout: LayoutName = "expert_major",
    dispatched_row_bytes: int | None = None,
    scales: ScaleSizes | None = None,
    capacity_rows: int | None = None,
    capacity_rows_per_expert: int | None = None,
    can_grow: bool = False,
    spans_devices: bool = False,
    rank_reduction: bool = False,
    num_balanced_experts: int = 0,
) -> WindowSizes:
    """Bytes of every kind of window.

    Args:
        num_ranks: R.
        num_tokens: T; LOW_LATENCY: `EpConfig.num_max_tokens_per_rank`.
        num_topk: K.
        num_experts: E.
        num_local_experts: Experts of the rank that has most.
        row_bytes: Bytes of a row of the experts' output and of a sum.
        weight_bytes: Bytes of a dispatched weight, 0 without weights.
        depth: `EpConfig.num_max_in_flight`.
        expert_alignment: Rows per local expert are padded to a multiple of this.
        imbalance: Rows of the busiest rank over the mean; unused with `worst_case` and LOW_LATENCY.
        worst_case: Every token goes to one rank.
        layout: Order of received rows.
        dispatched_row_bytes: Bytes of a row as it is dispatched, where it is quantized; None for
            `row_bytes`.
        scales: Scale factors of quantized rows, or None.
        capacity_rows: See `limited_recv_rows`, like the two below.
        capacity_rows_per_expert: Not LOW_LATENCY.
        can_grow: Not LOW_LATENCY.
        spans_devices: See `receive_window_bytes`.
        rank_reduction: As in `EpConfig`, on GPUs; the CPU takes nothing for it.
        num_balanced_experts: Experts with several slots, at most, where they are balanced: in RANK_MAJOR peers
            read sets of tokens, a bit each, of `depth` operations, on GPUs of one more. On several nodes each
            further node takes as much again.
    """
    has_capacity = capacity_rows is not None or capacity_rows_per_expert is not None
    if layout == "low_latency" and has_capacity:
        raise ValueError("LOW_LATENCY has a place for every token and takes no capacity")
    if layout == "low_latency":
        num_rows = low_latency_recv_rows(num_ranks, num_tokens, num_local_experts)
    elif layout == "rank_major":
        num_rows = rank_major_recv_rows(
            num_ranks, num_tokens, num_topk, imbalance=imbalance, worst_case=worst_case
        )
    else:
        by_expert = {"num_local_experts": num_local_experts, "expert_alignment": expert_alignment}
        num_rows = (
            worst_case_recv_rows(num_ranks, num_tokens, num_topk, **by_expert)
            if worst_case
            else expected_recv_rows(num_tokens, num_topk, imbalance=imbalance, **by_expert)
        )
    num_rows = limited_recv_rows(
        num_rows,
        capacity_rows=capacity_rows,
        capacity_rows_per_expert=capacity_rows_per_expert,
        can_grow=can_grow,
        num_local_experts=num_local_experts,
        expert_alignment=expert_alignment,
    )
    windows = [
        receive_window_bytes(
            num_rows,
            of_row,
            weight_bytes,
            scales=of_scales,
            layout=layout,
            num_topk=num_topk,
            num_rows_per_expert=num_ranks * num_tokens if layout == "low_latency" else None,
            spans_devices=spans_devices,
        )
        for of_row, of_scales in (
            (row_bytes if dispatched_row_bytes is None else dispatched_row_bytes, scales),
            (row_bytes, None),
        )
    ]
    sums = round_window_bytes(num_tokens * row_bytes)
    if rank_reduction and layout != "rank_major":
        sums += round_window_bytes(
            rank_sums_bytes(num_tokens, num_topk, num_rows, row_bytes, max(weight_bytes, 4))
        )
    return WindowSizes(
        num_recv_rows=num_rows,
        dispatched=round_window_bytes(windows[0]),
        gradients=round_window_bytes(windows[1]),
        expert_output=round_window_bytes(num_rows * row_bytes),
        sums=sums,
        control=round_window_bytes(workspace_bytes(num_ranks, num_experts, depth))
        + round_window_bytes(_sizes().CONTROL_BLOCK_BYTES)
        + (depth + 1) * token_sets_bytes(num_ranks, num_tokens, num_topk, num_balanced_experts),
    )


def token_sets_bytes(num_ranks: int, num_tokens: int, num_topk: int, num_experts: int) -> int:
    """Most bytes that a rank offers with its row in RANK_MAJOR, where so many experts have several slots."""
    return round_window_bytes(
        _sizes().token_sets_bytes(
            num_ranks=num_ranks,
            num_shared=num_experts,
            num_tokens=num_tokens,
            num_topk=num_topk,
        )
    )


def live_heap_bytes(
    sizes: WindowSizes,
    *,
    num_dispatched: int,
    num_expert_outputs: int,
    num_sums: int,
    num_gradients: int = 0,
) -> int:
    """Heap of one rank that holds so many windows of each kind at once, in whole 2 MiB pages."""
    num_bytes = (
        sizes.control
        + num_dispatched * sizes.dispatched
        + num_gradients * sizes.gradients
        + num_expert_outputs * sizes.expert_output
        + num_sums * sizes.sums
    )
    return _round_up(num_bytes, HUGE_PAGE_BYTES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """Memory that a training step holds at its peak, on one rank.

    Args:
        num_ranks: R.
        num_local_ranks: Ranks of a node, R with one node.
        sizes: One window of each kind.
        num_dispatched: Dispatched windows alive at the peak.
        num_gradients: Windows of dispatched gradients alive at the peak.
        num_expert_outputs: Expert outputs alive at the peak.
        num_sums: Sums alive at the peak.
        rank_bytes: Heap of one rank; what `Communicator.reserve` takes.
        rail_region_bytes: Bytes that GPUs of several nodes take beside it; see `rail_region_bytes`.
    """

    num_ranks: int
    num_local_ranks: int
    sizes: WindowSizes
    num_dispatched: int
    num_gradients: int
    num_expert_outputs: int
    num_sums: int
    rank_bytes: int
    rail_region_bytes: int = 0

    @property
    def machine_bytes(self) -> int:
        """Heaps of all ranks of a node, which share its memory with the host backend."""
        return self.num_local_ranks * self.rank_bytes


def budget_bytes(
    sizes: WindowSizes,
    *,
    num_ranks: int,
    num_local_ranks: int | None = None,
    num_moe_layers: int = 1,
    num_microbatches: int = 1,
    recompute: bool = False,
    weights_in_combine: bool = True,
    rail_region_bytes: int = 0,
) -> Budget:
    """Windows alive at the peak of a training step: the backward of the last layer begins.

    Autograd keeps, for every MoE layer of every microbatch whose backward has not run:

    - the dispatched rows, input of the experts' first matrix product;
    - the experts' output, where combine applied the weights (its backward needs it);
    - the sums, conservatively: whatever follows the layer may have saved them.

    With `recompute` a layer is dispatched again in its backward, so that only its sums are kept, and
    one layer at a time has all of the above. On top of either, the backward in progress holds one
    window of gradients dispatched to the experts, one of gradients to combine, and its sums.

    Args:
        sizes: See `window_sizes`.
        num_ranks: R.
        num_local_ranks: Ranks of a node; None for R.
        num_moe_layers: MoE layers of this rank.
        num_microbatches: Microbatches in flight: forward done, backward not.
        recompute: Activations of whole MoE layers are recomputed, dispatch included.
        weights_in_combine: Combine applies the router's weights; else the experts do.
        rail_region_bytes: Bytes of one buffer, as the function of that name returns them.
    """
    for name, value in (("num_moe_layers", num_moe_layers), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    num_kept = num_moe_layers * num_microbatches
    num_full = 1 if recompute else num_kept
    # The output of the layer in progress is alive until its combine returns, saved or not.
    num_expert_outputs = (num_full if weights_in_combine else 0) + 1
    num_sums = num_kept + 1
    return Budget(
        num_ranks=num_ranks,
        num_local_ranks=num_ranks if num_local_ranks is None else num_local_ranks,
        sizes=sizes,
        num_dispatched=num_full,
        num_gradients=1,
        num_expert_outputs=num_expert_outputs,
        num_sums=num_sums,
        rank_bytes=live_heap_bytes(
            sizes,
            num_dispatched=num_full,
            num_gradients=1,
            num_expert_outputs=num_expert_outputs,
            num_sums=num_sums,
        ),
        rail_region_bytes=rail_region_bytes,
    )


def _sizes() -> type[_host.layout]:
    # Loaded when it is asked: importing the package needs no native module.
    from moe_comm import _host

    return _host.layout


def _places(
    num_rows: int, layout: LayoutName, num_rows_per_expert: int | None
) -> tuple[int, int, int]:
    """Number of the layout, M, and places of one expert, as csrc/layout takes them."""
    name: LayoutName = layout if num_rows_per_expert is None else "low_latency"
    return _LAYOUT_NAMES.index(name), num_rows, num_rows_per_expert or 0


def _scale_arguments(scales: ScaleSizes | None) -> tuple[int, int, bool]:
    if scales is None:
        return 0, 1, False
    return scales.num_scales, scales.scale_bytes, scales.is_column_major


def _round_up(value: int, multiple: int) -> int:
    return (value + multiple - 1) // multiple * multiple
