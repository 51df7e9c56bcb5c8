"""What ranks agree on when a buffer is made, whatever its backend."""

from __future__ import annotations

from typing import Protocol

from moe_comm.backends import messages
from moe_comm.backends.routing import Placement
from moe_comm.bootstrap import Bootstrap
from moe_comm.config import EpConfig

__all__ = ["Peers", "agree_on_config"]


class Peers(Protocol):
    """What the plain backends need of a communicator."""

    @property
    def rank_idx(self) -> int:
        """This rank, in [0, num_ranks)."""
        ...

    @property
    def num_ranks(self) -> int:
        """Ranks of the communicator."""
        ...

    @property
    def bootstrap(self) -> Bootstrap:
        """One all-gather of Python objects."""
        ...


def agree_on_config(peers: Peers, config: EpConfig, backend_name: str) -> Placement:
    """Check that every rank makes the same kind of buffer, and place the experts. Collective.

    Raises:
        ValueError: On every rank, where a rank's configuration differs or does not fit the number of
            ranks; the message has both values.
    """
    fields: dict[str, str] = {}
    error: Exception | None = None
    try:
        fields = {"backend": backend_name, **messages.describe_config(config, peers.num_ranks)}
    except ValueError as raised:
        error = raised
    gathered: list[tuple[dict[str, str], Exception | None]] = peers.bootstrap.all_gather(
        (fields, error)
    )
    rejected = messages.rejected([peer_error for _, peer_error in gathered])
    if rejected is not None:
        raise rejected from error
    differs = messages.config_differs([other for other, _ in gathered])
    if differs is not None:
        raise differs
    return Placement.of(config.resolve_expert_rank(peers.num_ranks), peers.num_ranks)
