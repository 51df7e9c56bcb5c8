"""Callables that see, and may replace, what passes a point of a dispatcher."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any


class RemovableHook:
    """A registered hook; `remove()` ends it and may be called again."""

    def __init__(self, hooks: dict[int, Callable[..., Any]], key: int) -> None:
        self._hooks = hooks
        self._key = key

    def remove(self) -> None:
        """Call the hook no more."""
        self._hooks.pop(self._key, None)


class HookList:
    """Hooks in the order they were registered."""

    def __init__(self) -> None:
        self._hooks: dict[int, Callable[..., Any]] = {}
        self._keys = itertools.count()

    def register(self, hook: Callable[..., Any]) -> RemovableHook:
        """Call `hook` from now on."""
        if not callable(hook):
            raise TypeError(f"a hook must be callable, got {hook!r}")
        key = next(self._keys)
        self._hooks[key] = hook
        return RemovableHook(self._hooks, key)

    def run(self, owner: object, *values: Any) -> tuple[Any, ...]:
        """Pass `values` through every hook.

        A hook is called as `hook(owner, *values)` and returns what replaces them (the value, or a tuple
        where there are several), or None to leave them.
        """
        for hook in list(self._hooks.values()):
            replaced = hook(owner, *values)
            if replaced is not None:
                values = tuple(replaced) if len(values) > 1 else (replaced,)
        return values
