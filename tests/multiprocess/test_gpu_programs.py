"""Programs of `make gpu`, on CPU ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import Communicator, EpBuffer, Layout, compat
from moe_comm.cli.bench.case import BenchCase, make_topk_idx
from moe_comm.cli.bench.traffic import rank_traffic
from moe_comm.tensors.quantization import FP8_BLOCK128
from moe_comm.testing import RankContext, RankError, run_ranks
from tests.helpers import deep_ep_rounds

PROGRAM = Path(__file__).resolve().parents[1] / "gpu/kernel_times.py"
CASE = BenchCase(
    num_ranks=2, num_tokens=16, hidden=512, num_topk=3, num_experts=4, layout=Layout.RANK_MAJOR
)


def compare_on_cpu(context: RankContext, case: BenchCase, wrong: str) -> dict[str, Any]:
    """With this package's own `deep_ep`; the sums of one side may be wrong."""
    compat.install("deep_ep")
    try:
        with pytest.MonkeyPatch.context() as patch:
            if wrong:
                side = deep_ep_rounds._DEEP_EP[wrong]
                combine = side.combine
                patch.setattr(side, "combine", lambda *args: combine(*args) + 1)
            return deep_ep_rounds.compare(context, case, "cpu", 2, 2)
    finally:
        compat.uninstall("deep_ep")


@pytest.mark.parametrize(
    ("layout", "names"),
    [(Layout.RANK_MAJOR, ["v1", "v2"]), (Layout.LOW_LATENCY, ["low_latency"])],
)
def test_deep_ep_and_this_package_are_timed_in_turns(layout: Layout, names: list[str]) -> None:
    case = dataclasses.replace(CASE, layout=layout)
    for rank_idx, found in enumerate(run_ranks(compare_on_cpu, 2, case, "")):
        traffic = rank_traffic(case, rank_idx)
        num_dispatched = traffic.num_read_tokens + traffic.num_sent_rows
        assert found["bytes"]["dispatch"] == num_dispatched * case.row_bytes
        times = found["times_us"]
        both = ["ours", *names, "copy_roof"]
        assert list(times["dispatch+combine"]) == both
        alone = both if layout is Layout.RANK_MAJOR else ["ours", "copy_roof"]
        for operation in ("dispatch", "cached_dispatch", "combine"):
            assert list(times[operation]) == alone
        assert all(time_us > 0 for of_side in times.values() for time_us in of_side.values())


@pytest.mark.parametrize("wrong", ["v1", "v2", "low_latency"])
def test_a_side_whose_sums_are_wrong_is_not_timed(wrong: str) -> None:
    layout = Layout.LOW_LATENCY if wrong == "low_latency" else Layout.RANK_MAJOR
    with pytest.raises(RankError, match=f"sums of {wrong} differ"):
        run_ranks(compare_on_cpu, 2, dataclasses.replace(CASE, layout=layout), wrong)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_times", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "kernel_times", module)
    spec.loader.exec_module(module)
    return module


