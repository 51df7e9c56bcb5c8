from __future__ import annotations

import dataclasses
import functools
import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.cli import bench_command
from moe_comm.cli.bench import oracle, sweep
from moe_comm.cli.bench.case import BenchCase, make_topk_idx, make_x
from moe_comm.cli.bench.memory import parse_smaps, total_bytes
from moe_comm.cli.bench.options import LAYER, BenchOptions
from moe_comm.cli.bench.parts import PARTS, middle_half, take_apart
from moe_comm.cli.bench.peers.pipeline import AllToAllPipeline
from moe_comm.cli.bench.processes import WorkerProcesses
from moe_comm.cli.bench.rank import Sample
from moe_comm.cli.bench.replicas import place_replicas, summarize_rows
from moe_comm.cli.bench.report import case_title, result_table, sweep_tables, write_plot
from moe_comm.cli.bench.result import BenchRow, to_json
from moe_comm.cli.bench.run import CaseRun, check_options, default_operations
from moe_comm.cli.bench.statistics import Pair, makespan_us, median_ratio, percentile
from moe_comm.cli.bench.svg import DARK, LIGHT
from moe_comm.cli.bench.sweep import check_sweep
from moe_comm.cli.bench.sweep_picture import draw_sweep, sweep_pictures
from moe_comm.cli.bench.times import SideTimes, ratios_in_rounds, summarize_roof
from moe_comm.cli.bench.worker import Worker
from moe_comm.cli.command_rules import wide_console
from moe_comm.ep.config import Layout
from moe_comm.ep.placement import Placement
from moe_comm.ep.planner import plan_placement
from moe_comm.ep.routing_trace import save_routing_trace
from moe_comm.ep.tracing import PhaseRecord
from moe_comm.tensors.quantization import (
    FP8_BLOCK128,
    MXFP8,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
)
from tests.helpers.command_line import output_of

SMALL = BenchCase(num_ranks=3, num_tokens=17, hidden=64, num_topk=3, num_experts=7, skew=0.7)


PLACEMENT = Placement([[5, 1, 0], [6, 5, 4], [5, 2, 3]], 7)
REPLICATED = dataclasses.replace(SMALL, placement=PLACEMENT)


PACKED_COLUMNS = Quantization(
    format=QuantizationFormat.FP8_BLOCK128, scale_format=ScaleFormat.UE8M0, is_column_major=True
)


def test_routing_is_the_same_in_every_process_and_distinct() -> None:
    first = make_topk_idx(SMALL, 1).clone()
    make_topk_idx.cache_clear()
    assert torch.equal(make_topk_idx(SMALL, 1), first)
    assert not torch.equal(make_topk_idx(SMALL, 0), first)
    assert all(len(set(choices)) == 3 for choices in first.tolist())


def test_skew_makes_popular_experts_popular() -> None:
    def largest_share(skew: float) -> float:
        case = BenchCase(
            num_ranks=1, num_tokens=2000, hidden=8, num_topk=2, num_experts=32, skew=skew
        )
        counts = torch.bincount(make_topk_idx(case, 0).flatten(), minlength=32)
        return float(counts.max() / counts.sum())

    assert largest_share(0.0) < 0.06
    assert largest_share(1.5) > 0.25


