from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from moe_comm.cli.app import app
from moe_comm.cli.bench import sweep, worker
from moe_comm.cli.bench.barrier import SpinBarrier
from moe_comm.cli.bench.case import BenchCase, make_x
from moe_comm.cli.bench.internode_traffic import internode_bytes
from moe_comm.cli.bench.measured_calls import NativeExchange, Received
from moe_comm.cli.bench.options import LAYER, BenchOptions
from moe_comm.cli.bench.parts import PARTS
from moe_comm.cli.bench.peers.mpi import MpiPeer
from moe_comm.cli.bench.peers.mpi_launcher import MpiLauncher, MpiNotFoundError, find_mpi
from moe_comm.cli.bench.processes import RankProcesses, WorkerError
from moe_comm.cli.bench.rank import Sample
from moe_comm.cli.bench.run import CaseRun
from moe_comm.cli.bench.side import Side
from moe_comm.cli.bench.sweep_worker import SweepWorker
from moe_comm.ep.config import Layout
from moe_comm.ep.placement import Placement
from moe_comm.ep.routing_trace import save_routing_trace
from moe_comm.peers.bootstrap import RankThreads
from moe_comm.peers.communicator import Communicator
from moe_comm.tensors.quantization import FP8_BLOCK128, Quantization, QuantizationFormat
from tests.helpers.command_line import output_of
from tests.helpers.failing_ranks import has_stopped, wait_for
from tests.helpers.mpi_here import why_no_mpi
from tests.helpers.rank_threads import on_ranks

CASE = BenchCase(num_ranks=2, num_tokens=40, hidden=128, num_topk=4, num_experts=8)
COLUMNS = Quantization(format=QuantizationFormat.FP8_BLOCK128, is_column_major=True)
ALL_OPERATIONS = (
    "dispatch",
    "combine",
    "combine_copy_in",
    "dispatch+combine",
    "differentiable_overhead",
    "memory",
)

SMALL = ("--tokens", "16", "--hidden", "64", "--topk", "2", "--experts", "4", "--repeats", "1")


def bench(tmp_path: Path, *arguments: str) -> dict[str, dict]:
    """Run the command, return its rows by operation."""
    out = tmp_path / "out.json"
    output_of("bench", "dispatch-combine", *arguments, "--json", str(out))
    document = json.loads(out.read_text())
    assert document["environment"]["cores"] >= 1
    return {row["op"]: row for row in document["cases"]}


def test_host_backend_is_timed_between_roofs(tmp_path: Path) -> None:
    pytest.importorskip("moe_comm._host")
    rows = bench(
        tmp_path,
        *("--ranks", "2", "--tokens", "200", "--hidden", "1024", "--topk", "4", "--experts", "8"),
        *("--peers", "gloo", "--repeats", "2", "--operations", ",".join(ALL_OPERATIONS)),
        *("--plot", str(tmp_path / "plot.png")),
    )
    assert set(rows) == set(ALL_OPERATIONS)
    assert all(row["check"] == "ok" and row["backend"] == "host" for row in rows.values())
    for name in ("dispatch", "combine", "combine_copy_in"):
        row = rows[name]
        assert row["roof_bytes"] > 0
        assert len(row["pairs"]) == row["num_pairs"] + row["num_dropped"]
        assert row["p50_us"] <= row["p95_us"]
        assert row["speedup"]["gloo"] > 0.0
    assert rows["dispatch"]["bytes"] == 2 * 200 * 5 * 2048
    assert rows["combine_copy_in"]["bytes"] == 2 * 200 * 13 * 2048
    assert rows["dispatch+combine"]["speedup"]["gloo"] > 0.0
    assert "eager_dispatch_p50_us" in rows["differentiable_overhead"]
    memory = rows["memory"]
    for stage, window_bytes in memory["window_bytes"].items():
        assert memory["resident_bytes"][stage] >= window_bytes
    assert (tmp_path / "plot.png").exists()


SWEEP = ("--sweep", "--hidden", "64", "--topk", "2", "--experts", "12", "--repeats", "1")


