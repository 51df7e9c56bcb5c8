"""`moe-comm trace`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from moe_comm.cli.bench.case import BenchCase
from moe_comm.cli.bench.options import BenchOptions
from moe_comm.cli.bench.processes import RankProcesses
from moe_comm.cli.command_rules import (
    FoldedTable,
    example,
    in_a_sentence,
    wide_console,
)
from moe_comm.cli.options import DtypeName
from moe_comm.cli.plots import PLOT_HELP, check_plot, write_matrix
from moe_comm.cli.trace_report import (
    PhaseSummary,
    perfetto_document,
    summarize_phases,
    waited_us,
)
from moe_comm.ep.tracing import NO_PEER, PhaseRecord, read_trace
from moe_comm.output_files import check_output

trace_app = typer.Typer(
    help="Show which rank waited for which, per phase.",
    epilog=example("moe-comm trace run --ranks 2"),
    no_args_is_help=True,
    rich_markup_mode=None,
)

OUT_HELP = "Perfetto file to write."
WAITS_HELP = f"{PLOT_HELP} Waits: a waiting rank a row, the rank waited for a column."


@trace_app.command(
    "convert", epilog=example("moe-comm trace convert run.rank*.json --out run.json")
)
def convert(
    files: Annotated[
        list[Path],
        typer.Argument(
            exists=True,
            dir_okay=False,
            help="Files PATH.rank<N>.json that a run with MOE_COMM_TRACE=PATH left.",
        ),
    ],
    out: Annotated[Path, typer.Option(help=OUT_HELP)] = Path("trace.perfetto.json"),
    plot: Annotated[Path | None, typer.Option(help=WAITS_HELP)] = None,
) -> None:
    """Turn trace files of all ranks into one Perfetto file and a table."""
    with in_a_sentence("trace"):
        check_plot(plot)
        check_output("--out", out)
        _report([record for file_name in files for record in read_trace(file_name)], out, plot)


@trace_app.command("run", epilog=example("moe-comm trace run --ranks 4 --tokens 64 --out run.json"))
def run(
    ranks: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens of every rank.")] = 256,
    hidden: Annotated[int, typer.Option(min=1, help="Elements per row.")] = 2048,
    topk: Annotated[int, typer.Option(min=1, help="Choices per token.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Experts over all ranks.")] = 64,
    dtype: Annotated[DtypeName, typer.Option(help="Element type of rows.")] = "bf16",
    skew: Annotated[float, typer.Option(min=0.0, help="Zipf exponent of expert popularity.")] = 0.0,
    iterations: Annotated[int, typer.Option(min=1, help="Dispatches and combines to record.")] = 20,
    out: Annotated[Path, typer.Option(help=OUT_HELP)] = Path("trace.perfetto.json"),
    plot: Annotated[Path | None, typer.Option(help=WAITS_HELP)] = None,
) -> None:
    """Run dispatch and combine on the host backend, and trace them."""
    with in_a_sentence("trace"):
        check_plot(plot)
        check_output("--out", out)
        case = BenchCase(
            num_ranks=ranks,
            num_tokens=tokens,
            hidden=hidden,
            num_topk=topk,
            num_experts=experts,
            dtype=dtype,
            skew=skew,
        )
        with RankProcesses(case, BenchOptions()) as processes:
            per_rank = processes.call("record_trace", iterations)
        _report([record for records in per_rank for record in records], out, plot)


def _report(records: Sequence[PhaseRecord], out: Path, plot: Path | None) -> None:
    if not records:
        raise ValueError("there are no records")
    summaries = summarize_phases(records)
    out.write_text(json.dumps(perfetto_document(records)) + "\n", encoding="utf-8")
    wide_console().print(_table(summaries))
    typer.echo(f"{len(records)} records in {out}; open it at ui.perfetto.dev")
    if plot is not None:
        write_matrix(
            plot,
            {pair: us / 1e3 for pair, us in waited_us(summaries).items()},
            title="time waited, over all operations and phases",
            row_label="rank that waited",
            column_label="rank waited for",
            unit="ms",
        )


def _table(summaries: Sequence[PhaseSummary]) -> FoldedTable:
    table = Table(title="who waited for whom, per phase", title_justify="left")
    for name in ("operation", "phase", "rank", "spent on"):
        table.add_column(name)
    for name in ("times", "total us", "p50 us", "max us"):
        table.add_column(name, justify="right")
    for summary in summaries:
        table.add_row(
            summary.operation,
            summary.phase,
            str(summary.rank),
            "own work" if summary.peer == NO_PEER else f"waiting for rank {summary.peer}",
            str(summary.count),
            f"{summary.total_us:,.1f}",
            f"{summary.p50_us:,.1f}",
            f"{summary.max_us:,.1f}",
        )
    return FoldedTable(table)
