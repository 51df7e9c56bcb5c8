"""Tables of checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from moe_comm.cli.bench.checkpoint.case import CheckpointCase
from moe_comm.cli.bench.checkpoint.run import CheckpointRow
from moe_comm.cli.bench.columns import add_columns, number
from moe_comm.cli.command_rules import FoldedTable


def checkpoint_table(
    case: CheckpointCase, environment: dict[str, Any], rows: Sequence[CheckpointRow]
) -> Group:
    """A row per operation and way."""
    peers = sorted({peer for row in rows for peer in row.speedup})
    table = Table()
    table.add_column("operation")
    table.add_column("way")
    add_columns(table, "p50 ms", "p95 ms", "MB", "GB/s", "plain files GB/s", "of plain files")
    add_columns(table, *(f"vs {peer}" for peer in peers))
    table.add_column("peak MB")
    table.add_column("check")
    for row in rows:
        peak = ", ".join(f"{way} {num / 1e6:,.0f}" for way, num in row.peak_bytes.items())
        table.add_row(
            row.op,
            row.way,
            number(row.p50_us, 1, 1e3),
            number(row.p95_us, 1, 1e3),
            number(row.bytes, 1, 1e6),
            number(row.gbs, 2),
            number(row.roof_gbs, 2),
            number(row.fraction_of_roof, 2),
            *(f"{row.speedup[peer]:.2f}x" if peer in row.speedup else "-" for peer in peers),
            peak or "-",
            row.check,
        )
    title = (
        f"checkpoint: {case.source} to {case.target} on {case.num_ranks} ranks, "
        f"{case.num_bytes / 1e6:,.0f} MB of bfloat16, on {environment['file_system']}"
    )
    return Group(Text(title, style="italic"), FoldedTable(table))
