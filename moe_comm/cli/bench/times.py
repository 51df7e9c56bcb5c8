"""Times of one side over the rounds of an operation, and what they say about its roof."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_comm.cli.bench.rank import Sample
from moe_comm.cli.bench.roof_state import roof_state
from moe_comm.cli.bench.statistics import (
    Interval,
    Pair,
    makespan_us,
    medians,
    percentile,
    wall_times_us,
)

NUM_WARM_UP = 2
MAX_ROUNDS_PER_PAIR = 5


@dataclasses.dataclass(kw_only=True)
class SideTimes:
    """One side, one entry per round.

    Args:
        op_us: Time from the first rank's start to the last rank's end.
        wall_us: Wall time of every rank; num_ranks entries per round.
        pairs: Operations with the roofs around them; none if there is no roof.
        is_clean: Whether the round counts: always if there is no roof.
    """

    op_us: list[float] = dataclasses.field(default_factory=list)
    wall_us: list[float] = dataclasses.field(default_factory=list)
    pairs: list[Pair] = dataclasses.field(default_factory=list)
    is_clean: list[bool] = dataclasses.field(default_factory=list)

    def add(self, samples: Sequence[Sample]) -> None:
        """One round, samples of all ranks."""
        ops = [sample.op for sample in samples]
        before = [sample.roof_before for sample in samples if sample.roof_before is not None]
        after = [sample.roof_after for sample in samples if sample.roof_after is not None]
        self.op_us.append(makespan_us(ops))
        self.wall_us += wall_times_us(ops)
        if before and after:
            pair = Pair(
                op_us=self.op_us[-1],
                roof_before_us=makespan_us(before),
                roof_after_us=makespan_us(after),
            )
            self.pairs.append(pair)
        self.is_clean.append(not self.pairs or self.pairs[-1].is_clean)

    @property
    def median_us(self) -> float:
        """Median of `op_us`: over the rounds in which the machine held still, or all if there are none."""
        clean = [us for us, is_clean in zip(self.op_us, self.is_clean, strict=True) if is_clean]
        return percentile(clean or self.op_us, 0.5)


@dataclasses.dataclass(kw_only=True)
class Rounds:
    """Sides of an operation, and peers, timed in turns.

    Args:
        sides: Times of the side that is measured, then of what it is compared with.
        peer_wall_us: Wall times of every rank, by peer.
        ratios: A peer's time over the first side's, round by round, by peer.
        num_clean: Rounds that count for all sides.
    """

    sides: list[SideTimes]
    peer_wall_us: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    ratios: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    num_clean: int = 0

    def run(
        self,
        num_repeats: int,
        sample: Callable[[int], Sequence[Sample]],
        run_peers: Callable[[], Mapping[str, Sequence[Interval]]],
        on_progress: Callable[[str], None],
    ) -> None:
        """Warm up, then time rounds until so many are clean, and rounds with peers.

        Args:
            num_repeats: Clean rounds, and rounds with peers.
            sample: Times a side once, on all ranks.
            run_peers: Times every peer once: intervals of all ranks, by peer.
            on_progress: Called with "clean / wanted" after every round.
        """
        for side_idx in [*range(len(self.sides))] * NUM_WARM_UP:
            sample(side_idx)
        for round_idx in range(num_repeats * MAX_ROUNDS_PER_PAIR):
            for side_idx in sides_in_turn(len(self.sides), round_idx):
                self.sides[side_idx].add(sample(side_idx))
            self.num_clean += all(side.is_clean[-1] for side in self.sides)
            if round_idx < num_repeats:
                for peer, intervals in run_peers().items():
                    self.peer_wall_us.setdefault(peer, []).extend(wall_times_us(intervals))
                    ratio = makespan_us(intervals) / self.sides[0].op_us[-1]
                    self.ratios.setdefault(peer, []).append(ratio)
            on_progress(f"{self.num_clean}/{num_repeats}")
            if self.num_clean >= num_repeats and round_idx + 1 >= num_repeats:
                break

    def columns(self) -> dict[str, Any]:
        """Columns of a row that follow from rounds: pairs, and comparison with peers."""
        return {
            "num_pairs": self.num_clean,
            "num_dropped": len(self.sides[0].op_us) - self.num_clean,
            "speedup": medians(self.ratios),
            "peer_p50_us": medians(self.peer_wall_us),
        }


def sides_in_turn(num_sides: int, round_idx: int) -> list[int]:
    """Sides in the order of this round: each goes first as often as the other."""
    order = list(range(num_sides))
    return order if round_idx % 2 == 0 else order[::-1]


def ratios_in_rounds(theirs: SideTimes, ours: SideTimes) -> list[float]:
    """Their time over ours, round by round; rounds that are clean for both, or all if there are none."""
    rounds = list(zip(theirs.op_us, ours.op_us, theirs.is_clean, ours.is_clean, strict=True))
    clean = [their_us / our_us for their_us, our_us, a, b in rounds if a and b]
    return clean or [their_us / our_us for their_us, our_us, _, _ in rounds]


def summarize_roof(pairs: Sequence[Pair], num_bytes: int, roof_bytes: int) -> dict[str, Any]:
    """Columns `roof_gbs`, `fraction_of_roof` and `roof_state` of a row, and details for JSON.

    Args:
        pairs: Pairs of all rounds.
        num_bytes: Bytes of the operation, over all ranks.
        roof_bytes: Bytes of the roof; the loops move whole lines, so that it may differ a little.
    """
    clean = [pair for pair in pairs if pair.is_clean]
    summary: dict[str, Any] = {
        "roof_bytes": roof_bytes,
        "pairs": [dataclasses.asdict(pair) for pair in pairs],
    }
    if not clean:
        return summary | {"roof_state": "unstable"}
    roof_gbs = [roof_bytes / pair.roof_us / 1e3 for pair in clean]
    states = [roof_state(gbs) for gbs in roof_gbs]
    fractions = [pair.fraction * num_bytes / roof_bytes for pair in clean]
    summary["fraction_p10"] = percentile(fractions, 0.1)
    summary["fraction_p90"] = percentile(fractions, 0.9)
    for state in sorted(set(states)):
        summary[f"fraction_{state}"] = percentile(
            [value for value, at in zip(fractions, states, strict=True) if at == state], 0.5
        )
    counts = {state: states.count(state) for state in sorted(set(states))}
    summary["roof_gbs"] = percentile(roof_gbs, 0.5)
    summary["fraction_of_roof"] = percentile(fractions, 0.5)
    summary["roof_state"] = (
        ", ".join(f"{state} {count}" for state, count in counts.items())
        if len(counts) > 1
        else states[0]
    )
    return summary
