"""Time Megatron's flex dispatcher over this package against its all-to-all dispatcher over Gloo.

Run from the root of the repository, with megatron-core installed:

    python -m benchmarks.megatron_flex --ranks 4 --tokens 2048 --json out.json

Every client runs the same routing and is checked against the all-to-all dispatcher before it is timed.
Clients take turns. What experts compute is not timed; see docs/megatron.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rich.table import Table

from moe_comm import fused_a2a
from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.environment import collect_environment
from moe_comm.cli.bench.report import header_line
from moe_comm.cli.bench.result import BenchRow, to_json
from moe_comm.cli.bench.statistics import Interval, makespan_us, percentile
from moe_comm.cli.command_rules import wide_console
from moe_comm.dispatcher.megatron import MegatronManager, MegatronTokenDispatcher
from moe_comm.group_buffers import group_buffers
from moe_comm.output_files import check_output
from moe_comm.testing import RankContext, run_ranks
from moe_comm.testing.megatron import Routed, make_config, make_groups, on_cpu

ORACLE = "alltoall_gloo"
CLIENTS = ("flex_manager", "flex_hybridep", "flex_deepep", "own_dispatcher")
PHASES = ("dispatch", "combine", "combine_backward", "dispatch_backward")
# One dropped expert of eight changes a row by a third, bfloat16 sums in another order by 1 %.
MOST_ROW_ERROR = 0.03

_FUNCTIONS = (
    "fused_combine",
    "fused_dispatch",
    "hybrid_ep_combine",
    "hybrid_ep_dispatch",
    "set_deepep_num_sms",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlexCase:
    """What is timed.

    Args:
        num_ranks: EP ranks, processes on this machine.
        num_tokens: Of every rank.
        hidden: Elements of a token.
        num_experts: Over all ranks.
        num_topk: Experts of a token.
        num_repeats: Of every client.
        clients: Of `CLIENTS`.
    """

    num_ranks: int = 4
    num_tokens: int = 2048
    hidden: int = 4096
    num_experts: int = 64
    num_topk: int = 8
    num_repeats: int = 5
    clients: tuple[str, ...] = CLIENTS


def bench(case: FlexCase) -> list[BenchRow]:
    """A row per client and phase, "forward" and "step" included: times, and the ratio to all-to-all.

    A phase lasts from the first rank's start to the last rank's end; a step is its four phases. Ratios
    are medians over repeats, in which clients take turns.

    Raises:
        RankError: A client's results are not those of the all-to-all dispatcher.
    """
    ranks = run_ranks(time_rank, case.num_ranks, case, timeout_s=1800.0)
    backend = ranks[0].backend
    repeats = {
        client: [
            _with_sums(
                {
                    phase: makespan_us([rank.intervals[client][repeat][phase] for rank in ranks])
                    for phase in PHASES
                }
            )
            for repeat in range(case.num_repeats)
        ]
        for client in (ORACLE, *case.clients)
    }
    return [
        _row(case, client, phase, backend, repeats[client], repeats[ORACLE])
        for client in (ORACLE, *case.clients)
        for phase in repeats[client][0]
    ]


def _with_sums(phases: dict[str, float]) -> dict[str, float]:
    forward = phases["dispatch"] + phases["combine"]
    return phases | {"forward": forward, "step": sum(phases.values())}


def _row(
    case: FlexCase,
    client: str,
    phase: str,
    backend: str,
    ours: list[dict[str, float]],
    theirs: list[dict[str, float]],
) -> BenchRow:
    us = [repeat[phase] for repeat in ours]
    oracle_us = [repeat[phase] for repeat in theirs]
    ratios = [oracle / own for oracle, own in zip(oracle_us, us, strict=True)]
    is_oracle = client == ORACLE
    return BenchRow(
        op=f"megatron_{phase}",
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
        speedup={} if is_oracle else {ORACLE: percentile(ratios, 0.5)},
        peer_p50_us={} if is_oracle else {ORACLE: percentile(oracle_us, 0.5)},
        num_pairs=case.num_repeats,
        extra={"client": client},
    )


def result_table(case: FlexCase, rows: list[BenchRow]) -> Table:
    """p50 of every client and phase in milliseconds, with the ratio to all-to-all."""
    title = (
        f"megatron: {case.num_ranks} ranks, {case.num_tokens} tokens each, hidden {case.hidden}, "
        f"top-{case.num_topk} of {case.num_experts}, bf16; ms, and times faster than {ORACLE}"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("client")
    phases = list(dict.fromkeys(row.op for row in rows))
    for phase in phases:
        table.add_column(phase.removeprefix("megatron_").replace("_", " "), justify="right")
    for client in (ORACLE, *case.clients):
        cells = []
        for row in rows:
            if row.extra["client"] == client:
                assert row.p50_us is not None
                ratio = f" {row.speedup[ORACLE]:.1f}x" if row.speedup else ""
                cells.append(f"{row.p50_us / 1e3:,.1f}{ratio}")
        table.add_row(client, *cells)
    return table


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankTimes:
    """What one rank found.

    Args:
        backend: That carried the clients of this package.
        intervals: By client, repeat and phase.
    """

    backend: str
    intervals: dict[str, list[dict[str, Interval]]]


def time_rank(context: RankContext, case: FlexCase) -> RankTimes:
    """Intervals of every client, repeat and phase on this rank; checked first."""
    routed = _routed(context.rank_idx, case)
    groups = make_groups(context.rank_idx, context.num_ranks, 1)
    with (
        on_cpu() as module,
        mock.patch.multiple(module, **{name: getattr(fused_a2a, name) for name in _FUNCTIONS}),
    ):
        dispatchers = {
            name: _dispatcher(module, name, case, groups, context.rank_idx)
            for name in (ORACLE, *case.clients)
        }
        expected = _step(dispatchers[ORACLE], routed)[1]
        for name in case.clients:
            _check(name, expected, _step(dispatchers[name], routed)[1])
        found: dict[str, list[dict[str, Interval]]] = {name: [] for name in dispatchers}
        for _ in range(case.num_repeats):
            for name, dispatcher in dispatchers.items():
                found[name].append(_step(dispatcher, routed)[0])
        backend = group_buffers(groups.tp_ep).communicator.backend
    return RankTimes(backend=backend, intervals=found)


def _routed(rank_idx: int, case: FlexCase) -> Routed:
    generator = torch.Generator().manual_seed(rank_idx)
    shape = (case.num_tokens, case.num_experts)
    x = torch.randn(case.num_tokens, 1, case.hidden, generator=generator).bfloat16()
    choices = torch.rand(shape, generator=generator).topk(case.num_topk, dim=1).indices
    routing_map = torch.zeros(shape, dtype=torch.bool).scatter_(1, choices, True)
    return x, routing_map, (0.5 + torch.rand(shape, generator=generator)) * routing_map


def _dispatcher(module: Any, name: str, case: FlexCase, groups: Any, rank_idx: int) -> Any:
    options: dict[str, str] = {"moe_token_dispatcher_type": "flex"}
    if name == ORACLE:
        options = {"moe_token_dispatcher_type": "alltoall"}
    elif name == "flex_hybridep":
        options["moe_flex_dispatcher_backend"] = "hybridep"
    config = make_config(
        case.num_experts, case.num_topk, case.num_ranks, hidden=case.hidden, **options
    )
    num_local = case.num_experts // case.num_ranks
    indices = list(range(rank_idx * num_local, (rank_idx + 1) * num_local))
    if name == ORACLE:
        return module.MoEAlltoAllTokenDispatcher(num_local, indices, config, groups)
    if name == "own_dispatcher":
        return MegatronTokenDispatcher(num_local, indices, config, groups)
    dispatcher = module.MoEFlexTokenDispatcher(num_local, indices, config, groups)
    if name == "flex_manager":
        dispatcher._comm_manager = MegatronManager(groups.tp_ep, num_local)
    return dispatcher


def _step(dispatcher: Any, routed: Routed) -> tuple[dict[str, Interval], dict[str, torch.Tensor]]:
    """One forward and backward around experts that multiply by the weights; intervals and results."""
    x, routing_map, probs = routed
    x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
    intervals: dict[str, Interval] = {}

    start = _start()
    hidden, token_probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
    hidden, token_probs = dispatcher.token_dispatch(hidden, token_probs)
    rows, _, row_probs = dispatcher.dispatch_postprocess(hidden, token_probs)
    intervals["dispatch"] = (start, time.monotonic_ns())

    weights = row_probs.detach()
    out = (rows.detach() * weights.to(rows.dtype)[:, None]).requires_grad_()
    start = _start()
    y = dispatcher.combine_preprocess(out)
    y = dispatcher.combine_postprocess(dispatcher.token_combine(y))
    intervals["combine"] = (start, time.monotonic_ns())

    grad_y = torch.full_like(y, 2.0**-6)
    start = _start()
    y.backward(grad_y)
    intervals["combine_backward"] = (start, time.monotonic_ns())

    assert out.grad is not None
    grad_rows = out.grad * weights.to(rows.dtype)[:, None]
    grad_weights = (out.grad.float() * rows.detach().float()).sum(1).to(row_probs.dtype)
    start = _start()
    torch.autograd.backward([rows, row_probs], [grad_rows, grad_weights])
    intervals["dispatch_backward"] = (start, time.monotonic_ns())

    assert x.grad is not None
    assert probs.grad is not None
    return intervals, {"y": y.detach(), "grad_x": x.grad, "grad_probs": probs.grad}


def _start() -> int:
    dist.barrier()
    return time.monotonic_ns()


def _check(name: str, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    for key, reference in expected.items():
        wide = reference.double().flatten(end_dim=-2)
        error = (found[key].double().flatten(end_dim=-2) - wide).norm(dim=1)
        worst = float((error / wide.norm(dim=1)).max())
        if not worst <= MOST_ROW_ERROR:
            raise ValueError(
                f"{name}: a row of {key} differs from {ORACLE} by {worst:.3g} of its norm, more than "
                f"{MOST_ROW_ERROR}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=FlexCase.num_ranks)
    parser.add_argument("--tokens", type=int, default=FlexCase.num_tokens)
    parser.add_argument("--hidden", type=int, default=FlexCase.hidden)
    parser.add_argument("--experts", type=int, default=FlexCase.num_experts)
    parser.add_argument("--topk", type=int, default=FlexCase.num_topk)
    parser.add_argument("--repeats", type=int, default=FlexCase.num_repeats)
    parser.add_argument("--clients", default=",".join(CLIENTS), help="comma-separated")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    try:
        check_output("--json", args.json)
    except ValueError as error:
        parser.error(str(error))
    # By its importable name: ranks are other processes.
    from benchmarks import megatron_flex

    case = megatron_flex.FlexCase(
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
    rows = megatron_flex.bench(case)
    console.print(megatron_flex.result_table(case, rows))
    if args.json is not None:
        document = to_json(environment, rows, {})
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
