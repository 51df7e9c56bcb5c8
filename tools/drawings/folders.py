"""The folders of csrc and what each may know, as their READMEs say it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from moe_comm.cli.bench.svg import MARGIN, WIDTH, Palette
from tools.drawings.shapes import Canvas

CSRC = Path(__file__).resolve().parents[2] / "csrc"
KNOWS = re.compile(r"^Knows: ([\w, ]+)\.$", re.MULTILINE)
TOP, LEVEL, BOX_WIDTH, BOX_HEIGHT = 44, 82, 186, 48
# Centers in shares of the width, such that no arrow leads through a box.
COLUMNS = {
    "bindings": 0.4,
    "nvshmem": 0.2,
    "cuda": 0.2,
    "simt": 0.46,
    "runtime": 0.63,
    "ops": 0.5,
    "kernels": 0.83,
    "cpu": 0.4,
    "group": 0.63,
    "device": 0.86,
    "heap": 0.13,
    "layout": 0.63,
    "core": 0.4,
}


def known_folders(readme: str) -> set[str]:
    """Folders of csrc that a README says its folder knows."""
    (knows,) = KNOWS.findall(readme)
    return set() if knows == "nothing else" else set(knows.split(", "))


def read_arrows() -> dict[str, set[str]]:
    """Folders that each folder of csrc knows, by its name."""
    return {
        folder.name: known_folders((folder / "README.md").read_text()) for folder in CSRC.iterdir()
    }


def draw_folders(palette: Palette) -> str:
    """Every folder above those that it knows, with a line to each that no other line leads to."""
    canvas = Canvas(palette)
    arrows = read_arrows()
    levels: dict[str, int] = {}
    while len(levels) < len(arrows):
        for folder, known in arrows.items():
            if folder not in levels and known <= set(levels):
                levels[folder] = 1 + max((levels[other] for other in known), default=-1)
    num_levels = 1 + max(levels.values())
    places = {
        folder: (
            MARGIN + (WIDTH - 2 * MARGIN) * COLUMNS[folder],
            TOP + LEVEL * (num_levels - 1 - level),
        )
        for folder, level in levels.items()
    }
    for folder, known in arrows.items():
        for other in sorted(known):
            if not any(other in arrows[between] for between in known):
                (x, y), (other_x, other_y) = places[folder], places[other]
                canvas.arrow([(x, y + BOX_HEIGHT), (other_x, other_y - 1)])
    for folder, (x, y) in places.items():
        canvas.solid(x - BOX_WIDTH / 2, y, BOX_WIDTH, BOX_HEIGHT)
        canvas.label(x, y + 16, folder, anchor="middle", weight=600, size=13)
        for idx, line in enumerate(_subject(folder)):
            canvas.label(x, y + 29 + 12 * idx, line, anchor="middle", size=10, is_muted=True)
    height = TOP + LEVEL * num_levels
    canvas.notes(
        height - 12,
        "Arrow: may include. Indirect arrows are not drawn. tests/unit/test_layering.py checks every include.",
    )
    return canvas.svg(
        "Folders of csrc, and what each may know",
        "; ".join(
            f"{folder} knows {', '.join(sorted(known)) or 'nothing else'}"
            for folder, known in arrows.items()
        ),
        height + 4,
    )


def _subject(folder: str) -> list[str]:
    """The first clause of a folder's README in lines that its box has room for."""
    text = " ".join((CSRC / folder / "README.md").read_text().split())
    return textwrap.wrap(re.split(r"(?: `\w+`)?[:,.;(] ?", text)[0], 34)[:2]
