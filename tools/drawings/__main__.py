"""Write every drawing, for light and for dark pages."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from moe_comm.cli.bench.svg import DARK, LIGHT, Palette
from tools.drawings.folders import draw_folders
from tools.drawings.heap import draw_heap
from tools.drawings.operation import draw_operation
from tools.drawings.refit import draw_refit
from tools.drawings.rows import draw_rows

DRAWINGS: dict[str, Callable[[Palette], str]] = {
    "rows": draw_rows,
    "operation": draw_operation,
    "folders": draw_folders,
    "refit": draw_refit,
    "heap": draw_heap,
}


def main() -> None:
    """Draw all of `DRAWINGS` into the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    for name, draw in DRAWINGS.items():
        for palette in (LIGHT, DARK):
            (folder / f"{name}-{palette.name}.svg").write_text(draw(palette))


if __name__ == "__main__":
    main()
