"""The copy services of refits, one per process for each backend and group."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Literal

import torch.distributed as dist

from moe_comm.arguments import shown
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.gloo_copy_service import GlooCopyService
from moe_comm.resharding.copy_services.nccl_copy_service import NCCLCopyService
from moe_comm.resharding.copy_services.nixl_copy_service import NO_NIXL
from moe_comm.resharding.copy_services.nvshmem_copy_service import NVSHMEMCopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.refit_group import RefitGroup, agree, identity_of

__all__ = [
    "RefitBackendName",
    "check_backend",
    "check_serves",
    "clear_service_cache",
    "get_or_create",
    "get_or_create_service",
    "known_service",
    "service_cache",
]

RefitBackendName = Literal["gloo", "nccl", "nvshmem", "symmetric"]
Group = dist.ProcessGroup | Bootstrap | None

_SERVICES: dict[str, Callable[[Any], CopyService]] = {
    "gloo": GlooCopyService,
    "nccl": NCCLCopyService,
    "nvshmem": NVSHMEMCopyService,
    "symmetric": SymmetricCopyService,
}

service_cache: dict[tuple[str, int], CopyService] = {}
_lock = threading.Lock()


def get_or_create_service(backend: RefitBackendName, group: Group = None) -> CopyService:
    """The copy service of a backend for a group; one per process for each.

    Collective over the group where it makes one.

    Args:
        backend: "symmetric" (the shared heap of one machine), "gloo", "nccl" or "nvshmem".
        group: A process group; None for the default group; for "symmetric" also a `Bootstrap`.

    Raises:
        ValueError: There is no such backend, or it cannot serve this group.
    """
    name: Any = backend
    ranks = RefitGroup(group)
    if ranks.problem is None and _is_made(name, ranks):
        return get_or_create(backend, ranks, is_new=False)
    problem = ranks.problem
    try:
        if not isinstance(name, str):
            raise TypeError(f"backend must be a name, got {shown(name)}")
        check_serves(name, ranks)
    except (TypeError, ValueError) as error:
        problem = problem or error
    if problem is not None and any(key == identity_of(ranks.key) for _, key in service_cache):
        # Where this rank has a service of the group, its peers have one too, and do not wait.
        raise problem
    agree(
        ranks,
        problem=problem,
        options=f"function=get_or_create_service\nbackend={shown(name)}\ngroup={ranks}",
        has_service=False,
        plan_ids=[],
        nonce=0,
    )
    return get_or_create(backend, ranks, is_new=False)


def _is_made(name: Any, group: RefitGroup) -> bool:
    return isinstance(name, str) and (name, identity_of(group.key)) in service_cache


def clear_service_cache() -> None:
    """Close and forget all services of this process."""
    with _lock:
        services = list(service_cache.values())
        service_cache.clear()
    for service in services:
        service.close()


def check_backend(backend: str) -> None:
    """Raise ValueError where there is no backend of that name."""
    if backend not in _SERVICES:
        what = f"backend {NO_NIXL}" if backend == "nixl" else f"Unknown backend {backend!r}"
        raise ValueError(f"{what}; there are {', '.join(sorted(_SERVICES))}")


def check_serves(backend: str, group: RefitGroup) -> None:
    """There is such a service, and it can serve this group."""
    check_backend(backend)
    if backend in ("gloo", "nccl") and not isinstance(group.handle, dist.ProcessGroup | None):
        raise ValueError(
            f"{backend} needs a torch.distributed process group, got {type(group.handle).__name__}"
        )


def get_or_create(backend: str, group: RefitGroup, *, is_new: bool) -> CopyService:
    """The service of a backend that all ranks have agreed on; `is_new`: not one that is there."""
    check_serves(backend, group)
    key = backend, identity_of(group.key)
    service = service_cache.get(key)
    if service is not None and is_new:
        # Another rank has forgotten its part.
        service_cache.pop(key, None)
        service.close()
        service = None
    if service is None:
        service = _SERVICES[backend](group.handle)
        service_cache[key] = service
    return service


def known_service(
    service: CopyService | str | None, group: RefitGroup
) -> tuple[CopyService | str | None, str]:
    """A service of this module by its name, and what ranks compare of it.

    A service and the name of its kind are two things: a name means a service that this module makes
    where there is none, together with the others who give the name.
    """
    if service is None or isinstance(service, str):
        return service, service or ""
    for name, kind in _SERVICES.items():
        if service is service_cache.get((name, identity_of(group.key))):
            return name, name
        if isinstance(kind, type) and isinstance(service, kind):
            return service, f"a {kind.__name__}"
    return service, f"a {type(service).__name__}"
