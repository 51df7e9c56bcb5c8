"""Autograd functions whose operations run on all ranks: in the graph of every rank or of none."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from moe_comm.ep.autograd.agreement import combine_word, is_cut_from, is_differentiated

__all__ = [
    "apply_collectively",
    "apply_combine",
    "gradients_of",
    "heard",
    "link_to",
    "runs_once",
    "said",
    "tie",
]


class _Words(threading.local):
    """Of the call that this thread makes, which nothing of the forward's signature can carry."""

    said = 0
    heard = 0
    done: tuple[_Kept, Any] | None = None


_words = _Words()


class _Kept:
    """What a forward outside the graph keeps for the backward, in place of autograd's context."""


def said() -> int:
    """What this rank says of gradients in the forward under way."""
    return _words.said


def heard(word: int) -> None:
    """Take what all ranks said in the forward under way."""
    _words.heard = word


def runs_once(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator of forwards: in the graph, one takes over what was done outside it."""

    @functools.wraps(forward)
    def run(ctx: Any, *args: Any) -> Any:
        if _words.done is None:
            return forward(ctx, *args)
        kept, outputs = _words.done
        for name, value in vars(kept).items():
            setattr(ctx, name, value)
        return outputs

    return run


def apply_collectively(function: Any, word: int, args: tuple[Any, ...]) -> Any:
    """What a function returns; its outputs require a gradient where any rank needs one.

    The operation runs outside the graph: whether it belongs there only its ranks together know, and
    a function of autograd takes as long as a small exchange.

    Args:
        function: Whose forward `runs_once`, says `said()` and hands on what is `heard()`.
        word: What this rank says of gradients.
        args: Of the function.
    """
    words = _words
    words.said, words.heard = word, 0
    try:
        if torch._C._are_functorch_transforms_active():
            return _in_graph(function, *args)  # which refuses them
        kept = _Kept()
        # As `torch.no_grad()`, whose context costs as much as the checks of a call. A word is said
        # where gradients are enabled.
        torch._C._set_grad_enabled(False)
        try:
            outputs = function.forward(kept, *args)
        finally:
            torch._C._set_grad_enabled(word != 0)
        if is_differentiated(words.heard):
            words.done = (kept, outputs)
            outputs = _in_graph(function, *_with_leaf(args))
        return outputs
    finally:
        words.said = words.heard = 0
        words.done = None


def _in_graph(function: Any, *args: Any) -> Any:
    """The `apply` of autograd, beneath the one that `function` has in its place."""
    return super(function, function).apply(*args)


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


def apply_combine(function: Any, args: tuple[Any, ...], handle_idx: int) -> Any:
    """As `apply_collectively`, of a combine: tied to its dispatch by the handle `args[handle_idx]`."""
    rows = args[0] if args else None
    handle = args[handle_idx] if handle_idx < len(args) else None
    link = getattr(handle, "link", None)
    word = combine_word(rows, link)
    return apply_collectively(
        function,
        word,
        (tie(rows, link, getattr(handle, "num_pairs", None)), *args[1:]) if word else args,
    )


def gradients_of(ctx: Any, gradients: dict[int, torch.Tensor | None]) -> tuple[Any, ...]:
    """One gradient for every argument that forward got."""
    return tuple(gradients.get(idx) for idx in range(len(ctx.needs_input_grad)))
