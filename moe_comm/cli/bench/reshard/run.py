"""Runs a case: check, then rounds in which ours and every peer are timed next to each other."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from moe_comm.cli.bench.processes import WorkerError, WorkerProcesses
from moe_comm.cli.bench.reshard.case import (
    RESHARD_PEERS,
    TRANSPORTS,
    ReshardCase,
    ReshardOptions,
)
from moe_comm.cli.bench.reshard.worker import RefitSample, ReshardWorker
from moe_comm.cli.bench.result import MeasuredRow
from moe_comm.cli.bench.statistics import percentile, time_columns
from moe_comm.cli.bench.times import NUM_WARM_UP, Rounds, SideTimes, summarize_roof


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardRow(MeasuredRow):
    """One case, measured.

    Args:
        case: The case.
        outside_copies_us: Median over ranks and repeats of a refit's wall time less what its
            transport spent copying; None where the transport does not say.
        memory_bytes: Taken besides both models at the peak, sums over ranks: of the first refit
            `heap` and `private`, of the second `second_heap` and `second_private`.
        num_tensors: Tensors written, over all ranks.
    """

    case: ReshardCase
    outside_copies_us: float | None
    memory_bytes: dict[str, int]
    num_tensors: int

    def to_dict(self) -> dict[str, Any]:
        """The row as JSON writes it."""
        return {"op": "reshard", **self.case.to_dict(), **super().to_dict()}


def run_case(
    case: ReshardCase,
    options: ReshardOptions,
    on_progress: Callable[[str], None] = lambda _: None,
) -> ReshardRow:
    """Check a case, then measure it.

    Args:
        case: The case.
        options: Options of the measurement.
        on_progress: Called with a short text after every round.

    Raises:
        WorkerError: A rank failed, or an element is wrong.
    """
    peers = [peer for peer in options.peers if peer != case.transport]
    assert set(peers) <= {*TRANSPORTS, *RESHARD_PEERS}
    on_progress(f"{case.memory}: weights")
    make_worker = functools.partial(ReshardWorker, case, options)
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
    rounds = Rounds(sides=[SideTimes()])
    outside_us: list[float] = []

    def sample(_: int) -> Sequence[RefitSample]:
        samples: list[RefitSample] = ranks.call("sample", case.transport)
        outside_us.extend(_outside_us(samples))
        return samples

    rounds.run(
        options.num_repeats,
        sample,
        lambda: {peer: ranks.call("time_peer", peer) for peer in peers},
        lambda text: on_progress(f"{case.memory}: {case.transport} {text}"),
    )
    (side,) = rounds.sides
    num_bytes = case.num_bytes()
    roof: dict[str, Any] = {}
    if side.pairs:
        roof = summarize_roof(side.pairs, num_bytes, sum(ranks.call("roof_bytes")))
    outside_us = outside_us[NUM_WARM_UP * case.num_ranks :]
    columns = ("roof_gbs", "fraction_of_roof", "roof_state")
    shown: dict[str, Any] = {name: roof.get(name) for name in columns}
    described = ranks.call("describe")
    return ReshardRow(
        case=case,
        **time_columns(side.wall_us, side.median_us, num_bytes),
        outside_copies_us=percentile(outside_us, 0.5) if outside_us else None,
        memory_bytes=memory_bytes,
        num_tensors=sum(of_rank["num_target_tensors"] for of_rank in described),
        **rounds.columns(),
        **shown,
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