@pytest.mark.parametrize("num_ranks", [2, 3])  # with a core each, or not, where there are two
def test_a_sweep_takes_every_size_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_ranks: int
) -> None:
    pytest.importorskip("moe_comm._host")
    monkeypatch.setattr(sweep, "SWEEP_TOKENS", (1, 8))
    plot, out = tmp_path / "plot.svg", tmp_path / "out.json"
    said = output_of(
        *("bench", "dispatch-combine", *SWEEP, "--ranks", str(num_ranks)),
        *("--plot", str(plot), "--json", str(out)),
    )
    assert "fixed cost" in said
    cases = json.loads(out.read_text())["cases"]
    sizes = [case for case in cases if case["op"] == "sweep"]
    assert [case["tokens"] for case in sizes] == [1, 8]
    for case in sizes:
        assert (case["check"], case["ranks"]) == ("ok", num_ranks)
        assert set(case["threads_us"]) >= {"automatic", "1"}
        assert case["differentiable_ratio"] > 0.0
        for name in PARTS:
            both = case["dispatch_parts_us"][name] + case["combine_parts_us"][name]
            assert case["parts_us"][name] == pytest.approx(both)
            # Two ranks may have met without waiting; nothing else comes for nothing.
            assert both >= 0.0 if name == "waiting" else both > 0.0, name
    assert sizes[1]["bytes"] == num_ranks * 2 * 8 * 3 * 128
    assert sizes[1]["fraction_of_roof"] > 0.0
    fixed = {case["what"]: case for case in cases if case["op"] == "fixed_cost"}
    assert len(fixed) == len(cases) - 2 == 7
    assert fixed["EpBuffer.dispatch, 1 rank"]["tokens"] == 1
    assert fixed["EpBuffer.dispatch, 1 rank"]["hidden"] == 8
    assert all(case["ratio"] > 0.0 for case in fixed.values())
    assert {path.name for path in tmp_path.glob("*.svg")} == {"plot-light.svg", "plot-dark.svg"}


def test_a_wrong_result_ends_a_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("moe_comm._host")
    monkeypatch.setattr(SweepWorker, "begin", lambda *_: "rank 0 row 3 differs")
    monkeypatch.setattr(RankProcesses, "__init__", lambda *_, **__: None)
    monkeypatch.setattr(RankProcesses, "__exit__", lambda *_: None)
    monkeypatch.setattr(
        RankProcesses, "call", lambda _, method, *arguments: [getattr(SweepWorker, method)()]
    )
    with pytest.raises(WorkerError, match="check against the reference failed: rank 0 row 3"):
        sweep.run_sweep(CASE, BenchOptions())


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--tokens", "8"], "--tokens is not given, got 8"),
        (["--plot", "plot.png"], "must end in .svg, got plot.png"),
    ],
)
def test_what_a_sweep_cannot_do_is_refused(arguments: list[str], problem: str) -> None:
    said = output_of("bench", "dispatch-combine", *SWEEP, *arguments, exit_code=1)
    assert problem in " ".join(said.split())


@pytest.mark.full
@pytest.mark.parametrize("backend", ["collective", "reference"])
def test_other_backends_are_checked_and_timed_without_a_roof_of_windows(
    tmp_path: Path, backend: str
) -> None:
    rows = bench(
        tmp_path,
        *("--tokens", "20", "--hidden", "64", "--topk", "2", "--experts", "4"),
        *(
            "--backend",
            backend,
            "--repeats",
            "1",
            "--operations",
            "dispatch,dispatch+combine,memory",
        ),
    )
    # Only the host backend has windows whose memory could be counted.
    assert set(rows) == {"dispatch", "dispatch+combine"}
    assert all(row["backend"] == backend and row["p50_us"] > 0.0 for row in rows.values())


