"""Pictures as the text of SVG files, for light and for dark pages: what all of them are drawn with.

Written without a plotting library, so that the same results give the same bytes everywhere.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from xml.sax.saxutils import escape

# Pixels, at the width of a README.
WIDTH = 860
MARGIN = 8
BAR = 17
TICK = 5
FOOT_LINE = 17
FONT = "-apple-system, BlinkMacSystemFont, 'Segoe UI', Helvetica, Arial, sans-serif"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Palette:
    """Colors of one version.

    Args:
        name: Name of the version, also in the name of its file.
        text: Color of what is read first.
        muted: Color of the rest, lines included.
        track: Color of the whole that a share is a part of.
        roof: Color of shares of the roof.
        peers: Colors by peer.
        parts: Colors by part of a call (`moe_comm.cli.bench.parts.PARTS`).
    """

    name: str
    text: str
    muted: str
    track: str
    roof: str
    peers: Mapping[str, str]
    parts: Mapping[str, str]


LIGHT = Palette(
    name="light",
    text="#1f2328",
    muted="#59636e",
    track="#eaeef2",
    roof="#5e6b78",
    peers={"gloo": "#0969da", "mpi": "#bc4c00"},
    parts={
        "python": "#0969da",
        "binding": "#8250df",
        "rows": "#1a7f37",
        "waiting": "#bf8700",
        "copies": "#bc4c00",
    },
)
DARK = Palette(
    name="dark",
    text="#e6edf3",
    muted="#9198a1",
    track="#262c36",
    roof="#9aa7b4",
    peers={"gloo": "#4493f8", "mpi": "#db6d28"},
    parts={
        "python": "#4493f8",
        "binding": "#ab7df8",
        "rows": "#3fb950",
        "waiting": "#d29922",
        "copies": "#db6d28",
    },
)


def head(title: str, words: str, height: float, palette: Palette) -> Iterator[str]:
    """The beginning of a picture, with its title; `words`: what it shows, for those who cannot see it."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="{FONT}">'
    )
    yield f"<title>{escape(title)}</title>"
    yield f"<desc>{escape(words)}</desc>"
    yield text_at(MARGIN, 22, title, palette.text, size=17, weight=600)


def foot(notes: Sequence[str], bottom: float, palette: Palette) -> Iterator[str]:
    """Lines beneath what ends at `bottom`, axis included."""
    for idx, note in enumerate(notes):
        yield text_at(MARGIN, bottom + 46 + FOOT_LINE * idx, note, palette.muted, size=12)


def notes_height(notes: Sequence[str]) -> int:
    """Pixels that `foot` takes."""
    return 38 + FOOT_LINE * len(notes)


def axis_label(x: float, bottom: float, text: str, palette: Palette) -> str:
    """Draw the text beneath a tick of an axis that ends at `bottom`."""
    return text_at(x, bottom + TICK + 14, text, palette.muted, size=12, anchor="middle")


def text_at(
    x: float,
    y: float,
    text: str,
    color: str,
    *,
    size: int = 13,
    weight: int = 400,
    anchor: str = "start",
) -> str:
    """One line of text; `anchor`: which end of it is at x."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}" fill="{color}">{escape(text)}</text>'
    )


def vertical(x: float, top: float, bottom: float, color: str, *, dashes: str = "none") -> str:
    """A line from (x, top) to (x, bottom)."""
    return (
        f'<line x1="{x:.1f}" y1="{top:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" '
        f'stroke="{color}" stroke-dasharray="{dashes}"/>'
    )


def bar(x: float, y: float, width: float, color: str) -> str:
    """A bar of height `BAR` whose upper left corner is at (x, y)."""
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BAR}" fill="{color}"/>'
