"""Loads of experts that a buffer counts, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch

import moe_comm
from moe_comm import Capacity, Communicator, EpBuffer, Layout
from moe_comm.ep.backends import simt
from moe_comm.ep.placement import REPLICA_RULES, Placement, ReplicaRule
from tests.helpers.rank_threads import on_ranks
from tests.helpers.replica_ranks import NUM_EXPERTS, check_loads, chosen, config_of, inputs

RULES = (None, *REPLICA_RULES)


@pytest.mark.parametrize(
    ("backend", "rule"),
    [(backend, rule) for backend in ("host", "reference", "simt") for rule in RULES],
)
def test_uncached_dispatches_count_their_choices(backend: str, rule: ReplicaRule | None) -> None:
    on_ranks(3, lambda comm: check_loads(comm, rule), backend=backend)


@pytest.mark.parametrize("placement", [None, Placement([[5, 4, 0, -1], [0, 1, 2, 3]], NUM_EXPERTS)])
def test_counts_that_come_after_their_dispatch_has_returned(placement: Placement | None) -> None:
    def body(comm: Communicator) -> None:
        with simt.use_stream(simt.Stream()) as stream:
            with EpBuffer(comm, config_of(placement)) as buffer:
                buffer.count_loads()
                expected = torch.zeros(NUM_EXPERTS, dtype=torch.int64)
                results = []
                for seed in range(4):
                    x, topk_idx, _ = inputs(seed, comm.num_ranks)
                    results.append(
                        buffer.dispatch(
                            x[comm.rank_idx], topk_idx[comm.rank_idx], layout=Layout.LOW_LATENCY
                        )
                    )
                    expected += torch.tensor(chosen(topk_idx))
                assert buffer.expert_loads().tolist() == expected.tolist()
                stream.synchronize()

    on_ranks(2, body, backend="simt")


def test_what_is_dropped_or_refused_counts_for_nothing() -> None:
    def body(comm: Communicator) -> None:
        rank_idx = comm.rank_idx
        x, topk_idx, _ = inputs(0, comm.num_ranks)
        with EpBuffer(comm, config_of(None)) as buffer:
            buffer.count_loads()
            limit = Capacity(num_rows_per_expert=7, on_overflow="drop")
            buffer.dispatch(x[rank_idx], topk_idx[rank_idx], capacity=limit)
            expected = [min(7, count) for count in chosen(topk_idx)]
            assert max(chosen(topk_idx)) > 7
            assert buffer.expert_loads().tolist() == expected
            bad = topk_idx[rank_idx].clone()
            bad[0, 0] = NUM_EXPERTS if rank_idx == 0 else bad[0, 0]
            with pytest.raises(ValueError, match="is not an expert id"):
                buffer.dispatch(x[rank_idx], bad, async_op=True).event.wait()
            with pytest.raises(ValueError, match="is not an expert id"):
                buffer.expert_loads()
            assert buffer.expert_loads().tolist() == expected

    on_ranks(2, body)


def test_loads_are_logical_whatever_replaces_the_placement() -> None:
    placements = [
        Placement([[0, 1, 2, 3], [4, 5, 0, -1]], NUM_EXPERTS),
        Placement([[5, 4, 0, -1], [0, 1, 2, 3]], NUM_EXPERTS),
    ]

    def body(comm: Communicator) -> None:
        x, topk_idx, _ = inputs(3, 2)
        mine = (x[comm.rank_idx], topk_idx[comm.rank_idx])
        with EpBuffer(comm, config_of(placements[0])) as buffer:
            buffer.count_loads()
            buffer.dispatch(*mine)
            before = buffer.dispatch(*mine, async_op=True)
            buffer.replace_placement(placements[1])
            buffer.dispatch(*mine)
            before.event.wait()
            assert buffer.expert_loads().tolist() == [3 * each for each in chosen(topk_idx)]

    on_ranks(2, body)


def test_a_layer_with_gradients_counts_its_batch_once() -> None:
    def body(comm: Communicator) -> None:
        x, topk_idx, weights = (each[comm.rank_idx] for each in inputs(2, comm.num_ranks))
        with EpBuffer(comm, config_of(None)) as buffer:
            buffer.count_loads()
            result = moe_comm.dispatch(x.requires_grad_(), topk_idx, buffer=buffer)
            out = moe_comm.combine(result.x * 2, result.handle, buffer=buffer, topk_weights=weights)
            out.sum().backward()
            assert buffer.expert_loads().tolist() == chosen(inputs(2, comm.num_ranks)[1])

    on_ranks(2, body)