@pytest.mark.full
def test_nodes_are_checked_timed_and_their_bytes_counted(tmp_path: Path) -> None:
    pytest.importorskip("moe_comm._host")
    rows = bench(
        tmp_path,
        *("--ranks", "4", "--local-ranks", "2", "--rail", "sockets", "--peers", "collective"),
        *("--tokens", "150", "--hidden", "2048", "--topk", "4", "--experts", "8"),
        *("--repeats", "1", "--operations", "dispatch,combine,combine_copy_in,dispatch+combine"),
    )
    assert len(rows) == 4
    for name, row in rows.items():
        assert (row["check"], row["local_ranks"], row["rail"]) == ("ok", 2, "sockets")
        assert row["internode_bytes"] == row["internode_formula_bytes"] > 150 * 4096, name
        assert row["speedup"]["collective"] > 0.0


@pytest.mark.full
def test_node_reduction_is_checked_and_compared_with_none(tmp_path: Path) -> None:
    pytest.importorskip("moe_comm._host")
    rows = bench(
        tmp_path,
        *("--ranks", "4", "--local-ranks", "2", "--rail", "sockets", "--node-reduction"),
        *("--tokens", "150", "--hidden", "2048", "--topk", "4", "--experts", "8"),
        *("--repeats", "1", "--operations", "combine"),
    )
    row = rows["combine"]
    assert row["node_reduction"]
    assert row["check"] == "ok"
    # A sum for every token and the other node, at most; rows would be about twice as many.
    assert row["internode_bytes"] == row["internode_formula_bytes"] < 4 * 151 * 4096 * 1.02
    assert row["baseline"]["name"] == "unreduced"


def test_rank_reduction_is_checked_and_compared_with_none(tmp_path: Path) -> None:
    pytest.importorskip("moe_comm._host")
    rows = bench(
        tmp_path,
        *("--ranks", "3", "--rank-reduction", "--tokens", "40", "--hidden", "256"),
        *("--topk", "4", "--experts", "6", "--repeats", "1", "--operations", "combine"),
    )
    row = rows["combine"]
    assert row["rank_reduction"]
    assert row["check"] == "ok"
    assert row["baseline"]["name"] == "unreduced"


def test_checked_messages_are_compared_with_none(tmp_path: Path) -> None:
    pytest.importorskip("moe_comm._host")
    rows = bench(
        tmp_path,
        *("--ranks", "2", "--local-ranks", "1", "--rail", "sockets", "--check-messages"),
        *("--tokens", "150", "--hidden", "2048", "--topk", "4", "--experts", "8"),
        *("--repeats", "1", "--operations", "dispatch,combine"),
    )
    for row in rows.values():
        assert (row["check_messages"], row["check"]) == (True, "ok")
        assert row["internode_bytes"] == row["internode_formula_bytes"]
        assert row["baseline"]["name"] == "unchecked"


REPLICAS = ("--ranks", "2", "--replicas", "1", "--routing", "zipf:1.0", "--tokens", "64")


def test_replicas_are_checked_counted_and_timed_beside_none(tmp_path: Path) -> None:
    pytest.importorskip("moe_comm._host")
    rows = bench(
        tmp_path,
        *(*REPLICAS, "--hidden", "64", "--ffn-hidden", "32", "--topk", "2", "--experts", "8"),
        *("--repeats", "2", "--threads", "1", "--plot", str(tmp_path / "plot.png")),
    )
    assert set(rows) == {"rows", LAYER}
    counted = rows["rows"]
    assert sum(counted["rows_per_rank"]) == sum(counted["baseline"]["rows_per_rank"]) == 256
    assert counted["largest_rows"] == counted["optimum_rows"] == 128
    assert counted["baseline"]["largest_rows"] > 128
    assert [len(of_rank) for of_rank in counted["placement"]] == [5, 5]
    assert (counted["replica_rule"], counted["batch"], counted["skew"]) == ("balanced", 8, 1.0)
    layer = rows[LAYER]
    assert (layer["check"], layer["ffn_hidden"], layer["num_pairs"]) == ("ok", 32, 2)
    assert layer["speedup"]["no_replicas"] > 0.0
    assert layer["baseline"]["p50_us"] > 0.0
    assert (tmp_path / "plot.png").exists()


