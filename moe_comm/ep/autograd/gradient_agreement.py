"""Agreement of ranks on gradients: the word of a rank in a call, and the backward that follows on every rank.

What an operation's backward does for others follows from what any rank differentiates, so a call says
what this rank needs, its ranks agree in the rows that they exchange anyway, and where any of them needs
a gradient the call is part of the graph of every rank. The backward of a combine goes on to that of
its dispatch on every rank where it does so on any: a rank without rows, or whose experts used none of
them, follows. Where it does so on none and some rank has rows of its own that have a gradient, it ends
there on every rank, as in one process: who has cut the graph goes on by itself.
"""

from __future__ import annotations

import torch
from torch.autograd.graph import Node

from moe_comm.ep.gradient_word import (
    ENABLED,
    LEAVES_DISPATCH,
    NEEDS_ROWS,
    NEEDS_WEIGHTS,
    REACHES_DISPATCH,
)
from moe_comm.ep.validation import SUMMABLE


def dispatch_word(rows: object, weights: object, *, is_traced: bool = False) -> int:
    """Return the word on gradients that this rank sends in a dispatch.

    Args:
        rows: x, or the data of a pair. Rows of a dtype that combine does not add have no gradient.
        weights: Weights of the choices, or None.
        is_traced: Whether the call becomes part of a graph, which cannot wait for what others say: all
            that can have a gradient then needs one.
    """
    if not torch.is_grad_enabled():
        return 0
    word = ENABLED
    if (
        isinstance(rows, torch.Tensor)
        and (is_traced or rows.requires_grad)
        and rows.dtype in SUMMABLE
    ):
        word |= NEEDS_ROWS
    if (
        weights is not None
        and isinstance(weights, torch.Tensor)
        and (is_traced or weights.requires_grad)
    ):
        word |= NEEDS_WEIGHTS
    return word


def combine_word(
    rows: object, weights: object, link: torch.Tensor, *, is_traced: bool = False
) -> int:
    """Return the word on gradients that this rank sends in a combine.

    Args:
        rows: Rows of the combine.
        weights: Weights that it applies, or None.
        link: Link of the dispatch.
        is_traced: As in `dispatch_word`; the backward of the dispatch then follows that of the combine.
    """
    if not torch.is_grad_enabled():
        return 0
    if is_traced:
        return ENABLED | NEEDS_ROWS | REACHES_DISPATCH
    word = ENABLED | (NEEDS_ROWS if link.requires_grad else 0)
    if isinstance(rows, torch.Tensor) and rows.requires_grad:
        if link.requires_grad and _leads_to(rows.grad_fn, link.grad_fn):
            return word | REACHES_DISPATCH
        word |= NEEDS_ROWS | LEAVES_DISPATCH
    if isinstance(weights, torch.Tensor) and weights.requires_grad:
        # Seldom from the dispatch: theirs may be the graph of all layers before.
        if link.requires_grad and _leads_to(weights.grad_fn, link.grad_fn):
            return ENABLED | NEEDS_ROWS | REACHES_DISPATCH
        word |= NEEDS_ROWS
    return word


def _leads_to(origin: Node | None, destination: Node | None) -> bool:
    """Return whether a backward that comes to `origin` goes on to `destination`."""
    if origin is None or destination is None:
        return False
    if origin is destination:
        return True
    known = {origin}
    waiting = [origin]
    while waiting:
        # The first input, which is most often what came from the dispatch, is looked at first.
        for parent, _ in reversed(waiting.pop().next_functions):
            if parent is destination:
                return True
            if parent is not None and parent not in known:
                known.add(parent)
                waiting.append(parent)
    return False
