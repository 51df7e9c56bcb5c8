"""MPI through mpi4py: one thread that starts messages and polls for their ends."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from moe_comm import _host, env
from moe_comm.ep.backends.engine_pool import EnginePool, Lease
from moe_comm.ep.backends.rails.engine import Peers, RailEngine
from moe_comm.peers.plain_data import travels

# Counts of MPI are 32-bit: a longer message goes in pieces.
_PIECE_BYTES = 1 << 30
# MPI makes progress only where it is called; polls without an outcome are further and further apart.
_EAGER_POLLS = 100
_POLL_S = 50e-6
_END_S = 0.5


@travels
class MpiPlace(NamedTuple):
    """Position of a process in MPI.

    Args:
        job: Job of the launcher, "" if it does not say.
        rank: Rank in MPI_COMM_WORLD.
        size: Size of MPI_COMM_WORLD.
    """

    job: str
    rank: int
    size: int


class _Channel:
    """A communicator of a rail, and messages that MPI may still touch after their buffer is gone."""

    def __init__(self, communicator: Any) -> None:
        self.communicator = communicator
        self.abandoned: list[object] = []


# By the places of all ranks. MPI_Comm_free is collective, which the end of a buffer is not.
_kept_channels: dict[tuple[MpiPlace, ...], EnginePool[_Channel]] = {}


def mpi_place() -> tuple[MpiPlace | None, str | None]:
    """This process in MPI; else what keeps it from using MPI. Initializes MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        return None, "the mpi rail needs mpi4py, which is not installed (pip install mpi4py)"
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        return None, f"the mpi rail needs mpi4py with a working MPI: {error}"
    if not MPI.Is_initialized() or MPI.Is_finalized():
        return None, "the mpi rail needs MPI, which is finalized or was never initialized"
    level = MPI.Query_thread()
    if level != MPI.THREAD_MULTIPLE:
        return None, (
            f"the mpi rail needs MPI.THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}), got thread level {level}"
        )
    world = MPI.COMM_WORLD
    return MpiPlace(env.mpi_job(), world.Get_rank(), world.Get_size()), None


def _check_places(places: Sequence[MpiPlace]) -> None:
    """Raise unless the ranks are different processes of one MPI job.

    Raises:
        ValueError: They are not; names both.
    """
    for rank_idx, place in enumerate(places):
        if place.size < len(places):
            raise ValueError(
                f"the mpi rail needs all {len(places)} ranks in one MPI_COMM_WORLD, got one of size "
                f"{place.size} on rank {rank_idx}; start the ranks with the mpiexec of the MPI that mpi4py loads"
            )
        first_idx = places.index(place)
        if first_idx != rank_idx:
            raise ValueError(
                f"the mpi rail needs all ranks in one MPI job, and ranks {first_idx} and {rank_idx} "
                f"are both rank {place.rank} of MPI_COMM_WORLD"
            )
        if (place.job, place.size) != (places[0].job, places[0].size):
            raise ValueError(
                f"the mpi rail needs all ranks in one MPI job, got {places[0].job!r} of "
                f"{places[0].size} on rank 0 and {place.job!r} of {place.size} on rank {rank_idx}"
            )


class MpiEngine(RailEngine):
    """Non-blocking messages on a communicator of the rail's ranks.

    Collective over all ranks of the communicator.

    Args:
        peers: The ranks.
        places: Place of every rank in MPI.

    Raises:
        ValueError: The ranks are not processes of one MPI job; on every rank.
    """

    def __init__(self, peers: Peers, places: Sequence[MpiPlace]) -> None:
        _check_places(places)
        super().__init__("mpi", peers)
        self._lease: Lease[_Channel] = _kept_channels.setdefault(tuple(places), EnginePool()).take(
            ("rail", peers.nodes.num_local_ranks),
            peers.all_gather,
            lambda: _make_channel([places[rank_idx].rank for rank_idx in peers.rail]),
        )
        self._channel = self._lease.engine
        self._start("rail", self._carry)

    def _carry(self) -> None:
        """Start and end messages of all nodes until the rail is given up."""
        from mpi4py import MPI

        under_way: dict[_host.RailRequest, list[Any]] = {}
        num_idle_polls = 0
        while not self.rail.is_given_up:
            has_changed = False
            request = self.rail.next(not under_way)
            while request is not None:
                has_changed = True
                self._begin(request, under_way)
                request = self.rail.next(False)
            for request, pieces in list(under_way.items()):
                try:
                    if not MPI.Request.Testall(pieces):
                        continue
                except Exception as error:  # noqa: BLE001 - whatever it is, the operation names it
                    self._has_failed = True
                    # Pieces that go on may still touch its memory.
                    self._channel.abandoned.append((request, pieces))
                    request.fail(f"mpi: {error}")
                else:
                    request.complete()
                has_changed = True
                del under_way[request]
            num_idle_polls = 0 if has_changed else num_idle_polls + 1
            if num_idle_polls > 0:
                time.sleep(0.0 if num_idle_polls < _EAGER_POLLS else _POLL_S)
        if under_way:
            self._has_failed = True
            self._abandon(under_way)

    def _begin(
        self, request: _host.RailRequest, under_way: dict[_host.RailRequest, list[Any]]
    ) -> None:
        communicator = self._channel.communicator
        memory = memoryview(request)
        pieces: list[Any] = []
        try:
            for start in range(0, request.num_bytes, _PIECE_BYTES):
                piece = memory[start : start + _PIECE_BYTES]
                move = communicator.Isend if request.is_send else communicator.Irecv
                pieces.append(move(piece, request.node_idx))
        except Exception as error:  # noqa: BLE001 - whatever it is, the operation names it
            self._has_failed = True
            self._channel.abandoned.append((request, pieces))
            request.fail(f"mpi: {error}")
            return
        under_way[request] = pieces

    def _abandon(self, under_way: dict[_host.RailRequest, list[Any]]) -> None:
        """Give MPI a moment to let go of messages; what it does not let go of is kept for good."""
        from mpi4py import MPI

        try:
            for request, pieces in under_way.items():
                if not request.is_send:
                    for piece in pieces:
                        if piece != MPI.REQUEST_NULL:
                            piece.Cancel()
            deadline_s = time.monotonic() + _END_S
            while under_way and time.monotonic() < deadline_s:
                for request in [
                    key for key, pieces in under_way.items() if MPI.Request.Testall(pieces)
                ]:
                    del under_way[request]
                time.sleep(_POLL_S)
        finally:  # also where MPI refuses
            self._channel.abandoned.extend(under_way.items())

    def _is_stuck(self) -> bool:
        return False  # the thread polls

    def _break_engine(self) -> None:
        """Nothing: see `_is_stuck`."""

    def _give_back(self) -> None:
        self._lease.give_back()


def _make_channel(world_ranks: list[int]) -> _Channel:
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Get_group()
    rail = world.Incl(world_ranks)
    try:
        communicator = MPI.COMM_WORLD.Create_group(rail)
    finally:
        rail.Free()
        world.Free()
    communicator.Set_errhandler(MPI.ERRORS_RETURN)
    return _Channel(communicator)
