"""One rank that mpiexec started: `python -m tests.helpers.mpi_ranks NUM_LOCAL_RANKS`.

Bootstraps over MPI itself, and writes "ok RANK" when all went well.
"""

from __future__ import annotations

import faulthandler
import sys
from typing import Any
from unittest import mock

import torch
from mpi4py import MPI

from moe_comm import Communicator
from moe_comm.ep.backends.rails import make_rail, mpi
from moe_comm.testing import RankContext
from moe_comm.testing.case_list import CASES
from moe_comm.testing.scripts import run_case
from tests.helpers import node_ranks, rail_ranks
from tests.helpers.failing_ranks import wait_for

HANG_S = 300.0
"""Limit for what should take seconds; only a hang reaches it."""
NUM_CASES = 10


class MpiBootstrap:
    def __init__(self) -> None:
        self.rank_idx = MPI.COMM_WORLD.Get_rank()
        self.num_ranks = MPI.COMM_WORLD.Get_size()

    def all_gather(self, item: Any) -> list[Any]:
        return MPI.COMM_WORLD.allgather(item)


def exchange_messages(bootstrap: MpiBootstrap, num_local_ranks: int) -> None:
    with Communicator(
        bootstrap, num_local_ranks=num_local_ranks, backend="host", rail="mpi"
    ) as comm:
        channels = []
        for round_idx in range(3):
            engine = make_rail(comm)
            assert isinstance(engine, mpi.MpiEngine)
            channels.append(engine._channel)
            rail_ranks.exchange(comm, engine.rail, is_late=round_idx == 1)
            if round_idx == 1 and comm.rank_idx == 0:
                # Nobody answers this one: it is cancelled, and the channel not used again.
                with mock.patch.object(engine, "_begin", wraps=engine._begin) as begin:
                    engine.rail.receive(1, bytearray(10))
                    wait_for(lambda: begin.called)
                    engine.rail.give_up("over")
            comm.all_gather(b"")
            engine.close()
            assert not any(thread.is_alive() for thread in engine._threads)
        assert channels[0] is channels[1]
        assert channels[1] is not channels[2]


def main(num_local_ranks: str) -> None:
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    torch.set_num_threads(1)
    bootstrap = MpiBootstrap()
    mpi._PIECE_BYTES = 100_000  # long messages go in pieces
    exchange_messages(bootstrap, int(num_local_ranks))
    context = RankContext(bootstrap.rank_idx, bootstrap.num_ranks, bootstrap)
    target = node_ranks.target(int(num_local_ranks), "mpi")
    fitting = [case for case in CASES if case.num_ranks == bootstrap.num_ranks]
    for case in fitting[:: max(1, len(fitting) // NUM_CASES)]:
        faults = run_case(context, target, case)
        assert not faults, (case.name, faults[:5])
    sys.stdout.write(f"ok {bootstrap.rank_idx}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
