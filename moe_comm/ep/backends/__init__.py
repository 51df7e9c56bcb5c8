"""Backends by name; a backend's module is imported when it is first asked for.

`base` is what an `EpBuffer` asks of a backend. `host`, `cuda`, `nvshmem` and `simt` are extension modules of
this package (`native` and `native_*` are what they share); `collective` and `deep_ep` move rows in Python
(`collective_*`, `expert_ranks`, `rows`), and `reference` is the definition. `messages`, `gradients` and
`buffer_agreement` are the words in which ranks agree. Knows `moe_comm.peers`, and not who calls.
"""

from __future__ import annotations

import importlib
from typing import cast

import torch

from moe_comm.ep.backends.base import Backend

__all__ = ["BACKEND_CLASSES", "load_backend"]

BACKEND_CLASSES = {
    "host": "moe_comm.ep.backends.host:HostBackend",
    "cuda": "moe_comm.ep.backends.cuda:CudaBackend",
    "collective": "moe_comm.ep.backends.collective:CollectiveBackend",
    "nvshmem": "moe_comm.ep.backends.nvshmem:NvshmemBackend",
    "deep_ep": "moe_comm.ep.backends.deep_ep:DeepEpBackend",
    "reference": "moe_comm.ep.backends.reference:ReferenceBackend",
    "simt": "moe_comm.ep.backends.simt:SimtBackend",
}


# Backends of tensors that lie elsewhere than on the CPU.
_STAGED = {"host": "moe_comm.ep.backends.staged:StagedBackend"}


def load_backend(name: str, device: torch.device | None = None) -> type[Backend]:
    """The class of a backend.

    Args:
        name: Name of the backend.
        device: Device of the tensors; None for the one that it is for.

    Raises:
        ValueError: There is no backend of that name.
    """
    if name not in BACKEND_CLASSES:
        known = ", ".join(sorted(BACKEND_CLASSES))
        raise ValueError(f"backend must be one of {known}, got {name!r}")
    is_elsewhere = device is not None and device.type != "cpu"
    path = _STAGED.get(name, BACKEND_CLASSES[name]) if is_elsewhere else BACKEND_CLASSES[name]
    module_name, class_name = path.split(":")
    return cast("type[Backend]", getattr(importlib.import_module(module_name), class_name))
