"""Times of one side over the rounds of an operation, and what they say about its roof."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from moe_comm.cli.bench.environment import roof_state
from moe_comm.cli.bench.statistics import Pair, makespan_us, percentile, wall_times_us
from moe_comm.cli.bench.worker import Sample

__all__ = ["SideTimes", "ratios_in_rounds", "summarize_roof"]


@dataclasses.dataclass(kw_only=True)
class SideTimes:
    """One side, one entry per round.

    Args:
        op_us: From the first rank's start to the last rank's end.
        wall_us: Of every rank; num_ranks entries per round.
        pairs: With the roofs around it; none where there is no roof.
        is_clean: Whether the round counts: always where there is no roof.
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


def ratios_in_rounds(theirs: SideTimes, ours: SideTimes) -> list[float]:
    """Their time over ours, round by round; rounds that are clean for both, or all if there are none."""
    rounds = list(zip(theirs.op_us, ours.op_us, theirs.is_clean, ours.is_clean, strict=True))
    clean = [their_us / our_us for their_us, our_us, a, b in rounds if a and b]
    return clean or [their_us / our_us for their_us, our_us, _, _ in rounds]


def summarize_roof(pairs: Sequence[Pair], num_bytes: int, roof_bytes: int) -> dict[str, Any]:
    """Columns `roof_gbs`, `fraction_of_roof` and `roof_state` of a row, and details for JSON.

    Args:
        pairs: Of all rounds.
        num_bytes: Of the operation, over all ranks.
        roof_bytes: Of the roof; the loops move whole lines, so that it may differ a little.
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