def test_times_are_told_before_a_capture_that_may_not_end(
    program: types.ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def capture(*_: object) -> None:
        raise RuntimeError("no end")

    stream = types.SimpleNamespace(synchronize=lambda: None)
    for place, name, value in (
        (program, "Communicator", lambda group, **_: Communicator(group)),
        (program, "capture", capture),
        (program, "copy_us", lambda *_: 3.0),
        (program, "kernels_of", lambda *_: {"dispatch": {"median_us": 2.0}}),
        (program, "median_us", lambda *_: 1.0),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "current_stream", lambda: stream),
        (torch.profiler, "profile", lambda **_: contextlib.nullcontext()),
    ):
        monkeypatch.setattr(place, name, value)
    case = dataclasses.replace(CASE, with_weights=True)
    with pytest.raises(RankError, match="no end"):
        run_ranks(program.measure, 2, case, threading.Barrier(2), mode="threads")
    told = json.loads(capsys.readouterr().out)
    assert told["eager_us"]["dispatch"] == 1.0
    assert told["host_us"]["combine"] > 0
    assert told["kernels"] == {"dispatch": {"median_us": 2.0}}


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("quantization", [None, FP8_BLOCK128])
def test_kernels_are_timed_on_the_tokens_of_the_benchmark(
    program: types.ModuleType, layout: Layout, quantization: Any
) -> None:
    case = dataclasses.replace(CASE, layout=layout, quantization=quantization, with_weights=True)
    barrier = threading.Barrier(case.num_ranks)

    def measure(context: RankContext) -> dict[str, Any]:
        with (
            Communicator(context.group) as communicator,
            EpBuffer(communicator, case.config) as buffer,
        ):
            device = torch.device("cpu")
            operations = program.Operations(buffer, case, context.rank_idx, device, barrier)
            calls = operations.named()
            fixed = operations._fixed_out
            return {
                "device": context.rank_idx,
                "bytes": program.bytes_of(case, context.rank_idx),
                "host_us": program.host_times_us(calls, lambda: None, barrier, 3),
                "num_fixed_rows": fixed.shape[0] if fixed.dim() == 2 else fixed.shape[:2].numel(),
                "sums": tuple(operations.both_of_fixed_size().shape),
                "to_others": program.least_bytes_to_others(case, context.rank_idx),
                "kernels": {},
            }

    per_rank = run_ranks(measure, case.num_ranks, mode="threads")
    traffic = [rank_traffic(case, rank_idx) for rank_idx in range(case.num_ranks)]
    for rank_idx, found in enumerate(per_rank):
        assert found["sums"] == (case.num_tokens, case.hidden)
        assert list(found["host_us"]) == list(found["bytes"])
        assert all(time_us > 0 for time_us in found["host_us"].values())
        # A window that is larger than it has to be would be time for its zeros.
        if layout is not Layout.LOW_LATENCY:
            assert found["num_fixed_rows"] == max(each.num_recv_rows for each in traffic)
        owners = make_topk_idx(case, rank_idx) // (case.num_experts // case.num_ranks)
        num_crossing = int((owners == 1 - rank_idx).any(dim=1).sum())
        assert found["to_others"] == num_crossing * case.dispatched_row_bytes
    document = program.of_all_ranks(per_rank)
    assert document["devices"] == [0, 1]
    assert document["to_others"] == max(found["to_others"] for found in per_rank)
    assert document["bytes"]["combine"] == max(found["bytes"]["combine"] for found in per_rank)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "moe::kernels::(anonymous namespace)::exchange_rows(moe::kernels::Params)",
            "exchange_rows",
        ),
        (
            "void moe::kernels::(anonymous namespace)::dispatch<moe::kernels::Bytes, true>(moe::kernels::Params)",
            "dispatch<moe::kernels::Bytes, true>",
        ),
        (
            "void at::native::elementwise<4, at::Fill<int>, std::array<char*, (int)1>>(int, at::Fill<int>)",
            "elementwise<4, at::Fill<int>, std::array<char*, (int)1>>",
        ),
        ("Memcpy DtoD (Device -> Device)", "Memcpy DtoD"),
        ("triton_rows", "triton_rows"),
    ],
)
def test_the_table_tells_kernels_apart(program: types.ModuleType, name: str, short: str) -> None:
    event = types.SimpleNamespace(
        name=name, device_type=torch.autograd.DeviceType.CUDA, device_time=3.0
    )
    other = types.SimpleNamespace(**{**vars(event), "name": "a::other(int)"})
    profiler = types.SimpleNamespace(events=lambda: [event, other] * program.NUM_OPERATIONS)
    assert program.kernels_of(profiler, 1) == {
        short: {"launches": 1.0, "median_us": 3.0},
        "other": {"launches": 1.0, "median_us": 3.0},
    }


def test_ranks_capture_in_turn_and_replay_behind_the_last(
    program: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_ranks = 3
    settled: list[int] = []
    captured: list[int] = []
    streams: list[object] = []
    problems: list[str] = []
    is_underway = threading.Lock()
    number = threading.local()

    class Graph:
        def replay(self) -> None:
            if len(captured) < num_ranks:
                problems.append(f"a replay beside captures, behind {captured}")

    class Capture:
        def __init__(self, graph: Graph, *, stream: object, capture_error_mode: str) -> None:
            assert capture_error_mode == "thread_local"
            streams.append(stream)

        def __enter__(self) -> None:
            if len(settled) < num_ranks:
                problems.append(f"a capture beside kernels, only {settled} have settled")
            self._is_alone = is_underway.acquire(blocking=False)
            if not self._is_alone:
                problems.append("two captures at a time")
            time.sleep(0.02)  # for the others to come

        def __exit__(self, *_: object) -> None:
            captured.append(number.rank_idx)
            if self._is_alone:
                is_underway.release()

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", object)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    barrier = threading.Barrier(num_ranks, timeout=60.0)
    called: list[int] = []

    def capture(context: RankContext) -> None:
        number.rank_idx = context.rank_idx
        program.capture(
            lambda: called.append(context.rank_idx),
            lambda: settled.append(context.rank_idx),
            barrier,
        )

    run_ranks(capture, num_ranks, mode="threads")
    assert problems == []
    assert called == captured
    assert sorted(captured) == list(range(num_ranks))
    assert len(set(map(id, streams))) == num_ranks
