"""Marks on models that a failed refit left neither old nor new."""

from __future__ import annotations

import torch

__all__ = ["clear_stale", "is_stale", "mark_stale", "stale_reason"]

# In the module's own dictionary, so that a copy of a stale model is stale.
_REASON = "_stale_reason"


def mark_stale(model: torch.nn.Module, reason: str) -> None:
    """Say that some weights of `model` are not what they should be. A later reason replaces this."""
    model.__dict__[_REASON] = reason


def clear_stale(model: torch.nn.Module) -> None:
    """Say that `model` is whole: after its weights were all written, by a refit or otherwise."""
    for module in model.modules():
        module.__dict__.pop(_REASON, None)


def stale_reason(model: torch.nn.Module) -> str | None:
    """Why `model`, or a module in it, is marked; None where it is not."""
    for module in model.modules():
        reason = module.__dict__.get(_REASON)
        if reason is not None:
            return str(reason)
    return None


def is_stale(model: torch.nn.Module) -> bool:
    """Whether a refit failed after it may have written a part of `model` or of a module in it."""
    return stale_reason(model) is not None
