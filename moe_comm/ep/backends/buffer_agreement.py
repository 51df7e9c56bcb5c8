"""Agreement of the ranks when a buffer is made, whatever its backend."""

from __future__ import annotations

from typing import NoReturn, Protocol

import torch

from moe_comm.ep.backends import load_backend, messages
from moe_comm.ep.backends.base import Backend
from moe_comm.ep.config import EpConfig
from moe_comm.peers.agree import agree, raise_different
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.missed_calls import Telling


class Peers(Protocol):
    """Interface that the plain backends need of a communicator."""

    @property
    def rank_idx(self) -> int:
        """This rank, in [0, num_ranks)."""

    @property
    def num_ranks(self) -> int:
        """Ranks of the communicator."""

    @property
    def num_local_ranks(self) -> int:
        """Ranks of a node, consecutive ones; looked at for a `node_reduction` and for replicas."""

    @property
    def bootstrap(self) -> Bootstrap:
        """One all-gather of Python objects."""


class Communicators(Protocol):
    """Interface that choosing a backend needs of a communicator."""

    @property
    def backend(self) -> str:
        """Its name, the same on every rank."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks of the communicator."""

    @property
    def num_local_ranks(self) -> int:
        """Ranks of a node."""

    def exchange(self, call: str, payload: bytes) -> list[bytes]:
        """Every rank's payload in rank order, empty for ranks that failed before a recovery."""

    def reject(self, error: Exception) -> NoReturn:
        """Raise `error` on every rank, in place of an exchange that they enter."""


def agree_on_config(peers: Peers, config: EpConfig, backend_name: str) -> torch.Tensor:
    """Check that every rank makes the same kind of buffer. Collective.

    Returns:
        int32 `[num_experts]`, the rank of every expert.

    Raises:
        ValueError: A rank's configuration differs or does not fit the number of ranks; on every
            rank, and the message has both values.
    """
    error: Exception | None = None
    expert_rank = torch.empty(0)
    try:
        expert_rank = config.resolve_expert_rank(peers.num_ranks)
    except ValueError as raised:
        error = raised
    said = agree(
        peers.bootstrap.all_gather,
        error,
        messages.describe_config(config, backend_name, expert_rank),
    )
    raise_different("ranks configure the buffer differently", said)
    return expert_rank


def agree_on_backend(communicator: Communicators, config: object) -> type[Backend]:
    """The backend of a communicator, for a buffer. Collective.

    Raises:
        ValueError: A rank cannot load it or its configuration does not fit it, on every rank.
        TypeError: A rank's configuration is none, on every rank.
    """
    name = communicator.backend
    with Telling(communicator.reject):
        if not isinstance(config, EpConfig):
            raise TypeError(f"config must be an EpConfig, got {type(config).__name__}")
        backend_class = load_backend(name, communicator.device)
        for reduction in ("node_reduction", "rank_reduction"):
            if getattr(config, reduction) and not getattr(backend_class, f"has_{reduction}"):
                raise ValueError(
                    f"the {name} backend has no {reduction}: it must be False, got True"
                )
        if (
            config.placement is not None
            and config.replica_rule == "balanced"
            and not backend_class.has_balanced_replicas
        ):
            raise ValueError(
                f'the {name} backend does not balance replicas: replica_rule must be "nearest", "hash" '
                'or "given", got "balanced"'
            )
        num_local_ranks, num_ranks = communicator.num_local_ranks, communicator.num_ranks
        if config.rank_reduction and num_local_ranks != num_ranks:
            raise ValueError(
                "rank_reduction is of ranks that share a node: a node must have all "
                f"{num_ranks} ranks, got {num_local_ranks}"
            )
    communicator.exchange("EpBuffer", b"")
    return backend_class
