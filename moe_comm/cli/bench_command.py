"""`moe-comm bench`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.environment import collect_environment
from moe_comm.cli.bench.options import OPERATIONS, PEERS, BenchOptions
from moe_comm.cli.bench.replicas import place_replicas
from moe_comm.cli.bench.report import header_line, result_table, sweep_tables, write_plot
from moe_comm.cli.bench.result import to_json
from moe_comm.cli.bench.run import CaseRun
from moe_comm.cli.bench.sweep import SWEEP_TOKENS, check_sweep, run_sweep
from moe_comm.cli.bench.sweep_picture import draw_sweep, sweep_pictures
from moe_comm.cli.bench_checkpoint_command import bench_checkpoint
from moe_comm.cli.bench_reshard_command import bench_reshard
from moe_comm.cli.command_rules import example, in_a_sentence, sectioned, wide_console
from moe_comm.cli.options import (
    DtypeName,
    LayoutName,
    QuantizationName,
    ScaleFormatName,
    layout_of,
    quantization_of,
    reduced_ranks,
    split_list,
)
from moe_comm.cli.plots import PLOT_HELP, check_plot
from moe_comm.cli.progress import telling, write_json
from moe_comm.ep.routing_trace import load_routing_trace
from moe_comm.output_files import check_output

bench_app = typer.Typer(
    help="Check an operation, then time it against what the machine can do.",
    epilog=example("moe-comm bench dispatch-combine --ranks 2"),
    rich_markup_mode=None,
)


BackendName = Literal["auto", "host", "cuda", "collective", "reference"]
RailName = Literal["auto", "gloo", "mpi", "sockets"]
BalancingRule = Literal["balanced", "nearest", "hash"]
"""Rules of replicas that decide from logical experts."""

RankMode = Literal["processes", "threads"]
ApiName = Literal["native", "hybrid-ep"]
"""Names of `APIS` on the command line."""


@bench_app.callback()
def bench() -> None:
    """Check an operation, then time it against what the machine can do."""


@bench_app.command(
    "dispatch-combine",
    cls=sectioned(
        {
            "Routing and replicas": "skew routing replicas replica_rule versus_given",
            "Rows": "layout quantization scale_format column_major_scales api alignment",
            "Nodes": "local_ranks rail node_reduction rank_reduction check_messages",
            "Measuring": "ffn_hidden repeats operations threads sms huge_pages pin huge_page_x mode seed",
        }
    ),
    epilog=example(
        "moe-comm bench dispatch-combine --ranks 2 --tokens 1024 --hidden 2048 \\",
        "    --peers gloo --json results.json",
        "moe-comm bench dispatch-combine --ranks 2 --hidden 1024 \\",
        "    --replicas 1 --routing zipf:1.0 --plot loads.png",
    ),
)
def dispatch_combine(
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens of every rank [default: 4096].")
    ] = None,
    sweep: Annotated[
        bool,
        typer.Option(
            "--sweep",
            help="1, 2, 4, ... 4096 tokens in place of --tokens: what the time is made of.",
        ),
    ] = False,
    hidden: Annotated[int, typer.Option(min=1, help="Elements per row.")] = 7168,
    topk: Annotated[
        int | None, typer.Option(min=1, help="Choices per token [default: 8, or the trace's].")
    ] = None,
    experts: Annotated[
        int | None,
        typer.Option(min=1, help="Experts over all ranks [default: 64, or the trace's]."),
    ] = None,
    dtype: Annotated[DtypeName, typer.Option(help="Element type of rows.")] = "bf16",
    backend: Annotated[BackendName, typer.Option(help="Backend to measure.")] = "host",
    peers: Annotated[
        str, typer.Option(help=f"Pipelines to compare with, of {', '.join(PEERS)}; empty for none.")
    ] = "",
    skew: Annotated[
        float, typer.Option(min=0.0, help="Zipf exponent of expert popularity; 0 is uniform.")
    ] = 0.0,
    routing: Annotated[
        str | None,
        typer.Option(
            metavar="zipf:S|FILE", help="zipf:S is --skew S; else a routing trace (.npz) to replay."
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Further slots of every rank, for replicas placed by earlier batches; compared with none.",
        ),
    ] = None,
    replica_rule: Annotated[
        BalancingRule | None,
        typer.Option(help="Rule for the replica that takes a row [default: balanced]."),
    ] = None,
    versus_given: Annotated[
        bool,
        typer.Option(
            "--versus-given", help="Compare --replicas with its slots handed in, not with none."
        ),
    ] = False,
    ffn_hidden: Annotated[
        int, typer.Option(min=1, help="Elements between the two matrices of an expert.")
    ] = 1024,
    layout: Annotated[LayoutName, typer.Option(help="Order of rows.")] = "expert-major",
    quantization: Annotated[
        QuantizationName,
        typer.Option(
            help="Quantize rows while they are dispatched; compared with rows as they are."
        ),
    ] = "none",
    scale_format: Annotated[
        ScaleFormatName | None,
        typer.Option(help="Format of scale factors [default: the quantization's first]."),
    ] = None,
    column_major_scales: Annotated[
        bool, typer.Option("--column-major-scales", help="Scale factors in columns.")
    ] = False,
    api: Annotated[
        ApiName,
        typer.Option(help="hybrid-ep: routing map in, rows permuted; compared with native."),
    ] = "native",
    alignment: Annotated[
        int, typer.Option(min=1, help="Pad rows per local expert to a multiple.")
    ] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Pairs with agreeing roofs to collect.")] = 9,
    operations: Annotated[
        str,
        typer.Option(help=f"Operations, of {', '.join(OPERATIONS)} [default: by the size]."),
    ] = "",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of every rank [default: cores / ranks].")
    ] = None,
    sms: Annotated[
        int | None,
        typer.Option(
            "--num-sms", min=1, help="SMs of every buffer of a rank on a GPU [default: up to 24]."
        ),
    ] = None,
    huge_pages: Annotated[bool, typer.Option(help="Ask for 2 MiB pages for windows.")] = True,
    pin: Annotated[
        bool, typer.Option(help="Bind rank r to core r modulo the number of cores, peers too.")
    ] = False,
    huge_page_x: Annotated[bool, typer.Option(help="x in 2 MiB pages.")] = False,
    local_ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks of a node: as if this machine were several [default: all]."
        ),
    ] = None,
    rail: Annotated[RailName, typer.Option(help="Transport between nodes.")] = "auto",
    node_reduction: Annotated[
        bool,
        typer.Option(
            "--node-reduction", help="Add rows on their node before they cross; compared with not."
        ),
    ] = False,
    rank_reduction: Annotated[
        bool,
        typer.Option(
            "--rank-reduction", help="Add rows on their rank before they cross; compared with not."
        ),
    ] = False,
    check_messages: Annotated[
        bool,
        typer.Option(
            "--check-messages", help="Messages between nodes carry checksums; compared with not."
        ),
    ] = False,
    mode: Annotated[
        RankMode, typer.Option(help="Ranks are processes, or threads of one process.")
    ] = "processes",
    seed: Annotated[int, typer.Option(min=0, help="Seed of data and routing.")] = 0,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write the results here.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help=f"{PLOT_HELP} A sweep takes .svg, and writes a light and a dark one."),
    ] = None,
) -> None:
    """Dispatch and combine between ranks on this machine.

    With --quantization, --node-reduction, --rank-reduction, --check-messages, --api hybrid-ep, --layout low-latency
    or --replicas the same input is also exchanged without it, in turns, and the table has the ratio.
    """
    with in_a_sentence("bench"):
        check_output("--json", json_path)
        if sweep and tokens is not None:
            raise ValueError(f"--sweep is over tokens: --tokens is not given, got {tokens}")
        pictures = sweep_pictures(plot) if sweep and plot is not None else []
        for _, picture in pictures:
            check_output("--plot", picture)
        skew, trace = _read_routing(routing, skew)
        topk, experts = _resolve_routing(trace, topk, experts)
        case = BenchCase(
            num_ranks=ranks,
            num_tokens=SWEEP_TOKENS[-1] if sweep else 4096 if tokens is None else tokens,
            hidden=hidden,
            num_topk=topk,
            num_experts=experts,
            dtype=dtype,
            layout=layout_of(layout),
            quantization=quantization_of(quantization, scale_format, column_major_scales, dtype),
            api=api.replace("-", "_"),
            expert_alignment=alignment,
            skew=skew,
            routing=trace,
            with_huge_page_x=huge_page_x,
            reduced_local_ranks=reduced_ranks(local_ranks, node_reduction),
            rank_reduction=rank_reduction,
            check_messages=check_messages,
            ffn_hidden=ffn_hidden,
            seed=seed,
        )
        if replicas is not None:
            case = place_replicas(
                case,
                replicas,
                replica_rule=replica_rule or "balanced",
                versus_given=versus_given,
            )
        elif replica_rule is not None or versus_given:
            raise ValueError("--replica-rule and --versus-given need --replicas, got none")
        options = BenchOptions(
            backend=backend,
            peers=split_list(peers),
            num_repeats=repeats,
            operations=split_list(operations),
            num_threads=threads,
            num_sms=sms,
            with_huge_pages=huge_pages,
            is_pinned=pin,
            num_local_ranks=local_ranks,
            rail=rail,
            mode=mode,
        )
        if sweep:
            check_sweep(case, options)
        else:
            check_plot(plot)
        environment = collect_environment()
        console = wide_console()
        console.print(header_line(environment), soft_wrap=True)
        environment["pinned"] = pin
        if sweep:
            with telling(console) as tell:
                rows = run_sweep(case, options, tell)
            console.print(sweep_tables(rows))
            write_json(json_path, to_json(environment, rows, {}))
            for palette, path in pictures:
                text = draw_sweep(rows, header_line(environment), palette)
                path.write_text(text, encoding="utf-8")
            return
        with telling(console) as tell, CaseRun(case, options, tell) as run:
            rows = run.run()
            missing_peers = run.missing_peers
            environment["devices"] = run.devices
            environment["num_sms"] = run.num_sms
            if run.mpi is not None:
                environment["mpi"] = run.mpi.launcher.version
        if environment["num_sms"] is not None:
            console.print(f"{environment['num_sms']} SMs for every buffer of a rank")
        console.print(result_table(rows, missing_peers))
        environment["roof_state"] = {row.op: row.roof_state for row in rows if row.roof_state}
        write_json(json_path, to_json(environment, rows, missing_peers))
        if plot is not None:
            write_plot(plot, rows, environment)


bench_app.command(
    "reshard",
    cls=sectioned(
        {
            "Weights": "size experts tensors tensor_bytes dtype destination_dtype memory stacked_experts",
            "Measuring": "repeats threads huge_pages pin seed",
        }
    ),
    epilog=example("moe-comm bench reshard --ranks 4 --from tp2.ep2 --to tp4 --bytes 256MiB"),
)(bench_reshard)
bench_app.command(
    "checkpoint",
    epilog=example("moe-comm bench checkpoint --ranks 4 --bytes 256MiB --peers dcp"),
)(bench_checkpoint)


def _read_routing(routing: str | None, skew: float) -> tuple[float, Path | None]:
    """Exponent and trace that --routing and --skew ask for.

    Raises:
        ValueError: An exponent is none, both say one, or there is no such file.
    """
    if routing is None:
        return skew, None
    if not routing.startswith("zipf:"):
        if not Path(routing).is_file():
            raise ValueError(f"--routing is zipf:S or a routing trace, found no file {routing}")
        return skew, Path(routing)
    if skew:
        raise ValueError(f"--skew and --routing zipf:S are the same, got {skew:g} and {routing}")
    try:
        exponent = float(routing.removeprefix("zipf:"))
    except ValueError:
        exponent = math.nan
    if not 0.0 <= exponent < math.inf:
        raise ValueError(f"zipf:S takes a finite number >= 0, got {routing}")
    return exponent, None


def _resolve_routing(
    routing: Path | None, topk: int | None, experts: int | None
) -> tuple[int, int]:
    """Top-k and experts: as given, else the trace's, else the defaults."""
    if routing is None:
        return topk or 8, experts or 64
    trace = load_routing_trace(routing)
    return topk or trace.num_topk, experts or trace.num_experts
