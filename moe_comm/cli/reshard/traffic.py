"""Bytes that a reshard moves, and the time that this must take: formulas, from plans alone."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from moe_comm.resharding.plan.plan_check import bytes_per_pair
from moe_comm.resharding.plan.reshard_plan import ReshardPlan

GB = 1e9
Pair = tuple[int, int]


@dataclasses.dataclass
class Traffic:
    """Sums over the plans of receiving ranks.

    Args:
        num_ranks: Ranks of the group.
        bytes_per_pair: Bytes by (source rank, destination rank); equal ranks: copies within one.
        pieces_per_rank: Pieces by destination rank.
    """

    num_ranks: int
    bytes_per_pair: Counter[Pair] = dataclasses.field(default_factory=Counter)
    pieces_per_rank: dict[int, int] = dataclasses.field(default_factory=dict)

    def add_received(self, plan: ReshardPlan) -> None:
        """Count what the rank of `plan` receives."""
        for (src_rank, dst_rank), num_bytes in bytes_per_pair(plan).items():
            if dst_rank == plan.rank:
                self.bytes_per_pair[src_rank, dst_rank] += num_bytes
        self.pieces_per_rank[plan.rank] = len(plan.recv_ops)

    @property
    def total_bytes(self) -> int:
        """All bytes written to destinations."""
        return sum(self.bytes_per_pair.values())

    @property
    def local_bytes(self) -> int:
        """Bytes of those that are copied within a rank."""
        return sum(num_bytes for (src, dst), num_bytes in self.bytes_per_pair.items() if src == dst)

    def sent_per_rank(self) -> dict[int, int]:
        """Bytes to other ranks, by source rank; ranks that send nothing are left out."""
        return self._per_rank(0)

    def received_per_rank(self) -> dict[int, int]:
        """Bytes from other ranks, by destination rank; ranks that receive nothing are left out."""
        return self._per_rank(1)

    def _per_rank(self, end: int) -> dict[int, int]:
        sums: Counter[int] = Counter()
        for pair, num_bytes in self.bytes_per_pair.items():
            if pair[0] != pair[1]:
                sums[pair[end]] += num_bytes
        return dict(sorted(sums.items()))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
    """Links between ranks; the defaults are an H100's.

    Args:
        ranks_per_node: Ranks r and s share a node where r // ranks_per_node == s // ranks_per_node.
        intranode_gbs: GB/s of a rank to others of its node, each way.
        internode_gbs: GB/s of a rank to other nodes, each way.
        memory_gbs: GB/s of a rank's memory, reads and writes together.
    """

    ranks_per_node: int = 8
    intranode_gbs: float = 450.0
    internode_gbs: float = 50.0
    memory_gbs: float = 3350.0

    def __post_init__(self) -> None:
        if self.ranks_per_node < 1:
            raise ValueError(f"ranks_per_node must be >= 1, got {self.ranks_per_node}")
        for name in ("intranode_gbs", "internode_gbs", "memory_gbs"):
            if not getattr(self, name) > 0.0:
                raise ValueError(f"{name} must be > 0, got {getattr(self, name)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """Lower bounds in milliseconds, each of the rank that needs longest.

    Args:
        intranode_ms: Bytes between ranks of a node, both ways at once.
        internode_ms: Bytes between nodes, both ways at once.
        memory_ms: Every byte read once and written once.
        slots_memory_ms: The same through slots on both ends: packed, carried over, unpacked.
        full_duplex_ms: The largest of the first three: written in place, ranks send and receive at
            the same time.
        slots_ms: The same through slots.
        half_duplex_ms: Through slots, where a rank either sends or receives.
    """

    intranode_ms: float
    internode_ms: float
    memory_ms: float
    slots_memory_ms: float
    full_duplex_ms: float
    slots_ms: float
    half_duplex_ms: float

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as JSON writes it."""
        return dataclasses.asdict(self)


def predict(traffic: Traffic, links: Links) -> Prediction:
    """Predict the time of a reshard if links and memories are the only limit.

    Example:
        One rank that receives 50 GB from another node over a link of 50 GB/s needs 1000 ms.
    """
    sent: dict[str, Counter[int]] = {"intranode": Counter(), "internode": Counter()}
    received: dict[str, Counter[int]] = {"intranode": Counter(), "internode": Counter()}
    local: Counter[int] = Counter()
    for (src, dst), num_bytes in traffic.bytes_per_pair.items():
        if src == dst:
            local[src] += num_bytes
            continue
        is_near = src // links.ranks_per_node == dst // links.ranks_per_node
        scope = "intranode" if is_near else "internode"
        sent[scope][src] += num_bytes
        received[scope][dst] += num_bytes
    ranks = {rank for pair in traffic.bytes_per_pair for rank in pair}
    speeds = {"intranode": links.intranode_gbs, "internode": links.internode_gbs}

    def worst_ms(gb_times: Iterable[float]) -> float:
        return max(gb_times, default=0.0) * 1e3

    def wire_ms(scope: str, *, is_full_duplex: bool) -> float:
        join = max if is_full_duplex else _add
        return worst_ms(
            join(sent[scope][rank], received[scope][rank]) / GB / speeds[scope] for rank in ranks
        )

    def memory_ms(passes: int) -> float:
        """`passes`: times that a byte which travels is read or written on each end."""
        return worst_ms(
            (2 * local[rank] + passes * sum(by[rank] for by in both)) / GB / links.memory_gbs
            for rank in ranks
        )

    both = (*sent.values(), *received.values())
    intranode_ms, internode_ms = (wire_ms(scope, is_full_duplex=True) for scope in speeds)
    direct_ms, slots_ms = memory_ms(1), memory_ms(3)
    return Prediction(
        intranode_ms=intranode_ms,
        internode_ms=internode_ms,
        memory_ms=direct_ms,
        slots_memory_ms=slots_ms,
        full_duplex_ms=max(intranode_ms, internode_ms, direct_ms),
        slots_ms=max(intranode_ms, internode_ms, slots_ms),
        half_duplex_ms=max(slots_ms, *(wire_ms(scope, is_full_duplex=False) for scope in speeds)),
    )


def _add(a: int, b: int) -> int:
    return a + b


def schedule_steps(pairs: Mapping[Pair, int], slot_bytes: int) -> dict[str, int]:
    """Steps in which all pairs can exchange, when a pair moves at most `slot_bytes` in a step.

    Returns:
        `full_duplex`: where a rank sends to one and receives from one rank per step: exactly the
        largest number of batches of a rank in one direction (pairs are the edges of a bipartite
        graph, which can be colored with as many colors as its largest degree).
        `half_duplex`: where a rank sends or receives: at least so many, the largest number of
        batches of a rank in both directions.

    Example:
        A ring of 8 ranks: 1 full-duplex step, 2 half-duplex ones.
    """
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for (src, dst), num_bytes in pairs.items():
        if src != dst and num_bytes:
            num_batches = math.ceil(num_bytes / slot_bytes)
            sent[src] += num_batches
            received[dst] += num_batches
    ranks = sent.keys() | received.keys()
    return {
        "full_duplex": max((max(sent[rank], received[rank]) for rank in ranks), default=0),
        "half_duplex": max((sent[rank] + received[rank] for rank in ranks), default=0),
    }
