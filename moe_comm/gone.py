"""Modules that are no part of the package any more: an import of one says what does the same."""

from __future__ import annotations

import re
import sys

# Modules, and names of modules that stay, with their place in a checkout.
_DEEP_EP_UTILS = r"(?:moe_comm\.compat\.)?deep_ep\.utils\."
_GONE = {
    rf"{_DEEP_EP_UTILS}(envs|gate|refs|testing)": r"tests.helpers.deep_ep_utils.\1",
    rf"{_DEEP_EP_UTILS}math\.(count_bytes|create_grouped_scores|hash_tensors?|inplace_unique|safe_div)": (
        r"tests.helpers.deep_ep_utils.math.\1"
    ),
    r"moe_comm\.testing\.(dispatcher_cases|dispatcher_conformance)": r"tests.helpers.\1",
    r"moe_comm\.testing\.dispatchers": "tests.helpers.dispatcher_targets",
    r"moe_comm\.testing\.megatron": "tests.helpers.megatron_on_cpu",
}


def refuse(name: str) -> None:
    """Return for names that are in no row of the table.

    Raises:
        ModuleNotFoundError: One matches; the message has its place.
    """
    for gone, place in _GONE.items():
        found = re.fullmatch(gone, name)
        if found is not None:
            raise ModuleNotFoundError(
                f"{name} is no part of the package: in a checkout write {found.expand(place)}",
                name=name,
            )


class _Finder:
    """The last that Python asks for a module, where it is in none of its places."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        """Refuse a module; called as every finder of `sys.meta_path` is."""
        refuse(fullname)


def answer_imports() -> None:
    """Let imports of modules of the table say where they are. Idempotent."""
    if _Finder not in sys.meta_path:
        sys.meta_path.append(_Finder)
