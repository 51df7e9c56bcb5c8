"""Surroundings of every test: a seed of its own, poisoned windows, and the rung it stands on."""

from __future__ import annotations

import collections
import gc
import zlib
from collections.abc import Callable, Generator
from multiprocessing import forkserver
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from moe_comm.peers import missed_calls
from tests.helpers.client_rows import properties_of
from tests.helpers.selection import check_margin, mark_what_no_sample_has

BASE_SEED = 20260
# A machine that does something else as well is no fault of the code under test.
settings.register_profile("moe_comm", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("moe_comm")
# Modules that tests load; hundreds of ranks would each load it again. torch.compile is the longest of
# all, and torchtitan brings it along.
PRELOADED = [
    *("pytest", "hypothesis", "torch.distributed", "torch._dynamo"),
    *("moe_comm.resharding", "moe_comm.cli.bench.worker", "moe_comm.dispatcher.torchtitan"),
]
# And where tests of a client run, what takes long of it.
PRELOADED_FOR = {"test_transformers": ["transformers.models.qwen3_moe.modeling_qwen3_moe"]}
NUM_LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-benchmark", action="store_true", help="run tests that only time")


def pytest_configure(config: pytest.Config) -> None:
    # Windows hold 0xFF (NaN in every float format) when they are handed out, so that a row nobody
    # wrote shows. Child processes inherit it, as they do the limit to one thread per rank.
    environment = pytest.MonkeyPatch()
    environment.setenv("MOE_COMM_POISON", "1")
    environment.setenv("OMP_NUM_THREADS", "1")
    # Else every process that compiles starts others to compile for it, which load torch first.
    environment.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # The width of a pipe without it; xdist sets it in its workers.
    environment.delenv("COLUMNS", raising=False)
    if not torch.cuda.is_available():
        # Before anything imports Triton, which then interprets its kernels on CPU tensors.
        environment.setenv("TRITON_INTERPRET", "1")
    config.add_cleanup(environment.undo)
    torch.set_num_threads(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    mark_what_no_sample_has(items)
    for item in items:
        for mark in item.iter_markers("clock"):
            check_margin(item.nodeid, mark)
    yield  # and pytest selects by them
    # Skipped one by one, a thousand tests would take ten seconds.
    num_devices = torch.cuda.device_count()
    kept, left_out = [], []
    for item in items:
        needs_more = any(mark.args[0] > num_devices for mark in item.iter_markers("gpu"))
        (left_out if needs_more else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)
    config.stash[NUM_LEFT_OUT] = len(left_out)
    if hasattr(config, "workeroutput"):
        config.workeroutput["num_left_out"] = len(left_out)


def pytest_collection_finish() -> None:
    """Leave torch, the modules and the tests themselves out of every later collection of garbage.

    They live to the end, and looking through them takes an eighth of what the tests take.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)  # xdist's: its workers alone see tests
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[NUM_LEFT_OUT] = getattr(node, "workeroutput", {}).get("num_left_out", 0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("clock") and hasattr(item.config, "workerinput"):
        pytest.fail("a test of a wall-clock limit runs alone, not beside other workers of xdist")
    if item.get_closest_marker("multinode"):
        pytest.skip("needs more than one node")
    if item.get_closest_marker("benchmark") and not item.config.getoption("--run-benchmark"):
        pytest.skip("times only; --run-benchmark runs it")


@pytest.fixture(scope="session", autouse=True)
def _server_of_ranks(request: pytest.FixtureRequest) -> None:
    """Start what ranks are forked from, with more in it than a user's, and its output captured."""
    paths = {item.path for item in request.session.items}
    if any("multiprocess" in path.parts for path in paths):
        of_clients = [PRELOADED_FOR.get(path.stem, []) for path in sorted(paths)]
        forkserver.set_forkserver_preload(sum(of_clients, PRELOADED))
        forkserver.ensure_running()


@pytest.fixture(autouse=True)
def _seed(request: pytest.FixtureRequest) -> None:
    """The same random numbers for a test on every run, and others for every test."""
    torch.manual_seed(BASE_SEED + zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _missed_calls() -> None:
    """A mistake that one test leaves untold is not told by a call of the next in this process."""
    missed_calls.take()


@pytest.fixture(autouse=True)
def _client(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """Properties of a test of a framework, for the page of clients."""
    for name, value in properties_of(request.node).items():
        record_property(name, value)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what every rung of the ladder took: tests/<rung>/..."""
    seconds: collections.Counter[str] = collections.Counter()
    num_tests: collections.Counter[str] = collections.Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                rung = "/".join(report.nodeid.split("/")[:2])
                seconds[rung] += report.duration
                num_tests[rung] += report.when == "call"
    if seconds:
        terminalreporter.section("rungs")
    for rung, total in seconds.items():
        terminalreporter.write_line(f"{rung:<24} {num_tests[rung]:>6} tests {total:>8.1f} s")
    num_left_out = terminalreporter.config.stash.get(NUM_LEFT_OUT, 0)
    if num_left_out:
        terminalreporter.write_line(
            f"left out: {num_left_out} tests, which need more CUDA devices than the "
            f"{torch.cuda.device_count()} of this machine"
        )
