"""Tells whether anybody may look at operators of torch, which then have to be called as such."""

from __future__ import annotations

from collections.abc import Callable

import torch

_PLAIN_OR_NONE = frozenset({torch.Tensor, torch.nn.Parameter, type(None)})


def _may_have_hooks(_: bool) -> bool:
    return True


_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_has_transforms = torch._C._are_functorch_transforms_active
_tracing_state = torch._C._get_tracing_state
_is_profiled = torch._C._autograd._profiler_enabled
# Torch 2.7 cannot tell: there may always be hooks.
_saved_tensors_hooks: Callable[[bool], object] = getattr(
    torch._C._autograd, "_top_saved_tensors_default_hooks", _may_have_hooks
)


def has_torch_hooks() -> bool:
    """Return whether anything that this thread has turned on may look at operators: see `needs_dispatcher`."""
    return (
        _num_dispatch_modes() > 0
        or _has_transforms()
        or _tracing_state() is not None
        or _is_profiled()
        or _saved_tensors_hooks(False) is not None
    )


def are_plain(*tensors: torch.Tensor | None) -> bool:
    """Return whether all are ordinary tensors, which look at no operator: see `needs_dispatcher`."""
    return _PLAIN_OR_NONE.issuperset(map(type, tensors))


def needs_dispatcher(*tensors: torch.Tensor | None) -> bool:
    """Return whether anything may look at operators, which then have to be called as such.

    They are for compilers, for modes and subclasses of tensors (selective checkpointing is one), for
    profilers, and for hooks on what autograd saves, which a handle that is no tensor would go
    around. A call through them costs more than a small exchange.
    """
    return has_torch_hooks() or not are_plain(*tensors)
