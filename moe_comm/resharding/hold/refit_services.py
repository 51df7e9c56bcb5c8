"""The copy services of refits, one per process for each backend and group."""

from __future__ import annotations

import threading
from typing import Any, Literal

import torch.distributed as dist

from moe_comm.arguments import shown
from moe_comm.resharding.copy_services.base import CopyService
from moe_comm.resharding.copy_services.gloo_copy_service import GlooCopyService
from moe_comm.resharding.copy_services.nccl_copy_service import NCCLCopyService
from moe_comm.resharding.copy_services.nixl_copy_service import NO_NIXL
from moe_comm.resharding.copy_services.nvshmem_copy_service import NVSHMEMCopyService
from moe_comm.resharding.copy_services.symmetric_copy_service import SymmetricCopyService
from moe_comm.resharding.hold.refit_group import RefitGroup, agree, identity_of
from moe_comm.resharding.hold.refit_options import Group

RefitBackendName = Literal["gloo", "nccl", "nvshmem", "symmetric"]

SERVICES: dict[str, type[CopyService]] = {
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
    key = identity_of(ranks.key)
    if isinstance(name, str) and (name, key) in service_cache:
        return service_cache[name, key]
    problem = ranks.problem
    with problem:
        if not isinstance(name, str):
            raise TypeError(f"backend must be a name, got {shown(name)}")
        check_serves(name, ranks)
    if any(known == key for _, known in service_cache):
        # Peers of a rank that has a service of the group have one too, and do not wait.
        problem.raise_own()
    agree(
        ranks,
        problem=problem,
        options=f"function=get_or_create_service\nbackend={shown(name)}\ngroup={ranks}",
        has_service=False,
        plan_ids=[],
        nonce=0,
    )
    return create_service(name, ranks)


def clear_service_cache() -> None:
    """Close and forget all services of this process."""
    with _lock:
        services = list(service_cache.values())
        service_cache.clear()
    for service in services:
        service.close()


def check_backend(backend: str) -> None:
    """Raise ValueError where there is no backend of that name."""
    if backend not in SERVICES:
        what = f"backend {NO_NIXL}" if backend == "nixl" else f"Unknown backend {backend!r}"
        raise ValueError(f"{what}; there are {', '.join(sorted(SERVICES))}")


def check_serves(backend: str, group: RefitGroup) -> None:
    """There is such a service, and it can serve this group."""
    check_backend(backend)
    is_bootstrap = not isinstance(group.handle, dist.ProcessGroup | None)
    if is_bootstrap and not SERVICES[backend].takes_bootstrap:
        raise ValueError(
            f"{backend} needs a torch.distributed process group, got {type(group.handle).__name__}"
        )


def create_service(backend: str, group: RefitGroup) -> CopyService:
    """The service that all ranks have agreed to make; one that is there is closed.

    A rank has one already where another rank has forgotten its part.
    """
    key = backend, identity_of(group.key)
    old = service_cache.pop(key, None)
    if old is not None:
        old.close()
    make: Any = SERVICES[backend]
    service: CopyService = make(group.handle)
    service_cache[key] = service
    return service


def find_service(
    given: CopyService | str | None, group: RefitGroup
) -> tuple[str, CopyService | None, str]:
    """Find the service that a caller gave: a name of this module, or a service of the caller's.

    A service and the name of its kind are two things: a name means a service that this module makes
    where there is none, together with the others who give the name.

    Returns:
        The name, empty where it is no service of this module; the service, if there is one yet; and
        what ranks compare of it.
    """
    if given is None:
        return "", None, ""
    key = identity_of(group.key)
    if isinstance(given, str):
        return given, service_cache.get((given, key)), given
    kind: type = type(given)
    for name, made in SERVICES.items():
        if given is service_cache.get((name, key)):
            return name, given, name
        if isinstance(given, made):
            kind = made
            break
    return "", given, f"a {kind.__name__}"
