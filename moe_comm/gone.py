"""Modules that are no part of the package any more: an import of one says what does the same."""

from __future__ import annotations

import re
import sys

__all__ = ["answer_imports", "refuse"]

# Modules, and names of modules, with their place in a checkout.
_GONE = {
    "moe_comm.testing.dispatcher_cases": "tests.helpers.dispatcher_cases",
    "moe_comm.testing.dispatcher_conformance": "tests.helpers.dispatcher_conformance",
    "moe_comm.testing.dispatchers": "tests.helpers.dispatcher_targets",
    "moe_comm.testing.megatron": "tests.helpers.megatron_on_cpu",
}


def refuse(name: str) -> None:
    """Let nothing pass that is in the table.

    Raises:
        ModuleNotFoundError: It is, by one of its names; the message has its place.
    """
    place = _GONE.get(re.sub(r"^deep_ep\.", "moe_comm.compat.deep_ep.", name))
    if place is not None:
        raise ModuleNotFoundError(
            f"{name} is no part of the package: in a checkout write {place}", name=name
        )


class _Finder:
    """The last that Python asks for a module, where it is in none of its places."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        """As every finder of `sys.meta_path`."""
        del path, target
        refuse(fullname)


def answer_imports() -> None:
    """Let imports of modules of the table say where they are. Idempotent."""
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)
