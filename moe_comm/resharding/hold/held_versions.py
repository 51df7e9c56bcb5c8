"""Versions of weights that engines of a refit hold: which one an engine serves once a refit has ended or failed."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, TypeAlias

from moe_comm.resharding.move import stale

Version: TypeAlias = "int | str"
"""Version that a refit brings, as the trainers call it; of two ints the lower is the older."""


class RefitTarget(Protocol):
    """Interface of an engine around a refit, by which it serves whole versions only.

    Example:
        # With a `VllmCpuModel`, after `engine.accept(checkpoint)`:
        # world.prepare(CheckpointViews(engine.views, engine), Target())
        class Target:
            def begin(self, version):
                engine.accept(checkpoint)      # nothing that is served is written from here on
            def commit(self, version):
                engine.moved()
                engine.commit(str(version))
            def abort(self):                   # raise where the version before is not served
                if engine.version != before:
                    raise RuntimeError(f"version {engine.version} has been handed over")
    """

    def begin(self, version: Version) -> None:
        """Get ready to be written."""

    def commit(self, version: Version) -> None:
        """Serve what was written; every rank holds its part of it."""

    def abort(self) -> None:
        """Bring back the version from before `begin`, also after a `commit`; raise where it is lost."""


class _InPlace:
    """An engine that serves the storage which a refit writes: nothing brings the old version back.

    It is marked stale meanwhile: a refit that has written everything takes the mark away, one that may
    have written a part puts its own in the place.
    """

    def __init__(self, model: Any) -> None:
        self._model = model[0] if isinstance(model, list | tuple) else model
        self._before: str | None = None
        self._mark = ""

    def begin(self, version: Version) -> None:
        if self._model is not None:
            self._before = stale.stale_reason(self._model)
            self._mark = f"a refit to {version!r} has begun"
            stale.mark_stale(self._model, self._mark, is_known=True)

    def commit(self, version: Version) -> None:
        if self._model is not None:  # one that nothing is sent to keeps its mark
            stale.clear_stale(self._model)

    def abort(self) -> None:
        if self._model is None:
            return
        why = stale.stale_reason(self._model) or "it was written in place"
        if why == self._mark:  # nothing was written
            stale.clear_stale(self._model)
            if self._before is None:
                return
            why = self._before
        stale.mark_stale(self._model, why)
        raise RuntimeError(why)


@dataclasses.dataclass(frozen=True)
class Held:
    """Version that an engine holds; `problem` says why it is not whole, "" where it is."""

    version: Version | None = None
    problem: str = ""


class HeldVersions:
    """Version that this rank holds, and those that it has heard of engines of all ranks.

    Attributes:
        own: Version of this rank.
        by_rank: Versions by rank of the engine, as of the last exchange.
        target: Interface of this rank's engine.
    """

    def __init__(self) -> None:
        self.own = Held()
        self.by_rank: dict[int, Held] = {}
        self.target: RefitTarget = _InPlace(None)

    def take(self, target: RefitTarget | None, model: Any) -> None:
        """Take the interface of this rank's engine; None for one that serves `model` in place."""
        self.target = _InPlace(model) if target is None else target

    def commit(self, version: Version) -> None:
        """Serve what was written. Local; raises what the engine raises, and then holds no whole version."""
        self.own = Held(None, f"a commit of {version!r} has not ended")
        self.target.commit(version)
        self.own = Held(version)

    def abort(self, why: str, before: Held, model: Any, keeps: Held | None = None) -> None:
        """Bring the old version back. Local.

        Args:
            why: Reason why it is brought back.
            before: Version that is held then.
            model: Target that was written, or None.
            keeps: Version that is held where it cannot be brought back, if that is whole.
        """
        self.own = Held(None, why)
        if model is not None:
            stale.count_write(model)  # whatever brings the old version back
        try:
            self.target.abort()
            self.own = before
        except Exception as error:  # noqa: BLE001 - the versions say it
            is_whole = keeps is not None and not keeps.problem
            self.own = keeps if is_whole and keeps else Held(None, f"{why}; abort: {error}")

    def whole(self) -> dict[int, Version | None]:
        """Versions by rank of the engine; None for an engine that holds no whole one, or none of this world."""
        return {rank: None if held.problem else held.version for rank, held in self.by_rank.items()}

    def stale(self) -> dict[int, str]:
        """Reasons, by rank, why an engine does not hold the newest version."""
        whole = [version for version in self.whole().values() if version is not None]
        ints = [version for version in whole if isinstance(version, int)]
        newest = max(ints) if ints else None
        found = {}
        for rank, held in self.by_rank.items():
            if held.problem:
                found[rank] = f"it holds no whole version: {held.problem}"
            elif held.version is None:
                found[rank] = "it holds no version of this world"
            elif newest is not None and held.version != newest:
                found[rank] = f"it holds {held.version!r}, the newest is {newest!r}"
            elif newest is None and len(set(whole)) > 1:
                found[rank] = f"it holds {held.version!r}, and others hold others"
        return found

    def text(self) -> str:
        """Versions of all engines, for errors."""
        return ", ".join(
            f"engine {rank} {held.problem or repr(held.version)}"
            for rank, held in self.by_rank.items()
        )
