"""The plot of a sweep: time and roof of every size, and what the time is made of, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_comm.cli.bench.parts import PARTS
from moe_comm.cli.bench.report import case_title
from moe_comm.cli.bench.result import BenchRow
from moe_comm.cli.bench.svg import (
    DARK,
    LIGHT,
    MARGIN,
    TICK,
    Palette,
    axis_label,
    bar,
    foot,
    head,
    notes_height,
    text_at,
    vertical,
)

# Pixels.
TOP = 86
ROW = 24
TIME_LEFT, TIME_WIDTH = 68, 330
PARTS_LEFT, PARTS_WIDTH = 500, 330
LEGEND_STEP = 66


def sweep_pictures(path: Path) -> list[tuple[Palette, Path]]:
    """Files of a sweep's plot, beside `path`: one for light pages, one for dark ones.

    Raises:
        ValueError: `path` does not end in `.svg`.
    """
    if path.suffix != ".svg":
        raise ValueError(f"--plot of a sweep must end in .svg, got {path}")
    return [
        (palette, path.with_name(f"{path.stem}-{palette.name}.svg")) for palette in (LIGHT, DARK)
    ]


def draw_sweep(rows: Sequence[BenchRow], environment: str, palette: Palette) -> str:
    """The plot as the text of an SVG file; the page shows through its background.

    Args:
        rows: Rows of a sweep; those of sizes are drawn.
        environment: Environment on one line.
        palette: Colors of the plot.
    """
    sizes = [row for row in rows if row.op == "sweep"]
    notes = (
        case_title(sizes[0].case, is_sweep=True),
        "Time: median of ranks and calls. Roof, in front of it: plain loops over the same bytes.",
        *environment.split(" | kernel ", 1)[:1],
    )
    bottom = TOP + ROW * len(sizes)
    times_us = [us for row in sizes for us in (row.p50_us, _roof_us(row)) if us is not None]
    low = math.floor(math.log10(min(times_us)))
    decades = max(1, math.ceil(math.log10(max(times_us))) - low)

    def length(us: float) -> float:
        return TIME_WIDTH * (math.log10(us) - low) / decades

    title = "Dispatch + combine by number of tokens"
    words = " ".join([*map(_in_words, sizes), *notes])
    lines = [*head(title, words, bottom + notes_height(notes), palette)]
    lines.append(text_at(MARGIN, 58, "tokens", palette.text, weight=600))
    lines.append(text_at(TIME_LEFT, 58, "time, microseconds", palette.text, weight=600))
    lines.append(text_at(PARTS_LEFT, 58, "made of", palette.text, weight=600))
    for idx, name in enumerate(PARTS):
        left = PARTS_LEFT + LEGEND_STEP * idx
        lines.append(text_at(left, TOP - 9, name, palette.parts[name], size=12, weight=600))
    for tick in range(decades + 1):
        x = TIME_LEFT + TIME_WIDTH * tick / decades
        lines.append(vertical(x, bottom, bottom + TICK, palette.muted))
        lines.append(axis_label(x, bottom, f"{10.0 ** (low + tick):g}", palette))
    for percent in (0, 50, 100):
        x = PARTS_LEFT + PARTS_WIDTH * percent / 100
        lines.append(vertical(x, bottom, bottom + TICK, palette.muted))
        lines.append(axis_label(x, bottom, f"{percent} %", palette))
    for idx, row in enumerate(sizes):
        y = TOP + ROW * idx
        assert row.p50_us is not None
        lines.append(text_at(MARGIN, y + 13, str(row.case.num_tokens), palette.text))
        lines.append(bar(TIME_LEFT, y, length(row.p50_us), palette.track))
        roof_us = _roof_us(row)
        if roof_us is not None:
            lines.append(bar(TIME_LEFT, y, length(roof_us), palette.roof))
        end = TIME_LEFT + length(row.p50_us) + 6
        lines.append(text_at(end, y + 13, _in_us(row.p50_us), palette.text))
        lines += _stack(row, y, palette)
    for x in (TIME_LEFT, PARTS_LEFT):
        lines.append(vertical(x, TOP - 4, bottom, palette.muted))
    lines += foot(notes, bottom, palette)
    return "\n".join([*lines, "</svg>", ""])


def _stack(row: BenchRow, y: float, palette: Palette) -> Iterator[str]:
    parts_us = row.extra["parts_us"]
    total_us = sum(parts_us.values())
    x = float(PARTS_LEFT)
    for name in PARTS:
        width = PARTS_WIDTH * parts_us[name] / total_us
        yield bar(x, y, width, palette.parts[name])
        x += width


def _roof_us(row: BenchRow) -> float | None:
    if row.roof_gbs is None or row.bytes is None:
        return None
    return row.bytes / row.roof_gbs / 1e3


def _in_us(us: float) -> str:
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _in_words(row: BenchRow) -> str:
    assert row.p50_us is not None
    parts = ", ".join(f"{name} {us:.1f}" for name, us in row.extra["parts_us"].items())
    return f"{row.case.num_tokens} tokens: {_in_us(row.p50_us)} us ({parts})."