def test_case_replays_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    recorded = torch.tensor([[[0, 1], [2, -1], [3, 0]], [[1, 2], [0, 3], [2, 1]]])
    save_routing_trace(path, recorded, num_experts=4, num_ranks=1)
    case = BenchCase(num_ranks=2, num_tokens=4, hidden=8, num_topk=2, num_experts=4, routing=path)
    assert make_topk_idx(case, 0).tolist() == [[0, 1], [2, -1], [3, 0], [1, 2]]
    assert make_topk_idx(case, 1).tolist() == [[0, 3], [2, 1], [0, 1], [2, -1]]
    other = dataclasses.replace(case, num_experts=8)
    with pytest.raises(ValueError, match=r"top-2 of 4 experts.*top-2 of 8"):
        make_topk_idx(other, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "int8"}, "int8"),
        ({"num_ranks": 0}, "num_ranks must be >= 1, got 0"),
        ({"skew": -1.0}, "got -1.0"),
        ({"num_topk": 9}, "9 > 7"),
        ({"expert_alignment": 0}, "got 0"),
        ({"hidden": 7}, "16 bytes"),
        ({"api": "nccl"}, "native, hybrid_ep, got 'nccl'"),
        ({"api": "hybrid_ep"}, "7 experts on 3 ranks"),
        ({"api": "hybrid_ep", "layout": Layout.LOW_LATENCY}, "got layout LOW_LATENCY"),
        ({"api": "hybrid_ep", "quantization": MXFP8}, "got MXFP8"),
        ({"ffn_hidden": 0}, "ffn_hidden must be >= 1, got 0"),
        ({"versus_given": True}, "where there is a placement, got none"),
        ({"placement": PLACEMENT, "layout": Layout.RANK_MAJOR}, "with layout RANK_MAJOR"),
        ({"placement": PLACEMENT, "rank_reduction": True}, "with rank_reduction True"),
        ({"placement": PLACEMENT, "reduced_local_ranks": 1}, "with node_reduction True"),
    ],
)
def test_case_rejects(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_options_reject_unknown_names() -> None:
    with pytest.raises(ValueError, match="gloo, mpi, collective, got nccl"):
        BenchOptions(peers=("nccl",))
    with pytest.raises(ValueError, match="got fly"):
        BenchOptions(operations=("dispatch", "fly"))


QUANTIZED = dataclasses.replace(SMALL, quantization=FP8_BLOCK128)


HYBRID_EP = dataclasses.replace(SMALL, num_experts=6, api="hybrid_ep")


CHECKED = dataclasses.replace(SMALL, check_messages=True)


LOW_LATENCY = dataclasses.replace(SMALL, layout=Layout.LOW_LATENCY)


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (QUANTIZED, {"peers": ("gloo",)}, r"its baseline \(unquantized\), got peers gloo"),
        (LOW_LATENCY, {"peers": ("gloo",)}, "got layout LOW_LATENCY"),
        (HYBRID_EP, {"operations": ("differentiable_overhead",)}, "which this case is not"),
        (HYBRID_EP, {"operations": ("memory",)}, 'got "hybrid_ep"'),
        (HYBRID_EP, {"num_threads": 2}, "got 2 and True"),
        (HYBRID_EP, {"with_huge_pages": False}, "got None and False"),
        (HYBRID_EP, {"num_local_ranks": 1}, "got local ranks 1"),
        (SMALL, {"num_sms": 2}, "is for backend cuda, got num_sms 2 and backend host"),
        (SMALL, {"num_local_ranks": 2}, "must divide ranks, got 2 and 3"),
        (SMALL, {"num_local_ranks": 1, "backend": "collective"}, "got local ranks 1 and backend"),
        (SMALL, {"rail": "gloo"}, "got rail gloo and no local ranks"),
        (CHECKED, {}, "check_messages needs local ranks, got none"),
        (SMALL, {"peers": ("collective",), "backend": "collective"}, "compared with itself"),
        (REPLICATED, {"peers": ("gloo",)}, r"its baseline \(no_replicas\), got peers gloo"),
        (REPLICATED, {"num_local_ranks": 1}, "on one node, got local ranks 1"),
        (SMALL, {"peers": ("gloo",), "operations": (LAYER,)}, "no experts, got peers gloo"),
        (LOW_LATENCY, {"operations": (LAYER,)}, "got layout LOW_LATENCY"),
        (QUANTIZED, {"operations": (LAYER,)}, "got quantization FP8_BLOCK128"),
        (HYBRID_EP, {"operations": (LAYER,)}, "got api hybrid_ep"),
        (HYBRID_EP, {"operations": ("rows",)}, "got api hybrid_ep"),
    ],
)
def test_options_without_a_meaning_are_rejected(
    case: BenchCase, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_options(case, BenchOptions(**options))


def test_baselines_differ_in_one_thing() -> None:
    assert SMALL.baseline is None
    assert QUANTIZED.baseline == ("unquantized", SMALL)
    assert LOW_LATENCY.baseline == ("expert_major", SMALL)
    assert CHECKED.baseline == ("unchecked", SMALL)
    quantized = dataclasses.replace(QUANTIZED, check_messages=True)
    assert quantized.baseline == ("unchecked", QUANTIZED)
    assert REPLICATED.baseline == ("no_replicas", SMALL)
    given = dataclasses.replace(REPLICATED, versus_given=True).baseline
    assert given[0] == given[1].config.replica_rule == "given"
    assert given[1].placement == PLACEMENT
    assert HYBRID_EP.baseline is not None
    name, native = HYBRID_EP.baseline
    assert (name, native.api, native.sends_weights) == ("native", "native", True)


def test_ratio_is_the_median_over_rounds_that_are_clean_for_both() -> None:
    def side(*rounds: tuple[int, int, int]) -> SideTimes:
        times = SideTimes()
        for before, op, after in rounds:
            ends = [(0, before * 1000), (0, op * 1000), (0, after * 1000)]
            times.add([Sample(op=ends[1], roof_before=ends[0], roof_after=ends[2])])
        return times

    theirs = side((10, 30, 10), (10, 40, 10), (10, 90, 20))
    ours = side((10, 20, 10), (10, 10, 20), (10, 15, 10))
    assert (theirs.is_clean, ours.is_clean) == ([True, True, False], [True, False, True])
    assert ratios_in_rounds(theirs, ours) == [1.5]
    unclean = side((10, 20, 30), (10, 10, 30), (10, 15, 30))
    assert ratios_in_rounds(theirs, unclean) == [1.5, 4.0, 6.0]
    summary = summarize_roof(theirs.pairs, num_bytes=30_000, roof_bytes=10_000)
    # Both clean roofs take 10 us for a third of the bytes.
    assert summary["fraction_of_roof"] == pytest.approx((1.0 + 0.75) / 2)
    assert summary["roof_gbs"] == pytest.approx(1.0)
    assert summarize_roof(unclean.pairs, 1, 1)["roof_state"] == "unstable"


def test_size_decides_what_is_measured() -> None:
    large = BenchCase(num_ranks=2, num_tokens=1 << 16, hidden=7168, num_topk=8, num_experts=64)
    assert "combine_copy_in" in default_operations(large)
    assert "dispatch+combine" in default_operations(SMALL)
    assert default_operations(QUANTIZED) == ("dispatch+combine", "memory")
    assert default_operations(HYBRID_EP) == ("dispatch+combine",)
    assert default_operations(REPLICATED) == ("rows", LAYER)
    low_latency = dataclasses.replace(REPLICATED, layout=Layout.LOW_LATENCY)
    assert default_operations(low_latency) == ("rows", "dispatch+combine")
    given = dataclasses.replace(REPLICATED, versus_given=True)
    assert default_operations(given) == ("dispatch+combine",)
    assert default_operations(dataclasses.replace(large, quantization=MXFP8)) == (
        "dispatch",
        "memory",
    )
    assert default_operations(dataclasses.replace(large, api="hybrid_ep")) == (
        "dispatch",
        "combine",
    )


def test_percentile_interpolates() -> None:
    assert percentile([4.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([0.0, 10.0], 0.95) == pytest.approx(9.5)
    with pytest.raises(ValueError, match="at least one"):
        percentile([], 0.5)


def test_makespan_runs_from_first_start_to_last_end() -> None:
    assert makespan_us([(1_000, 9_000), (3_000, 12_000)]) == 11.0


def test_pair_is_clean_when_roofs_agree_within_a_fifth() -> None:
    assert Pair(op_us=110.0, roof_before_us=100.0, roof_after_us=120.0).is_clean
    assert not Pair(op_us=110.0, roof_before_us=121.0, roof_after_us=100.0).is_clean
    assert Pair(op_us=110.0, roof_before_us=100.0, roof_after_us=120.0).fraction == 1.0


SMAPS = """\
7f0000000000-7f0000400000 rw-s 00000000 00:01 41                         /memfd:moe (deleted)
Size:               4096 kB
Rss:                2048 kB
ShmemPmdMapped:     2048 kB
7f0001000000-7f0001400000 rw-s 00000000 00:01 42                         /memfd:moe (deleted)
Rss:                 100 kB
7f0002000000-7f0002400000 rw-p 00000000 00:00 0
Rss:                9999 kB
7f0003000000-7f0003400000 r--p 00000000 08:01 43                         /usr/lib/libc.so
Rss:                 777 kB
"""


def test_smaps_counts_segments_once() -> None:
    memory = parse_smaps(SMAPS)
    assert memory.resident_bytes == {41: 2048 * 1024, 42: 100 * 1024}
    assert memory.huge_page_bytes == 2048 * 1024
    assert parse_smaps(SMAPS, inode=42).resident_bytes == {42: 100 * 1024}
    assert total_bytes([memory, memory]) == 2148 * 1024


def exchange_alone(
    recv: torch.Tensor, send: torch.Tensor, recv_counts: Sequence[int], send_counts: Sequence[int]
) -> None:
    """The all-to-all of a single rank."""
    assert list(recv_counts) == list(send_counts) == [send.shape[0]]
    recv.copy_(send)


@pytest.mark.parametrize("alignment", [1, 4])
def test_pipeline_gives_expert_major_rows_and_sums(alignment: int) -> None:
    case = BenchCase(
        num_ranks=1,
        num_tokens=19,
        hidden=32,
        num_topk=3,
        num_experts=6,
        expert_alignment=alignment,
    )
    pipeline = AllToAllPipeline(case, 0, make_x(case, 0), exchange_alone)
    for _ in range(2):
        expert_x = pipeline.dispatch()
        assert oracle.check_dispatch(case, 0, expert_x) is None
        expert_out = torch.empty_like(expert_x)
        oracle.run_experts(case, 0, expert_x, expert_out)
        assert oracle.check_combine(case, 0, pipeline.combine(expert_out), max_ulps=2) is None


def test_pipeline_skips_unused_choices(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    save_routing_trace(
        path, torch.tensor([[[0, -1], [-1, -1], [1, 0]]]), num_experts=2, num_ranks=1
    )
    case = BenchCase(num_ranks=1, num_tokens=3, hidden=16, num_topk=2, num_experts=2, routing=path)
    pipeline = AllToAllPipeline(case, 0, make_x(case, 0), exchange_alone)
    expert_x = pipeline.dispatch()
    assert oracle.check_dispatch(case, 0, expert_x) is None
    expert_out = torch.empty_like(expert_x)
    oracle.run_experts(case, 0, expert_x, expert_out)
    assert oracle.check_combine(case, 0, pipeline.combine(expert_out), max_ulps=2) is None


def some_rows() -> list[BenchRow]:
    return [
        BenchRow(
            op="dispatch",
            case=SMALL,
            backend="host",
            p50_us=10.0,
            p95_us=12.0,
            op_us=11.0,
            bytes=1000,
            gbs=0.09,
            roof_gbs=0.1,
            fraction_of_roof=0.9,
            speedup={"gloo": 8.0},
            peer_p50_us={"gloo": 88.0},
            num_pairs=9,
            num_dropped=2,
            roof_state="slow",
        ),
        BenchRow(op="differentiable_overhead", case=SMALL, backend="host", p50_us=-1.0),
    ]


def test_json_has_the_documented_keys() -> None:
    document = json.loads(json.dumps(to_json({"cpu": "x"}, some_rows(), {"mpi": "not installed"})))
    assert document["environment"] == {"cpu": "x"}
    assert document["missing_peers"] == {"mpi": "not installed"}
    row = document["cases"][0]
    expected = {
        "op": "dispatch",
        "backend": "host",
        "ranks": 3,
        "tokens": 17,
        "hidden": 64,
        "topk": 3,
        "experts": 7,
        "dtype": "bf16",
        "p50_us": 10.0,
        "p95_us": 12.0,
        "bytes": 1000,
        "gbs": 0.09,
        "roof_gbs": 0.1,
        "fraction_of_roof": 0.9,
        "check": "ok",
        "speedup": {"gloo": 8.0},
        "api": "native",
        "quantization": None,
        "scale_format": None,
        "column_major_scales": False,
    }
    assert expected.items() <= row.items()
    packed = dataclasses.replace(SMALL, quantization=PACKED_COLUMNS)
    row = BenchRow(op="dispatch", case=packed, backend="host").to_dict()
    assert (row["quantization"], row["scale_format"]) == ("FP8_BLOCK128", "UE8M0")
    assert row["column_major_scales"]


def test_table_shows_ratios_and_missing_peers() -> None:
    console = wide_console()
    with console.capture() as capture:
        console.print(result_table(some_rows(), {"mpi": "needs mpi4py (pip install mpi4py)"}))
    text = capture.get()
    assert "8.0x" in text
    assert "0.900" in text
    assert "9 (2)" in text
    assert "pip install mpi4py" in text


def test_title_says_what_is_quantized() -> None:
    title = case_title(dataclasses.replace(SMALL, quantization=PACKED_COLUMNS))
    assert "FP8_BLOCK128 with UE8M0 scales, column-major" in title
    assert "hybrid_ep" in case_title(HYBRID_EP)


def test_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    environment = {
        "version": "0",
        "commit": None,
        "cpu": "x",
        "cores": 2,
        "isa": None,
        "kernel": "k",
        "transparent_huge_pages": {"shmem_enabled": "never"},
        "torch": "2",
        "load_average": 0.0,
    }
    write_plot(tmp_path / "plot.png", some_rows(), environment)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="nothing was timed"):
        write_plot(tmp_path / "plot.png", some_rows()[1:], environment)


def test_replicas_are_placed_by_earlier_batches_of_the_same_routing() -> None:
    case = place_replicas(SMALL, 2)
    assert case.placement is not None
    loads = torch.zeros(1, 7, dtype=torch.int64)
    for batch_idx in range(8):
        batch = dataclasses.replace(SMALL, batch_idx=batch_idx)
        for rank_idx in range(3):
            loads += torch.bincount(make_topk_idx(batch, rank_idx).flatten(), minlength=7)
    assert case == dataclasses.replace(SMALL, batch_idx=8, placement=plan_placement(loads, 3, 5)[0])
    batches = [dataclasses.replace(SMALL, batch_idx=number) for number in range(9)]
    drawn = {str(make_topk_idx(batch, 2).tolist()) for batch in batches}
    assert len(drawn) == 9
    assert torch.equal(make_topk_idx(case, 2), make_topk_idx(batches[8], 2))


def test_replicas_by_rank_are_compared_with_given_slots_alone() -> None:
    by_rank = dataclasses.replace(SMALL, layout=Layout.RANK_MAJOR)
    case = place_replicas(by_rank, 2, replica_rule="nearest", versus_given=True)
    assert case.replica_rule == "nearest"
    assert case.baseline == ("given", dataclasses.replace(case, are_slots_given=True))
    with pytest.raises(ValueError, match="no slots with layout RANK_MAJOR"):
        place_replicas(by_rank, 2)


def test_replicas_of_a_trace_are_placed_by_what_comes_before(tmp_path: Path) -> None:
    path = tmp_path / "trace.npz"
    recorded = torch.tensor([[0], [1], [0], [0], [3], [2], [2], [3], [3]]).view(1, 9, 1)
    save_routing_trace(path, recorded, num_experts=4, num_ranks=1)
    case = BenchCase(num_ranks=2, num_tokens=2, hidden=8, num_topk=1, num_experts=4, routing=path)
    placed = place_replicas(case, 1)
    # The first of two whole batches of 4 tokens says where experts go; the second is measured.
    assert placed.placement == plan_placement(torch.tensor([[3, 1, 0, 0]]), 2, 3)[0]
    assert [make_topk_idx(placed, rank_idx).tolist() for rank_idx in (0, 1)] == [
        [[3], [2]],
        [[2], [3]],
    ]
    with pytest.raises(ValueError, match=r"has 9 tokens, fewer than two .* 2 ranks x 3 tokens"):
        place_replicas(dataclasses.replace(case, num_tokens=3), 1)


def rows_of_ranks() -> BenchRow:
    extra = summarize_rows(REPLICATED, [(40, 61, 52), (70, 50, 33)])
    return BenchRow(op="rows", case=REPLICATED, backend="host", extra=extra)


def test_rows_per_rank_are_held_against_the_optimum_of_the_placement() -> None:
    counts = torch.zeros(7, dtype=torch.int64)
    for rank_idx in range(3):
        counts += torch.bincount(make_topk_idx(REPLICATED, rank_idx).flatten(), minlength=7)
    # Expert 5 lies on all ranks, so that only what others bring a rank, or the mean, is in the way.
    own = [int(counts[[1, 0]].sum()), int(counts[[6, 4]].sum()), int(counts[[2, 3]].sum())]
    optimum = max(17 * 3, *own)
    document = rows_of_ranks().to_dict()
    assert document["placement"] == PLACEMENT.slots
    assert document["rows_per_rank"] == [40, 61, 52]
    assert document["optimum_rows"] == optimum
    assert document["largest_over_mean"] == pytest.approx(61 / 51)
    assert document["largest_over_optimum"] == pytest.approx(61 / optimum)
    baseline = document["baseline"]
    assert (baseline["name"], baseline["rows_per_rank"]) == ("no_replicas", [70, 50, 33])
    console = wide_console()
    with console.capture() as capture:
        console.print(result_table([rows_of_ranks()], {}))
    lines = [line.replace("│", " ").split() for line in capture.get().splitlines()]
    assert ["0", "70", "40"] in lines
    assert ["largest", "over", "mean", f"{70 / 51:.4f}", f"{61 / 51:.4f}"] in lines
    assert "3 slots a rank, balanced" in capture.get()


def test_rows_per_rank_are_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    huge = {"shmem_enabled": "never"}
    names = ("version", "commit", "cpu", "cores", "isa", "kernel", "torch")
    environment = {**dict.fromkeys(names, "x"), "transparent_huge_pages": huge, "load_average": 0.0}
    sizes = []
    for rows in ([rows_of_ranks()], [rows_of_ranks(), *some_rows()], some_rows()):
        write_plot(tmp_path / "plot.png", rows, environment)
        header = (tmp_path / "plot.png").read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        sizes.append(int.from_bytes(header[16:20], "big"))
    alone, beside, times = sizes
    assert beside > max(alone, times)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--routing", "zipf:much"], "finite number >= 0, got zipf:much"),
        (["--routing", "zipf:-1"], "finite number >= 0, got zipf:-1"),
        (["--routing", "zipf:1", "--skew", "2"], "are the same, got 2 and zipf:1"),
        (["--routing", "no-such-file"], "found no file no-such-file"),
        (["--replica-rule", "hash"], "need --replicas, got none"),
        (["--versus-given"], "need --replicas, got none"),
        (["--replicas", "1", "--peers", "gloo"], "got peers gloo"),
        (["--replicas", "1", "--sweep"], "got one compared with no_replicas"),
    ],
)
def test_wrong_routings_and_replicas_are_refused(arguments: list[str], problem: str) -> None:
    small = ["--hidden", "8", "--topk", "2", "--experts", "4"]
    said = output_of("bench", "dispatch-combine", *small, *arguments, exit_code=1)
    assert problem in " ".join(said.split())


def phase(epoch: int, name: str, start_us: int, end_us: int, peer: int = -1) -> PhaseRecord:
    return PhaseRecord(
        rank=0,
        buffer=1,
        epoch=epoch,
        operation="dispatch",
        phase=name,
        start_ns=start_us * 1000,
        end_ns=end_us * 1000,
        peer=peer,
    )


def test_a_call_is_taken_apart_into_parts_that_add_up() -> None:
    records = [
        phase(7, "prepare", 10, 12),
        phase(7, "rows", 12, 15),
        phase(7, "rows", 15, 35, peer=1),
        phase(7, "data", 35, 42),
        phase(7, "done", 42, 43, peer=2),
        phase(7, "done", 43, 44),
        phase(8, "data", 70, 80),
    ]
    # Calls of 50 and of 25 us, with native calls of 40 and 16 us in them.
    first, second = take_apart([(0, 50_000), (60_000, 85_000)], [40_000, 16_000], records[::-1])
    assert first == {"python": 10, "binding": 6, "rows": 6, "waiting": 21, "copies": 7}
    assert second == {"python": 9, "binding": 6, "rows": 0, "waiting": 0, "copies": 10}
    assert tuple(first) == PARTS
    with pytest.raises(RuntimeError, match=r"1 calls made 1 native calls .* 2 operations"):
        take_apart([(0, 50_000)], [40_000], records)


def test_parts_are_of_the_middle_half_of_the_calls() -> None:
    def call(us: float) -> dict[str, float]:
        return {"python": us - 4, "binding": 1, "rows": 1, "waiting": 0, "copies": 2}

    middle = middle_half([call(us) for us in (1000, 12, 10, 5, 11)])
    assert middle == {"python": 7, "binding": 1, "rows": 1, "waiting": 0, "copies": 2}
    assert middle_half([call(5), call(7)])["python"] == 2


@pytest.mark.parametrize(
    ("case", "options", "message"),
    [
        (SMALL, {"backend": "reference"}, "host backend apart, got reference"),
        (SMALL, {"peers": ("gloo",)}, "no peers, got gloo"),
        (SMALL, {"operations": ("dispatch",)}, "no operations, got dispatch"),
        (SMALL, {"num_threads": 2}, "no threads, which it compares, got 2"),
        (SMALL, {"num_local_ranks": 1}, "no local ranks, got 1"),
        (SMALL, {"num_sms": 4}, "no SMs, got 4"),
        (SMALL, {"mode": "threads"}, "got mode threads"),
        (SMALL, {"rail": "gloo"}, "rail gloo"),
        (HYBRID_EP, {}, "got one compared with native"),
        (LOW_LATENCY, {}, "got one compared with expert_major"),
    ],
)
def test_a_sweep_rejects(case: BenchCase, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_sweep(case, BenchOptions(**options))


def a_size(num_tokens: int, p50_us: float, roof_us: float | None) -> BenchRow:
    parts = dict(zip(PARTS, (4.0, 2.0, 1.0, 1.0, 8.0), strict=True))
    return BenchRow(
        op="sweep",
        case=dataclasses.replace(SMALL, num_tokens=num_tokens),
        backend="host",
        p50_us=p50_us,
        p95_us=2 * p50_us,
        bytes=4000,
        roof_gbs=None if roof_us is None else 4.0 / roof_us,
        fraction_of_roof=None if roof_us is None else roof_us / p50_us,
        extra={
            "parts_us": parts,
            "threads_ratio": 1.3,
            "differentiable_ratio": 1.7,
        },
    )


def test_ratios_of_a_sweep_are_medians_over_rounds() -> None:
    """Whatever a machine does from one round to the next, blocks of one round saw much the same."""
    times = {"ours": iter([9.0, 1.0, 2.0, 60.0]), "theirs": iter([9.0, 2.0, 1.0, 40.0])}
    order: list[str] = []

    def block(name: str) -> list[float]:
        order.append(name)
        us = next(times[name])
        return [us, us + 1.0, us + 2.0]

    blocks = {name: functools.partial(block, name) for name in times}
    pooled, medians = sweep._in_turns(blocks, 3, lambda _: None)
    # A warm-up, then rounds of which each starts one block later.
    assert order == ["ours", "theirs", "ours", "theirs", "theirs", "ours", "ours", "theirs"]
    assert medians == {"ours": [2.0, 3.0, 61.0], "theirs": [3.0, 2.0, 41.0]}
    assert median_ratio(medians["ours"], medians["theirs"]) == pytest.approx(61 / 41)
    assert len(pooled["ours"]) == 9


def test_a_sweep_has_a_table_of_sizes_and_one_of_the_fixed_cost() -> None:
    fixed = BenchRow(
        op="fixed_cost",
        case=SMALL,
        backend="host",
        p50_us=9.0,
        peer_p50_us={"a no-op": 4.5},
        extra={"what": "EpBuffer.dispatch", "ratio": 2.0},
    )
    console = wide_console()
    with console.capture() as capture:
        console.print(sweep_tables([a_size(1, 100.0, None), a_size(8, 1000.0, 10.0), fixed]))
    lines = capture.get().splitlines()
    cells = {
        words[0]: words[1:]
        for words in ([cell.strip() for cell in line.split("│")[1:-1]] for line in lines)
        if words
    }
    assert cells["1"][5:] == ["-", "4.0", "2.0", "1.0", "1.0", "8.0", "1.70x", "1.30x", "ok"]
    assert cells["8"][:6] == ["1,000.0", "2,000.0", "0.00", "-", "0.4", "0.010"]
    assert cells["EpBuffer.dispatch"] == ["9.0", "a no-op", "4.5", "2.00x"]


@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=lambda palette: palette.name)
def test_the_plot_of_a_sweep_shows_its_numbers(palette: Any) -> None:
    svg = draw_sweep([a_size(1, 100.0, None), a_size(8, 1000.0, 10.0)], "here & now", palette)
    root = ET.fromstring(svg)
    widths: dict[str, list[float]] = {}
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        widths.setdefault(rect.attrib["fill"], []).append(float(rect.attrib["width"]))
    shown = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    # From 10 to 1000 us, on a logarithmic axis that begins where the lowest number is.
    short, long = widths[palette.track]
    assert (short * 2, widths[palette.roof][0]) == (pytest.approx(long), 0.0)
    python, copies = (widths[palette.parts[name]] for name in ("python", "copies"))
    assert copies == [pytest.approx(2 * us, abs=0.2) for us in python]
    assert {"1", "8", "100", "1,000", "10", "here & now", *PARTS} <= set(shown)
    assert "8 tokens: 1,000 us" in str(root.findtext("{http://www.w3.org/2000/svg}desc"))


def test_a_plot_of_a_sweep_is_two_files(tmp_path: Path) -> None:
    pictures = sweep_pictures(tmp_path / "out.svg")
    assert [path.name for _, path in pictures] == ["out-light.svg", "out-dark.svg"]
    with pytest.raises(ValueError, match=r"must end in \.svg, got .*out\.png"):
        sweep_pictures(tmp_path / "out.png")


def test_sms_of_a_gpu_are_handed_on_and_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launched: list[Any] = []

    def start(_: object, num_ranks: int, make: functools.partial[Worker], mode: str) -> None:
        launched.extend(make.args)

    def call(_: object, method: str, *__: object) -> list[Any]:
        told = {"backend": "cuda", "device": "cuda:0", "num_sms": launched[1].num_sms}
        return [told if method == "describe" else None]

    for name, function in (
        ("__init__", start),
        ("__enter__", lambda ranks: ranks),
        ("__exit__", lambda *_: None),
        ("call", call),
    ):
        monkeypatch.setattr(WorkerProcesses, name, function)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(CaseRun, "run", lambda _: [])
    monkeypatch.setattr(bench_command, "result_table", lambda *_: "")
    out = tmp_path / "out.json"
    command = ["bench", "dispatch-combine", "--backend", "cuda", "--num-sms", "9"]
    said = output_of(*command, "--json", str(out))
    assert "9 SMs for every buffer of a rank" in said
    assert json.loads(out.read_text())["environment"]["num_sms"] == 9
    assert launched[1].num_sms == 9
