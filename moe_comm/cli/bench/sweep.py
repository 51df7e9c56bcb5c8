"""One shape over many numbers of tokens: roofs in the caches, and what the fixed cost is made of."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.options import BenchOptions
from moe_comm.cli.bench.parts import PARTS, Parts, middle_half
from moe_comm.cli.bench.processes import RankProcesses
from moe_comm.cli.bench.result import BenchRow
from moe_comm.cli.bench.run import operation_bytes
from moe_comm.cli.bench.statistics import (
    Interval,
    all_wall_times_us,
    median_ratio,
    medians,
    percentile,
    time_columns,
)
from moe_comm.cli.bench.sweep_worker import CALLS, SweepWorker

SWEEP_TOKENS = tuple(2**i for i in range(13))

FIXED_ROW_BYTES = 16
"""Bytes of the row of the token whose bytes cost nothing: the smallest row there is."""

DIFFERENTIABLE_TOKENS = 8

BLOCK_US = 50_000.0
MIN_ITERATIONS, MAX_ITERATIONS = 7, 200
NUM_WARM_UP = 5
ROOF_BYTES_PER_US = 10_000.0  # what a slow machine moves, for the number of passes alone


def check_sweep(case: BenchCase, options: BenchOptions) -> None:
    """Check that a sweep can be made of a case with these options.

    Raises:
        ValueError: An option has no meaning for it.
    """
    if options.backend != "host":
        raise ValueError(f"a sweep takes calls of the host backend apart, got {options.backend}")
    if case.baseline is not None:
        raise ValueError(f"a sweep is of the plain call, got one compared with {case.baseline[0]}")
    for name, value in (
        ("peers", ", ".join(options.peers)),
        ("operations", ", ".join(options.operations)),
        ("threads, which it compares", options.num_threads),
        ("local ranks", options.num_local_ranks),
        ("SMs", options.num_sms),
    ):
        if value:
            raise ValueError(f"a sweep has no {name}, got {value}")
    if options.rail != "auto" or options.mode != "processes":
        raise ValueError(
            f"a sweep is of processes of one node, got mode {options.mode} and rail {options.rail}"
        )


def run_sweep(
    case: BenchCase, options: BenchOptions, on_progress: Callable[[str], None] = lambda _: None
) -> list[BenchRow]:
    """Check and measure every size of `SWEEP_TOKENS`, then the fixed cost.

    Args:
        case: Case whose number of tokens is not looked at.
        options: See `check_sweep`.
        on_progress: Called with a short text after every round.

    Returns:
        A row `"sweep"` for every size, then rows `"fixed_cost"`.

    Raises:
        ValueError: See `check_sweep`.
        WorkerError: A rank failed, or a result is wrong.
    """
    check_sweep(case, options)
    with RankProcesses(case, options, SweepWorker) as ranks:
        sizes = [
            _measure_size(ranks, dataclasses.replace(case, num_tokens=num_tokens), options, tell)
            for num_tokens in SWEEP_TOKENS
            for tell in [_with_prefix(on_progress, f"tokens {num_tokens}")]
        ]
        fixed = _measure_fixed_cost(ranks, case, options, on_progress)
    return [*sizes, *fixed, *_ratios_of_sizes(sizes)]


def _numbers_of_threads() -> tuple[int, ...]:
    """1, 2, 4, ... and all cores."""
    num_cores = len(os.sched_getaffinity(0))
    return tuple(sorted({*(2**i for i in range(num_cores.bit_length() - 1)), num_cores}))


def _measure_size(
    ranks: RankProcesses, case: BenchCase, options: BenchOptions, tell: Callable[[str], None]
) -> BenchRow:
    numbers = _numbers_of_threads()
    tell("check")
    ranks.check("begin", case, numbers)
    bytes_of = operation_bytes(case)
    num_bytes = bytes_of["dispatch"] + bytes_of["combine"]
    for _ in range(2):  # the first calls of a size find out how much memory it takes
        warm_up = ranks.call("run_eager", NUM_WARM_UP)
    num_iterations = _num_iterations(warm_up)
    of_rank_us = num_bytes / case.num_ranks / ROOF_BYTES_PER_US
    num_passes = max(1, min(MAX_ITERATIONS, int(BLOCK_US / 20 / max(of_rank_us, 1e-3))))

    def timed(method: str, *arguments: Any) -> Callable[[], list[float]]:
        return lambda: all_wall_times_us(ranks.call(method, *arguments, num_iterations))

    def roof(is_streaming: bool) -> Callable[[], list[float]]:
        return lambda: [
            us for us in ranks.call("run_roof", num_passes, is_streaming) if us is not None
        ]

    parts: dict[str, list[Parts]] = {"dispatch": [], "combine": []}

    def take_apart() -> list[float]:
        for of_rank in ranks.call("run_taken_apart", num_iterations):
            for operation, taken in of_rank.items():
                parts[operation] += taken
        return []

    blocks = {
        "automatic": timed("run_eager"),
        "cached": roof(False),
        "streaming": roof(True),
        **{str(number): timed("run_threads", number) for number in numbers},
        "differentiable": timed("run_differentiable"),
        "parts": take_apart,
    }
    pooled, in_rounds = _in_turns(blocks, options.num_repeats, tell)
    eager_us = pooled["automatic"]
    threads_us = medians({name: pooled[name] for name in ("automatic", *map(str, numbers))})
    by_operation = {operation: middle_half(taken) for operation, taken in parts.items()}
    return BenchRow(
        op="sweep",
        case=case,
        backend="host",
        num_pairs=options.num_repeats,
        **time_columns(eager_us, percentile(eager_us, 0.5), num_bytes),
        **_roof_columns(pooled, in_rounds, num_bytes),
        extra={
            "num_iterations": num_iterations,
            "parts_us": {
                name: sum(by_operation[operation][name] for operation in by_operation)
                for name in PARTS
            },
            **{f"{operation}_parts_us": taken for operation, taken in by_operation.items()},
            "threads_us": threads_us,
            "threads_ratio": max(
                median_ratio(in_rounds["automatic"], in_rounds[str(number)]) for number in numbers
            ),
            "roof_us": medians(
                {stores: pooled[stores] for stores in ("cached", "streaming") if pooled[stores]}
            ),
            "differentiable_us": percentile(pooled["differentiable"], 0.5),
            "differentiable_ratio": median_ratio(
                in_rounds["differentiable"], in_rounds["automatic"]
            ),
        },
    )


def _roof_columns(
    pooled: dict[str, list[float]], in_rounds: dict[str, list[float]], num_bytes: int
) -> dict[str, Any]:
    """The faster of the two loops is the roof of a size: cached stores, until bytes outgrow the caches."""
    if not pooled["cached"]:
        return {}
    best = min(("cached", "streaming"), key=lambda stores: percentile(pooled[stores], 0.5))
    return {
        "roof_gbs": num_bytes / percentile(pooled[best], 0.5) / 1e3,
        "fraction_of_roof": median_ratio(in_rounds[best], in_rounds["automatic"]),
    }


def _measure_fixed_cost(
    ranks: RankProcesses,
    case: BenchCase,
    options: BenchOptions,
    on_progress: Callable[[str], None],
) -> list[BenchRow]:
    """Measure one token whose bytes cost nothing: on these ranks, on one, and against an operator's call."""
    tiny = dataclasses.replace(
        case, num_tokens=1, hidden=FIXED_ROW_BYTES // case.torch_dtype.itemsize
    )
    alone = dataclasses.replace(tiny, num_ranks=1)
    tell = _with_prefix(on_progress, "fixed cost")
    with contextlib.ExitStack() as stack:
        one = (
            ranks
            if case.num_ranks == 1
            else stack.enter_context(RankProcesses(alone, options, SweepWorker))
        )
        one.check("begin", alone, ())
        if one is not ranks:
            ranks.check("begin", tiny, ())

        def timed(of: RankProcesses, method: str, *arguments: Any) -> Callable[[], list[float]]:
            return lambda: all_wall_times_us(of.call(method, *arguments, MAX_ITERATIONS))

        blocks = {
            "no-op": timed(one, "run_no_op"),
            **{name: timed(one, "run_call", name) for name in CALLS},
            "one": timed(one, "run_eager"),
        }
        if one is not ranks:
            blocks["all"] = timed(ranks, "run_eager")
        pooled, in_rounds = _in_turns(blocks, options.num_repeats, tell)
    no_op = "a no-op operator of torch.library"
    compared = [(name, f"{name}, 1 rank", "no-op", no_op, alone) for name in CALLS]
    if one is not ranks:
        pair = "dispatch + combine of a token of 16 bytes"
        compared.append(("all", f"{pair}, {_ranks(case)}", "one", "1 rank", tiny))
    return [
        BenchRow(
            op="fixed_cost",
            case=of,
            backend="host",
            p50_us=percentile(pooled[name], 0.5),
            p95_us=percentile(pooled[name], 0.95),
            peer_p50_us={against: percentile(pooled[theirs], 0.5)},
            num_pairs=options.num_repeats,
            extra={"what": what, "ratio": median_ratio(in_rounds[name], in_rounds[theirs])},
        )
        for name, what, theirs, against, of in compared
    ]


