"""Two ranks, their segments, and windows in them that both address alike."""

from __future__ import annotations

from moe_comm.cli.bench.svg import Palette
from tools.drawings.shapes import Canvas

LEFTS, WIDTH, TOP = (8, 446), 406, 68
SEGMENT_X, SEGMENT_WIDTH, SEGMENT_HEIGHT = 92, 300, 44
# Windows of each segment of each rank: begin and size in shares of the segment, and whose they are.
WINDOWS = [
    [
        [(0.0, 0.36, "rows, dispatch 7"), (0.4, 0.36, "sums, combine 6")],
        [(0.0, 0.5, "a model's weights")],
    ],
    [[(0.1, 0.42, "rows, dispatch 7"), (0.66, 0.3, "expert output")]],
]


def draw_heap(palette: Palette) -> str:
    """What each rank owns, what it has mapped of its peer, and one address."""
    canvas = Canvas(palette)
    for rank_idx, left in enumerate(LEFTS):
        canvas.box(left, TOP - 16, WIDTH, 312, None, dashes="4 3", radius=6)
        canvas.label(left + 10, TOP + 4, f"rank {rank_idx}: a process", weight=600, size=14)
        y = TOP + 26.0
        for owner in (rank_idx, 1 - rank_idx):
            words = "its own segments" if owner == rank_idx else f"mapped: those of rank {owner}"
            canvas.label(left + 10, y, words, size=12, rank_idx=owner)
            y += 8
            for segment_idx, windows in enumerate(WINDOWS[owner]):
                x = left + SEGMENT_X
                canvas.label(left + 16, y + 26, f"segment {segment_idx}", is_muted=True, size=11)
                is_own = owner == rank_idx
                canvas.box(
                    x, y, SEGMENT_WIDTH, SEGMENT_HEIGHT, owner, dashes="none" if is_own else "4 3"
                )
                for begin, size, name in windows:
                    at, width = x + SEGMENT_WIDTH * begin, SEGMENT_WIDTH * size
                    canvas.box(at, y + 6, width, SEGMENT_HEIGHT - 12, owner, fill=0.3)
                    canvas.label(at + width / 2, y + 26, name, anchor="middle", size=10)
                y += SEGMENT_HEIGHT + 8
            y += 22
    begin, size, _ = WINDOWS[1][0][0]
    mapped = TOP + 26 + 8 + 2 * (SEGMENT_HEIGHT + 8) + 22 + 8
    x = LEFTS[0] + SEGMENT_X + SEGMENT_WIDTH * begin
    canvas.arrow(
        [(x + 1, mapped + SEGMENT_HEIGHT + 34), (x + 1, mapped + SEGMENT_HEIGHT - 4)], None
    )
    canvas.label(
        x - 30,
        mapped + SEGMENT_HEIGHT + 48,
        "address: rank 1, segment 0, offset",
        size=12,
        weight=600,
    )
    canvas.label(
        x - 30,
        mapped + SEGMENT_HEIGHT + 64,
        "a store here is in rank 1's memory",
        size=11,
        is_muted=True,
    )
    canvas.notes(
        TOP + 322,
        "heap: all segments. A segment is a memfd of its owner, mapped by its peers. The heap grows by a segment; none moves.",
        "window: a part of the heap with one holder. The last tensor over it frees it.",
    )
    return canvas.svg(
        "Heap, segments and windows",
        "Two processes. Each has segments of its own and has mapped those of its peer. Windows lie in segments; an address is a rank, "
        "a segment and an offset, so that it means the same in both.",
        TOP + 350,
    )
