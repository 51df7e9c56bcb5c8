"""The native group of a communicator: its sockets, its heap, and the ranks behind both."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moe_comm import env
from moe_comm.peers.agree import agree
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator_options import CommunicatorOptions
from moe_comm.peers.node_layout import RankPlace
from moe_comm.peers.peer_timeouts import CONNECT_TIMEOUT_S
from moe_comm.peers.threads_per_rank import default_num_threads

if TYPE_CHECKING:
    from moe_comm import _host


def connect_group(
    bootstrap: Bootstrap,
    options: CommunicatorOptions,
    places: Sequence[RankPlace],
    num_local_ranks: int,
    parent: _host.Group | None,
) -> _host.Group:
    """Connect the ranks, each with a heap of its own, or as a child over the parent's. Collective.

    Args:
        bootstrap: Bootstrap of the ranks.
        options: Options of the communicator.
        places: Places of all ranks.
        num_local_ranks: Ranks of a node.
        parent: The native group of the parent, or None.

    Raises:
        ValueError: A rank has no interface that others can reach, or its machine refused a socket;
            on every rank.
        OSError: The machine refused a connection or memory.
    """
    from moe_comm import _host

    boots = [place.machine.boot for place in places]
    num_machine_ranks = boots.count(boots[bootstrap.rank_idx])
    num_threads = options.num_threads or default_num_threads(num_machine_ranks)
    channel = bootstrap.all_gather(secrets.randbits(62))[0]
    if parent is not None:
        return _host.Group.create_child(
            parent,
            [place.parent_rank for place in places],
            bootstrap.rank_idx,
            channel,
            options.stall_timeout_s,
            options.arrival_timeout_s,
            num_threads,
            num_local_ranks,
            num_machine_ranks,
        )
    mesh, addresses = _listen(bootstrap, places, num_local_ranks)
    # A bootstrap of another communicator's ranks says which have given up meanwhile.
    check = getattr(bootstrap, "check", None)
    mesh.connect(
        bootstrap.rank_idx,
        addresses,
        CONNECT_TIMEOUT_S,
        check,
        num_local_ranks,
        options.stall_timeout_s,
    )
    try:
        heap = _host.ShmHeap.create(
            mesh, options.max_heap_bytes or 0, options.with_huge_pages, env.poison_windows()
        )
        return _host.Group.create(
            mesh,
            heap,
            channel,
            options.stall_timeout_s,
            options.arrival_timeout_s,
            num_threads,
            num_local_ranks,
            num_machine_ranks,
            check,
        )
    except BaseException as error:
        if (give_up := getattr(bootstrap, "give_up", None)) is not None:
            give_up(error)
        # The error keeps the sockets open, while peers wait for what this rank will never say.
        mesh.leave()
        raise


def _listen(
    bootstrap: Bootstrap, places: Sequence[RankPlace], num_local_ranks: int
) -> tuple[_host.PeerMesh, list[bytes]]:
    """The sockets at which peers reach this rank, and the addresses of those of all. Collective."""
    from moe_comm import _host

    mesh = None
    address = b""
    problem = None
    try:
        if num_local_ranks == len(places):
            mesh = _host.PeerMesh.create()
        else:
            is_one_machine = len({place.machine for place in places}) == 1
            mesh = _host.PeerMesh.create_over_nodes(
                is_one_machine, env.socket_interface() or "", env.master_address() or ""
            )
        address = mesh.address()
    except (ValueError, OSError) as error:  # an interface that only this machine lacks
        problem = str(error)
    addresses = agree(bootstrap.all_gather, problem, address)
    assert mesh is not None
    return mesh, addresses
