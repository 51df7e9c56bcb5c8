"""csrc/cuda over the worst CUDA that NVIDIA's documents allow, with kernels on the emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.helpers.native_programs import build_program

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="CUDA's headers come with nvcc, which is not installed"
)

CASES = (
    "captured",
    "captured_for_all_threads",
    "captured_low_latency",
    "creeping_sizes",
    "default_stream_of_another_device",
    "default_streams",
    "driver_of_an_earlier_version",
    "eager_of_another_stream_behind_a_graph",
    "end_behind_a_replay",
    "event_of_outside_a_capture",
    "first_operation_beside_create",
    "first_operation_beside_create_on_two_devices",
    "foreign_kernel_that_is_loaded",
    "graph_behind_former_operations",
    "host_runs_ahead",
    "last_buffer_ends_beside_a_kernel",
    "low_latency_results_and_rows_copied_in",
    "low_latency_results_of_a_quarter_gigabyte",
    "low_latency_windows_that_do_not_fit",
    "many_windows",
    "memory_of_operations_in_flight",
    "memory_that_a_kernel_holds",
    "more_streams_than_connections",
    "nothing_waits_for_large_operations",
    "nothing_waits_in_operations",
    "operation_behind_a_graph",
    "other_stream_beside_a_capture",
    "pairs_of_operations",
    "pairs_of_operations_on_two_devices",
    "process_that_may_not_import",
    "processes",
    "processes_with_wrong_p2p",
    "processes_without_p2p",
    "processes_without_virtual_memory",
    "refused_behind_a_bad_id",
    "refused_ways_of_loading",
    "replay_beside_async",
    "second_buffer_beside_a_kernel",
    "shared_memory_of_kernels",
    "streams_of_callers_alone",
    "threads_and_a_process_on_three_devices",
    "threads_on_one_device",
    "threads_on_two_devices",
    "wrong_calls",
)
# What callers may not do (docs/gpu.md): the stand-in finds it.
DEADLOCKS = {
    "deadlock_by_a_foreign_kernel": "the first launch of foreign waits for ExchangeParams",
    "deadlock_by_a_first_replay": "the first launch of a graph waits for ExchangeParams",
    "deadlock_by_an_allocation": "cudaMalloc waits for ExchangeParams",
    "deadlock_by_kernels_that_are_not_loaded": (
        "the first launch of ExchangeParams waits for ExchangeParams"
    ),
    "deadlock_by_making_a_graph": "cudaGraphInstantiate waits for ExchangeParams",
    "deadlock_by_pageable_memory": ("cudaMemcpyAsync of pageable memory waits for ExchangeParams"),
}
# Most calls of an operation for the host's own state: whether the caller's stream is captured and,
# where there are several devices, which is current.
HOST_CALLS = {
    "host_calls_of_default_streams": 2,
    "host_calls_on_two_devices": 2,
    "host_calls_with_one_device": 1,
}
# Most calls of an operation that put work into a stream: launches, copies, records of events and
# waits for them.
BUDGET = {
    "dispatch": 7,
    "combine": 6,
    "cached_dispatch": 7,
    "dispatch_low_latency": 7,
    "combine_low_latency": 6,
    "cached_dispatch_low_latency": 7,
    "replay": 1,  # the caller's own
}


@pytest.fixture(scope="module")
def program() -> Path:
    return build_program("worst_driver")


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, check=False, timeout=200
    )


def test_every_case_is_listed(program: Path) -> None:
    listed = run(program).stdout.split()
    assert listed == sorted((*CASES, *DEADLOCKS, *HOST_CALLS))


@pytest.mark.parametrize("case", CASES)
def test_case(program: Path, case: str) -> None:
    ended = run(program, case)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ok\n", "", 0)


@pytest.mark.parametrize("case", DEADLOCKS)
def test_the_stand_in_finds(program: Path, case: str) -> None:
    ended = run(program, case)
    assert (ended.stdout, ended.returncode) == (f"deadlock: {DEADLOCKS[case]}\n", 3)


@pytest.mark.parametrize("case", HOST_CALLS)
def test_operations_keep_to_their_budget_of_calls(program: Path, case: str) -> None:
    ended = run(program, case)
    *lines, last = ended.stdout.splitlines()
    assert (last, ended.returncode) == ("ok", 0)
    found = {name: (int(work), int(state)) for name, work, state, *_ in map(str.split, lines)}
    # Default streams are not captured.
    assert BUDGET.keys() - found.keys() == ({"replay"} if "default" in case else set())
    over = {
        name: calls
        for name, calls in found.items()
        if calls[0] > BUDGET[name] or calls[1] > HOST_CALLS[case]
    }
    assert over == {}
