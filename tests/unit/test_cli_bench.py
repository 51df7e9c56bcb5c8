from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from moe_comm.cli.bench import oracle, traffic
from moe_comm.cli.bench.case import BenchCase, make_topk_idx, make_x
from moe_comm.cli.bench.memory import parse_smaps, total_bytes
from moe_comm.cli.bench.peers.pipeline import AllToAllPipeline
from moe_comm.cli.bench.report import result_table, wide_console, write_plot
from moe_comm.cli.bench.result import BenchRow, to_json
from moe_comm.cli.bench.run import BenchOptions, default_operations, operation_bytes
from moe_comm.cli.bench.statistics import Pair, makespan_us, percentile
from moe_comm.config import Layout, default_expert_rank
from moe_comm.routing_trace import save_routing_trace

SMALL = BenchCase(num_ranks=3, num_tokens=17, hidden=64, num_topk=3, num_experts=7, skew=0.7)
CASES = [
    pytest.param(SMALL, id="expert-major"),
    pytest.param(dataclasses.replace(SMALL, expert_alignment=4), id="aligned"),
    pytest.param(dataclasses.replace(SMALL, layout=Layout.RANK_MAJOR), id="rank-major"),
    pytest.param(dataclasses.replace(SMALL, num_ranks=1), id="one-rank"),
    pytest.param(dataclasses.replace(SMALL, num_tokens=0), id="no-tokens"),
    pytest.param(dataclasses.replace(SMALL, dtype="fp64", hidden=6), id="fp64"),
]


def brute_force_rows(case: BenchCase, rank_idx: int) -> torch.Tensor:
    """Received rows by three nested loops over the definition."""
    expert_rank = default_expert_rank(case.num_experts, case.num_ranks).tolist()
    data = [(make_x(case, i), make_topk_idx(case, i).tolist()) for i in range(case.num_ranks)]
    rows = []
    if case.layout == Layout.RANK_MAJOR:
        for x, topk_idx in data:
            for token_idx, choices in enumerate(topk_idx):
                if any(expert >= 0 and expert_rank[expert] == rank_idx for expert in choices):
                    rows.append(x[token_idx])
    else:
        for expert in range(case.num_experts):
            if expert_rank[expert] != rank_idx:
                continue
            for x, topk_idx in data:
                for token_idx, choices in enumerate(topk_idx):
                    rows += [x[token_idx] for choice in choices if choice == expert]
            while len(rows) % case.expert_alignment:
                rows.append(torch.zeros(case.hidden, dtype=case.torch_dtype))
    if not rows:
        return torch.empty(0, case.hidden, dtype=case.torch_dtype)
    return torch.stack(rows)


