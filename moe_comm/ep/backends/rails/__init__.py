"""Choice of the engine that carries rows between nodes, made for one buffer at a time.

The host backend queues transfers, and an engine here starts them and says when they have ended: `gloo` or
`mpi`, on threads that `engine` drives. Rails of sockets live in csrc/group. Knows nodes and bytes, no rows.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Protocol

from moe_comm.ep.backends.rails.engine import Peers, RailEngine
from moe_comm.ep.backends.rails.gloo import GlooEngine, gloo_problem
from moe_comm.ep.backends.rails.mpi import MpiEngine, MpiPlace, mpi_place
from moe_comm.errors import CommunicationError
from moe_comm.peers.agree import FirstError, agree, raise_different, raise_together
from moe_comm.peers.bootstrap import Bootstrap, process_group_of
from moe_comm.peers.gather_objects import gather_objects
from moe_comm.peers.node_layout import NodeLayout

if TYPE_CHECKING:
    from moe_comm import _host

__all__ = ["RailEngine", "RailOwner", "make_rail"]


class RailOwner(Protocol):
    """Interface that rails need of a communicator."""

    bootstrap: Bootstrap
    rank_idx: int
    nodes: NodeLayout
    rail_name: str

    def require_native(self) -> _host.Group:
        """The native group; ValueError without one."""


def make_rail(communicator: RailOwner) -> RailEngine | None:
    """The engine that joins this rank to its rail, for one buffer. Collective over all living ranks.

    Args:
        communicator: Communicator of the ranks. Its rail "auto" means gloo if its group has that
            for CPU tensors, else sockets.

    Returns:
        The engine, which belongs to the caller. None for the communicator's own sockets: asked for,
        chosen by "auto", because there is one node, or because ranks have failed, with which any
        other engine cannot be set up.

    Raises:
        ValueError: Ranks ask for different engines (both named), or one of them cannot use the
            engine or fails to set it up; on every rank.
    """
    if communicator.nodes.num_nodes == 1:
        return None
    native = communicator.require_native()
    group = process_group_of(communicator.bootstrap)
    place: MpiPlace | None = None
    problem: str | None = None
    name = communicator.rail_name
    if name == "auto":
        name = "sockets" if gloo_problem(group, communicator.nodes.num_ranks) else "gloo"
    elif name == "gloo":
        problem = gloo_problem(group, communicator.nodes.num_ranks)
    elif name == "mpi":
        place, problem = mpi_place()

    all_gather = functools.partial(gather_objects, native.all_gather)
    said = all_gather((name, problem, place))
    if None in said:
        return None
    raise_together([peer_problem for _, peer_problem, _ in said])
    raise_different("ranks use different rails", [{"rail": peer_name} for peer_name, _, _ in said])
    peers = Peers(
        rank_idx=communicator.rank_idx,
        nodes=communicator.nodes,
        native=native,
        all_gather=all_gather,
    )
    if name == "sockets":
        return None
    engine: RailEngine | None = None
    with FirstError() as first:
        if name == "gloo":
            assert group is not None  # else there was a problem
            engine = GlooEngine(peers, group)
        elif name == "mpi":
            engine = MpiEngine(peers, [peer_place for _, _, peer_place in said])
        else:
            raise ValueError(f"no engine belongs to the rail {name!r}")
    if isinstance(first.error, CommunicationError):
        first.raise_own()
    try:
        agree(all_gather, first.take_line())
    except BaseException:
        if engine is not None:
            engine.close()
        raise
    return engine
