"""Dispatch and combine with replicas of experts: over collectives, and over several nodes."""

from __future__ import annotations

import pytest

from moe_comm import FP8_BLOCK128, Capacity, Communicator, Layout
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.replica_ranks import (
    check_dense_by_rank,
    check_dispatch,
    check_loads,
    check_reduced,
    check_same_bits,
)


def be_rank(context: RankContext, backend: str) -> None:
    drop = Capacity(num_rows=24, num_rows_per_expert=9, on_overflow="drop")
    with Communicator(context.group, backend=backend, num_local_ranks=2) as comm:
        for seed in range(3):
            check_dispatch(comm, "balanced", Layout.EXPERT_MAJOR, seed)
            check_dispatch(comm, "balanced", Layout.RANK_MAJOR, seed)
            check_dense_by_rank(comm, seed)
        check_dispatch(comm, "balanced", Layout.EXPERT_MAJOR, 4, capacity=drop, expert_alignment=4)
        check_dispatch(comm, "balanced", Layout.EXPERT_MAJOR, 5, quantization=FP8_BLOCK128)
        check_dispatch(comm, "balanced", Layout.LOW_LATENCY, 6, masked=(2,))
        check_dispatch(comm, "nearest", Layout.RANK_MAJOR, 7)
        check_dispatch(comm, "given", Layout.EXPERT_MAJOR, 8)
        check_same_bits(comm, "balanced", 3)
        check_reduced(comm, 9, "node_reduction")
        check_loads(comm, "balanced")
        check_loads(comm, None)


@pytest.mark.parametrize("backend", ["collective", "host", "simt"])
def test_ranks_of_two_nodes(backend: str) -> None:
    run_ranks(be_rank, 4, backend)
