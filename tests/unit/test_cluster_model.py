"""Predictions for clusters: byte formulas against worked numbers, the simulation against the formulas."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.published import PUBLISHED, compare, spread
from moe_comm.cli.model.cluster import CLUSTERS, Cluster
from moe_comm.cli.model.drawn_routing import draw_traffic
from moe_comm.cli.model.prediction import predict
from moe_comm.cli.model.simulation import simulate
from moe_comm.cli.model.workload import (
    Bytes,
    Movement,
    Workload,
    count_row_bytes,
    expected_alone,
    expected_distinct,
)
from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8, Quantization
from tests.helpers.command_line import output_of
from tests.helpers.configs import ep_config

H100 = CLUSTERS["h100-cx7"]
ONCE = Movement(element_bytes=2.0, is_once_per_node=True, is_once_per_rank=True)
ONCE_FP8 = dataclasses.replace(ONCE, element_bytes=1.03125)
SMALL = Workload(num_tokens=64, hidden=128, num_topk=4, num_experts=32)


def cluster(num_nodes: int, num_local_ranks: int) -> Cluster:
    return Cluster(machine=H100, num_nodes=num_nodes, num_local_ranks=num_local_ranks)


def reference(dispatch: Movement) -> Workload:
    return Workload(
        num_tokens=4096, hidden=7168, num_topk=8, num_experts=256, dispatch=dispatch, combine=ONCE
    )


@pytest.mark.parametrize(
    ("num_groups", "hits"), [(2, 1.993), (4, 3.614), (8, 5.295), (16, 6.523), (64, 7.676)]
)
def test_expected_distinct(num_groups: int, hits: float) -> None:
    assert expected_distinct(num_groups, 256, 8) == pytest.approx(hits, abs=5e-4)


def test_memory_bytes_of_one_pass() -> None:
    one = cluster(1, 8)
    # A mean of 4.633 of 7 slots on other ranks get a row, the others a copy that is read there.
    copies = 7 - expected_distinct(8, 256, 8) * 7 / 8
    for movement, element_bytes in ((ONCE, 2), (ONCE_FP8, 1.03125)):
        assert Bytes.of_dispatch(reference(movement), one).memory == pytest.approx(
            4096 * 7168 * (2 + (8 + copies) * element_bytes)
        )
        per_slot = dataclasses.replace(movement, is_once_per_rank=False)
        assert Bytes.of_dispatch(reference(per_slot), one).memory == pytest.approx(
            4096 * 7168 * (2 + 8 * element_bytes)
        )
    row_bytes = 4096 * 2 * 7168
    per_slot = dataclasses.replace(ONCE, is_once_per_rank=False)
    every_row = dataclasses.replace(reference(ONCE), combine=per_slot)
    assert Bytes.of_combine(every_row, one).memory == row_bytes * (8 + 1)
    # 5.295 of 8 ranks hit, 3.192 by one expert: a sum is written and read for the others.
    assert expected_alone(8, 256, 8) == pytest.approx(3.192, abs=5e-4)
    assert Bytes.of_combine(reference(ONCE), one).memory == pytest.approx(
        row_bytes * (8 + 1 + 2 * (5.295 - 3.192)), rel=1e-4
    )
    assert expected_alone(2, 4, 1) == 1.0
    assert expected_alone(2, 2, 2) == 2.0
    assert expected_alone(2, 4, 4) == 0.0


def test_link_bytes() -> None:
    # 5.295 of 8 ranks hit, one of eight is the rank itself: 272 MB; per slot 411 MB.
    assert Bytes.of_dispatch(reference(ONCE), cluster(1, 8)).nvlink == pytest.approx(
        272e6, rel=2e-3
    )
    per_slot = dataclasses.replace(ONCE, is_once_per_rank=False)
    assert Bytes.of_dispatch(reference(per_slot), cluster(1, 8)).nvlink == 4096 * 7 * 7168 * 2
    # 1.993 of 2 nodes: 603 us of a NIC of 50 GB/s in FP8.
    nic = Bytes.of_dispatch(reference(ONCE_FP8), cluster(2, 8)).nic
    assert nic / 50e3 == pytest.approx(603, rel=2e-3)
    assert Bytes.of_dispatch(reference(ONCE), cluster(1, 8)).nic == 0


def test_count_rows_grow_at_most_with_ranks_times_experts() -> None:
    assert count_row_bytes(64, 256) == 64 * (144 + 4 * (256 + 64 + 2))
    for num_ranks in (2, 8, 32, 128):
        doubled = count_row_bytes(2 * num_ranks, 512) / count_row_bytes(num_ranks, 256)
        assert doubled <= 4.0  # both double


@pytest.mark.parametrize("movement", [ONCE, SMALL.dispatch, SMALL.combine])
def test_drawn_traffic_counts_every_token(movement: Movement) -> None:
    stated = cluster(2, 4)
    traffic = draw_traffic(SMALL, stated, movement, skew=0.7, seed=3)
    assert traffic.to_slots.sum() == 8 * 64 * 4
    if not movement.is_once_per_rank:
        assert traffic.to_rank.sum() == 8 * 64 * 4
        assert np.array_equal(traffic.to_rank.sum(axis=0), traffic.to_slots)
    assert np.all(traffic.to_node <= 64 * (1 if movement.is_once_per_node else 4))
    by_node = traffic.to_rank.reshape(8, 2, 4).sum(axis=2)
    assert np.all(traffic.to_node <= by_node)


def test_skew_draws_some_experts_more_often() -> None:
    one = cluster(1, 8)
    even = draw_traffic(SMALL, one, SMALL.dispatch, skew=0.0, seed=1).to_slots
    skewed = draw_traffic(SMALL, one, SMALL.dispatch, skew=1.5, seed=1).to_slots
    assert skewed.max() > 1.2 * even.max()


def test_limited_nodes() -> None:
    stated = cluster(4, 2)
    limited = dataclasses.replace(SMALL, max_nodes=2)
    traffic = draw_traffic(limited, stated, ONCE, skew=0.0, seed=1)
    assert np.all(traffic.to_node.sum(axis=1) <= 2 * 64)
    assert traffic.to_slots.sum() == 8 * 64 * 4


@pytest.mark.parametrize("is_combine", [False, True])
@pytest.mark.parametrize(("num_nodes", "num_local_ranks"), [(1, 8), (4, 1), (3, 4)])
def test_simulation_moves_every_byte(
    num_nodes: int, num_local_ranks: int, is_combine: bool
) -> None:
    stated = cluster(num_nodes, num_local_ranks)
    workload = Workload(num_tokens=512, hidden=1024, num_topk=4, num_experts=24, combine=ONCE)
    if num_nodes == 1:
        workload = dataclasses.replace(workload, dispatch=ONCE)
    movement = workload.combine if is_combine else workload.dispatch
    traffic = draw_traffic(workload, stated, movement, skew=0.0, seed=5)
    done = simulate(traffic, workload, stated, is_combine=is_combine)
    of = Bytes.of_combine if is_combine else Bytes.of_dispatch
    expected = of(workload, stated)
    # The busiest rank sends a little more than the mean.
    assert done.nic_bytes == pytest.approx(expected.nic, rel=0.1, abs=1)
    assert done.nvlink_bytes == pytest.approx(expected.nvlink, rel=0.1, abs=1)
    bound_us = max(
        expected.nic / H100.nic_gbs,
        expected.nvlink / H100.nvlink_gbs,
        expected.memory / H100.hbm_gbs,
    )
    assert done.time_us - done.rows_us > 0.95 * bound_us / 1e3
    assert 0 < done.median_rank_us <= done.time_us


def test_a_receiver_that_all_choose_holds_its_senders_back() -> None:
    stated = cluster(4, 1)
    workload = Workload(num_tokens=1000, hidden=1000, num_topk=1, num_experts=4)
    traffic = draw_traffic(workload, stated, workload.dispatch, skew=0.0, seed=0)
    even = simulate(traffic, workload, stated).time_us
    traffic.to_node[:] = 0.0
    traffic.to_node[:, 2] = 1000.0
    traffic.to_rank[:] = traffic.to_node
    done = simulate(traffic, workload, stated)
    # Three senders, one NIC that receives: 3 * 1000 rows of 2000 bytes at 50 GB/s.
    assert done.time_us - done.rows_us == pytest.approx(
        3 * 2e6 / 50e3 + H100.nic_latency_us, rel=0.01
    )
    assert done.time_us > 2 * even


def test_predictions_of_equal_seeds_are_equal() -> None:
    stated = cluster(2, 4)
    first, again = (predict(SMALL, stated, skew=0.5, seed=9, num_chunks=2) for _ in range(2))
    assert first == again
    assert predict(SMALL, stated, skew=0.5, seed=10, num_chunks=2) != first


@pytest.mark.full
def test_published_figures_lie_near() -> None:
    few = [figure for figure in PUBLISHED if figure.num_nodes * figure.num_local_ranks <= 16]
    low, median, high = spread([compare(figure) for figure in few])
    # Above 1: the model has no protocol overhead. The documentation says how far.
    assert 0.9 < low < median < 1.4 < high < 1.8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--experts", "100"], ("100", "64")),
        (["--topk", "300"], ("300", "256")),
        (["--nodes", "300"], ("2048", "2400")),
        (["--max-nodes", "1", "--experts", "64", "--topk", "9"], ("9 experts", "1 nodes of 8")),
        (["--nic-gbs", "-3"], ("nic_gbs", "-3")),
    ],
)
def test_bad_arguments_are_named(arguments: list[str], words: tuple[str, ...]) -> None:
    said = output_of("model", *arguments, exit_code=1)
    assert "Traceback" not in said
    for word in words:
        assert word in said


def test_rows_cross_nvlink_once_for_each_rank_of_one_node() -> None:
    def rows_a_token(operation_idx: int, *arguments: str) -> float:
        sizes = "--tokens 1000 --hidden 100 --topk 8 --experts 64"
        said = output_of("model", *arguments, *sizes.split(), "--json")
        of_operation = json.loads(said)["operations"][operation_idx]
        return float(of_operation["mean_bytes"]["nvlink"]) / (1000 * 100 * 2)

    node = ("--nodes", "1", "--local-ranks", "8")
    assert rows_a_token(0, *node) == pytest.approx(4.75, abs=5e-3)
    assert rows_a_token(1, *node) == pytest.approx(7.0)
    assert rows_a_token(1, *node, "--rank-reduction") == rows_a_token(0, *node)
    # Between nodes rows are fanned out into every slot.
    assert rows_a_token(0, "--nodes", "2", "--local-ranks", "4") == pytest.approx(8 * 3 / 4)
    said = output_of("model", "--nodes", "2", "--rank-reduction", exit_code=1)
    assert "of one node, got 2 nodes" in said


def test_json_holds_what_the_table_shows() -> None:
    arguments = [
        "--nodes",
        "2",
        "--local-ranks",
        "2",
        "--tokens",
        "64",
        "--experts",
        "16",
        "--json",
    ]
    said = output_of("model", *arguments)
    document = json.loads(said)
    assert [one["operation"] for one in document["operations"]] == ["dispatch", "combine"]
    assert document["heap_bytes"] > 64 * 8 * 7168 * 2
    table = output_of("model", *arguments[:-1])
    assert "simulated us" in table


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(
    ("wire", "quantization"), [("bf16", None), ("fp8_block128", FP8_BLOCK128), ("mxfp8", MXFP8)]
)
def test_the_heap_is_that_of_a_buffer(
    nodes: int, wire: str, quantization: Quantization | None
) -> None:
    config = ep_config(16, 4, 1040, 96, rank_reduction=nodes == 1)
    sizes = config.window_sizes(2 * nodes, quantization=quantization, spans_devices=nodes == 1)
    arguments = f"model --nodes {nodes} --local-ranks 2 --tokens 96 --hidden 1040 --topk 4".split()
    arguments += ["--experts", "16", "--wire", wire, "--json"]
    if nodes == 1:
        arguments.append("--rank-reduction")
    assert json.loads(output_of(*arguments))["heap_bytes"] == (
        sizes.dispatched + sizes.expert_output + sizes.sums + sizes.control
    )


@pytest.mark.slow
def test_two_thousand_ranks() -> None:
    stated = cluster(256, 8)
    workload = Workload(num_tokens=4096, hidden=7168, num_topk=8, num_experts=2048)
    for one in predict(workload, stated, skew=0.0, seed=0, num_chunks=1):
        assert one.simulated.time_us > 0.95 * one.bound_us
