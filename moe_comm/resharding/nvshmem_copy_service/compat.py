"""Names of NVIDIA's Python packages that moved between releases."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any

__all__ = ["ensure_nvshmem_compat", "get_cuda_core_device_class"]


def ensure_nvshmem_compat() -> None:
    """Provide `cuda.core.experimental._memory` and `_stream`, which nvshmem4py imports.

    From release 0.5 of cuda-core they are `cuda.core._memory` and `_stream`. Does nothing where
    cuda-core is missing or still has them; may be called any number of times, before nvshmem4py is
    imported.
    """
    for name in ("_memory", "_stream"):
        former = f"cuda.core.experimental.{name}"
        if former in sys.modules or _exists(former):
            continue
        if _exists(f"cuda.core.{name}"):
            sys.modules[former] = importlib.import_module(f"cuda.core.{name}")


def get_cuda_core_device_class() -> type[Any]:
    """`Device` of cuda-core, wherever the installed release has it.

    Raises:
        ImportError: cuda-core is not installed.
    """
    for name in ("cuda.core", "cuda.core.experimental"):
        if _exists(name):
            device = getattr(importlib.import_module(name), "Device", None)
            if isinstance(device, type):
                return device
    raise ImportError("cuda-core is not installed: pip install cuda-core")


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
