"""Numbers that plots show."""

from __future__ import annotations

import re
from pathlib import Path


def cell_numbers(plot: Path) -> list[str]:
    """Return the numbers in the cells of a heat map in an .svg file, row by row."""
    text = plot.read_text(encoding="utf-8")
    return re.findall(r"<text style=\"font-size: 6px[^>]*>([^<]+)</text>", text)