@pytest.mark.parametrize("rule", ["balanced", "nearest", "hash"])
def test_rules_of_replicas_are_compared_with_given_slots(tmp_path: Path, rule: str) -> None:
    pytest.importorskip("moe_comm._host")
    rows = bench(
        tmp_path,
        *(*REPLICAS, *SMALL[2:], "--replica-rule", rule, "--versus-given"),
        *("--operations", "rows,dispatch,dispatch+combine"),
    )
    assert rows["rows"]["rows_per_rank"] == rows["rows"]["baseline"]["rows_per_rank"]
    for name in ("dispatch", "dispatch+combine"):
        assert (rows[name]["replica_rule"], rows[name]["check"]) == (rule, "ok")
        assert rows[name]["speedup"]["given"] > 0.0


def test_experts_in_wrong_slots_are_found() -> None:
    case = dataclasses.replace(
        CASE, placement=Placement([[*range(5)], [*range(4, 8), 0]], 8), ffn_hidden=16
    )

    def body(comm: Communicator) -> list[str | None]:
        x = make_x(case, comm.rank_idx)
        exchange = NativeExchange(comm, case, comm.rank_idx, x)
        with exchange.buffer, torch.no_grad():
            side = Side(case, comm.rank_idx, exchange, x)
            # Ranks are threads without a device: nobody meets at the barrier.
            problems = [side.prepare_experts(None)]  # type: ignore[arg-type]
            make = side._make_experts
            monkeypatch = pytest.MonkeyPatch()
            monkeypatch.setattr(side, "_make_experts", lambda ids: make(ids[::-1]))
            problems.append(side.prepare_experts(None))  # type: ignore[arg-type]
        return problems

    for right, wrong in on_ranks(2, body, backend="reference"):
        assert right is None
        assert "sums of experts that differ by" in str(wrong)


def test_other_bits_than_without_replicas_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    case = dataclasses.replace(CASE, num_ranks=1, placement=Placement([[*range(8)]], 8))
    checker = object.__new__(worker.Worker)
    checker.case, checker.rank_idx = case, 0
    sides = [object.__new__(Side) for _ in range(2)]
    for side, sums in zip(sides, (0.0, -1.0), strict=True):
        side.sums = torch.full((2, 2), sums)
    checker.sides, checker.barrier = sides, None  # type: ignore[assignment]
    monkeypatch.setattr(Side, "check", lambda *_: None)
    assert "differ from those of no_replicas" in str(checker.check())
    sides[1].sums = sides[0].sums.clone()
    assert checker.check() is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "case",
    [
        dataclasses.replace(CASE, num_ranks=4),
        dataclasses.replace(CASE, num_ranks=4, with_weights=True, expert_alignment=8),
        dataclasses.replace(CASE, num_ranks=4, num_tokens=700, hidden=2048, skew=1.0),
        dataclasses.replace(CASE, num_ranks=4, layout=Layout.RANK_MAJOR),
        dataclasses.replace(CASE, num_ranks=4, layout=Layout.RANK_MAJOR, with_weights=True),
        dataclasses.replace(CASE, num_ranks=4, layout=Layout.LOW_LATENCY),
        dataclasses.replace(CASE, num_ranks=4, hidden=1024, quantization=FP8_BLOCK128),
        dataclasses.replace(CASE, num_ranks=4, hidden=1024, quantization=COLUMNS),
        dataclasses.replace(CASE, num_ranks=4, num_tokens=700, hidden=2048, check_messages=True),
        "reduced",
        "reduced-rank-major",
        "checked-reduced",
    ],
    ids=[
        "plain",
        "weights",
        "chunks",
        "rank-major",
        "rank-major-weights",
        "low-latency",
        "fp8",
        "fp8-columns",
        "checked",
        "reduced",
        "reduced-rank-major",
        "checked-reduced",
    ],
)
@pytest.mark.parametrize("num_local_ranks", [1, 2])
def test_bytes_between_nodes_are_those_of_the_formula(
    case: BenchCase | str, num_local_ranks: int
) -> None:
    pytest.importorskip("moe_comm._host")
    if isinstance(case, str):
        layout = Layout.RANK_MAJOR if case.endswith("rank-major") else Layout.EXPERT_MAJOR
        case = dataclasses.replace(
            CASE,
            num_ranks=4,
            layout=layout,
            reduced_local_ranks=num_local_ranks,
            check_messages=case.startswith("checked"),
        )

    def body(comm: Communicator) -> list[int]:
        exchange = NativeExchange(comm, case, comm.rank_idx, make_x(case, comm.rank_idx))
        with exchange.buffer as buffer:
            exchange.dispatch()  # finds out how much memory a call needs
            marks = [buffer._backend.internode_bytes()[0]]
            result = exchange.dispatch()
            marks.append(buffer._backend.internode_bytes()[0])
            exchange.combine(exchange.empty_expert_output(result.handle), result.handle)
            marks.append(buffer._backend.internode_bytes()[0])
        return marks

    ranks = on_ranks(
        case.num_ranks,
        body,
        num_local_ranks=num_local_ranks,
        rail="sockets",
        check_messages=case.check_messages,
    )
    expected = internode_bytes(case, num_local_ranks)
    assert expected["dispatch"] == sum(after - before for before, after, _ in ranks)
    assert expected["combine"] == sum(after - before for _, before, after in ranks)


