from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from moe_comm.ep import budget
from moe_comm.ep.buffer import EpBuffer
from moe_comm.ep.config import Capacity, EpConfig, Layout
from moe_comm.ep.placement import Placement
from moe_comm.peers.bootstrap import RankThreads
from moe_comm.peers.communicator import Communicator
from moe_comm.tensors.quantization import (
    FP8_BLOCK128,
    MXFP8,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
)
from tests.helpers.command_line import output_of
from tests.helpers.configs import ep_config

MIB = 1 << 20


def test_rows() -> None:
    assert budget.expected_recv_rows(4096, 8, num_local_experts=8, expert_alignment=16) == 32888
    assert budget.expected_recv_rows(100, 2, imbalance=1.5) == 300
    assert budget.worst_case_recv_rows(8, 4096, 8, num_local_experts=8) == 262144
    assert budget.worst_case_recv_rows(8, 4096, 8, num_local_experts=2) == 65536
    with pytest.raises(ValueError, match=r"got 0\.5"):
        budget.expected_recv_rows(1, 1, imbalance=0.5)


def test_window_rounding_is_the_heap_s() -> None:
    assert [budget.round_window_bytes(n) for n in (0, 1, 64, 4032, 4033, 4096, 4097)] == [
        0,
        64,
        64,
        4032,
        4096,
        4096,
        8192,
    ]


def test_receive_window_has_rows_then_weights() -> None:
    assert budget.receive_window_bytes(3, 16) == 64
    assert budget.receive_window_bytes(3, 16, 4) == 128


def test_window_says_whose_copies_rows_are_where_devices_differ() -> None:
    for layout, more_bytes in (("expert_major", 64), ("low_latency", 64), ("rank_major", 0)):
        sizes = [
            budget.receive_window_bytes(
                6,
                384,
                4,
                layout=layout,
                num_rows_per_expert=3 if layout == "low_latency" else None,
                spans_devices=spans_devices,
            )
            for spans_devices in (False, True)
        ]
        assert sizes[1] - sizes[0] == more_bytes
    config = EpConfig(num_experts=8, num_topk=2, hidden=64, num_max_tokens_per_rank=4096)
    sizes = [config.window_sizes(2, spans_devices=spans).dispatched for spans in (False, True)]
    assert sizes[1] - sizes[0] == 4 * 4096 * 2
    assert config.heap_bytes(2, spans_devices=True) >= config.heap_bytes(2)
    documents = [
        json.loads(output_of("budget", "--json", *arguments))
        for arguments in ([], ["--across-gpus"])
    ]
    dispatched = [document["sizes"]["dispatched"] for document in documents]
    assert dispatched[1] - dispatched[0] == 4 * 4096 * 8


