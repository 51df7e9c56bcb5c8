"""Options of measurements: how ranks run, how often what is timed, and next to what."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

PEERS = ("gloo", "mpi", "collective")
THROUGHPUT_OPERATIONS = ("dispatch", "combine", "combine_copy_in")
LATENCY_OPERATIONS = ("dispatch+combine", "differentiable_overhead")
LAYER = "dispatch+experts+combine"
OPERATIONS = ("rows", *THROUGHPUT_OPERATIONS, LAYER, *LATENCY_OPERATIONS, "memory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankOptions:
    """Options of every benchmark.

    Args:
        peers: Peers to measure, of `known_peers`.
        num_repeats: Clean pairs to collect, and rounds with peers.
        num_threads: Threads of the communicator; None for its own choice.
        with_huge_pages: Whether the communicator uses huge pages.
        is_pinned: Every rank is bound to one core, peers too.
    """

    known_peers: ClassVar[tuple[str, ...]]

    peers: tuple[str, ...] = ()
    num_repeats: int = 9
    num_threads: int | None = None
    with_huge_pages: bool = True
    is_pinned: bool = False

    def __post_init__(self) -> None:
        self._check_known("peers", self.known_peers)
        if self.num_repeats < 1:
            raise ValueError(f"num_repeats must be >= 1, got {self.num_repeats}")

    def _check_known(self, name: str, allowed: tuple[str, ...]) -> None:
        unknown = [value for value in getattr(self, name) if value not in allowed]
        if unknown:
            raise ValueError(f"{name} must be of {', '.join(allowed)}, got {', '.join(unknown)}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchOptions(RankOptions):
    """Options of a measurement of dispatch and combine.

    Args:
        backend: Backend of the communicator.
        operations: Operations to measure, of `OPERATIONS`; empty for what suits the size.
        num_sms: Multiprocessors that the communicator uses, for a GPU; None for its own choice.
        num_local_ranks: Ranks of a node, which this machine holds several of; None for one node.
        rail: Rail of the communicator, between nodes.
        mode: Ranks are "processes", or "threads" of one process: on one GPU, whose kernels run side by
            side only if they are of one process (or under MPS).
    """

    known_peers = PEERS

    backend: str = "host"
    operations: tuple[str, ...] = ()
    num_sms: int | None = None
    num_local_ranks: int | None = None
    rail: str = "auto"
    mode: str = "processes"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_known("operations", OPERATIONS)
