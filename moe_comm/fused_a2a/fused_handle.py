"""Handles of dispatches, and what ties the backward of a combine to them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.handles import DispatchHandle
from moe_comm.fused_a2a.collective_function import link_to

__all__ = ["FusedHandle", "linked"]


class FusedHandle(NamedTuple):
    """What combine and the backward need of a `FusedDispatch`; opaque."""

    buffer: EpBuffer
    places: DispatchHandle
    link: torch.Tensor | None = None
    num_pairs: int | None = None


def linked(dispatched: Any) -> Any:
    """What a dispatch returned, its handle with what ties the backward of combine to it."""
    rows, *others, handle = dispatched
    if not rows.requires_grad:
        return dispatched
    handle = handle._replace(link=link_to(rows))
    if isinstance(handle, FusedHandle):  # whose rows are tokens, of which experts may share some
        handle = handle._replace(num_pairs=int(others[-1].sum()))
    return (rows, *others, handle)
