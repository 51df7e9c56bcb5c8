"""The backend under test."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from moe_comm.ep.backends import load_backend
from moe_comm.ep.backends.base import Backend
from moe_comm.ep.config import EpConfig
from moe_comm.peers.communicator import Communicator
from moe_comm.testing.launch import RankContext


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A backend and how to reach it.

    Args:
        name: A registered backend, or any name where `make` is given.
        make: `make(communicator, config) -> Backend`, at the top of an importable module; None for the
            registered backend.
        connect: `connect(group)`, the communicator for `make`; None for a `Communicator` without a heap,
            which has `rank_idx`, `num_ranks`, `bootstrap` and `group`.
        can_overlap: Asynchronous operations on several buffers may be issued in another order on every
            rank. False for a backend that computes when it is called.
    """

    name: str
    make: Callable[[Any, EpConfig], Backend] | None = None
    connect: Callable[[Any], Any] | None = None
    can_overlap: bool = True

    @contextlib.contextmanager
    def communicator(
        self, context: RankContext, num_local_ranks: int | None = None
    ) -> Iterator[Any]:
        """The communicator of one rank, destroyed at the end.

        Args:
            context: Context of the rank.
            num_local_ranks: Ranks of a node; None for whatever `connect` makes, or the machine.

        Raises:
            ValueError: `connect` makes other nodes.
        """
        if self.connect is not None:
            communicator = self.connect(context.group)
            if num_local_ranks not in (None, communicator.num_local_ranks):
                raise ValueError(
                    f"the case wants {num_local_ranks} ranks a node, connect() makes nodes of "
                    f"{communicator.num_local_ranks}"
                )
        else:
            carrier = self.name if self.make is None else "reference"
            communicator = Communicator(
                context.group, backend=carrier, num_local_ranks=num_local_ranks
            )
        try:
            yield communicator
        finally:
            communicator.destroy()

    def backend(self, communicator: Any, config: EpConfig) -> Backend:
        """A backend for one buffer. Collective."""
        make = load_backend(self.name) if self.make is None else self.make
        return make(communicator, config)
