"""Bytes that one rank moves in one dispatch and one combine: formulas over sizes, no routing drawn.

R ranks on N nodes, T tokens a rank, K choices a token, E experts, H elements a row, b bytes an
element on the wire.
"""

from __future__ import annotations

import dataclasses
import math

from moe_comm.cli.model.cluster import Cluster
from moe_comm.ep import budget
from moe_comm.ep.limits import check_num_experts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Movement:
    """Movement of rows by one operation.

    Args:
        element_bytes: Bytes of an element on the wire, scale factors included.
        is_once_per_node: Whether a row crosses the NIC once per node that has experts of its token
            (combine: nodes add their rows first); else once per choice.
        is_once_per_rank: Whether the same holds of NVLink and ranks.
    """

    element_bytes: float
    is_once_per_node: bool
    is_once_per_rank: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """One MoE layer.

    Args:
        num_tokens: T, of every rank.
        hidden: H.
        num_topk: K, distinct experts.
        num_experts: E, spread evenly.
        source_bytes: Bytes of an element as the caller has it.
        dispatch: Movement in dispatch; by default bf16, once per node, and over NVLink straight
            into every final slot, as between nodes. Within one node rows go once per rank.
        combine: Movement in combine; by default bf16, every row of every choice, so that one order
            of addition holds on every layout.
        max_nodes: Most nodes that the experts of one token lie on; None for any number.

    Raises:
        ValueError: K exceeds E, or a number is out of range.
    """

    num_tokens: int
    hidden: int
    num_topk: int
    num_experts: int
    source_bytes: float = 2.0
    dispatch: Movement = Movement(element_bytes=2.0, is_once_per_node=True, is_once_per_rank=False)
    combine: Movement = Movement(element_bytes=2.0, is_once_per_node=False, is_once_per_rank=False)
    max_nodes: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_tokens", "hidden", "num_topk", "num_experts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        check_num_experts(self.num_experts)
        if self.num_topk > self.num_experts:
            raise ValueError(
                f"a token chooses {self.num_topk} distinct experts of {self.num_experts}"
            )
        if self.max_nodes is not None and self.max_nodes < 1:
            raise ValueError(f"max_nodes must be >= 1, got {self.max_nodes}")

    def check(self, cluster: Cluster) -> None:
        """Raise ValueError where the experts do not spread evenly over the ranks of `cluster`."""
        if self.num_experts % cluster.num_ranks:
            raise ValueError(
                f"{self.num_experts} experts do not spread evenly over {cluster.num_ranks} ranks"
            )
        if self.max_nodes is not None:
            per_node = self.num_experts // cluster.num_nodes
            if self.num_topk > self.max_nodes * per_node:
                raise ValueError(
                    f"{self.num_topk} experts do not fit {self.max_nodes} nodes of {per_node} experts"
                )


def expected_distinct(num_groups: int, num_experts: int, num_topk: int) -> float:
    """Distinct groups that K of E experts, drawn without repetition, hit on average.

    `G * (1 - C(E - E/G, K) / C(E, K))`.

    Example:
        E = 256, K = 8: 1.993 of 2 groups, 5.295 of 8, 7.676 of 64.
    """
    rest = num_experts - num_experts // num_groups
    return num_groups * (1.0 - math.comb(rest, num_topk) / math.comb(num_experts, num_topk))


def expected_alone(num_groups: int, num_experts: int, num_topk: int) -> float:
    """Groups that exactly one of K of E experts hits on average: `E C(E - E/G, K - 1) / C(E, K)`.

    Example:
        E = 256, K = 8: 3.192 of 8 groups.
    """
    rest = num_experts - num_experts // num_groups
    return num_experts * math.comb(rest, num_topk - 1) / math.comb(num_experts, num_topk)


