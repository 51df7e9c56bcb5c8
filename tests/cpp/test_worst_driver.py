"""csrc/cuda over the worst CUDA that NVIDIA's documents allow, with kernels on the emulator."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.helpers.native_programs import build_program, cases_of
from tests.helpers.source_tree import captured

pytestmark = pytest.mark.skipif(
    shutil.which("nvcc") is None, reason="CUDA's headers come with nvcc, which is not installed"
)

# Mistakes of callers (docs/gpu.md): the stand-in finds it.
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


CASES = [case for case in cases_of("worst_driver") if case not in DEADLOCKS | HOST_CALLS]


def run(case: str) -> subprocess.CompletedProcess[str]:
    command = [str(build_program("worst_driver")), case]
    return captured(command, timeout=200)


@pytest.mark.parametrize("case", CASES)
def test_case(case: str) -> None:
    ended = run(case)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ok\n", "", 0)


@pytest.mark.parametrize("case", DEADLOCKS)
def test_the_stand_in_finds(case: str) -> None:
    ended = run(case)
    assert (ended.stdout, ended.returncode) == (f"deadlock: {DEADLOCKS[case]}\n", 3)


@pytest.mark.parametrize("case", HOST_CALLS)
def test_operations_keep_to_their_budget_of_calls(case: str) -> None:
    ended = run(case)
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
