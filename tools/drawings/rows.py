"""Two ranks and their rows: written once, and by two permutes with an all-to-all between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from moe_comm.cli.bench.svg import Palette
from moe_comm.ep.spec import Dispatch, Origin
from tools.drawings.shapes import Canvas

# Two ranks of three tokens with two choices each; experts 0 and 1 lie on rank 0, 2 and 3 on rank 1.
TOPK_IDX = [[[0, 2], [1, 3], [0, 3]], [[0, 2], [1, 2], [1, 3]]]
EXPERT_RANK = [0, 0, 1, 1]
ROW, GAP = 15, 3
BAND_TOPS = (84, 236)
BAND_HEIGHT = 138
ROW_BYTES = 7168 * 2


def draw_rows(palette: Palette) -> str:
    """What a dispatch writes, beside what it takes with permutes."""
    canvas = Canvas(palette)
    asked = Dispatch([torch.tensor(of_rank) for of_rank in TOPK_IDX], EXPERT_RANK, "expert_major")
    windows = [[row for row in window.rows if row is not None] for window in asked.windows]
    canvas.label(8, 56, "moe_comm: one pass", weight=600, size=14)
    canvas.label(410, 56, "permute, all-to-all, permute", weight=600, size=14)
    for rank_idx, top in enumerate(BAND_TOPS):
        for left, width in ((8, 372), (410, 442)):
            canvas.box(left, top - 16, width, BAND_HEIGHT, None, dashes="4 3", radius=6)
            canvas.label(left + 6, top + BAND_HEIGHT - 22, f"rank {rank_idx}", is_muted=True)

    tokens = [
        [Origin(rank_idx, token_idx, -1) for token_idx in range(len(of_rank))]
        for rank_idx, of_rank in enumerate(TOPK_IDX)
    ]
    x_at, window_at = 70, 260
    _column(canvas, x_at, tokens, "x")
    _column(canvas, window_at, windows, "window")
    _experts(canvas, window_at + 58)
    _arrows(canvas, x_at, tokens, window_at, windows)

    sent = [
        sorted((row for rows in windows for row in rows if row[0] == rank_idx), key=_expert_of)
        for rank_idx in range(2)
    ]
    came = [sorted(rows, key=lambda row: (row[0], _expert_of(row))) for rows in windows]
    columns = [
        (450, tokens, "x"),
        (552, sent, "to send"),
        (664, came, "received"),
        (770, windows, ""),
    ]
    for at, rows, name in columns:
        _column(canvas, at, rows, name or "sorted")
    for (at, rows, _), (next_at, next_rows, _) in itertools.pairwise(columns):
        _arrows(canvas, at, rows, next_at, next_rows)
    _experts(canvas, 770 + 58)

    num_tokens, num_rows = (sum(map(len, of_ranks)) for of_ranks in (tokens, windows))
    for at, reads, writes, text in (
        (8, num_tokens, num_rows, "Every row is written once, and each token read once."),
        (410, num_tokens + 2 * num_rows, 3 * num_rows, "Every row is written three times."),
    ):
        kib = (reads + writes) * ROW_BYTES // 1024
        canvas.label(at, 402, text, weight=600)
        text = f"{reads} rows read, {writes} written: {kib} KiB of 7168 columns in bfloat16"
        canvas.label(at, 420, text, is_muted=True)
    return canvas.svg(
        "Where the rows of a dispatch go (r0 t1: rank 0, token 1; e2: expert 2)",
        "Left, tokens of two ranks go straight to their places, sorted by expert, in the windows of both. "
        "Right, the same rows are permuted, exchanged and permuted again.",
        432,
    )


def _expert_of(row: Origin) -> int:
    return TOPK_IDX[row.source_idx][row.token_idx][row.topk_pos]


def _y(rank_idx: int, row_idx: int) -> float:
    return BAND_TOPS[rank_idx] + 14 + row_idx * (ROW + GAP)


def _column(canvas: Canvas, x: float, rows: Sequence[Sequence[Origin]], name: str) -> None:
    for rank_idx, of_rank in enumerate(rows):
        canvas.label(x + 26, _y(rank_idx, 0) - 6, name, anchor="middle", is_muted=True, size=11)
        for row_idx, row in enumerate(of_rank):
            y = _y(rank_idx, row_idx)
            canvas.box(x, y, 52, ROW, row.source_idx, fill=0.25, radius=2)
            text = f"r{row.source_idx} t{row.token_idx}"
            canvas.label(x + 26, y + 11.5, text, anchor="middle", size=11)


def _experts(canvas: Canvas, x: float) -> None:
    for rank_idx, _ in enumerate(BAND_TOPS):
        for local_idx in range(2):
            top = _y(rank_idx, 3 * local_idx)
            canvas.label(x, top + 28, f"e{2 * rank_idx + local_idx}", size=11, is_muted=True)
            canvas.arrow([(x - 3, top), (x - 3, top + 3 * ROW + 2 * GAP)], has_head=False)


def _arrows(
    canvas: Canvas,
    x: float,
    rows: Sequence[Sequence[Origin]],
    next_x: float,
    next_rows: Sequence[Sequence[Origin]],
) -> None:
    at = {row: (rank, idx) for rank, of_rank in enumerate(rows) for idx, row in enumerate(of_rank)}
    for rank_idx, of_rank in enumerate(next_rows):
        for row_idx, row in enumerate(of_rank):
            begin = at.get(row) or at[row._replace(topk_pos=-1)]
            ends = (x + 53, _y(*begin) + ROW / 2), (next_x - 1, _y(rank_idx, row_idx) + ROW / 2)
            canvas.arrow(ends, row.source_idx, width=1.0)