def _ratios_of_sizes(sizes: Sequence[BenchRow]) -> list[BenchRow]:
    """Return the fixed costs that sizes give: of a gradient, and of threads where that is worst."""
    rows = []
    for row in sizes:
        if row.case.num_tokens != DIFFERENTIABLE_TOKENS:
            continue
        assert row.p50_us is not None
        us, ratio = row.extra["differentiable_us"], row.extra["differentiable_ratio"]
        rows.append(_fixed_row(row, "differentiable", us, "eager", row.p50_us, ratio))
    worst = max(sizes, key=lambda row: row.extra["threads_ratio"])
    threads_us = worst.extra["threads_us"]
    what = "threads by themselves, the worst size"
    us, ratio = threads_us["automatic"], worst.extra["threads_ratio"]
    return [*rows, _fixed_row(worst, what, us, *_best_fixed(threads_us), ratio)]


def _fixed_row(
    of: BenchRow, what: str, us: float, against: str, their_us: float, ratio: float
) -> BenchRow:
    case = of.case
    return BenchRow(
        op="fixed_cost",
        case=case,
        backend="host",
        p50_us=us,
        peer_p50_us={against: their_us},
        num_pairs=of.num_pairs,
        extra={
            "what": f"{what}: {case.num_tokens} tokens, {_ranks(case)}",
            "ratio": ratio,
        },
    )


