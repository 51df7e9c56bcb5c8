"""One finding of `moe-comm doctor`."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is here or not.

    Args:
        name: Name of what was looked for.
        is_present: Whether it is here and works.
        detail: Text of what was found.
        remedy: Use of what is missing, and how to get it; empty when present.
        is_required: Whether the default backend needs it.
    """

    name: str
    is_present: bool
    detail: str
    remedy: str = ""
    is_required: bool = False

    @staticmethod
    def here(name: str, detail: str, *, is_required: bool = False) -> Finding:
        """Return what is here."""
        return Finding(name=name, is_present=True, detail=detail, is_required=is_required)

    @staticmethod
    def missing(name: str, detail: str, remedy: str, *, is_required: bool = False) -> Finding:
        """Return what is not here, and how to get it."""
        return Finding(
            name=name, is_present=False, detail=detail, remedy=remedy, is_required=is_required
        )
