"""A weight on its way from one layout to another: what is described, planned and moved."""

from __future__ import annotations

import itertools

from moe_comm.cli.bench.svg import Palette
from moe_comm.resharding.describe.intervals import Intervals, Run, chunk, intersect, whole
from tools.drawings.shapes import Canvas

SHAPE = (6, 8)
CELL = 24
TOP = 96
# Trainers cut columns in two, engines rows in three.
NUM_TRAINERS, NUM_ENGINES = 2, 3

Held = tuple[Intervals, Intervals]


def draw_refit(palette: Palette) -> str:
    """Both sides, the pieces that they have in common, and where these go."""
    canvas = Canvas(palette)
    rows, columns = (whole(size) for size in SHAPE)
    trainers: list[Held] = [
        (rows, chunk(columns, NUM_TRAINERS, idx)) for idx in range(NUM_TRAINERS)
    ]
    engines: list[Held] = [(chunk(rows, NUM_ENGINES, idx), columns) for idx in range(NUM_ENGINES)]
    for x, step, text in (
        (8, "1. describe", "which part of the whole each rank holds"),
        (300, "2. plan", "every part of a target from one source"),
        (610, "3. move", "directly to its final place"),
    ):
        canvas.label(x, 56, step, weight=600, size=14)
        canvas.label(x, 74, text, is_muted=True)

    for idx, held in enumerate(trainers):
        _part(canvas, 30, TOP + 10, held, idx, f"trainer {idx}")
    canvas.label(
        30 + CELL * SHAPE[1] / 2,
        TOP + 24 + CELL * SHAPE[0],
        "2 trainers, by columns",
        anchor="middle",
    )
    below = TOP + 60 + CELL * SHAPE[0]
    for idx, held in enumerate(engines):
        _part(canvas, 30, below, held, None, f"engine {idx}")
    canvas.label(
        30 + CELL * SHAPE[1] / 2,
        below + 14 + CELL * SHAPE[0],
        "3 engines, by rows",
        anchor="middle",
    )

    x, y = 320.0, TOP + 80.0
    pieces = []
    for (source_idx, source), (engine_idx, engine) in itertools.product(
        enumerate(trainers), enumerate(engines)
    ):
        runs = [intersect(*pair) for pair in zip(source, engine, strict=True)]
        for row, column in itertools.product(*runs):
            pieces.append((source_idx, engine_idx, row, column))
            at = x + CELL * column.dst_start, y + CELL * (2 * engine_idx + row.dst_start)
            _piece(canvas, *at, source_idx, row, column, f"{source_idx} to {engine_idx}")
    canvas.label(
        x + CELL * SHAPE[1] / 2,
        y - 10,
        "one tensor of the checkpoint",
        anchor="middle",
        is_muted=True,
        size=11,
    )
    canvas.label(
        x + CELL * SHAPE[1] / 2,
        y + 18 + CELL * SHAPE[0],
        f"{len(pieces)} pieces, {SHAPE[0] * SHAPE[1]} elements,",
        anchor="middle",
    )
    canvas.label(
        x + CELL * SHAPE[1] / 2, y + 34 + CELL * SHAPE[0], "each of them once", anchor="middle"
    )

    engine_tops = [TOP + 20 + 112.0 * idx for idx in range(NUM_ENGINES)]
    trainer_tops = [TOP + 40.0 + 170 * idx for idx in range(NUM_TRAINERS)]
    for idx, top in enumerate(trainer_tops):
        canvas.label(556, top + 18, f"trainer {idx}", rank_idx=idx, weight=600)
    for source_idx, engine_idx, row, column in pieces:
        top = engine_tops[engine_idx]
        at = 656 + CELL * column.dst_start, top + CELL * row.dst_start
        _piece(canvas, *at, source_idx, row, column, "")
        end = at[0] - 1 if column.dst_start == 0 else at[0] + 6, at[1] + CELL
        canvas.arrow([(626, trainer_tops[source_idx] + 14), end], source_idx)
    for idx, top in enumerate(engine_tops):
        canvas.box(656, top, CELL * SHAPE[1], CELL * 2, None)
        right = 656 + CELL * SHAPE[1]
        canvas.label(right, top - 6, f"engine {idx}", anchor="end", is_muted=True, size=11)
    height = below + 40 + CELL * SHAPE[0]
    canvas.notes(
        height,
        "A second refit repeats step 3 only. No rank ever holds the whole tensor.",
    )
    return canvas.svg(
        "A refit: describe, plan, move",
        "Two trainers hold halves of a tensor by columns, three engines want thirds by rows. The plan has six pieces, and each is "
        "copied from its trainer to its place in its engine.",
        height + 12,
    )


def _part(canvas: Canvas, x: float, y: float, held: Held, rank_idx: int | None, name: str) -> None:
    """What a rank holds of the whole, at its place there."""
    for row, column in itertools.product(*held):
        left, top = x + CELL * column.global_start, y + CELL * row.global_start
        width, height = CELL * column.length, CELL * row.length
        canvas.box(left, top, width, height, rank_idx, fill=0.2 if rank_idx is not None else 0.0)
        canvas.label(left + width / 2, top + height / 2 + 4, name, anchor="middle", size=11)


def _piece(
    canvas: Canvas, x: float, y: float, rank_idx: int, row: Run, column: Run, name: str
) -> None:
    width, height = CELL * column.length, CELL * row.length
    canvas.box(x, y, width, height, rank_idx, fill=0.25)
    canvas.label(x + width / 2, y + height / 2 + 4, name, anchor="middle", size=11)
