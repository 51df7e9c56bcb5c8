"""Gloo through torch.distributed: one thread a node and direction, which waits in Gloo."""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from moe_comm import _host
from moe_comm.ep.backends.engine_pool import EnginePool, Lease, make_group
from moe_comm.ep.backends.rails.engine import Peers, RailEngine

# All ranks have just met: who does not connect by then has ended.
CONNECT_TIMEOUT_S = 60.0
# The operation judges whether a peer is late, not the engine.
_NO_LIMIT = timedelta(days=30)
# Messages that Gloo is told of before the first of them has ended.
_MOST_UNDER_WAY = 16

_kept_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, EnginePool[dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)


def gloo_problem(group: dist.ProcessGroup | None, num_ranks: int) -> str | None:
    """Why ranks of that group cannot use Gloo, or None.

    Args:
        group: Behind the communicator; None where there is none.
        num_ranks: Ranks of the communicator.
    """
    if group is None:
        return "the gloo rail needs a torch.distributed group, and this communicator has none"
    if not dist.is_gloo_available():
        return "this torch was built without gloo"
    if dist.get_world_size(group) != num_ranks:
        return (
            f"the gloo rail needs a torch.distributed group of {num_ranks} ranks, got one of "
            f"{dist.get_world_size(group)}"
        )
    backends = dist.get_backend_config(group)
    if "cpu:gloo" not in backends:
        return f"the gloo rail needs a group with gloo for CPU tensors, got {backends!r}"
    return None


class GlooEngine(RailEngine):
    """Point-to-point messages on a group of the rail's ranks.

    Collective over all ranks of the communicator.

    Args:
        peers: The ranks.
        group: Their torch.distributed group.
    """

    def __init__(self, peers: Peers, group: dist.ProcessGroup) -> None:
        super().__init__("gloo", peers)
        self._waiting: set[dist.Work] = set()
        global_ranks = dist.get_process_group_ranks(group)
        rail = [global_ranks[rank_idx] for rank_idx in peers.rail]
        self._lease: Lease[dist.ProcessGroup] = _kept_groups.setdefault(group, EnginePool()).take(
            ("rail", peers.nodes.num_local_ranks),
            peers.all_gather,
            lambda: make_group(rail, "gloo", CONNECT_TIMEOUT_S, peers.all_gather),
        )
        self._group = self._lease.engine
        for node_idx, global_rank in enumerate(rail):
            if node_idx == peers.node_idx:
                continue
            peer = dist.get_group_rank(self._group, global_rank)
            self._start(
                f"to {peers.rail[node_idx]}", self._carry, self.rail.next_send, node_idx, peer
            )
            self._start(
                f"from {peers.rail[node_idx]}", self._carry, self.rail.next_receive, node_idx, peer
            )

    def _carry(
        self,
        next_request: Callable[[int, bool], _host.RailRequest | None],
        node_idx: int,
        peer: int,
    ) -> None:
        """Move one direction of one node, in order, until the rail is given up."""
        under_way: collections.deque[tuple[_host.RailRequest, dist.Work]] = collections.deque()
        while True:
            request = None
            if len(under_way) < _MOST_UNDER_WAY:
                request = next_request(node_idx, not under_way)
            if request is not None:
                work = self._begin(request, peer)
                if work is not None:
                    under_way.append((request, work))
            elif under_way:
                self._end(*under_way.popleft())
            else:
                return

    def _begin(self, request: _host.RailRequest, peer: int) -> dist.Work | None:
        # Bytes, because Gloo does not know every dtype; no copy, the tensor holds the request.
        data = torch.frombuffer(request, dtype=torch.uint8)
        try:
            move = self._group.send if request.is_send else self._group.recv
            return move([data], peer, 0)
        except Exception as error:  # noqa: BLE001 - whatever it is, the operation names it
            self._fail(request, error)
            return None

    def _end(self, request: _host.RailRequest, work: dist.Work) -> None:
        if self.rail.is_given_up:
            self._has_failed = True
        self._waiting.add(work)
        try:
            work.wait(_NO_LIMIT)
        except Exception as error:  # noqa: BLE001 - whatever it is, the operation names it
            self._fail(request, error)
        else:
            request.complete()
        finally:
            self._waiting.remove(work)

    def _fail(self, request: _host.RailRequest, error: Exception) -> None:
        self._has_failed = True
        request.fail(f"gloo: {error}")

    def _is_stuck(self) -> bool:
        return len(self._waiting) > 0

    def _break_engine(self) -> None:
        """Let a wait of no length time out, upon which Gloo closes all connections of the group."""
        peer = 1 if self._group.rank() == 0 else 0
        nothing = torch.empty(1, dtype=torch.uint8)
        with contextlib.suppress(RuntimeError):
            self._group.recv([nothing], peer, 1).wait(timedelta(milliseconds=1))

    def _give_back(self) -> None:
        self._lease.give_back()