def test_trace_is_replayed(tmp_path: Path) -> None:
    pytest.importorskip("moe_comm._host")
    trace = tmp_path / "trace.npz"
    ids = torch.tensor([[[0, 2], [-1, 2], [-1, -1], [2, 1]]])
    save_routing_trace(trace, ids, num_experts=3, num_ranks=1)
    rows = bench(
        tmp_path,
        *("--tokens", "4", "--hidden", "64", "--routing", str(trace), "--repeats", "1"),
        *("--operations", "dispatch", "--alignment", "4"),
    )
    row = rows["dispatch"]
    assert (row["topk"], row["experts"], row["routing"]) == (2, 3, "trace.npz")
    # Both ranks send the same 4 tokens: 3 read, 5 written each; experts receive 2, 2 and 6 rows.
    assert row["bytes"] == (2 * (3 + 5) + 2 + 2 + 2) * 128


@pytest.mark.full
def test_ranks_may_be_threads_of_one_process(tmp_path: Path) -> None:
    """On a GPU that is how kernels of several ranks run side by side."""
    rows = bench(tmp_path, *SMALL, "--mode", "threads", "--operations", "dispatch")
    assert (rows["dispatch"]["check"], rows["dispatch"]["backend"]) == ("ok", "host")
    environment = json.loads((tmp_path / "out.json").read_text())["environment"]
    assert environment["devices"] == ["cpu", "cpu"]
    with RankProcesses(CASE, BenchOptions(backend="host", mode="threads")) as ranks:
        assert len({process.pid for process in ranks._processes}) == 1


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--peers", "gloo"], "no peers gloo"),
        (["--api", "hybrid-ep"], "no api hybrid_ep"),
        (["--backend", "collective"], "no backend collective"),
        (["--operations", "memory"], "no operations memory"),
        (["--local-ranks", "1"], "no local ranks 1"),
    ],
)
def test_threads_have_no_process_group(arguments: list[str], problem: str) -> None:
    command = ["bench", "dispatch-combine", *SMALL, "--mode", "threads", *arguments]
    done = CliRunner().invoke(app, command)
    assert done.exit_code != 0
    assert problem in " ".join(done.output.split())


def test_rank_major_has_no_peers(tmp_path: Path) -> None:
    pytest.importorskip("moe_comm._host")
    rows = bench(tmp_path, *SMALL, "--layout", "rank-major", "--operations", "dispatch,combine")
    assert rows["combine"]["layout"] == "RANK_MAJOR"
    options = (*SMALL, "--layout", "rank-major", "--peers", "gloo")
    said = output_of("bench", "dispatch-combine", *options, exit_code=1)
    assert "RANK_MAJOR" in said


TINY = ("--tokens", "24", "--hidden", "256", "--topk", "2", "--experts", "4", "--repeats", "1")


