"""Clients of this package inside a framework, timed in turns with the framework's own exchange.

What `megatron_flex`, `transformers_experts` and `vllm_experts` share: every client runs the same
routing, is checked against the framework's own exchange before it is timed, and takes turns with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.environment import collect_environment
from moe_comm.cli.bench.report import header_line
from moe_comm.cli.bench.result import BenchRow, to_json
from moe_comm.cli.bench.statistics import Interval, makespan_us, percentile
from moe_comm.cli.command_rules import wide_console
from moe_comm.output_files import check_output
from moe_comm.testing import run_ranks

# One dropped expert of eight changes a row by a third, bfloat16 sums in another order by 1 %.
MOST_ROW_ERROR = 0.03


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClientCase:
    """What is timed.

    Args:
        num_ranks: EP ranks, processes on this machine.
        num_tokens: Of every rank.
        hidden: Elements of a token.
        num_experts: Over all ranks.
        num_topk: Experts of a token.
        num_repeats: Of every client.
        clients: Of those of the framework.
    """

    num_ranks: int = 4
    num_tokens: int = 2048
    hidden: int
    num_experts: int = 64
    num_topk: int = 8
    num_repeats: int = 5
    clients: tuple[str, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank found.

    Args:
        backend: That carried the clients of this package.
        intervals: By client, repeat and phase.
    """

    backend: str
    intervals: dict[str, list[dict[str, Interval]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Framework:
    """Whose clients are timed.

    Args:
        name: Before the phase in every row's `op`.
        oracle: Its own exchange, over Gloo.
        case: By default.
        time_rank: Times every client on one rank, checked first; at the top of an importable module.
        with_sums: Adds what phases make together to their times.
    """

    name: str
    oracle: str
    case: ClientCase
    time_rank: Callable[..., RankTimes]
    with_sums: Callable[[dict[str, float]], dict[str, float]]


def bench(framework: Framework, case: ClientCase) -> list[BenchRow]:
    """A row per client and phase, sums included: times, and the ratio to the framework's own exchange.

    A phase lasts from the first rank's start to the last rank's end. Ratios are medians over repeats,
    in which clients take turns.

    Raises:
        RankError: A client's results are not those of the framework's own exchange.
    """
    ranks = run_ranks(framework.time_rank, case.num_ranks, case, timeout_s=1800.0)
    backend = ranks[0].backend
    names = (framework.oracle, *case.clients)
    repeats = {
        client: [
            framework.with_sums(
                {
                    phase: makespan_us([rank.intervals[client][repeat][phase] for rank in ranks])
                    for phase in ranks[0].intervals[client][repeat]
                }
            )
            for repeat in range(case.num_repeats)
        ]
        for client in names
    }
    return [
        result_row(
            framework, case, client, phase, backend, repeats[client], repeats[framework.oracle]
        )
        for client in names
        for phase in repeats[client][0]
    ]


def result_row(
    framework: Framework,
    case: ClientCase,
    client: str,
    phase: str,
    backend: str,
    ours: list[dict[str, float]],
    theirs: list[dict[str, float]],
) -> BenchRow:
    """Of a client and phase, from the times of all repeats."""
    us = [repeat[phase] for repeat in ours]
    oracle_us = [repeat[phase] for repeat in theirs]
    ratios = [oracle / own for oracle, own in zip(oracle_us, us, strict=True)]
    is_oracle = client == framework.oracle
    return BenchRow(
        op=f"{framework.name}_{phase}",
        case=BenchCase(
            num_ranks=case.num_ranks,
            num_tokens=case.num_tokens,
            hidden=case.hidden,
            num_topk=case.num_topk,
            num_experts=case.num_experts,
            with_weights=True,
        ),
        backend="gloo" if is_oracle else backend,
        p50_us=percentile(us, 0.5),
        p95_us=percentile(us, 0.95),
        op_us=percentile(us, 0.5),
        speedup={} if is_oracle else {framework.oracle: percentile(ratios, 0.5)},
        peer_p50_us={} if is_oracle else {framework.oracle: percentile(oracle_us, 0.5)},
        num_pairs=case.num_repeats,
        extra={"client": client},
    )


def result_table(framework: Framework, case: ClientCase, rows: list[BenchRow]) -> Table:
    """p50 of every client and phase in milliseconds, with the ratio to the framework's own exchange."""
    title = (
        f"{framework.name}: {case.num_ranks} ranks, {case.num_tokens} tokens each, hidden "
        f"{case.hidden}, top-{case.num_topk} of {case.num_experts}, bf16; ms, and times faster than "
        f"{framework.oracle}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("client")
    phases = list(dict.fromkeys(row.op for row in rows))
    for phase in phases:
        label = phase.removeprefix(f"{framework.name}_").replace("_", " ")
        table.add_column(label, justify="right")
    for client in (framework.oracle, *case.clients):
        cells = []
        for row in rows:
            if row.extra["client"] == client:
                assert row.p50_us is not None
                ratio = f" {row.speedup[framework.oracle]:.1f}x" if row.speedup else ""
                cells.append(f"{row.p50_us / 1e3:,.1f}{ratio}")
        table.add_row(client, *cells)
    return table


Step = Callable[[], tuple[dict[str, Interval], Mapping[str, torch.Tensor]]]
"""One pass of a client: intervals by phase, and results to check."""


def in_turns(
    oracle: str, num_repeats: int, steps: Mapping[str, Step]
) -> dict[str, list[dict[str, Interval]]]:
    """Intervals by client, repeat and phase on this rank, once every client was checked. Collective.

    Args:
        oracle: The framework's own exchange, among `steps`.
        num_repeats: Of every client.
        steps: By client.

    Raises:
        ValueError: A client's results are not the oracle's.
    """
    expected = steps[oracle]()[1]
    for name, step in steps.items():
        if name != oracle:
            check(oracle, name, expected, step()[1])
    found: dict[str, list[dict[str, Interval]]] = {name: [] for name in steps}
    for _ in range(num_repeats):
        for name, step in steps.items():
            found[name].append(step()[0])
    return found


def start() -> int:
    """When all ranks have come here, in nanoseconds."""
    dist.barrier()
    return time.monotonic_ns()


def check(
    oracle: str, name: str, expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]
) -> None:
    """Hold the results of a client against those of the framework's own exchange, row by row.

    Raises:
        ValueError: A row is too far off.
    """
    for key, reference in expected.items():
        wide = reference.double().flatten(end_dim=-2)
        error = (found[key].double().flatten(end_dim=-2) - wide).norm(dim=1)
        worst = float((error / wide.norm(dim=1)).max())
        if not worst <= MOST_ROW_ERROR:
            raise ValueError(
                f"{name}: a row of {key} differs from {oracle} by {worst:.3g} of its norm, more than "
                f"{MOST_ROW_ERROR}"
            )


def main(framework: Framework, description: str) -> None:
    """The command of a framework's module."""
    default = framework.case
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--ranks", type=int, default=default.num_ranks)
    parser.add_argument("--tokens", type=int, default=default.num_tokens)
    parser.add_argument("--hidden", type=int, default=default.hidden)
    parser.add_argument("--experts", type=int, default=default.num_experts)
    parser.add_argument("--topk", type=int, default=default.num_topk)
    parser.add_argument("--repeats", type=int, default=default.num_repeats)
    parser.add_argument("--clients", default=",".join(default.clients), help="comma-separated")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    try:
        check_output("--json", args.json)
    except ValueError as error:
        parser.error(str(error))
    case = ClientCase(
        num_ranks=args.ranks,
        num_tokens=args.tokens,
        hidden=args.hidden,
        num_experts=args.experts,
        num_topk=args.topk,
        num_repeats=args.repeats,
        clients=tuple(args.clients.split(",")),
    )
    environment = collect_environment()
    console = wide_console()
    console.print(header_line(environment), soft_wrap=True)
    rows = bench(framework, case)
    console.print(result_table(framework, case, rows))
    if args.json is not None:
        document = to_json(environment, rows, {})
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
