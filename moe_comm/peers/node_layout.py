"""Ranks that share a node: declared, told by the launcher, or found from their machines.

A node is a block of consecutive ranks that share memory; all nodes have equally many. Every rank
gathers the same `RankPlace`s and comes to the same verdict alone.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import socket
from collections.abc import Sequence
from pathlib import Path

from moe_comm import env
from moe_comm.peers.agree import raise_different
from moe_comm.peers.plain_data import travels


@dataclasses.dataclass(frozen=True, kw_only=True)
class NodeLayout:
    """Division of ranks into nodes: consecutive ranks, equally many on every node.

    Args:
        num_ranks: Ranks.
        num_local_ranks: Ranks of a node; divides them.

    Example:
        6 ranks, 2 a node: rank 3 is local rank 1 of node 1, on the rail of ranks 1, 3 and 5.
    """

    num_ranks: int
    num_local_ranks: int

    @property
    def num_nodes(self) -> int:
        """Nodes."""
        return self.num_ranks // self.num_local_ranks

    def node_idx(self, rank_idx: int) -> int:
        """Node of a rank."""
        return rank_idx // self.num_local_ranks

    def local_rank_idx(self, rank_idx: int) -> int:
        """A rank among those of its node."""
        return rank_idx % self.num_local_ranks

    def local_ranks(self, node_idx: int) -> range:
        """The ranks of a node."""
        first = node_idx * self.num_local_ranks
        return range(first, first + self.num_local_ranks)

    def rail(self, rank_idx: int) -> range:
        """The ranks through which a rank reaches every node, by node; itself for its own."""
        return range(self.local_rank_idx(rank_idx), self.num_ranks, self.num_local_ranks)


@travels
@dataclasses.dataclass(frozen=True)
class Machine:
    """Machine that a process runs on.

    Args:
        boot: Equal for processes that run on the same cores.
        network_namespace: Namespace in which abstract sockets are seen.
    """

    boot: str
    network_namespace: str

    def __str__(self) -> str:
        return " ".join(part for part in (self.boot, self.network_namespace) if part)


def own_machine() -> Machine:
    """Return the machine of this process. Equal for processes that can pass each other file descriptors."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return Machine(f"boot {boot}", os.readlink("/proc/self/ns/net"))
    except OSError:
        return Machine(f"host {socket.gethostname()}", "")


@travels
@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Statement of a rank about the place where it runs.

    Args:
        machine: Machine of its process.
        declared: Its `num_local_ranks` argument.
        launched: Ranks on its node by the launcher's environment, None where that says nothing
            about this group.
        parent_rank: Its rank in the parent communicator, -1 without one.
        parent_node: Node of that rank there, -1 without one.
    """

    machine: Machine
    declared: int | None
    launched: int | None
    parent_rank: int = -1
    parent_node: int = -1


def launched_num_local_ranks(rank_idx: int, num_ranks: int) -> int | None:
    """Ranks on this rank's node as the launcher's environment tells, None where it does not.

    The environment describes all processes that the launcher started, so it counts only where they
    are the group: in its size, and in the number of this rank.
    """
    for launched_rank, launched_size, local_size in env.launched_ranks():
        if (launched_rank, launched_size) == (rank_idx, num_ranks) and local_size > 0:
            return local_size
    return None


def problem_with_declared(num_local_ranks: int | None, num_ranks: int) -> str | None:
    """Return the problem with the number itself, or None; where ranks lie is `agree_on_nodes`' matter."""
    if num_local_ranks is None:
        return None
    if (
        not isinstance(num_local_ranks, int)
        or num_local_ranks < 1
        or num_ranks % num_local_ranks != 0
    ):
        return (
            f"num_local_ranks must divide the number of ranks, {num_ranks}, got {num_local_ranks!r}"
        )
    return None


def agree_on_nodes(places: Sequence[RankPlace], with_launcher: bool, must_fit: bool) -> int | None:
    """Ranks of a node, equal on every rank; None where ranks are placed unevenly.

    What is declared counts; then the parent's nodes for a child, else what every rank's launcher
    told where that agrees with the machines, else the machines.

    Args:
        places: Places of all ranks.
        with_launcher: Whether the launcher may make several nodes of one machine.
        must_fit: Whether ranks placed unevenly are an error.

    Raises:
        ValueError: No such layout, with the values that stand against it.
    """
    raise_different(
        "ranks declare different node layouts",
        [{"num_local_ranks": place.declared} for place in places],
    )
    declared = places[0].declared
    has_parent = places[0].parent_rank >= 0
    if declared is not None:
        _check_declared(declared, places, has_parent)
        return declared
    launched = places[0].launched
    if (
        with_launcher
        and not has_parent
        and launched is not None
        and all(place.launched == launched for place in places)
        and _problem_with_size(launched, places, has_parent) is None
    ):
        return launched
    blocks = _blocks(places, has_parent)
    sizes = [size for _, size in blocks]
    is_regular = len(set(sizes)) == 1 and len({label for label, _ in blocks}) == len(blocks)
    if is_regular:
        return sizes[0]
    if not must_fit:
        return None
    what = "node of the parent" if has_parent else "machine"
    counts = ", ".join(f"{size} on {label}" for label, size in blocks)
    raise ValueError(
        f"every node must have equally many consecutive ranks; in rank order there are, by {what}: "
        f"{counts}; choose or order the ranks otherwise, or give a num_local_ranks that fits, such as "
        f"{math.gcd(*sizes)}"
    )


def _label(place: RankPlace, has_parent: bool) -> str:
    return f"node {place.parent_node}" if has_parent else str(place.machine)


def _blocks(places: Sequence[RankPlace], has_parent: bool) -> list[tuple[str, int]]:
    """Runs of consecutive ranks in one place, with their lengths."""
    labels = [_label(place, has_parent) for place in places]
    return [(label, len(list(run))) for label, run in itertools.groupby(labels)]


def _problem_with_size(
    num_local_ranks: int, places: Sequence[RankPlace], has_parent: bool
) -> str | None:
    num_ranks = len(places)
    problem = problem_with_declared(num_local_ranks, num_ranks)
    if problem is not None:
        return problem
    for first in range(0, num_ranks, num_local_ranks):
        for rank_idx in range(first, first + num_local_ranks):
            here, there = (_label(places[i], has_parent) for i in (first, rank_idx))
            if here != there:
                return (
                    f"num_local_ranks {num_local_ranks} puts ranks {first} and {rank_idx} on one node, "
                    f"but rank {first} is on {here}, rank {rank_idx} on {there}"
                )
    return None


def _check_declared(num_local_ranks: int, places: Sequence[RankPlace], has_parent: bool) -> None:
    problem = _problem_with_size(num_local_ranks, places, has_parent)
    if problem is not None:
        raise ValueError(problem)