@pytest.mark.full
def test_quantized_dispatch_takes_turns_with_the_plain_one(tmp_path: Path) -> None:
    pytest.importorskip("moe_comm._host")
    rows = bench(
        tmp_path,
        *(*TINY, "--quantization", "fp8_block128", "--scale-format", "ue8m0"),
        *("--column-major-scales", "--alignment", "4"),
        *("--operations", "dispatch,combine,dispatch+combine,memory"),
    )
    assert set(rows) == {"dispatch", "combine", "dispatch+combine", "memory"}
    for name in ("dispatch", "combine", "dispatch+combine"):
        assert rows[name]["quantization"] == "FP8_BLOCK128"
        assert rows[name]["speedup"]["unquantized"] > 0.0
    dispatch = rows["dispatch"]
    assert dispatch["baseline"]["name"] == "unquantized"
    assert len(dispatch["pairs"]) == len(dispatch["baseline"]["pairs"])
    # 256 channels are 2 blocks, packed in 4 bytes; padding is as wide.
    num_written, remainder = divmod(dispatch["bytes"] - 2 * 24 * 512, 260)
    assert remainder == 0
    assert dispatch["baseline"]["bytes"] == (2 * 24 + num_written) * 512
    assert rows["memory"]["window_bytes"]["dispatch"] == num_written * 260


@pytest.mark.full
@pytest.mark.parametrize("backend", ["host", "reference"])
def test_hybrid_ep_takes_turns_with_the_native_call(tmp_path: Path, backend: str) -> None:
    if backend == "host":
        pytest.importorskip("moe_comm._host")
    rows = bench(
        tmp_path,
        *(*TINY, "--api", "hybrid-ep", "--alignment", "4", "--backend", backend),
        *("--operations", "dispatch,combine,combine_copy_in,dispatch+combine"),
    )
    assert len(rows) == 4
    for row in rows.values():
        assert (row["api"], row["backend"], row["check"]) == ("hybrid_ep", backend, "ok")
        assert row["speedup"]["native"] > 0.0
        assert row["peer_p50_us"]["native"] > 0.0


@pytest.mark.full
def test_low_latency_takes_turns_with_expert_major(tmp_path: Path) -> None:
    rows = bench(
        tmp_path,
        *(*TINY, "--layout", "low-latency", "--quantization", "mxfp8", "--backend", "reference"),
    )
    assert rows["dispatch+combine"]["layout"] == "LOW_LATENCY"
    assert rows["dispatch+combine"]["speedup"]["unquantized"] > 0.0
    rows = bench(tmp_path, *TINY, "--layout", "low-latency", "--backend", "reference")
    assert rows["dispatch+combine"]["speedup"]["expert_major"] > 0.0


def test_wrong_quantized_rows_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    case = dataclasses.replace(CASE, num_ranks=1, quantization=FP8_BLOCK128)
    plain = NativeExchange.dispatch

    def dispatch(exchange: NativeExchange) -> Received:
        result = plain(exchange)
        if result.x_sf is not None:
            result.x_sf[-1, -1] += 1.0
        return result

    shared = tmp_path / "barrier"
    shared.write_bytes(bytes(SpinBarrier.file_bytes(case.num_ranks)))
    barrier = SpinBarrier(shared, 0, case.num_ranks)
    with Communicator(RankThreads(1)[0], backend="reference") as communicator:
        x = make_x(case, 0)
        side = Side(case, 0, NativeExchange(communicator, case, 0, x), x)
        assert side.check(None, barrier) is None
        monkeypatch.setattr(NativeExchange, "dispatch", dispatch)
        assert "differs from rank 0" in str(side.check(None, barrier))


def test_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankProcesses(CASE, BenchOptions(backend="reference")) as ranks:
        problems = ranks.call("check")
    assert problems == [None, None]
    monkeypatch.setattr(
        RankProcesses, "call", lambda _self, method, *_: ["rank 0 row 3 differs", None]
    )
    with pytest.raises(WorkerError, match="check against the reference failed: rank 0 row 3"):
        CaseRun(CASE, BenchOptions(backend="reference")).__enter__()


@pytest.mark.parametrize("mode", ["processes", "threads"])
def test_failing_rank_is_named_and_none_is_left(mode: str) -> None:
    with pytest.raises(WorkerError, match=r"rank \d failed") as caught:
        with RankProcesses(CASE, BenchOptions(backend="reference", mode=mode)) as ranks:
            ranks.call("run_gloo", "dispatch", 1)  # not prepared
    assert "AssertionError" in str(caught.value)
    assert not any(process.is_alive() for process in ranks._processes)
    assert not ranks.folder.exists()