@pytest.mark.parametrize("case", CASES)
def test_oracle_accepts_exactly_the_right_rows(case: BenchCase) -> None:
    for rank_idx in range(case.num_ranks):
        rows = brute_force_rows(case, rank_idx)
        assert oracle.check_dispatch(case, rank_idx, rows) is None
        if rows.shape[0] == 0:
            continue
        for row_idx in {0, rows.shape[0] // 2, rows.shape[0] - 1}:
            wrong = rows.clone()
            wrong.view(torch.uint8)[row_idx, 3] ^= 1
            problem = oracle.check_dispatch(case, rank_idx, wrong)
            assert problem is not None
            assert f"row {row_idx} " in problem
        assert oracle.check_dispatch(case, rank_idx, rows[:-1]) is not None


@pytest.mark.parametrize("case", CASES)
def test_oracle_accepts_exactly_the_right_sums(case: BenchCase) -> None:
    wide = torch.float64 if case.dtype == "fp64" else torch.float32
    expert_rank = default_expert_rank(case.num_experts, case.num_ranks).tolist()
    for rank_idx in range(case.num_ranks):
        x, topk_idx = make_x(case, rank_idx), make_topk_idx(case, rank_idx).tolist()
        sums = torch.empty_like(x)
        for token_idx, choices in enumerate(topk_idx):
            labels = choices
            if case.layout == Layout.RANK_MAJOR:
                labels = sorted({expert_rank[expert] for expert in choices})
            acc = torch.zeros(case.hidden, dtype=wide)
            for label in labels:
                scale = 1.0 + (label % 61) / 64.0
                acc += (x[token_idx].to(wide) * scale).to(x.dtype).to(wide)
            sums[token_idx] = acc.to(x.dtype)
        assert oracle.check_combine(case, rank_idx, sums) is None
        if case.num_tokens:
            sums.view(torch.uint8)[case.num_tokens - 1, 0] ^= 1
            problem = oracle.check_combine(case, rank_idx, sums)
            assert problem is not None
            assert f"token {case.num_tokens - 1} " in problem
            assert oracle.check_combine(case, rank_idx, sums, max_ulps=1) is None


def test_experts_mark_padding_with_nan() -> None:
    case = dataclasses.replace(SMALL, expert_alignment=8)
    rows = brute_force_rows(case, 0)
    out = torch.empty_like(rows)
    oracle.run_experts(case, 0, rows, out)
    is_padding = (rows == 0).all(dim=1)
    assert is_padding.any()
    assert torch.equal(out.isnan().all(dim=1), is_padding)


@pytest.mark.parametrize("case", CASES)
def test_traffic_counts_rows(case: BenchCase) -> None:
    num_sent = sum(traffic.rank_traffic(case, i).num_sent_rows for i in range(case.num_ranks))
    num_received = 0
    for rank_idx in range(case.num_ranks):
        of_rank = traffic.rank_traffic(case, rank_idx)
        num_received += of_rank.num_recv_rows
        rows = brute_force_rows(case, rank_idx)
        assert of_rank.num_recv_rows + of_rank.num_padding_rows == rows.shape[0]
    assert num_sent == num_received


def test_byte_formulas_of_the_balanced_case() -> None:
    case = BenchCase(num_ranks=2, num_tokens=64, hidden=128, num_topk=8, num_experts=16)
    row_bytes, num_tokens, k = 256, 2 * 64, 8
    assert operation_bytes(case) == {
        "dispatch": num_tokens * (k + 1) * row_bytes,
        "combine": num_tokens * (k + 1) * row_bytes,
        "combine_copy_in": num_tokens * (3 * k + 1) * row_bytes,
        "dispatch+combine": 2 * num_tokens * (k + 1) * row_bytes,
    }


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
    ],
)
def test_case_rejects(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)


def test_options_reject_unknown_names() -> None:
    with pytest.raises(ValueError, match="gloo, mpi, got nccl"):
        BenchOptions(peers=("nccl",))
    with pytest.raises(ValueError, match="got fly"):
        BenchOptions(operations=("dispatch", "fly"))


def test_size_decides_what_is_measured() -> None:
    large = BenchCase(num_ranks=2, num_tokens=1 << 16, hidden=7168, num_topk=8, num_experts=64)
    assert "combine_copy_in" in default_operations(large)
    assert "dispatch+combine" in default_operations(SMALL)


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


class LoopTransport:
    """The all-to-all of a single rank."""

    def exchange(
        self,
        recv: torch.Tensor,
        send: torch.Tensor,
        recv_counts: Sequence[int],
        send_counts: Sequence[int],
    ) -> None:
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
    pipeline = AllToAllPipeline(case, 0, make_x(case, 0), LoopTransport())
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
    pipeline = AllToAllPipeline(case, 0, make_x(case, 0), LoopTransport())
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
    }
    assert expected.items() <= row.items()


def test_table_shows_ratios_and_missing_peers() -> None:
    console = wide_console()
    with console.capture() as capture:
        console.print(result_table(some_rows(), {"mpi": "needs mpi4py (pip install mpi4py)"}))
    text = capture.get()
    assert "8.0x" in text
    assert "0.900" in text
    assert "9 (2)" in text
    assert "pip install mpi4py" in text


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