def test_memory_goes_by_slots() -> None:
    sizes = {"num_topk": 2, "hidden": 64, "num_max_tokens_per_rank": 128, "dtype": torch.bfloat16}
    plain, as_many = (EpConfig(num_experts=number, **sizes) for number in (1000, 1400))
    slots = [[*range(500), *range(500, 700)], [*range(500, 1000), *range(200)]]
    placed = dataclasses.replace(plain, placement=Placement(slots, 1000))
    # Tables of 2 ranks and, for once and again, of as many experts as may have two slots each.
    set_bytes = (2 + 2 * 700) * 128 // 8
    of_one = budget.round_window_bytes(set_bytes)
    for layout in Layout:
        found, expected = (each.window_sizes(2, layout=layout) for each in (placed, as_many))
        expected = dataclasses.replace(expected, control=expected.control + 5 * of_one)
        assert found == expected != plain.window_sizes(2, layout=layout)
    found, expected = (each.rail_region_bytes(2, 1) for each in (placed, as_many))
    # Behind the row that is sent, and those of 4 epochs that come.
    assert found == expected + 5 * -(-set_bytes // 64) * 64 > plain.rail_region_bytes(2, 1)
    given = dataclasses.replace(placed, replica_rule="given")
    assert given.rail_region_bytes(2, 1) == expected
    arguments = [
        "budget",
        "--ranks",
        "4",
        "--experts",
        "10",
        "--layout",
        "low-latency",
        "--tokens",
        "8",
    ]
    documents = [
        json.loads(output_of(*arguments, *more, "--json"))
        for more in ([], ["--replicas", "0"], ["--replicas", "2"])
    ]
    assert [document["num_slots_per_rank"] for document in documents] == [3, 3, 5]
    rows = [document["sizes"]["num_recv_rows"] for document in documents]
    assert rows == [3 * 4 * 8, 3 * 4 * 8, 5 * 4 * 8]
    table = output_of(*arguments, "--replicas", "2")
    assert "one rank of 5 slots" in table


def test_ranks_that_add_first_hold_sums_for_others() -> None:
    assert budget.rank_sums_bytes(3, 2, 5, 32) == 64 + 64 + 64 + 64 + 5 * 32
    assert budget.rank_sums_bytes(3, 2, 5, 32, number_bytes=8) == 64 + 64 + 64 + 64 + 5 * 32
    assert budget.rank_sums_bytes(9, 2, 0, 32, number_bytes=8) == 3 * 192 + 64
    plain = EpConfig(num_experts=8, num_topk=2, hidden=64, num_max_tokens_per_rank=4096)
    adding = dataclasses.replace(plain, rank_reduction=True)
    for layout in Layout:
        sizes, without = (config.window_sizes(2, layout=layout) for config in (adding, plain))
        asked = 2 * 4096 * 2 * 8 + 4096 * 2 * 4 + 64
        more = budget.round_window_bytes(asked + sizes.num_recv_rows * 128)
        assert sizes.sums - without.sums == (0 if layout is Layout.RANK_MAJOR else more)
        assert dataclasses.replace(sizes, sums=0) == dataclasses.replace(without, sums=0)
    documents = [
        json.loads(output_of("budget", "--json", *arguments))
        for arguments in ([], ["--rank-reduction"])
    ]
    assert documents[1]["sizes"]["sums"] > 8 * documents[0]["sizes"]["sums"]


def test_rows_of_the_other_layouts() -> None:
    assert budget.rank_major_recv_rows(8, 4096, 2) == 8192
    assert budget.rank_major_recv_rows(8, 4096, 16) == 8 * 4096
    assert budget.rank_major_recv_rows(8, 4096, 2, imbalance=9.0) == 8 * 4096
    assert budget.rank_major_recv_rows(8, 4096, 2, worst_case=True) == 8 * 4096
    assert budget.low_latency_recv_rows(8, 128, 4) == 4 * 8 * 128


def test_capacity_limits_rows() -> None:
    limited = budget.limited_recv_rows
    assert limited(1000, capacity_rows=640) == 640
    assert limited(1000, capacity_rows=2000) == 2000
    assert limited(1000, capacity_rows=640, can_grow=True) == 1000
    per_expert = {"capacity_rows_per_expert": 100, "num_local_experts": 4, "expert_alignment": 16}
    assert limited(1000, **per_expert) == 4 * 112
    assert limited(100, **per_expert) == 100
    with pytest.raises(ValueError, match=r"capacity_rows must be >= 0, got -1"):
        limited(1000, capacity_rows=-1)


SCALES = budget.ScaleSizes(num_scales=3, scale_bytes=4)
COLUMNS = budget.ScaleSizes(num_scales=3, scale_bytes=4, is_column_major=True)


def test_window_has_a_region_for_scale_factors() -> None:
    # 5 rows of 384 bytes: 1920 = 30 lines; 60 bytes of factors, or columns of 8: 96.
    assert budget.receive_window_bytes(5, 384) == 1920
    assert budget.receive_window_bytes(5, 384, scales=SCALES) == 1920 + 64
    assert budget.receive_window_bytes(5, 384, scales=COLUMNS) == 1920 + 128
    assert budget.receive_window_bytes(5, 384, 4, scales=SCALES) == 1920 + 64 + 64
    assert budget.scale_region_bytes(5, COLUMNS) == 96
    # LOW_LATENCY: columns of the places of one expert, as they are.
    assert budget.scale_region_bytes(6, COLUMNS, num_rows_per_expert=3) == 72


def test_rank_major_window_has_ids() -> None:
    # 5 rows of 2 choices: 40 bytes of weights, 80 bytes of ids.
    rank_major = budget.receive_window_bytes(5, 384, 4, layout="rank_major", num_topk=2)
    assert rank_major == 1920 + 64 + 128


def test_workspace_has_rows_offers_and_flags() -> None:
    # A row of 144 bytes and a place of 320 for a message, or 4 * (257 + 24 + 2) of counts.
    assert budget.workspace_bytes(2, 3, 4) == 64 * 3 + 4 * 2 * (512 + 128)
    assert budget.workspace_bytes(24, 257, 5) == 64 * 25 + 5 * 24 * (1280 + 128)
    assert budget.count_row_bytes(64, 256) == 144 + 4 * (256 + 64 + 2)
    assert budget.count_row_bytes(64, 256, is_cached=True) == 144


@pytest.mark.parametrize(
    (
        "ranks",
        "num_experts",
        "num_tokens",
        "num_topk",
        "row",
        "depth",
        "node_reduction",
        "expected",
    ),
    [
        # The least area, 256 KiB, in both directions.
        ((2, 1), 4, 0, 8, (8, torch.bfloat16), 2, False, 526144),
        ((2, 1), 4, 1, 1, (8, torch.bfloat16), 2, False, 526144),
        ((6, 2), 257, 100, 7, (8, torch.bfloat16), 2, True, 1058176),
        ((6, 2), 257, 5000, 7, (7168, torch.float32), 5, False, 594634368),
        ((32, 8), 64, 300, 8, (7168, torch.float32), 5, True, 53621504),
        ((32, 8), 64, 4096, 8, (2048, torch.bfloat16), 4, True, 111755392),
    ],
)
def test_memory_between_nodes_holds_the_largest_operation(
    ranks: tuple[int, int],
    num_experts: int,
    num_tokens: int,
    num_topk: int,
    row: tuple[int, torch.dtype],
    depth: int,
    node_reduction: bool,
    expected: int,
) -> None:
    config = ep_config(
        num_experts,
        num_topk,
        row[0],
        num_tokens,
        dtype=row[1],
        num_max_in_flight=depth,
        node_reduction=node_reduction,
    )
    assert config.rail_region_bytes(*ranks) == expected


def test_memory_between_nodes() -> None:
    config = EpConfig(num_experts=256, num_topk=8, hidden=7168, num_max_tokens_per_rank=4096)
    assert config.rail_row_bytes == 14336 + 896
    assert config.rail_region_bytes(16, 8) == 126384704
    assert config.rail_region_bytes(8, 8) == 0
    with pytest.raises(ValueError, match="got 3 and 8"):
        config.rail_region_bytes(8, 3)
    with pytest.raises(ValueError, match="got None, 7168, 4096 and"):
        dataclasses.replace(config, num_topk=None).rail_region_bytes(16, 8)


def sizes() -> budget.WindowSizes:
    return budget.window_sizes(
        num_ranks=2,
        num_tokens=1024,
        num_topk=4,
        num_experts=8,
        num_local_experts=4,
        row_bytes=4096,
        weight_bytes=0,
    )


def test_training_keeps_every_layer_of_every_microbatch() -> None:
    one = sizes()
    assert (one.dispatched, one.expert_output, one.sums) == (16 * MIB, 16 * MIB, 4 * MIB)
    assert one.gradients == one.dispatched
    kept = budget.budget_bytes(one, num_ranks=2, num_moe_layers=3, num_microbatches=2)
    assert (kept.num_dispatched, kept.num_gradients) == (6, 1)
    assert (kept.num_expert_outputs, kept.num_sums) == (7, 7)
    # One more page for the control area.
    assert kept.rank_bytes == 7 * 36 * MIB + 2 * MIB
    assert kept.machine_bytes == 2 * kept.rank_bytes


def test_recompute_keeps_sums_only() -> None:
    recomputed = budget.budget_bytes(
        sizes(), num_ranks=2, num_moe_layers=3, num_microbatches=2, recompute=True
    )
    assert (recomputed.num_dispatched, recomputed.num_gradients) == (1, 1)
    assert (recomputed.num_expert_outputs, recomputed.num_sums) == (2, 7)


def test_weights_at_the_experts_let_their_output_go() -> None:
    at_experts = budget.budget_bytes(
        sizes(), num_ranks=2, num_moe_layers=3, weights_in_combine=False
    )
    assert (at_experts.num_dispatched, at_experts.num_gradients) == (3, 1)
    assert at_experts.num_expert_outputs == 1


def test_config_counts_its_busiest_rank() -> None:
    config = ep_config(4, 2, 1024, 1024, dtype=torch.float32, expert_rank=[0, 0, 0, 1])
    # Rank 0 has 3 experts: 2048 rows and 3 * 511 of padding, 4096 bytes and a weight each.
    assert (
        config.heap_bytes(
            2, num_live_windows=1, num_live_expert_outputs=0, num_live_sums=0, expert_alignment=512
        )
        == 16 * MIB
    )
    more = config.heap_bytes(2, num_live_windows=3, num_live_expert_outputs=0, num_live_sums=0)
    assert more > 3 * 8 * MIB
    worst = config.heap_bytes(
        2, num_live_windows=1, num_live_expert_outputs=0, num_live_sums=0, worst_case=True
    )
    assert worst > 2 * 1024 * 2 * 4096


def test_config_counts_quantized_rows_and_their_scale_factors() -> None:
    config = EpConfig(num_experts=4, num_topk=2, hidden=1024, num_max_tokens_per_rank=1024)
    plain = config.window_sizes(2)
    quantized = config.window_sizes(2, quantization=FP8_BLOCK128)
    assert plain.dispatched == 2048 * (2048 + 4)
    assert quantized.dispatched == 2048 * (1024 + 8 * 4 + 4)
    assert quantized.gradients == plain.gradients == plain.dispatched
    assert quantized.expert_output == plain.expert_output
    windows = {"num_live_windows": 8, "num_live_expert_outputs": 0, "num_live_sums": 0}
    assert config.heap_bytes(2, **windows, quantization=FP8_BLOCK128) == 18 * MIB
    assert config.heap_bytes(2, **windows) == 34 * MIB


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(
    "quantization",
    [
        pytest.param(None, id="as-they-are"),
        pytest.param(FP8_BLOCK128, id="fp8"),
        pytest.param(dataclasses.replace(FP8_BLOCK128, is_column_major=True), id="fp8-columns"),
        pytest.param(MXFP8, id="mxfp8"),
        pytest.param(
            Quantization(
                format=QuantizationFormat.FP8_BLOCK128,
                scale_format=ScaleFormat.UE8M0,
                is_column_major=True,
            ),
            id="packed-columns",
        ),
    ],
)
def test_formula_is_what_the_heap_gives_out(
    layout: Layout, quantization: Quantization | None
) -> None:
    pytest.importorskip("moe_comm._host")
    # Small enough that no window is rounded to pages.
    config = EpConfig(num_experts=2, num_topk=2, hidden=160, num_max_tokens_per_rank=5)
    topk_idx = torch.tensor([[0, 1]] * 5)
    with (
        Communicator(RankThreads(1)[0], backend="host") as communicator,
        EpBuffer(communicator, config) as buffer,
    ):
        live_bytes = communicator.heap_stats().live_bytes
        result = buffer.dispatch(
            torch.randn(5, 160).bfloat16(),
            topk_idx,
            torch.rand(5, 2),
            layout=layout,
            quantization=quantization,
            copy_out=False,
        )
        given_out = communicator.heap_stats().live_bytes - live_bytes
        del result
    sizes = config.window_sizes(1, layout=layout, quantization=quantization)
    assert given_out == sizes.dispatched


def test_config_counts_a_capacity_and_fixed_places() -> None:
    config = EpConfig(num_experts=4, num_topk=2, hidden=1024, num_max_tokens_per_rank=128)
    assert config.window_sizes(2, layout=Layout.LOW_LATENCY).num_recv_rows == 2 * 2 * 128
    assert config.window_sizes(2, layout=Layout.RANK_MAJOR).num_recv_rows == 256
    capacity = Capacity(num_rows=96, on_overflow="drop")
    assert config.window_sizes(2, capacity=capacity).num_recv_rows == 96
    with pytest.raises(ValueError, match="LOW_LATENCY"):
        config.heap_bytes(2, layout=Layout.LOW_LATENCY, capacity=capacity)


def test_command_prints_what_to_reserve() -> None:
    arguments = ["budget", "--ranks", 2, "--tokens", 1024, "--hidden", 2048, "--topk", 4]
    document = json.loads(output_of(*arguments, "--experts", 8, "--json"))
    assert document["machine_bytes"] == 2 * document["rank_bytes"]
    table = output_of(*arguments, "--experts", 8)
    assert f"communicator.reserve({document['rank_bytes']})" in table

    def sizes_with(*more: object) -> dict[str, int]:
        return dict(json.loads(output_of(*arguments, "--json", *more))["sizes"])

    dispatched = sizes_with("--experts", 8, "--quantization", "mxfp8")["dispatched"]
    assert dispatched == 4096 * (2048 + 2048 // 32 + 4)
    assert sizes_with("--layout", "low-latency")["num_recv_rows"] == 32 * 2 * 1024
    assert sizes_with("--capacity-rows", 640)["num_recv_rows"] == 640
    for wrong, message in (
        (["--scale-format", "ue8m0"], "need --quantization"),
        (["--quantization", "mxfp8", "--scale-format", "float32"], "got FLOAT32"),
        (["--quantization", "mxfp8", "--dtype", "fp64"], "got fp64"),
        (["--layout", "low-latency", "--capacity-rows", "1"], "capacity must be None"),
        (["--local-ranks", "3"], "got 3 and 2"),
        (["--node-reduction"], "needs --local-ranks"),
    ):
        assert message in output_of(*arguments, *wrong, exit_code=1)
    config = EpConfig(num_experts=8, num_topk=4, hidden=2048, num_max_tokens_per_rank=1024)
    across = ["--experts", "8", "--local-ranks", "1"]
    nodes = json.loads(output_of(*arguments, *across, "--json"))
    assert nodes["rail_region_bytes"] == config.rail_region_bytes(2, 1)
    few = dataclasses.replace(config, num_max_tokens_per_rank=64)
    reduced = dataclasses.replace(few, node_reduction=True).rail_region_bytes(2, 1)
    assert reduced < few.rail_region_bytes(2, 1)
    sums = ["--tokens", "64", "--node-reduction", "--json"]
    of_sums = json.loads(output_of(*arguments, *across, *sums))
    assert of_sums["rail_region_bytes"] == reduced
    assert nodes["rank_bytes"] == nodes["machine_bytes"] == document["rank_bytes"]
    assert document["rail_region_bytes"] == 0
    assert "memory between nodes" in output_of(*arguments, *across)
    assert "16 bytes" in output_of("budget", "--hidden", 7, exit_code=1)
