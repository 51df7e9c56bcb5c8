"""Tables and plots of weights that move."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moe_comm.cli.bench.report import header_line
from moe_comm.cli.bench.reshard.case import ReshardCase, dtype_name
from moe_comm.cli.bench.reshard.run import ReshardRow
from moe_comm.cli.command_rules import FoldedTable
from moe_comm.cli.plots import new_figure
from moe_comm.cli.reshard.shapes import describe

__all__ = ["reshard_document", "reshard_table", "reshard_title", "write_reshard_plot"]


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
    for name in (
        *("p50 ms", "p95 ms", "MB", "GB/s", "roof GB/s", "of roof", "pairs (dropped)"),
        "outside copies ms",
    ):
        table.add_column(name, justify="right")
    table.add_column("roof state")
    for peer in peers:
        table.add_column(f"vs {peer}", justify="right")
    table.add_column("check")
    notes = []
    for row in rows:
        table.add_row(
            row.case.memory,
            f"{row.p50_us / 1e3:,.2f}",
            f"{row.p95_us / 1e3:,.2f}",
            f"{row.bytes / 1e6:,.1f}",
            f"{row.gbs:,.1f}",
            _number(row.roof_gbs, 1),
            _number(row.fraction_of_roof, 3),
            f"{row.num_pairs} ({row.num_dropped})",
            _number(None if row.outside_copies_us is None else row.outside_copies_us / 1e3, 2),
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


def reshard_document(environment: dict[str, Any], rows: Sequence[ReshardRow]) -> dict[str, Any]:
    """Build the document that `--json` writes."""
    return {
        "environment": environment,
        "cases": [row.to_dict() for row in rows],
        "missing_peers": {},
    }


def write_reshard_plot(path: Path, rows: Sequence[ReshardRow], environment: dict[str, Any]) -> None:
    """Bars of time per destination, ours beside every peer's, on a logarithmic axis.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    names = [rows[0].case.transport, *sorted({peer for row in rows for peer in row.peer_p50_us})]
    figure = new_figure(9.0, 4.8)
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for name_idx, name in enumerate(names):
        for row_idx, row in enumerate(rows):
            value = row.p50_us if name_idx == 0 else row.peer_p50_us.get(name)
            if value is None:
                continue
            place = row_idx + (name_idx - (len(names) - 1) / 2) * width
            label = name if row_idx == 0 else None
            axes.bar(place, value / 1e3, width, color=f"C{name_idx}", label=label)
            text = f"{value / 1e3:.1f}"
            if name_idx == 0 and row.fraction_of_roof is not None:
                text += f"\n{row.fraction_of_roof:.0%} of roof"
            axes.annotate(text, (place, value / 1e3), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(
        range(len(rows)), [f"destination: {row.case.memory}" for row in rows], fontsize=8
    )
    axes.set_yscale("log")
    axes.set_ylabel("p50 of wall time [ms]")
    axes.set_title(reshard_title(rows[0].case) + "\n" + header_line(environment), fontsize=6)
    axes.legend()
    axes.margins(y=0.2)
    figure.savefig(path, dpi=150)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"
