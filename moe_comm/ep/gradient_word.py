"""Word of a rank on gradients in an operation: bits that travel in its row.

Ranks may say different things, and each finds the same in all their words: an operation is
differentiated on every rank where any rank needs its gradient, and refused on every rank where some
rank could not run its backward. `layout::GradientWord` of csrc/layout/row.h is the same word, and
csrc/ops/agreement.cpp judges it alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

ENABLED = 1
"""This rank can run a backward: its gradients are enabled and its call is differentiable."""
NEEDS_ROWS = 2
"""It needs the gradient of what rows are made of; in a combine, any gradient."""
NEEDS_WEIGHTS = 4
"""It needs that of the weights of a dispatch; says nothing in a combine or where no weights travel."""
NEEDS_ANY = NEEDS_ROWS | NEEDS_WEIGHTS
REACHES_DISPATCH = 8
"""In a combine: its rows come from those of its dispatch, whose backward therefore follows its own."""
LEAVES_DISPATCH = 16
"""In a combine: its rows have a gradient and do not come from those of its dispatch."""

_OF_BACKWARD = ENABLED | NEEDS_ANY | REACHES_DISPATCH | LEAVES_DISPATCH
_WEIGHT_BYTES_SHIFT = 8


def check_word(word: object) -> None:
    """A word that a caller may give: needs nothing, or is enabled.

    Raises:
        TypeError: Not an int.
        ValueError: No such word.
    """
    if type(word) is not int:
        raise TypeError(f"gradients must be an int, got {type(word).__name__}")
    if word != 0 and not (word & ENABLED and 0 < word <= _OF_BACKWARD):
        raise ValueError(
            f"gradients must be 0, or {ENABLED} with {NEEDS_ROWS} and {NEEDS_WEIGHTS} added for what "
            f"is needed, and in a combine {REACHES_DISPATCH} for rows that come from their dispatch or "
            f"{LEAVES_DISPATCH} for others that have a gradient, got {word}"
        )


def with_applied_weights(word: int, topk_weights: torch.Tensor | None) -> int:
    """The word of a combine that applies weights: its backward takes them on every rank or on none."""
    if topk_weights is None:
        return word
    return word | topk_weights.element_size() << _WEIGHT_BYTES_SHIFT


def unite(words: Sequence[int]) -> int:
    """Unite the words of all ranks: 0 where some rank runs no backward, and then none does."""
    united = 0
    for word in words:
        if not word & ENABLED:
            return 0
        united |= word
    return united & _OF_BACKWARD


def clash(words: Sequence[int], operation: str) -> ValueError | None:
    """Return an error for every rank, where ranks that do the same could not run its backward; else None.

    Args:
        words: Word of every rank on gradients.
        operation: "dispatch", "cached dispatch" or "combine".
    """
    needs = [rank for rank, word in enumerate(words) if word & NEEDS_ANY]
    if not needs:
        return None
    needing = _ranks(needs)
    disabled = [rank for rank, word in enumerate(words) if not word & ENABLED]
    if disabled:
        return ValueError(
            f"ranks disagree: a gradient of this {operation} is needed on {needing}, and gradients "
            f"are disabled on {_ranks(disabled)} (torch.no_grad, inference mode, or an EpBuffer's own "
            f"{operation}): every rank runs its backward or none does"
        )
    applied = [word >> _WEIGHT_BYTES_SHIFT for word in words]
    for rank, num_bytes in enumerate(applied):
        if num_bytes != applied[0]:
            return ValueError(
                f"ranks disagree: a combine whose backward is needed on {needing} applies "
                f"{_weights(applied[0])} on rank 0 and {_weights(num_bytes)} on rank {rank}"
            )
    return None


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _weights(num_bytes: int) -> str:
    return f"float{num_bytes * 8} weights" if num_bytes else "no weights"
