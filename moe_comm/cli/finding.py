"""One finding of `moe-comm doctor`."""

from __future__ import annotations

import dataclasses

__all__ = ["Finding"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is here or not.

    Args:
        name: What was looked for.
        is_present: Whether it is here and works.
        detail: What was found.
        remedy: What it would be good for and how to get it; empty when present.
        is_required: Whether the default backend needs it.
    """

    name: str
    is_present: bool
    detail: str
    remedy: str = ""
    is_required: bool = False
