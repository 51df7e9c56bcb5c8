"""Bytes that cross between nodes, over all ranks: what the counters of the rails must say."""

from __future__ import annotations

import torch

from moe_comm.cli.bench.case import BenchCase, make_topk_idx
from moe_comm.ep.config import Layout, default_expert_rank

__all__ = ["internode_bytes"]

WEIGHT_BYTES = 4
CHECKSUM_BYTES = 4


def internode_bytes(case: BenchCase, num_local_ranks: int) -> dict[str, int]:
    """Bytes of all messages between nodes of one dispatch and of one combine; csrc/ops/README.md.

    A second offer, 64 bytes from a rank that was short to every other node, is not counted: none is
    made where a call needs about as much memory as earlier ones.

    Example:
        2 nodes, bfloat16, hidden H, top-K without -1, expert-major, without weights: a dispatch takes
        `2 H + 8 K` bytes a token and destination node (and padding to 64 bytes a chunk), a combine
        `2 H + 8` a row that lies on another node than its token.
    """
    # Here, because the other backends work without the native module.
    from moe_comm import _host

    num_nodes = case.num_ranks // num_local_ranks
    num_rows = [_num_rows_by_node(case, rank, num_local_ranks) for rank in range(case.num_ranks)]
    messages = _host.layout.row_stride(case.num_ranks, case.num_experts)
    messages += CHECKSUM_BYTES if case.check_messages else 0
    quantization = case.quantization
    scale_bytes = 0
    if quantization is not None:
        num_scales = quantization.num_scales(case.hidden)
        scale_bytes = num_scales * quantization.sf_dtype.itemsize
    is_rank_major = case.layout is Layout.RANK_MAJOR
    total = {"dispatch": 0, "combine": 0}
    for rank_idx in range(case.num_ranks):
        own_node, local_rank_idx = divmod(rank_idx, num_local_ranks)
        num_tokens = _num_tokens_by_node(case, rank_idx, num_local_ranks)
        for node_idx in range(num_nodes):
            if node_idx == own_node:
                continue
            rail_rank = node_idx * num_local_ranks + local_rank_idx
            total["dispatch"] += messages + _host.internode.dispatch_bytes(
                layout=case.layout.value,
                row_bytes=case.dispatched_row_bytes - scale_bytes,
                scale_bytes=scale_bytes,
                weight_bytes=WEIGHT_BYTES if case.sends_weights else 0,
                num_topk=case.num_topk,
                num_local_ranks=num_local_ranks,
                # Rank-major rows carry the ids of their token's choices, and scale factors in
                # columns are collected by expert.
                with_ids=is_rank_major
                or (quantization is not None and quantization.is_column_major),
                num_rows=num_tokens[node_idx],
                num_nodes=num_nodes,
                checks_messages=case.check_messages,
            )
            total["combine"] += messages
            are_sums = case.reduced_local_ranks is not None
            num_supplied_sums = _num_tokens_by_node(case, rail_rank, num_local_ranks)[own_node]
            num_supplied_rows = num_rows[rail_rank][own_node]
            if case.check_messages:
                total["combine"] += _host.internode.pull_checksum_bytes(
                    num_wanted_rows=num_rows[rank_idx][node_idx],
                    num_supplied=num_supplied_sums if are_sums else num_supplied_rows,
                    are_sums=are_sums,
                    row_bytes=case.row_bytes,
                    num_slots=case.num_topk,
                    num_nodes=num_nodes,
                )
            if are_sums:
                total["combine"] += _host.internode.reduction_bytes(
                    num_wanted_rows=num_rows[rank_idx][node_idx],
                    applied_bytes=0 if is_rank_major else max(case.torch_dtype.itemsize, 4),
                    num_supplied_sums=num_supplied_sums,
                    row_bytes=case.row_bytes,
                )
                continue
            total["combine"] += _host.internode.combine_bytes(
                num_wanted_rows=num_rows[rank_idx][node_idx],
                num_supplied_rows=num_supplied_rows,
                row_bytes=case.row_bytes,
                weight_bytes=0,
                num_weights=0,
            )
    return total


def _dst_nodes(case: BenchCase, rank_idx: int, num_local_ranks: int) -> torch.Tensor:
    """Node of every choice of one rank, -1 where there is none: `[num_tokens, num_topk]`."""
    return _dst_ranks(case, rank_idx).div(num_local_ranks, rounding_mode="floor")


def _dst_ranks(case: BenchCase, rank_idx: int) -> torch.Tensor:
    topk_idx = make_topk_idx(case, rank_idx)
    expert_rank = default_expert_rank(case.num_experts, case.num_ranks).to(torch.int64)
    return torch.where(topk_idx >= 0, expert_rank[topk_idx.clamp(min=0)], -1)


def _num_tokens_by_node(case: BenchCase, rank_idx: int, num_local_ranks: int) -> list[int]:
    """Tokens of one rank with a choice on every node."""
    nodes = _dst_nodes(case, rank_idx, num_local_ranks)
    num_nodes = case.num_ranks // num_local_ranks
    return [int((nodes == node_idx).any(dim=1).sum()) for node_idx in range(num_nodes)]


def _num_rows_by_node(case: BenchCase, rank_idx: int, num_local_ranks: int) -> list[int]:
    """Rows of one rank's tokens on every node."""
    ranks = _dst_ranks(case, rank_idx)
    if case.layout is Layout.RANK_MAJOR:
        goes_to = ranks[:, :, None] == torch.arange(case.num_ranks)
        by_rank = goes_to.any(dim=1).sum(dim=0)
    else:
        by_rank = torch.bincount(ranks[ranks >= 0], minlength=case.num_ranks)
    rows: list[int] = by_rank.view(-1, num_local_ranks).sum(dim=1).tolist()
    return rows
