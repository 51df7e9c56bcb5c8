"""Ranks on hosts of their own, as the network shows them: namespaces, links that fail."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.helpers.namespace_ranks import HANG_S, Job, Outcome, outcome_path, started_path
from tests.helpers.networks import BridgeNetwork, MissingPartError, Network, RelayNetwork

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = HANG_S + 90.0  # ranks load torch, and one that hangs says where
KINDS = {"bridge": BridgeNetwork, "relay": RelayNetwork}


@contextmanager
def made(kind: str, num_hosts: int) -> Iterator[Network]:
    try:
        network = KINDS[kind](num_hosts)
    except MissingPartError as error:
        pytest.skip(str(error))
    try:
        yield network
    finally:
        network.close()


class Ranks:
    """The processes of a job, in their namespaces."""

    def __init__(self, network: Network, job: Job, folder: Path) -> None:
        self.folder = folder
        self.job = job
        job_file = folder / "job.json"
        job_file.write_text(json.dumps(dataclasses.asdict(job)))
        command = [sys.executable, "-m", "tests.helpers.namespace_ranks", str(job_file)]
        env = {
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": "eth0",
            "MASTER_ADDR": job.address,
            "OMP_NUM_THREADS": "1",
        }
        num_local_ranks = job.num_ranks // job.num_hosts
        self.processes = [
            network.popen(rank // num_local_ranks, [*command, str(rank)], env, self.log(rank))
            for rank in range(job.num_ranks)
        ]

    def log(self, rank_idx: int) -> Path:
        return self.folder / f"rank{rank_idx}.log"

    def logs(self) -> str:
        return "\n".join(
            f"--- rank {rank}, {process.poll()}\n{self.log(rank).read_text()[-3000:]}"
            for rank, process in enumerate(self.processes)
        )

    def await_steps(self) -> None:
        deadline_s = time.monotonic() + LIMIT_S
        ranks = range(self.job.num_ranks)
        while not all(started_path(self.folder, rank).exists() for rank in ranks):
            assert all(process.poll() is None for process in self.processes), self.logs()
            assert time.monotonic() < deadline_s, self.logs()
            time.sleep(0.02)

    def outcomes(self) -> list[Outcome]:
        """Reports of all ranks, which have left their processes in good order."""
        deadline_s = time.monotonic() + LIMIT_S
        try:
            for process in self.processes:
                process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"ranks hang\n{self.logs()}") from None
        paths = [outcome_path(self.folder, rank) for rank in range(self.job.num_ranks)]
        assert all(path.exists() for path in paths), self.logs()
        outcomes = [Outcome(**json.loads(path.read_text())) for path in paths]
        assert [fault for outcome in outcomes for fault in outcome.faults] == []
        assert [process.returncode for process in self.processes] == [0] * len(paths), self.logs()
        return outcomes

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()


@contextmanager
def running(network: Network, job: Job, folder: Path) -> Iterator[Ranks]:
    ranks = Ranks(network, job, folder)
    try:
        yield ranks
    finally:
        ranks.end()


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "num_hosts", "rail"),
    [
        (4, 2, "gloo"),
        (4, 2, "sockets"),
        (3, 3, "gloo"),
        (6, 3, "sockets"),
    ],
)
def test_hosts_of_their_own(tmp_path: Path, num_ranks: int, num_hosts: int, rail: str) -> None:
    with made("bridge", num_hosts) as network:
        job = Job(num_ranks, num_hosts, network.address(0), rail, "conform")
        with running(network, job, tmp_path) as ranks:
            ranks.outcomes()


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rail", ["gloo", "sockets"])
def test_links_that_delay_and_lose(tmp_path: Path, kind: str, rail: str) -> None:
    with made(kind, 2) as network:
        try:
            network.spoil(delay_ms=3, jitter_ms=2, loss_percent=0.5)
        except MissingPartError as error:
            pytest.skip(str(error))
        job = Job(4, 2, network.address(0), rail, "conform")
        with running(network, job, tmp_path) as ranks:
            ranks.outcomes()


# Cuts of which the kernel is told, and of which nobody is: two ways in which a host is suddenly alone.
CUTS = ("unplug", "drop_all")
STALL_TIMEOUT_S = 6.0


@pytest.mark.clock(usual_s=0.5, limit_s=STALL_TIMEOUT_S)
@pytest.mark.parametrize("rail", ["gloo", "sockets"])
@pytest.mark.parametrize("cut", CUTS)
def test_a_link_that_dies_is_named_on_every_rank(tmp_path: Path, cut: str, rail: str) -> None:
    with made("bridge", 2) as network:
        job = Job(4, 2, network.address(0), rail, "until_error", STALL_TIMEOUT_S)
        with running(network, job, tmp_path) as ranks:
            ranks.await_steps()
            getattr(network, cut)(1)
            outcomes = ranks.outcomes()
    for rank_idx, outcome in enumerate(outcomes):
        assert outcome.error in ("PeerFailedError", "PeerTimeoutError"), outcome
        # A rank that is named is on the other side of the cut.
        assert outcome.ranks, outcome
        assert {rank // 2 for rank in outcome.ranks} == {1 - rank_idx // 2}, outcome