def expected_distinct_limited(
    num_groups: int, num_experts: int, num_topk: int, max_groups: int | None
) -> float:
    """The same where a token is kept to the experts of `max_groups` groups."""
    if max_groups is None or max_groups >= num_groups:
        return expected_distinct(num_groups, num_experts, num_topk)
    experts_there = num_experts // num_groups * max_groups
    return expected_distinct(max_groups, experts_there, num_topk)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes that one rank moves on average, one way, under uniform routing.

    Args:
        memory: Bytes through its device memory: what it reads and what is written for it.
        nvlink: Bytes out to peers of its node: its own rows and those it fans out for other nodes.
        nic: Bytes out to other nodes.
        count_rows: Bytes of all count rows that arrive here.
    """

    memory: float
    nvlink: float
    nic: float
    count_rows: int

    @staticmethod
    def of_dispatch(workload: Workload, cluster: Cluster) -> Bytes:
        """Source rows are read once, every final slot is written once (`H (2 + K b)` a token).

        Slots of other ranks that get no row over NVLink are copies, which read it once more there.
        """
        row = workload.hidden * workload.dispatch.element_bytes
        local = cluster.num_local_ranks
        num_slots = workload.num_tokens * workload.num_topk * (local - 1) / local
        num_copies = num_slots - _nvlink_rows(workload, cluster, workload.dispatch)
        memory = (
            workload.num_tokens
            * (workload.hidden * workload.source_bytes + workload.num_topk * row)
            + num_copies * row
        )
        return Bytes(
            memory=memory,
            nvlink=_nvlink_rows(workload, cluster, workload.dispatch) * row,
            nic=_nic_rows(workload, cluster, workload.dispatch) * row,
            count_rows=count_row_bytes(cluster.num_ranks, workload.num_experts),
        )

    @staticmethod
    def of_combine(workload: Workload, cluster: Cluster) -> Bytes:
        """K rows of every token are read, one sum is written (`2 H (K + 1)`).

        On one node, where ranks add first, they write a sum where a token has several rows, which is read
        again.
        """
        row = workload.hidden * workload.combine.element_bytes
        num_moved: float = workload.num_topk + 1
        if workload.combine.is_once_per_rank and cluster.num_nodes == 1:
            shape = (cluster.num_ranks, workload.num_experts, workload.num_topk)
            num_moved += 2 * (expected_distinct(*shape) - expected_alone(*shape))
        return Bytes(
            memory=workload.num_tokens * num_moved * row,
            nvlink=_nvlink_rows(workload, cluster, workload.combine) * row,
            nic=_nic_rows(workload, cluster, workload.combine) * row,
            count_rows=cluster.num_ranks
            * budget.count_row_bytes(cluster.num_ranks, workload.num_experts, is_cached=True),
        )


def count_row_bytes(num_ranks: int, num_experts: int) -> int:
    """Bytes of the count rows that arrive at a rank in an uncached dispatch, one of every rank.

    Example:
        64 ranks, 256 experts: `64 * (144 + 4 * (256 + 64 + 2)) = 91648`.
    """
    return num_ranks * budget.count_row_bytes(num_ranks, num_experts)


def _nic_rows(workload: Workload, cluster: Cluster, movement: Movement) -> float:
    """Rows a rank sends to other nodes."""
    hits: float = workload.num_topk
    if movement.is_once_per_node:
        hits = expected_distinct_limited(
            cluster.num_nodes, workload.num_experts, workload.num_topk, workload.max_nodes
        )
    return workload.num_tokens * hits * (cluster.num_nodes - 1) / cluster.num_nodes


def _nvlink_rows(workload: Workload, cluster: Cluster, movement: Movement) -> float:
    """Rows a rank sends to peers of its node, its own and those that came for them over its NIC."""
    local = cluster.num_local_ranks
    hits: float = workload.num_topk
    if movement.is_once_per_rank:
        # Ranks hit within the nodes that are hit, which may be limited.
        nodes_hit = min(workload.max_nodes or cluster.num_nodes, cluster.num_nodes)
        experts_there = workload.num_experts // cluster.num_nodes * nodes_hit
        hits = expected_distinct(nodes_hit * local, experts_there, workload.num_topk)
    return workload.num_tokens * hits * (local - 1) / local