def _ranks(case: BenchCase) -> str:
    return f"{case.num_ranks} rank{'s' * (case.num_ranks != 1)}"


def _best_fixed(threads_us: dict[str, float]) -> tuple[str, float]:
    number, us = min(
        ((name, us) for name, us in threads_us.items() if name != "automatic"),
        key=lambda item: item[1],
    )
    return f"{number} thread{'s' * (number != '1')}", us


def _in_turns(
    blocks: dict[str, Callable[[], list[float]]], num_rounds: int, tell: Callable[[str], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Times of every block over all rounds, and their median in each; a round starts one block later."""
    pooled: dict[str, list[float]] = defaultdict(list)
    in_rounds: dict[str, list[float]] = defaultdict(list)
    names = list(blocks)
    for name in names:
        blocks[name]()
    for round_idx in range(num_rounds):
        first = round_idx % len(names)
        for name in [*names[first:], *names[:first]]:
            times_us = blocks[name]()
            pooled[name] += times_us
            if times_us:
                in_rounds[name].append(percentile(times_us, 0.5))
        tell(f"{round_idx + 1}/{num_rounds}")
    return pooled, in_rounds


def _num_iterations(warm_up: Iterable[Sequence[Interval]]) -> int:
    us = percentile(all_wall_times_us(warm_up), 0.5)
    return max(MIN_ITERATIONS, min(MAX_ITERATIONS, int(BLOCK_US / us)))


def _with_prefix(on_progress: Callable[[str], None], prefix: str) -> Callable[[str], None]:
    return lambda text: on_progress(f"{prefix}: {text}")
