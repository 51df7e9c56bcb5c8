"""State that engines between nodes keep: for later buffers, and for an engine that still writes."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from moe_comm import _host
from moe_comm.ep.backends.engine_pool import EnginePool, Lease
from moe_comm.ep.backends.rails import mpi


def _refuse(*_: Any) -> Any:
    raise RuntimeError("no more sockets")


def test_indices_stay_equal_where_one_rank_could_not_make_an_engine() -> None:
    ranks: list[EnginePool[str]] = [EnginePool(), EnginePool()]

    def take(rank: int, engine: str) -> Lease[str]:
        return ranks[rank].take("kind", lambda fitting: [fitting, []], lambda: engine)

    with pytest.raises(RuntimeError, match="no more sockets"):
        ranks[0].take("kind", lambda fitting: [fitting], _refuse)
    take(1, "first")
    leases = [take(rank, "second") for rank in range(2)]
    assert [(lease.idx, lease.engine) for lease in leases] == [(1, "second")] * 2
    leases[0].give_back()
    again = ranks[0].take("kind", lambda fitting: [fitting, [1]], _refuse)
    assert (again.idx, again.engine) == (1, "second")


def test_messages_that_mpi_does_not_cancel_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(REQUEST_NULL=None, Request=SimpleNamespace(Testall=_refuse))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=fake))
    rail = _host.QueuedRail("mpi", 2, 0)
    rail.receive(1, bytearray(8))
    request = rail.next()
    assert request is not None
    engine = object.__new__(mpi.MpiEngine)
    engine._channel = mpi._Channel(None)
    pieces = [SimpleNamespace(Cancel=_refuse)]
    with pytest.raises(RuntimeError, match="no more sockets"):
        engine._abandon({request: pieces})
    assert engine._channel.abandoned == [(request, pieces)]
