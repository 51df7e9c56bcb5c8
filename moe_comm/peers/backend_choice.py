"""Names of backends and rails, what each is for, and the choice that "auto" stands for."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from moe_comm.peers import node_layout

BACKENDS = ("auto", "host", "collective", "deep_ep", "reference", "simt", "cuda", "nvshmem")
# Backends over shared-memory heaps, one a node.
HEAP_BACKENDS = ("host", "simt", "cuda", "nvshmem")
# Backends whose rows lie on a GPU.
GPU_BACKENDS = ("cuda", "nvshmem")
# Backends that know no nodes, or lay them out themselves.
ONE_NODE_BACKENDS = ("cuda", "deep_ep")
RAILS = ("auto", "gloo", "mpi", "sockets")


def problem_with_names(
    backend: str, rail: str, check_messages: bool, device: torch.device
) -> str | None:
    """Return the problem with a backend and its options for nodes, for tensors on `device`, or None."""
    if backend not in BACKENDS:
        return f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}"
    if rail not in RAILS:
        return f"rail must be one of {', '.join(RAILS)}, got {rail!r}"
    has_rail = backend == "host" or (backend == "auto" and device.type == "cpu")
    if rail != "auto" and not has_rail:
        return f"rail is for the host backend, got {rail!r} with {backend!r} on {device}"
    if check_messages and not has_rail:
        return f"check_messages is for the host backend, got {check_messages} with {backend!r} on {device}"
    if backend == "host":
        return None  # moves tensors of any device, those of others than the CPU through the host's memory
    if device.type not in ("cpu", "cuda"):
        return f'device must be cpu or cuda, or the backend "host", got {device} with {backend!r}'
    if backend != "auto" and (backend in GPU_BACKENDS) != (device.type == "cuda"):
        return f"the {backend} backend does not move tensors on {device}"
    return None


def choose_backend(
    backend: str,
    rail: str,
    check_messages: bool,
    device: torch.device,
    places: Sequence[node_layout.RankPlace],
) -> tuple[str, int]:
    """The backend, chosen where it is "auto", and the ranks of a node. Equal on every rank.

    Args:
        backend: Backend that the ranks ask for.
        rail: Likewise.
        check_messages: Likewise.
        device: Device where rows live.
        places: Places of all ranks.

    Raises:
        ValueError: The ranks lie where this backend cannot serve them.
    """
    num_ranks = len(places)
    machines = [place.machine for place in places]
    if backend in HEAP_BACKENDS and backend in ONE_NODE_BACKENDS and len(set(machines)) > 1:
        other = next(i for i, machine in enumerate(machines) if machine != machines[0])
        raise ValueError(
            f"the {backend} backend needs all ranks on one machine and in one network namespace; "
            f"rank 0 is on {machines[0]}, rank {other} on {machines[other]}; use "
            'backend="host" or "collective"'
        )
    is_auto_gpu = backend == "auto" and device.type == "cuda"
    num_local_ranks = node_layout.agree_on_nodes(
        places,
        # GPUs of one machine reach each other, whatever its launcher makes of it.
        with_launcher=backend not in ONE_NODE_BACKENDS and not is_auto_gpu,
        must_fit=backend in HEAP_BACKENDS
        or is_auto_gpu
        or (backend == "auto" and places[0].parent_rank >= 0),
    )
    if is_auto_gpu:
        backend = "cuda" if num_local_ranks == num_ranks else "nvshmem"
    elif backend == "auto":
        backend = "collective" if num_local_ranks is None else "host"
        if backend == "collective" and (rail != "auto" or check_messages):
            option = f"rail {rail!r}" if rail != "auto" else f"check_messages {check_messages}"
            raise ValueError(
                f"{option} is for the host backend, which needs equally many consecutive ranks "
                "on every node; these ranks are placed unevenly"
            )
    if backend in ONE_NODE_BACKENDS and places[0].declared not in (None, num_ranks):
        raise ValueError(
            f"the {backend} backend takes one node: num_local_ranks must be None or {num_ranks}, got "
            f"{places[0].declared}"
        )
    # Ranks that are placed unevenly are nodes of one where nodes play no part.
    return backend, num_local_ranks or 1
