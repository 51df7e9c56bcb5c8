"""`deep_ep.utils`: events, FP8 and roundings of sizes."""

from __future__ import annotations

from moe_comm import gone
from moe_comm.compat.deep_ep.utils.event import EventHandle, EventOverlap
from moe_comm.compat.deep_ep.utils.math import (
    align,
    calc_diff,
    ceil_div,
    per_token_cast_back,
    per_token_cast_to_fp8,
)

__all__ = [
    "EventHandle",
    "EventOverlap",
    "align",
    "calc_diff",
    "ceil_div",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
]

gone.answer_imports()
