"""Marks on models that a failed refit left neither old nor new."""

from __future__ import annotations

from moe_comm.resharding.describe.module_tensors import RefitSide, module_of, modules_with

__all__ = ["clear_stale", "is_stale", "mark_stale", "mark_torn", "stale_reason"]

# In the module's own dictionary, so that a copy of a stale model is stale.
_REASON = "_stale_reason"


def mark_stale(model: RefitSide, reason: str) -> None:
    """Say that some weights of `model` are not what they should be. A later reason replaces this."""
    module_of(model).__dict__[_REASON] = reason


def mark_torn(model: RefitSide | None, call: str, error: BaseException) -> None:
    """Say of a target, if there is one, that a call which failed may have written a part of it.

    Args:
        model: The target.
        call: Such as "a refit".
        error: It failed by.
    """
    if model is not None:
        text = str(error).split("\n", 1)[0]
        mark_stale(model, f"{call} failed: {type(error).__name__}: {text}")


def clear_stale(model: RefitSide, *, look_again: bool = True) -> None:
    """Say that `model` is whole: after its weights were all written, by a refit or otherwise.

    Args:
        model: The model, and every module in it.
        look_again: See submodules that were replaced since the model was last looked at.
    """
    for module in modules_with(model, _REASON, look_again=look_again):
        module.__dict__.pop(_REASON, None)


def stale_reason(model: RefitSide, *, look_again: bool = True) -> str | None:
    """Why `model`, or a module in it, is marked; None where it is not.

    Args:
        model: The model.
        look_again: See submodules that were replaced since the model was last looked at.
    """
    marked = modules_with(model, _REASON, look_again=look_again)
    return str(marked[0].__dict__[_REASON]) if marked else None


def is_stale(model: RefitSide) -> bool:
    """Return whether a refit failed after it may have written a part of `model` or of a module in it."""
    return stale_reason(model) is not None
