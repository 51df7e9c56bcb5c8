"""Medians of clock readings: what counts, what is dropped."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moe_comm.cli.bench.roof_state import roofs_agree

Interval = tuple[int, int]
"""Start and end of a call on one rank, nanoseconds of `CLOCK_MONOTONIC`."""


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the values lie, interpolated linearly.

    Raises:
        ValueError: There are no values.

    Example:
        `percentile([1.0, 2.0, 4.0], 0.5) == 2.0`
    """
    if not values:
        raise ValueError("a percentile needs at least one value, got none")
    ordered = sorted(values)
    position = (len(ordered) - 1) * fraction
    low = math.floor(position)
    high = math.ceil(position)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def makespan_us(intervals: Sequence[Interval]) -> float:
    """Time from the first rank's start to the last rank's end.

    At least the slowest rank's own time. Where ranks outnumber cores it stays right: there a rank may
    have finished its part before another one was given a core.
    """
    return (max(end for _, end in intervals) - min(start for start, _ in intervals)) / 1e3


def wall_times_us(intervals: Sequence[Interval]) -> list[float]:
    """Time of the call on every rank."""
    return [(end - start) / 1e3 for start, end in intervals]


def all_wall_times_us(per_rank: Iterable[Sequence[Interval]]) -> list[float]:
    """Times of all calls on all ranks."""
    return [us for intervals in per_rank for us in wall_times_us(intervals)]


def medians(samples: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the median of each."""
    return {name: percentile(values, 0.5) for name, values in samples.items()}


def median_ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    """Return the median over rounds of the ratios of two times."""
    return percentile([a / b for a, b in zip(theirs, ours, strict=True)], 0.5)


def time_columns(wall_us: Sequence[float], op_us: float, num_bytes: int | None) -> dict[str, Any]:
    """Columns of a row that times give: `p50_us`, `p95_us`, `op_us`; with bytes `bytes` and `gbs`.

    Args:
        wall_us: Wall times of all ranks and repeats.
        op_us: Median time of the operation.
        num_bytes: Bytes that it moves; None if they are not counted.
    """
    columns: dict[str, Any] = {
        "p50_us": percentile(wall_us, 0.5),
        "p95_us": percentile(wall_us, 0.95),
        "op_us": op_us,
    }
    if num_bytes is not None:
        columns |= {"bytes": num_bytes, "gbs": num_bytes / op_us / 1e3}
    return columns


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pair:
    """One timed operation between two roofs.

    Args:
        op_us: Time of the operation.
        roof_before_us: Time of a plain loop that moves the same bytes, right before.
        roof_after_us: Time of the same loop, right after.
    """

    op_us: float
    roof_before_us: float
    roof_after_us: float

    @property
    def is_clean(self) -> bool:
        """Return whether the machine held still: see `roofs_agree`."""
        return roofs_agree(self.roof_before_us, self.roof_after_us)

    @property
    def roof_us(self) -> float:
        """Mean of the two roofs."""
        return (self.roof_before_us + self.roof_after_us) / 2.0

    @property
    def fraction(self) -> float:
        """Share of the roof the operation reached."""
        return self.roof_us / self.op_us
