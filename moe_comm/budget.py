"""Bytes a configuration needs before anything is allocated.

Plain arithmetic on sizes. R ranks, T tokens a rank, K choices a token, E experts; M rows received by
the rank that receives most.
"""

from __future__ import annotations

import dataclasses
import math

__all__ = [
    "Budget",
    "WindowSizes",
    "budget_bytes",
    "expected_recv_rows",
    "live_heap_bytes",
    "receive_window_bytes",
    "round_window_bytes",
    "window_sizes",
    "workspace_bytes",
    "worst_case_recv_rows",
]

CACHE_LINE_BYTES = 64
PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
# Sizes of the control area, as csrc/layout/row.h and workspace.h have them.
ROW_HEADER_BYTES = 144
ROW_MESSAGE_BYTES = 320
CONTROL_BLOCK_BYTES = 640


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


def receive_window_bytes(num_rows: int, row_bytes: int, weight_bytes: int = 0) -> int:
    """The window of a dispatch: rows, then one weight per row, each part from a new cache line."""
    weights_offset = _round_up(num_rows * row_bytes, CACHE_LINE_BYTES)
    return _round_up(weights_offset + num_rows * weight_bytes, CACHE_LINE_BYTES)


def round_window_bytes(num_bytes: int) -> int:
    """What a window of `num_bytes` occupies in the heap."""
    small = _round_up(num_bytes, CACHE_LINE_BYTES)
    return small if small < PAGE_BYTES else _round_up(num_bytes, PAGE_BYTES)


def workspace_bytes(num_ranks: int, num_experts: int, depth: int) -> int:
    """Control area of one buffer on one rank.

    Args:
        num_ranks: R.
        num_experts: E.
        depth: Entries of its ring, `EpConfig.num_max_in_flight`.
    """
    tail_bytes = max(4 * (num_experts + num_ranks + 2), ROW_MESSAGE_BYTES)
    row_stride = _round_up(ROW_HEADER_BYTES + tail_bytes, CACHE_LINE_BYTES)
    entry_bytes = num_ranks * (row_stride + 2 * CACHE_LINE_BYTES)
    return CACHE_LINE_BYTES * (1 + num_ranks) + depth * entry_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSizes:
    """Bytes of every kind of window of one rank, as they occupy the heap.

    Args:
        num_recv_rows: M.
        dispatched: Received rows and their weights.
        expert_output: Rows of the experts, written in place or copied in.
        sums: Sums of a combine.
        control: Workspace of the buffer and control block of the rank.
    """

    num_recv_rows: int
    dispatched: int
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
    depth: int = 4,
    expert_alignment: int = 1,
    imbalance: float = 1.0,
    worst_case: bool = False,
) -> WindowSizes:
    """Sizes for EXPERT_MAJOR rows (RANK_MAJOR needs no more).

    Args:
        num_ranks: R.
        num_tokens: T.
        num_topk: K.
        num_experts: E.
        num_local_experts: Experts of the rank that has most.
        row_bytes: Bytes of a row.
        weight_bytes: Bytes of a dispatched weight, 0 without weights.
        depth: `EpConfig.num_max_in_flight`.
        expert_alignment: Rows per local expert are padded to a multiple of this.
        imbalance: Rows of the busiest rank over the mean; unused with `worst_case`.
        worst_case: Every token goes to one rank.
    """
    if worst_case:
        num_rows = worst_case_recv_rows(
            num_ranks,
            num_tokens,
            num_topk,
            num_local_experts=num_local_experts,
            expert_alignment=expert_alignment,
        )
    else:
        num_rows = expected_recv_rows(
            num_tokens,
            num_topk,
            imbalance=imbalance,
            num_local_experts=num_local_experts,
            expert_alignment=expert_alignment,
        )
    return WindowSizes(
        num_recv_rows=num_rows,
        dispatched=round_window_bytes(receive_window_bytes(num_rows, row_bytes, weight_bytes)),
        expert_output=round_window_bytes(num_rows * row_bytes),
        sums=round_window_bytes(num_tokens * row_bytes),
        control=round_window_bytes(workspace_bytes(num_ranks, num_experts, depth))
        + round_window_bytes(CONTROL_BLOCK_BYTES),
    )


def live_heap_bytes(
    sizes: WindowSizes, *, num_dispatched: int, num_expert_outputs: int, num_sums: int
) -> int:
    """Heap of one rank that holds so many windows of each kind at once, in whole 2 MiB pages."""
    num_bytes = (
        sizes.control
        + num_dispatched * sizes.dispatched
        + num_expert_outputs * sizes.expert_output
        + num_sums * sizes.sums
    )
    return _round_up(num_bytes, HUGE_PAGE_BYTES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Budget:
    """What a training step holds at its peak, on one rank.

    Args:
        num_ranks: R.
        sizes: One window of each kind.
        num_dispatched: Dispatched windows alive at the peak.
        num_expert_outputs: Expert outputs alive at the peak.
        num_sums: Sums alive at the peak.
        rank_bytes: Heap of one rank; what `Communicator.reserve` takes.
    """

    num_ranks: int
    sizes: WindowSizes
    num_dispatched: int
    num_expert_outputs: int
    num_sums: int
    rank_bytes: int

    @property
    def machine_bytes(self) -> int:
        """Heaps of all ranks, which share one machine with the host backend."""
        return self.num_ranks * self.rank_bytes


def budget_bytes(
    sizes: WindowSizes,
    *,
    num_ranks: int,
    num_moe_layers: int = 1,
    num_microbatches: int = 1,
    recompute: bool = False,
    weights_in_combine: bool = True,
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
        num_moe_layers: MoE layers of this rank.
        num_microbatches: Microbatches in flight: forward done, backward not.
        recompute: Activations of whole MoE layers are recomputed, dispatch included.
        weights_in_combine: Combine applies the router's weights; else the experts do.
    """
    for name, value in (("num_moe_layers", num_moe_layers), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ValueError(f"{name} must be >= 1, got {value}")
    num_kept = num_moe_layers * num_microbatches
    num_full = 1 if recompute else num_kept
    # The output of the layer in progress is alive until its combine returns, saved or not.
    num_dispatched = num_full + 1
    num_expert_outputs = (num_full if weights_in_combine else 0) + 1
    num_sums = num_kept + 1
    return Budget(
        num_ranks=num_ranks,
        sizes=sizes,
        num_dispatched=num_dispatched,
        num_expert_outputs=num_expert_outputs,
        num_sums=num_sums,
        rank_bytes=live_heap_bytes(
            sizes,
            num_dispatched=num_dispatched,
            num_expert_outputs=num_expert_outputs,
            num_sums=num_sums,
        ),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
