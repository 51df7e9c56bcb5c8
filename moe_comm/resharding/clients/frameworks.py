"""Parts of frameworks that clients are classes of, where these are installed."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["class_of", "module_of"]


def module_of(name: str) -> Any:
    """Import a module of a framework; None where the framework is not installed.

    Raises:
        ModuleNotFoundError: The framework is installed and lacks the module, or something that this needs.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        return None


def class_of(module: Any, name: str) -> Any:
    """Return what a client is a class of; `object` where the framework is not installed.

    Nobody but the framework makes such a client, so it can be imported anywhere.
    """
    return object if module is None else getattr(module, name)
