"""Autograd functions whose operations run on all ranks: in the graph of every rank or of none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from moe_comm.autograd.agreement import combine_word, is_cut_from, is_differentiated

__all__ = ["apply_collectively", "apply_combine", "gradients_of", "heard", "link_to", "said", "tie"]


class _Words(threading.local):
    """Of the call that this thread makes, which nothing of the forward's signature can carry."""

    said = 0
    heard = 0


_words = _Words()


def said() -> int:
    """What this rank says of gradients in the forward under way."""
    return _words.said


def heard(word: int) -> None:
    """Take what all ranks said in the forward under way."""
    _words.heard = word


def apply_collectively(apply: Callable[..., Any], word: int, args: tuple[Any, ...]) -> Any:
    """Call a function's `apply`; its outputs require a gradient where any rank needs one.

    Args:
        apply: Of the function, whose forward says `said()` and hands on what is `heard()`.
        word: What this rank says of gradients.
        args: Of the function.
    """
    if not word:
        return apply(*args)
    _words.said, _words.heard = word, 0
    try:
        outputs = apply(*_with_leaf(args))
        is_needed = is_differentiated(_words.heard)
    finally:
        _words.said = _words.heard = 0
    if is_needed:
        return outputs
    return tuple(map(_detached, outputs)) if isinstance(outputs, tuple) else _detached(outputs)


def link_to(rows: torch.Tensor) -> torch.Tensor:
    """float32 `[0]` that depends on the dispatch of `rows`: what `tie` takes in the combine."""
    link: torch.Tensor = _Link.apply(rows)  # type: ignore[no-untyped-call]
    return link


def tie(rows: Any, link: torch.Tensor | None, num_pairs: int | None) -> Any:
    """`rows`, whose backward goes on to what `link` is of, even where the rows themselves do not.

    Args:
        rows: Of a combine.
        link: Of its dispatch.
        num_pairs: See `is_cut_from`, whose rows are left alone.
    """
    if link is None or not link.requires_grad or not isinstance(rows, torch.Tensor):
        return rows
    if is_cut_from(rows, link.grad_fn and link.grad_fn.next_functions[0][0], num_pairs):
        return rows
    return _Tie.apply(rows, link)  # type: ignore[no-untyped-call]


class _Link(torch.autograd.Function):
    """Nothing of the rows, and no gradient: the engine goes on all the same."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor) -> torch.Tensor:
        return rows.new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:
        return None


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, link: torch.Tensor) -> torch.Tensor:
        same: torch.Tensor = torch.ops.aten.alias.default(rows)
        return same

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _with_leaf(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, one of which requires a gradient if any can: the function is in the graph then."""
    could = [
        position
        for position, value in enumerate(args)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    if not could or any(args[position].requires_grad for position in could):
        return args
    leaf = args[could[0]].detach().requires_grad_()
    return (*args[: could[0]], leaf, *args[could[0] + 1 :])


def _detached(output: Any) -> Any:
    if isinstance(output, torch.Tensor) and output.requires_grad:
        return output.detach()
    return output


def apply_combine(apply: Callable[..., Any], args: tuple[Any, ...], handle_idx: int) -> Any:
    """Call `apply` of a combine, tied to its dispatch by the handle `args[handle_idx]`. Collective."""
    rows = args[0] if args else None
    handle = args[handle_idx] if handle_idx < len(args) else None
    link = getattr(handle, "link", None)
    word = combine_word(rows, link)
    return apply_collectively(
        apply,
        word,
        (tie(rows, link, getattr(handle, "num_pairs", None)), *args[1:]) if word else args,
    )


def gradients_of(ctx: Any, gradients: dict[int, torch.Tensor | None]) -> tuple[Any, ...]:
    """One gradient for every argument that forward got."""
    return tuple(gradients.get(idx) for idx in range(len(ctx.needs_input_grad)))
