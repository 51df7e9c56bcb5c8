"""What this rank says of gradients in a call, and how its backward comes to be on every rank.

What an operation's backward does for others follows from what any rank differentiates, so a call says
what this rank needs, its ranks agree in the rows that they exchange anyway, and where any of them needs
a gradient the call is part of the graph of every rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.autograd.graph import Node

from moe_comm.ep.backends.gradients import ENABLED, NEEDS_ROWS, NEEDS_WEIGHTS
from moe_comm.ep.validation import SUMMABLE

__all__ = [
    "combine_word",
    "dispatch_word",
    "is_graph_cut",
]


def dispatch_word(rows: object, weights: object, *, is_traced: bool = False) -> int:
    """What this rank says in a dispatch.

    Args:
        rows: x, or the data of a pair. Rows of a dtype that combine does not add have no gradient.
        weights: Of the choices, or None.
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


def combine_word(*inputs: object, is_traced: bool = False) -> int:
    """What this rank says in a combine.

    Args:
        inputs: All that may have a gradient: rows, weights, the link of the dispatch; or None.
        is_traced: As in `dispatch_word`.
    """
    if not torch.is_grad_enabled():
        return 0
    if is_traced:
        return ENABLED | NEEDS_ROWS
    for tensor in inputs:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            return ENABLED | NEEDS_ROWS
    return ENABLED


def is_graph_cut(
    rows: object, dispatch: Node | None, num_pairs: Callable[[], int] | None = None
) -> bool:
    """Whether the caller has cut the graph between a dispatch and the rows of its combine.

    Schedules that run a backward in parts, and checkpoints that are re-entrant, do: they go on from a
    tensor of their own, with as many rows. The backward of that combine must then end where they cut
    it, as they begin the one of the dispatch. Rows that come from weights alone, as those of a rank
    that skips its experts or detaches their input, are not cut: nobody else would begin the backward
    of their dispatch.

    Args:
        rows: Of the combine.
        dispatch: Its node in the graph, or None where it has none.
        num_pairs: Rows that experts have, where `rows` has one for several of them; asked for only
            where the graph says too little.
    """
    if not isinstance(rows, torch.Tensor) or not rows.requires_grad or dispatch is None:
        return False
    origin = rows.grad_fn
    if origin is dispatch:
        return False
    if origin is None:
        return not isinstance(rows, nn.Parameter)
    leaves = set()
    known = {origin}
    waiting = [origin]
    while waiting:
        node = waiting.pop()
        if node is dispatch:
            return False
        leaf = getattr(node, "variable", None)
        if leaf is not None and not isinstance(leaf, nn.Parameter):
            leaves.add(_num_rows(leaf))
        # The first input, which is most often what came from the dispatch, is looked at first.
        for parent, _ in reversed(node.next_functions):
            if parent is not None and parent not in known:
                known.add(parent)
                waiting.append(parent)
    if _num_rows(rows) in leaves:
        return True
    return bool(leaves) and num_pairs is not None and num_pairs() in leaves


def _num_rows(tensor: torch.Tensor) -> int:
    return math.prod(tensor.shape[:-1]) if tensor.dim() > 1 else -1
