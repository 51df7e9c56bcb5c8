"""Shapes of a drawing over those of `moe_comm.cli.bench.svg`, in the color of a rank or without one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from moe_comm.cli.bench.svg import MARGIN, Palette, head, text_at

Point = tuple[float, float]
RANK_COLORS = ("python", "copies", "rows", "binding")
HEAD = 7.0


@dataclasses.dataclass
class Canvas:
    """A drawing that grows line by line. Coordinates are pixels from its upper left corner."""

    palette: Palette
    lines: list[str] = dataclasses.field(default_factory=list)

    def color(self, rank_idx: int | None) -> str:
        """Color of a rank; of None, that of lines that belong to nobody."""
        if rank_idx is None:
            return self.palette.muted
        return self.palette.parts[RANK_COLORS[rank_idx]]

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        rank_idx: int | None = None,
        *,
        fill: float = 0.0,
        dashes: str = "none",
        radius: float = 3,
    ) -> None:
        """A rectangle; `fill`: opacity of its color inside."""
        color = self.color(rank_idx)
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="{radius}" '
            f'fill="{color}" fill-opacity="{fill:.2f}" stroke="{color}" stroke-dasharray="{dashes}"/>'
        )

    def solid(self, x: float, y: float, width: float, height: float) -> None:
        """A rectangle that hides lines beneath it."""
        self.lines.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4" '
            f'fill="{self.palette.track}" stroke="{self.palette.muted}"/>'
        )

    def label(
        self,
        x: float,
        y: float,
        text: str,
        *,
        anchor: str = "start",
        size: int = 12,
        weight: int = 400,
        is_muted: bool = False,
        rank_idx: int | None = None,
    ) -> None:
        """A line of text whose baseline is at `y`."""
        color = self.palette.muted if is_muted else self.palette.text
        if rank_idx is not None:
            color = self.color(rank_idx)
        self.lines.append(text_at(x, y, text, color, size=size, weight=weight, anchor=anchor))

    def arrow(
        self,
        points: Sequence[Point],
        rank_idx: int | None = None,
        *,
        dashes: str = "none",
        width: float = 1.3,
        has_head: bool = True,
    ) -> None:
        """A line through points, with a head at the last."""
        color = self.color(rank_idx)
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.lines.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}" '
            f'stroke-dasharray="{dashes}"/>'
        )
        if has_head:
            (x0, y0), (x1, y1) = points[-2:]
            angle = math.atan2(y1 - y0, x1 - x0)
            corners = [(x1, y1)] + [
                (x1 - HEAD * math.cos(angle + turn), y1 - HEAD * math.sin(angle + turn))
                for turn in (0.4, -0.4)
            ]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
            self.lines.append(f'<polygon points="{path}" fill="{color}"/>')

    def notes(self, y: float, *texts: str) -> None:
        """Lines of small text from the left margin."""
        for idx, text in enumerate(texts):
            self.label(MARGIN, y + 17 * idx, text, is_muted=True)

    def svg(self, title: str, words: str, height: float) -> str:
        """The whole picture as text; `words`: what it shows, for those who cannot see it."""
        framed = [*head(title, words, height, self.palette), *self.lines, "</svg>", ""]
        return "\n".join(framed)
