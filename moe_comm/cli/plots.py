"""Plots that several commands draw with matplotlib, and whether they can be."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_comm.output_files import check_output

PLOT_HELP = "Write a plot here, .png, .svg or .pdf (needs matplotlib)."

_ENDINGS = (".pdf", ".png", ".svg")
# More cells than this would not be read, and their text would overlap.
_NUM_MAX_WRITTEN = 16


def check_plot(path: Path | None) -> None:
    """Check before the work whose result it shows that a plot can be drawn into a file.

    Args:
        path: Path of the file; None if no plot was asked for.

    Raises:
        ValueError: It cannot be written, has another ending than `.png`, `.svg` or `.pdf`, or matplotlib
            is not installed.
    """
    if path is None:
        return
    check_output("--plot", path)
    if path.suffix not in _ENDINGS:
        raise ValueError(f"--plot must end in one of {', '.join(_ENDINGS)}, got {path}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install matplotlib")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure that saves itself without a display.

    Args:
        width: Inches.
        height: Inches.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_matrix(
    path: Path,
    values: Mapping[tuple[int, int], float],
    *,
    title: str,
    row_label: str,
    column_label: str,
    unit: str,
) -> None:
    """Draw values of pairs of ranks as a heat map, with the numbers in the cells where they are few.

    Args:
        path: File to write.
        values: Values by (rank of the row, rank of the column); pairs without one stay empty.
        title: Title above the plot.
        row_label: Meaning of rows.
        column_label: Meaning of columns.
        unit: Unit of the values.
    """
    rows, columns = (sorted({pair[end] for pair in values}) for end in (0, 1))
    cells = [[values.get((row, column), float("nan")) for column in columns] for row in rows]
    figure = new_figure(
        3.0 + 0.45 * min(len(columns), 2 * _NUM_MAX_WRITTEN),
        2.4 + 0.4 * min(len(rows), 2 * _NUM_MAX_WRITTEN),
    )
    axes = figure.add_subplot()
    image = axes.imshow(cells, cmap="viridis", vmin=0.0)
    for ranks, axis in ((rows, axes.yaxis), (columns, axes.xaxis)):
        step = -(-len(ranks) // _NUM_MAX_WRITTEN)
        axis.set_ticks(range(0, len(ranks), step), [str(rank) for rank in ranks[::step]])
    if max(len(rows), len(columns)) <= _NUM_MAX_WRITTEN:
        middle = max(values.values()) / 2
        for row_idx, row in enumerate(cells):
            for column_idx, value in enumerate(row):
                if value == value:  # an empty cell is not a number
                    axes.text(
                        column_idx,
                        row_idx,
                        f"{value:.3g}" if value < 1000 else f"{value:,.0f}",
                        ha="center",
                        va="center",
                        fontsize=6,
                        color="white" if value < middle else "black",
                    )
    axes.set_ylabel(row_label)
    axes.set_xlabel(column_label)
    axes.set_title(title, fontsize=8)
    figure.colorbar(image, label=unit)
    import matplotlib as mpl

    # Text of an .svg stays text, which can be searched and copied.
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, dpi=150)
