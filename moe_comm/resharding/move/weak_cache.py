"""Cache of values for objects, for as long as they live."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterable
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class WeakCache(Generic[KeyT, ValueT]):
    """A dictionary whose values are dropped with the first of the objects that they are for.

    A key may hold `id`s of these objects: it is gone before another object can have the same.
    """

    def __init__(self) -> None:
        self._entries: dict[KeyT, tuple[ValueT, list[weakref.ref[Any]]]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: KeyT) -> ValueT | None:
        """The value under `key`, if there is one."""
        found = self._entries.get(key)
        return None if found is None else found[0]

    def put(self, key: KeyT, value: ValueT, owners: Iterable[Any]) -> None:
        """Keep a value until one of `owners` is gone.

        Args:
            key: Key whose value this replaces, if there is one.
            value: Refers to no owner, or that one would never go.
            owners: Objects that can be referred to weakly; None for none.
        """
        this = weakref.ref(self)

        def forget(_: weakref.ref[Any]) -> None:
            cache = this()
            if cache is not None:
                cache.drop(key)

        ends = [weakref.ref(owner, forget) for owner in owners if owner is not None]
        self._entries[key] = value, ends

    def drop(self, key: KeyT) -> None:
        """Forget the value under `key`, if there is one."""
        self._entries.pop(key, None)

    def clear(self) -> None:
        """Forget all values."""
        self._entries.clear()
