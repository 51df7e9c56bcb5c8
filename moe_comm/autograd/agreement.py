"""What this rank says of gradients in a call, and how its backward comes to be on every rank.

What an operation's backward does for others follows from what any rank differentiates, so a call says
what this rank needs, its ranks agree in the rows that they exchange anyway, and where any of them needs
a gradient the call is part of the graph of every rank.
"""

from __future__ import annotations

import torch

from moe_comm.backends.gradients import ENABLED, NEEDS_ANY, NEEDS_ROWS, NEEDS_WEIGHTS
from moe_comm.validation import SUMMABLE

__all__ = ["combine_word", "dispatch_word", "is_differentiated", "needs_rows", "needs_weights"]


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
    if isinstance(weights, torch.Tensor) and (is_traced or weights.requires_grad):
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
    needs_any = is_traced or any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in inputs
    )
    return ENABLED | NEEDS_ROWS if needs_any else ENABLED


def is_differentiated(word: int) -> bool:
    """Whether a call is part of the graph, by what its ranks say together."""
    return word & NEEDS_ANY != 0


def needs_rows(word: int) -> bool:
    """Whether the rows of a dispatch have a gradient."""
    return word & NEEDS_ROWS != 0


def needs_weights(word: int) -> bool:
    """Whether the weights of a dispatch have a gradient."""
    return word & NEEDS_WEIGHTS != 0
