"""Values of every option of dispatch and combine, for tests that try them all."""

from __future__ import annotations

import dataclasses
from typing import Any

from moe_comm import FP8_BLOCK128, MXFP8, Capacity, Layout


@dataclasses.dataclass(frozen=True)
class Values:
    """Values of one option.

    Args:
        good: Two values or more that a call takes; where ranks must say the same, no two are the same.
        bad: Values that no call takes.
        words: Words that the ranks' disagreement quotes, of each good value; if ranks must say
            the same.
        moves_rows: Whether no two good values bring the same rows. Else all do.
    """

    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    words: tuple[str, ...] = ()
    moves_rows: bool = True


VALUES = {
    "layout": Values(
        (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR, Layout.LOW_LATENCY),
        (1, None, "EXPERT_MAJOR", 7),
        ("EXPERT_MAJOR", "RANK_MAJOR", "LOW_LATENCY"),
    ),
    "expert_alignment": Values(
        (1, 8),
        (0, -7, True, 1.0, "8", 2**31),
        ("expert_alignment=1", "expert_alignment=8"),
    ),
    "quantization": Values(
        (MXFP8, FP8_BLOCK128),
        ("MXFP8", 1, True),
        ("MXFP8", "FP8_BLOCK128"),
    ),
    "capacity": Values(
        (
            Capacity(num_rows_per_expert=4, on_overflow="drop"),
            Capacity(num_rows_per_expert=16, on_overflow="raise"),
        ),
        (8, "drop", (8, None, "drop")),
        ("on_overflow=drop, num_rows_per_expert=4", "on_overflow=raise, num_rows_per_expert=16"),
    ),
    "masked_ranks": Values(((), (1,)), ()),
    "copy_out": Values(("auto", True, False), (1, None, "yes", 0), moves_rows=False),
    "async_op": Values((False, True), (1, None, "no"), moves_rows=False),
    "gradients": Values((1, 3), (True, 2, -1, 1.0, None), moves_rows=False),
}
