"""Marks on models that a failed refit left neither old nor new, and signs that something has written a model."""

from __future__ import annotations

import operator
import weakref
from typing import Any

import torch

from moe_comm.resharding.describe.checkpoint_views import CheckpointViews
from moe_comm.resharding.describe.module_tensors import (
    ModuleState,
    RefitSide,
    module_of,
    modules_with,
)

_VERSION = operator.attrgetter("_version")

# In the module's own dictionary, so that a copy of a stale model is stale.
_REASON = "_stale_reason"


_num_writes: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def count_write(model: RefitSide) -> None:
    """Say that a refit or a load is about to write `model`, so that others know that it was not theirs."""
    _num_writes[module_of(model)] = num_writes(model) + 1


def num_writes(model: RefitSide) -> int:
    """Number of calls of `count_write` for `model`."""
    return _num_writes.get(module_of(model), 0)


def _owned(side: RefitSide | None) -> dict[str, torch.Tensor]:
    """Parameters that views lie in, which do not see what is written to these where they are by `Tensor.data`."""
    return side.owned if isinstance(side, CheckpointViews) else {}


def counted_by_torch(side: RefitSide | None, state: ModuleState) -> tuple[int, ...]:
    """Numbers of in-place writes that torch has counted, of each tensor of a side.

    Args:
        side: The side; None for none.
        state: State of the side now.
    """
    tensors = (*state.tensors.values(), *_owned(side).values())
    try:
        return tuple(map(_VERSION, tensors))
    except RuntimeError:  # of tensors of inference, nothing is counted
        return tuple(0 if each.is_inference() else each._version for each in tensors)


def written_since(
    side: RefitSide | None, state: ModuleState, before: tuple[int, ...]
) -> dict[str, tuple[torch.Tensor, int, int]]:
    """Tensors of a side that torch has counted writes of, and the numbers of these then and now.

    Args:
        side: As of `counted_by_torch`.
        state: As there; the same as then.
        before: Counts that it returned then.
    """
    now = counted_by_torch(side, state)
    if now == before:
        return {}
    owned = {f"{name} (of the owner)": each for name, each in _owned(side).items()}
    named = zip((state.tensors | owned).items(), before, now, strict=True)
    return {name: (each, then, count) for (name, each), then, count in named if then != count}


def mark_stale(model: RefitSide, reason: str, *, is_known: bool = False) -> None:
    """Say that some weights of `model` are not what they should be. A later reason replaces this.

    Args:
        model: The model.
        reason: Reason why.
        is_known: Whether nothing is wrong with them yet.
    """
    module_of(model).__dict__[_REASON] = reason
    if not is_known:
        count_write(model)


def mark_torn(model: RefitSide | None, call: str, error: BaseException) -> None:
    """Say of a target, if there is one, that a call which failed may have written a part of it.

    Args:
        model: The target.
        call: Call that failed, such as "a refit".
        error: Error by which it failed.
    """
    if model is not None:
        text = str(error).split("\n", 1)[0]
        mark_stale(model, f"{call} failed: {type(error).__name__}: {text}")


def clear_stale(model: RefitSide, *, look_again: bool = True) -> None:
    """Say that `model` is whole: after its weights were all written, by a refit or otherwise.

    Args:
        model: The model, and every module in it.
        look_again: Whether to see submodules that were replaced since the model was last looked at.
    """
    for module in modules_with(model, _REASON, look_again=look_again):
        if module.__dict__.pop(_REASON, None) is not None:
            count_write(model)


def stale_reason(model: RefitSide, *, look_again: bool = True) -> str | None:
    """Why `model`, or a module in it, is marked; None where it is not.

    Args:
        model: The model.
        look_again: Whether to see submodules that were replaced since the model was last looked at.
    """
    marked = modules_with(model, _REASON, look_again=look_again)
    return str(marked[0].__dict__[_REASON]) if marked else None


def is_stale(model: RefitSide) -> bool:
    """Return whether a refit failed after it may have written a part of `model` or of a module in it."""
    return stale_reason(model) is not None
