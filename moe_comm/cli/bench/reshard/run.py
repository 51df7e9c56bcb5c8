"""Runs a case: check, then rounds in which ours and every peer are timed next to each other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from moe_comm.cli.bench.processes import WorkerError, WorkerProcesses
from moe_comm.cli.bench.reshard.case import (
    CHECKSUM,
    DELTA,
    DELTA_MASK,
    FULL_TENSORS,
    TRANSPORTS,
    ReshardCase,
)
from moe_comm.cli.bench.reshard.worker import RefitSample, ReshardLaunch, ReshardWorker
from moe_comm.cli.bench.statistics import makespan_us, percentile, wall_times_us
from moe_comm.cli.bench.times import SideTimes, summarize_roof

__all__ = ["RESHARD_PEERS", "ReshardOptions", "ReshardRow", "run_case"]

RESHARD_PEERS = ("gloo", FULL_TENSORS, CHECKSUM, DELTA, DELTA_MASK)

NUM_WARM_UP = 2
MAX_ROUNDS_PER_PAIR = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardOptions:
    """Options of a measurement.

    Args:
        peers: Of `RESHARD_PEERS`: the same plan over another transport; whole tensors by name over
            Gloo, each from a rank that holds it to every rank that does; the same refit with its proof; the same
            where 1 % of the blocks changed, found by checksums or told by a mask.
        num_repeats: Clean pairs to collect, and rounds with peers.
        num_threads: Of the communicator; None for its own choice.
        with_huge_pages: Of the communicator.
        is_pinned: Every rank is bound to one core.
    """

    peers: tuple[str, ...] = ()
    num_repeats: int = 9
    num_threads: int | None = None
    with_huge_pages: bool = True
    is_pinned: bool = False

    def __post_init__(self) -> None:
        unknown = [peer for peer in self.peers if peer not in RESHARD_PEERS]
        if unknown:
            raise ValueError(
                f"peers must be of {', '.join(RESHARD_PEERS)}, got {', '.join(unknown)}"
            )
        if self.num_repeats < 1:
            raise ValueError(f"num_repeats must be >= 1, got {self.num_repeats}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardRow:
    """One case, measured.

    Args:
        case: The case.
        p50_us: Median of the ranks' wall times over ranks and repeats.
        p95_us: 95th percentile of the same.
        op_us: Median time from the first rank's start to the last rank's end, over clean pairs.
        bytes: Read and written over all ranks, by formula.
        gbs: `bytes / op_us`.
        outside_copies_us: Median over ranks and repeats of a refit's wall time less what its
            transport spent copying; None where the transport does not say.
        memory_bytes: Taken besides both models at the peak, sums over ranks: of the first refit
            `heap` and `private`, of the second `second_heap` and `second_private`.
        num_tensors: Tensors written, over all ranks.
        roof_gbs: Median bandwidth of the plain copy timed around the refit; None without a roof.
        fraction_of_roof: Median over clean pairs.
        check: "ok"; a wrong result ends the run.
        speedup: Median ratio of a peer's time to ours, by name.
        peer_p50_us: Median wall time of each.
        num_pairs: Clean pairs behind the fraction (repeats where there is no roof).
        num_dropped: Pairs left out because their roofs disagreed.
        roof_state: "slow", "fast", or both numbers where it changed during the run.
        extra: Details for JSON.
    """

    case: ReshardCase
    p50_us: float
    p95_us: float
    op_us: float
    bytes: int
    gbs: float
    outside_copies_us: float | None
    memory_bytes: dict[str, int]
    num_tensors: int
    roof_gbs: float | None = None
    fraction_of_roof: float | None = None
    check: str = "ok"
    speedup: dict[str, float] = dataclasses.field(default_factory=dict)
    peer_p50_us: dict[str, float] = dataclasses.field(default_factory=dict)
    num_pairs: int = 0
    num_dropped: int = 0
    roof_state: str | None = None
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON writes it."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("case", "extra")
        }
        return {"op": "reshard", **self.case.to_dict(), **values, **self.extra}


def run_case(
    case: ReshardCase,
    options: ReshardOptions,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ReshardRow:
    """Check a case, then measure it.

    Args:
        case: The case.
        options: How to measure.
        on_progress: Called with a short text after every round.

    Raises:
        WorkerError: A rank failed, or an element is wrong.
    """
    launch = ReshardLaunch(
        case=case,
        num_threads=options.num_threads,
        with_huge_pages=options.with_huge_pages,
        is_pinned=options.is_pinned,
    )
    peers = [peer for peer in options.peers if peer != case.transport]
    assert set(peers) <= {*TRANSPORTS, *RESHARD_PEERS}
    on_progress(f"{case.memory}: weights")
    make_worker = functools.partial(ReshardWorker, launch)
    with WorkerProcesses(case.num_ranks, make_worker) as ranks:
        on_progress(f"{case.memory}: check {case.transport}")
        # First, as a peer may leave it what it would need memory for.
        memory_bytes = _check(ranks, case.transport)
        for peer in peers:
            on_progress(f"{case.memory}: check {peer}")
            _check(ranks, peer)
        if not all(ranks.call("prepare_roof")):
            ranks.call("release_roof")  # some rank has none, and all of them time it or none
        return _measure(ranks, case, options, peers, memory_bytes, on_progress)


def _check(ranks: WorkerProcesses, transport: str) -> dict[str, int]:
    answers = ranks.call("check", transport)
    problems = [problem for problem, _ in answers if problem is not None]
    if problems:
        # A wrong operation has no speed.
        raise WorkerError(f"the check of {transport} failed: " + "; ".join(problems))
    totals: dict[str, int] = {}
    for _, memory in answers:
        for name, num_bytes in memory.items():
            totals[name] = totals.get(name, 0) + num_bytes
    return totals


def _measure(
    ranks: WorkerProcesses,
    case: ReshardCase,
    options: ReshardOptions,
    peers: Sequence[str],
    memory_bytes: dict[str, int],
    on_progress: Callable[[str], None],
) -> ReshardRow:
    for _ in range(NUM_WARM_UP):
        ranks.call("sample", case.transport)
    side = SideTimes()
    outside_us: list[float] = []
    peer_wall_us: dict[str, list[float]] = {peer: [] for peer in peers}
    ratios: dict[str, list[float]] = {peer: [] for peer in peers}
    num_clean = 0
    for round_idx in range(options.num_repeats * MAX_ROUNDS_PER_PAIR):
        samples = ranks.call("sample", case.transport)
        side.add(samples)
        outside_us += _outside_us(samples)
        num_clean += side.is_clean[-1]
        if round_idx < options.num_repeats:
            for peer in peers:
                intervals = ranks.call("time_peer", peer)
                peer_wall_us[peer] += wall_times_us(intervals)
                ratios[peer].append(makespan_us(intervals) / side.op_us[-1])
        on_progress(f"{case.memory}: {case.transport} {num_clean}/{options.num_repeats}")
        if num_clean >= options.num_repeats and round_idx + 1 >= options.num_repeats:
            break
    clean_us = [us for us, is_clean in zip(side.op_us, side.is_clean, strict=True) if is_clean]
    median_us = percentile(clean_us or side.op_us, 0.5)
    num_bytes = case.num_bytes()
    roof: dict[str, Any] = {}
    if side.pairs:
        roof = summarize_roof(side.pairs, num_bytes, sum(ranks.call("roof_bytes")))
    columns = ("roof_gbs", "fraction_of_roof", "roof_state")
    described = ranks.call("describe")
    return ReshardRow(
        case=case,
        p50_us=percentile(side.wall_us, 0.5),
        p95_us=percentile(side.wall_us, 0.95),
        op_us=median_us,
        bytes=num_bytes,
        gbs=num_bytes / median_us / 1e3,
        outside_copies_us=percentile(outside_us, 0.5) if outside_us else None,
        memory_bytes=memory_bytes,
        roof_gbs=roof.get("roof_gbs"),
        fraction_of_roof=roof.get("fraction_of_roof"),
        roof_state=roof.get("roof_state"),
        num_tensors=sum(of_rank["num_target_tensors"] for of_rank in described),
        speedup={peer: percentile(values, 0.5) for peer, values in ratios.items()},
        peer_p50_us={peer: percentile(values, 0.5) for peer, values in peer_wall_us.items()},
        num_pairs=num_clean,
        num_dropped=len(side.op_us) - num_clean,
        extra={
            "outside_copies_p95_us": percentile(outside_us, 0.95) if outside_us else None,
            **{name: value for name, value in roof.items() if name not in columns},
        },
    )


def _outside_us(samples: Sequence[RefitSample]) -> list[float]:
    return [
        (sample.op[1] - sample.op[0] - sample.copy_ns) / 1e3
        for sample in samples
        if sample.copy_ns is not None
    ]