@pytest.mark.parametrize("when", ["in a call", "before a call", "with a call unread"])
def test_dead_rank_is_named(when: str) -> None:
    ranks = RankProcesses(CASE, BenchOptions(backend="reference"))
    victim = ranks._processes[1]
    assert victim.pid is not None
    if when == "with a call unread":
        os.kill(victim.pid, signal.SIGSTOP)
        wait_for(lambda: has_stopped(victim.pid))
        ranks._pipes[1].send(("check", ()))
    victim.kill()
    if when == "before a call":
        victim.join()
    with pytest.raises(WorkerError, match=r"rank 1 died \(exit code -9\)"):
        if when == "before a call":
            ranks.call("prepare_roof")
        else:
            ranks._collect("check")
    ranks.close()
    assert not ranks.folder.exists()


needs_mpi = pytest.mark.skipif(bool(why_no_mpi()), reason=why_no_mpi())


@needs_mpi
def test_mpi_takes_turns_with_ours() -> None:
    options = BenchOptions(
        backend="reference", peers=("mpi",), num_repeats=1, operations=("dispatch", "combine")
    )
    with CaseRun(CASE, options) as run:
        rows = run.run()
    assert [row.op for row in rows] == ["dispatch", "combine"]
    assert all(row.speedup["mpi"] > 0.0 for row in rows)


@needs_mpi
def test_mpi_ranks_that_are_alone_are_told(tmp_path: Path) -> None:
    """A launcher of another MPI starts every process as a job of its own."""
    other = tmp_path / "mpiexec"
    other.write_text(f'#!/bin/sh\nwhile [ "$1" != {sys.executable} ]; do shift; done\nexec "$@"\n')
    other.chmod(0o755)
    launcher = dataclasses.replace(find_mpi(), path=other)
    peer = MpiPeer(launcher, CASE, tmp_path)
    try:
        with pytest.raises(RuntimeError, match=f"must have {CASE.num_ranks} ranks, got 1"):
            peer.check()
    finally:
        peer.close()


def test_missing_mpi_is_said_not_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def find_none() -> MpiLauncher:
        raise MpiNotFoundError("needs mpiexec (pip install ...)")

    monkeypatch.setattr("moe_comm.cli.bench.run.find_mpi", find_none)
    out = tmp_path / "out.json"
    said = output_of(
        *("bench", "dispatch-combine", "--tokens", "4", "--hidden", "64", "--topk", "2"),
        *("--experts", "4", "--backend", "reference", "--repeats", "1", "--peers", "mpi"),
        *("--operations", "dispatch", "--json", str(out)),
    )
    assert "needs mpiexec" in said
    assert json.loads(out.read_text())["missing_peers"] == {
        "mpi": "needs mpiexec (pip install ...)"
    }


@pytest.mark.full
def test_trace_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("moe_comm._host")
    out = tmp_path / "trace.json"
    output_of(
        *("trace", "run", "--tokens", "16", "--hidden", "64", "--topk", "2", "--experts", "4"),
        *("--iterations", "3", "--out", str(out)),
    )
    events = [e for e in json.loads(out.read_text())["traceEvents"] if e["ph"] == "X"]
    assert {event["pid"] for event in events} == {0, 1}
    assert {"dispatch: data", "combine: data"} <= {event["name"] for event in events}


@pytest.mark.full
def test_rank_major_worker_serves_every_operation() -> None:
    case = BenchCase(
        num_ranks=2, num_tokens=8, hidden=64, num_topk=2, num_experts=4, layout=Layout.RANK_MAJOR
    )
    with RankProcesses(case, BenchOptions(backend="reference")) as ranks:
        assert ranks.call("check") == [None, None]
        assert ranks.call("prepare_roof") in ([True, True], [False, False])
        for sample in ranks.call("sample", "combine_copy_in", 0):
            assert isinstance(sample, Sample)
            assert sample.op[0] < sample.op[1]
