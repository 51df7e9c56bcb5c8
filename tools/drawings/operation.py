"""One operation of three ranks on a time line, and the same where a rank dies."""

from __future__ import annotations

from moe_comm.cli.bench.svg import Palette
from tools.drawings.shapes import Canvas

LEFT, UNIT = 84, 7.4
LANE, HEIGHT = 46, 22
# Of every rank: when it enters, and how long it moves rows. Rank 2 comes late.
ENTERS = (0, 6, 22)
MOVES = (30, 22, 26)
SAY, JUDGE = 6, 7
FLIGHT = 3


def draw_operation(palette: Palette) -> str:
    """Both time lines, one above the other."""
    canvas = Canvas(palette)
    heard = max(ENTERS) + SAY + FLIGHT
    _line(canvas, 62, "All come: rank 2 late", heard, died_at=None)
    _line(canvas, 262, "Rank 2 dies while it moves rows", heard, died_at=heard + JUDGE + 10)
    canvas.notes(
        448,
        "say: send a control row to every peer: call, hash of its arguments, status, offered window, counts of rows.",
        "hear: wait for the control rows of all. In errors and traces, say and hear are phase rows.",
        "judge: every rank gets the same result from the same control rows; mistakes are raised here, before data moves.",
        "move: write rows to their places (phase data). done: wait until every peer has written here.",
    )
    return canvas.svg(
        "One operation, from the call to its end",
        "Above, three ranks say, hear, judge, move and end together; two wait for the third, which comes late. "
        "Below, the third dies while it moves rows, and the two others raise PeerFailedError naming it.",
        517,
    )


def _x(time: float) -> float:
    return LEFT + UNIT * time


def _line(canvas: Canvas, top: float, title: str, heard: float, died_at: float | None) -> None:
    canvas.label(8, top, title, weight=600, size=14)
    moved = [heard + JUDGE + moves for moves in MOVES]
    end = max(moved) + FLIGHT if died_at is None else died_at + 6
    for rank_idx, enters in enumerate(ENTERS):
        y = top + 18 + LANE * rank_idx
        canvas.label(8, y + 15, f"rank {rank_idx}", rank_idx=rank_idx, weight=600)
        _phase(canvas, rank_idx, y, enters, enters + SAY, "say", 0.45)
        _phase(canvas, rank_idx, y, enters + SAY, heard, "hear", 0.0)
        _phase(canvas, rank_idx, y, heard, heard + JUDGE, "judge", 0.45)
        is_dead = died_at is not None and rank_idx == len(ENTERS) - 1
        stop = died_at if died_at is not None and is_dead else min(moved[rank_idx], end)
        _phase(canvas, rank_idx, y, heard + JUDGE, stop, "move", 0.25)
        if is_dead:
            x = _x(stop)
            canvas.label(x + 6, y + 16, "killed", weight=600)
            continue
        if stop < end:
            _phase(canvas, rank_idx, y, stop, end, "done", 0.0)
        canvas.arrow([(_x(end), y - 4), (_x(end), y + HEIGHT + 4)], has_head=False, width=2)
        told = "returns" if died_at is None else "PeerFailedError: rank 2"
        canvas.label(_x(end) + 6, y + 16, told, weight=600)
    last = len(ENTERS) - 1
    source = top + 18 + LANE * last
    for rank_idx in range(last):
        y = top + 18 + LANE * rank_idx
        canvas.arrow([(_x(ENTERS[last] + SAY), source), (_x(heard), y + HEIGHT)], last)
        if died_at is None:
            slowest = MOVES.index(max(MOVES))
            if rank_idx != slowest:
                begin = top + 18 + LANE * slowest + HEIGHT
                canvas.arrow([(_x(moved[slowest]), begin), (_x(end), y)], slowest)
        else:
            canvas.arrow([(_x(died_at), source), (_x(end), y + HEIGHT)], last, dashes="3 3")
    if died_at is None:
        canvas.arrow([(_x(moved[0]), top + 18 + HEIGHT), (_x(end), source)], 0)
    bottom = source + HEIGHT + 18
    canvas.arrow([(_x(heard), top + 8), (_x(heard), bottom)], dashes="3 3", has_head=False)
    canvas.label(_x(heard) + 6, bottom, "all control rows are here", size=11, is_muted=True)


def _phase(
    canvas: Canvas, rank_idx: int, y: float, begin: float, end: float, name: str, fill: float
) -> None:
    """A phase; one that waits has no color inside."""
    width = _x(end) - _x(begin)
    canvas.box(_x(begin), y, width, HEIGHT, rank_idx, fill=fill, dashes="none" if fill else "4 3")
    if width > 26:
        canvas.label(_x(begin) + width / 2, y + 15, name, anchor="middle", size=12)
