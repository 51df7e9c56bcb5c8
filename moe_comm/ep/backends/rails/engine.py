"""Base of the engines between nodes: threads that drive a queue of transfers."""

from __future__ import annotations

import abc
import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from moe_comm import _host
from moe_comm.peers.forks import forks
from moe_comm.peers.node_layout import NodeLayout

# Threads that wait for nothing end at once; one inside the engine may have to be freed first.
_ORDERLY_END_S = 1.0
_FORCED_END_S = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peers:
    """The ranks, as an engine needs to know them.

    Args:
        rank_idx: This rank.
        nodes: Layout that says which ranks share a node.
        native: The communicator's native part.
        all_gather: Function that gathers Python objects from all ranks.
    """

    rank_idx: int
    nodes: NodeLayout
    native: _host.Group
    all_gather: Callable[[Any], list[Any]]

    @property
    def node_idx(self) -> int:
        """Node of this rank."""
        return self.nodes.node_idx(self.rank_idx)

    @property
    def rail(self) -> range:
        """The ranks of this rank's rail, by node."""
        return self.nodes.rail(self.rank_idx)


class RailEngine(abc.ABC):
    """A rail whose bytes threads of this process move with an engine's own calls.

    Args:
        name: Name of the engine.
        peers: The ranks.

    The threads are daemons, so that a peer that never answers does not keep the process from leaving.
    """

    def __init__(self, name: str, peers: Peers) -> None:
        self._peers = peers
        self.rail = _host.QueuedRail(name, len(peers.rail), peers.node_idx)
        self._threads: list[threading.Thread] = []
        self._has_failed = False
        self._num_recoveries = peers.native.num_recoveries
        self._fork_generation = forks.generation
        self._is_closed = False

    def close(self) -> None:
        """End the threads and leave the engine to a later buffer, if nothing is under way. Idempotent.

        Local. Waits for a transfer that the engine cannot end, but not for long.
        """
        # A forked child has none of the threads, and perhaps a lock that one of them held.
        if self._is_closed or forks.generation != self._fork_generation:
            return
        self._is_closed = True
        self.rail.give_up("the buffer was destroyed")
        if not self._join(_ORDERLY_END_S):
            # Peers may still need connections that are in order: a slow machine is no reason.
            if self._is_stuck():
                self._has_failed = True
                self._break_engine()
            if not self._join(_FORCED_END_S):
                return
        # An operation that ended early may have left messages on the way.
        native = self._peers.native
        has_aborted = native.is_aborted or native.num_recoveries != self._num_recoveries
        if not self._has_failed and not has_aborted:
            self._give_back()

    def _start(self, name: str, body: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(
            target=body, args=args, name=f"moe_comm {self.rail.name} {name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def _join(self, limit_s: float) -> bool:
        deadline_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @abc.abstractmethod
    def _is_stuck(self) -> bool:
        """Return whether a thread waits in the engine."""

    @abc.abstractmethod
    def _break_engine(self) -> None:
        """Make calls that wait in the engine end; it is of no more use."""

    @abc.abstractmethod
    def _give_back(self) -> None:
        """Leave the engine, on which nothing is under way, to a later buffer."""
