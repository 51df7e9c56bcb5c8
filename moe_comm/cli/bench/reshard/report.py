"""Tables and plots of weights that move."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moe_comm.cli.bench.columns import add_columns, number, plot_times
from moe_comm.cli.bench.report import header_line
from moe_comm.cli.bench.reshard.case import ReshardCase, dtype_name
from moe_comm.cli.bench.reshard.run import ReshardRow
from moe_comm.cli.command_rules import FoldedTable
from moe_comm.cli.plots import new_figure
from moe_comm.cli.reshard.shapes import describe


def reshard_title(case: ReshardCase) -> str:
    """The case on one line, without where destinations lie."""
    layouts = case.layouts
    dtypes = dtype_name(layouts.source_dtype)
    if layouts.destination_dtype is not layouts.source_dtype:
        dtypes += f" to {dtype_name(layouts.destination_dtype)}"
    where = "disjoint" if layouts.is_disjoint else "collocated"
    return (
        f"reshard: {layouts.source} on {layouts.source.num_ranks} ranks to {layouts.destination} on "
        f"{layouts.destination.num_ranks}{' by views' if case.is_stacked else ''}, {where}, {describe(layouts.shape)}, {dtypes}, "
        f"{layouts.shape.num_bytes(layouts.source_dtype) / 1e6:,.0f} MB, {case.transport}"
    )


def reshard_table(rows: Sequence[ReshardRow]) -> Group:
    """A row per destination; memory below."""
    peers = sorted({peer for row in rows for peer in row.speedup})
    table = Table()
    table.add_column("destination")
    add_columns(table, "p50 ms", "p95 ms", "MB", "GB/s", "roof GB/s", "of roof")
    add_columns(table, "pairs (dropped)", "outside copies ms")
    table.add_column("roof state")
    add_columns(table, *(f"vs {peer}" for peer in peers))
    table.add_column("check")
    notes = []
    for row in rows:
        table.add_row(
            row.case.memory,
            number(row.p50_us, 2, 1e3),
            number(row.p95_us, 2, 1e3),
            number(row.bytes, 1, 1e6),
            number(row.gbs, 1),
            number(row.roof_gbs, 1),
            number(row.fraction_of_roof, 3),
            f"{row.num_pairs} ({row.num_dropped})",
            number(row.outside_copies_us, 2, 1e3),
            row.roof_state or "-",
            *(f"{row.speedup[peer]:.1f}x" if peer in row.speedup else "-" for peer in peers),
            row.check,
        )
        memory = {name: num_bytes / 1e6 for name, num_bytes in row.memory_bytes.items()}
        notes.append(
            Text(
                f"{row.case.memory}: {row.num_tensors:,} tensors; besides both models, all ranks "
                f"together: first refit {memory['heap']:,.1f} MB of the heap and "
                f"{memory['private']:,.1f} MB private, second {memory['second_heap']:,.1f} and "
                f"{memory['second_private']:,.1f} MB"
            )
        )
    return Group(Text(reshard_title(rows[0].case), style="italic"), FoldedTable(table), *notes)


def write_reshard_plot(path: Path, rows: Sequence[ReshardRow], environment: dict[str, Any]) -> None:
    """Bars of time per destination, ours beside every peer's, on a logarithmic axis.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = new_figure(9.0, 4.8)
    axes = figure.add_subplot()
    labels = [f"destination: {row.case.memory}" for row in rows]
    plot_times(axes, rows, rows[0].case.transport, labels, unit=(1e3, "ms", 1))
    axes.set_title(reshard_title(rows[0].case) + "\n" + header_line(environment), fontsize=6)
    figure.savefig(path, dpi=150)
