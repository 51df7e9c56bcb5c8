"""Cells and bars in which every benchmark shows its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from moe_comm.cli.bench.result import MeasuredRow


def add_columns(table: Table, *headings: str) -> None:
    """Add columns of numbers."""
    for heading in headings:
        table.add_column(heading, justify="right")


def number(value: float | None, digits: int, unit: float = 1.0) -> str:
    """Return a number in units, "-" where there is none."""
    return "-" if value is None else f"{value / unit:,.{digits}f}"


def ratio(value: float | None) -> str:
    """Return how many times as fast something is, "-" where that is not known."""
    if value is None:
        return "-"
    return f"{value:.1f}x" if value >= 4.0 else f"{value:.2f}x"


def plot_times(
    axes: Any,
    rows: Sequence[MeasuredRow],
    name: str,
    labels: Sequence[str],
    *,
    unit: tuple[float, str, int] = (1.0, "us", 0),
) -> None:
    """Bars of time, ours beside every peer's, on a logarithmic axis.

    Args:
        axes: Axes of matplotlib.
        rows: A group of bars each.
        name: Name of our bars.
        labels: Labels of the groups.
        unit: Microseconds in it, its name, and digits behind the point.
    """
    size, unit_name, digits = unit
    names = [name, *sorted({peer for row in rows for peer in row.peer_p50_us})]
    width = 0.8 / len(names)
    for name_idx, each in enumerate(names):
        for row_idx, row in enumerate(rows):
            us = row.p50_us if name_idx == 0 else row.peer_p50_us.get(each)
            if us is None:
                continue
            place = row_idx + (name_idx - (len(names) - 1) / 2) * width
            label = each if row_idx == 0 else None
            axes.bar(place, us / size, width, color=f"C{name_idx}", label=label)
            text = f"{us / size:.{digits}f}"
            if name_idx == 0 and row.fraction_of_roof is not None:
                text += f"\n{row.fraction_of_roof:.0%} of roof"
            axes.annotate(text, (place, us / size), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(rows)), labels, fontsize=8)
    axes.set_yscale("log")
    axes.set_ylabel(f"p50 of wall time [{unit_name}]")
    axes.legend()
    axes.margins(y=0.2)
