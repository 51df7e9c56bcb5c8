"""Routing that is drawn for a simulation: rows between every rank and every destination."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from moe_comm.cli.model.cluster import Cluster
from moe_comm.cli.model.workload import Movement, Workload

# Tokens drawn over all ranks; traffic is scaled up from them.
MAX_DRAWN_TOKENS = 1 << 17
# Numbers held at a time while drawing.
BATCH_NUMBERS = 1 << 24

Floats = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """Rows between ranks, on the way from tokens to experts.

    Args:
        to_node: `[num_ranks, num_nodes]`, rows that a rank sends to a node: one for every token with
            an expert there, or one per choice, as `Movement` says.
        to_rank: `[num_ranks, num_ranks]`, the same to a rank in the end.
        to_slots: `[num_ranks]`, final slots on a rank: one per choice.
    """

    to_node: Floats
    to_rank: Floats
    to_slots: Floats


def expert_weights(num_experts: int, skew: float) -> Floats:
    """Popularity of experts, `1 / (rank of popularity) ** skew`, popular ones spread over all ranks.

    Neighbors in popularity lie far apart, as a load balancer would place them.
    """
    order = np.arange(num_experts)
    step = max(1, int(num_experts * 0.6180339887))
    while np.gcd(step, num_experts) != 1:
        step += 1
    places = (order * step) % num_experts
    weights = np.empty(num_experts)
    weights[places] = 1.0 / (order + 1.0) ** skew
    return weights


def draw_traffic(
    workload: Workload, cluster: Cluster, movement: Movement, *, skew: float, seed: int
) -> Traffic:
    """Traffic of tokens that choose K distinct experts, drawn by their popularity.

    Args:
        workload: Layer; with `max_nodes`, a token is kept to the nodes whose best experts score
            highest.
        cluster: Cluster; experts are spread evenly over its ranks, in order.
        movement: Movement of the operation that the traffic is for.
        skew: Exponent of the popularity; 0 for uniform routing.
        seed: Equal seeds draw equal traffic.
    """
    rng = np.random.default_rng(seed)
    num_ranks, num_nodes = cluster.num_ranks, cluster.num_nodes
    num_experts, num_topk = workload.num_experts, workload.num_topk
    drawn = min(workload.num_tokens, max(8, MAX_DRAWN_TOKENS // num_ranks))
    logits = np.log(expert_weights(num_experts, skew))
    rank_of = np.arange(num_experts) // (num_experts // num_ranks)
    node_of = rank_of // cluster.num_local_ranks
    traffic = Traffic(
        to_node=np.zeros((num_ranks, num_nodes)),
        to_rank=np.zeros((num_ranks, num_ranks)),
        to_slots=np.zeros(num_ranks),
    )
    ranks_at_once = max(1, BATCH_NUMBERS // (drawn * num_experts))
    for first in range(0, num_ranks, ranks_at_once):
        sources = np.arange(first, min(first + ranks_at_once, num_ranks))
        scores = logits + rng.gumbel(size=(len(sources) * drawn, num_experts))
        if workload.max_nodes is not None and workload.max_nodes < num_nodes:
            _limit_nodes(scores, num_nodes, workload.max_nodes)
        chosen = np.argpartition(scores, num_experts - num_topk, axis=1)[:, -num_topk:]
        source_of = np.repeat(sources, drawn)
        _count(traffic.to_rank, source_of, rank_of[chosen], is_dedup=movement.is_once_per_rank)
        _count(traffic.to_node, source_of, node_of[chosen], is_dedup=movement.is_once_per_node)
        traffic.to_slots[:] += np.bincount(rank_of[chosen].ravel(), minlength=num_ranks)
    scale = workload.num_tokens / drawn
    return Traffic(
        to_node=traffic.to_node * scale,
        to_rank=traffic.to_rank * scale,
        to_slots=traffic.to_slots * scale,
    )


def _limit_nodes(scores: Floats, num_nodes: int, max_nodes: int) -> None:
    """Rules out the experts of all but the best nodes: those with the highest sum of two scores.

    As DeepSeek-V3's group-limited routing chooses its groups.
    """
    by_node = scores.reshape(len(scores), num_nodes, -1)
    num_best = min(2, by_node.shape[2])
    best = np.partition(by_node, by_node.shape[2] - num_best, axis=2)[:, :, -num_best:].sum(axis=2)
    worst = np.argpartition(best, num_nodes - max_nodes, axis=1)[:, : num_nodes - max_nodes]
    np.put_along_axis(by_node, worst[:, :, None], -np.inf, axis=1)


def _count(
    matrix: Floats,
    sources: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
    *,
    is_dedup: bool,
) -> None:
    """Adds one row per (token, distinct target), or per choice, to `matrix[source, target]`."""
    ordered = np.sort(targets, axis=1)
    counts = np.ones(ordered.shape, dtype=bool)
    if is_dedup:
        counts[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    flat = sources[:, None] * matrix.shape[1] + ordered
    added = np.bincount(flat[counts], minlength=matrix.size)
    matrix += added.reshape(matrix.shape)
