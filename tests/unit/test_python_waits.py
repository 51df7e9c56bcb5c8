"""Waits of Python's own end by themselves, and say whom they waited for."""

from __future__ import annotations

import datetime as dt
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_comm import PeerTimeoutError
from moe_comm.cli.bench import environment
from moe_comm.cli.bench.peers import mpi_control
from moe_comm.cli.bench.peers.mpi import MpiPeer
from moe_comm.cli.bench.processes import WorkerError, WorkerProcesses
from moe_comm.ep.backends.collective_transport import ProgressThread
from moe_comm.peers.forks import forks
from moe_comm.resharding.copy_services import RecvOp, gloo_copy_service
from moe_comm.resharding.copy_services.gloo_copy_service import GlooCopyService


def test_a_copy_whose_thread_does_not_end_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo_copy_service, "_wait_for_peer", lambda *_: None)
    monkeypatch.setattr(gloo_copy_service, "_GRACE_S", 0.01)
    monkeypatch.setattr(gloo_copy_service, "timeout_of", lambda _: dt.timedelta(0))
    service = object.__new__(GlooCopyService)
    service._wire_group = None  # type: ignore[assignment]
    service._in_flight = None
    service.rank = 0
    ops = [RecvOp(task_id=None, tensor=torch.zeros(1), src_rank=peer) for peer in (2, 1)]
    with pytest.raises(PeerTimeoutError, match=r"messages of round 4 failed: with ranks \[1, 2\]"):
        service._wait(4, [SimpleNamespace(), SimpleNamespace()], ops)  # type: ignore[list-item]


def test_an_operation_of_the_parent_is_refused_in_a_forked_child(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    progress = ProgressThread("test")
    done = progress.submit(lambda: 1)
    assert done.wait() == 1
    monkeypatch.setattr(progress, "_run", lambda: None)  # a fork takes no thread along
    monkeypatch.setattr(progress, "_thread", None)
    pending = progress.submit(lambda: 2)
    monkeypatch.setattr(forks, "generation", forks.generation + 1)
    with pytest.raises(ValueError, match=f"the parent of this forked child {os.getpid()}"):
        pending.wait()
    assert done.wait() == 1


class _Stuck:
    """A rank of the benchmark, of which the second ends no call."""

    def __init__(self, folder: Path, rank_idx: int) -> None:
        self._rank_idx = rank_idx

    def work(self) -> int:
        if self._rank_idx == 1:
            os.kill(os.getpid(), 19)  # SIGSTOP: it answers nobody
        return self._rank_idx

    def close(self) -> None:
        """Nothing is held."""


def test_a_rank_of_the_benchmark_that_is_stopped_is_named() -> None:
    with WorkerProcesses(2, _Stuck) as ranks:
        ranks.call_timeout_s = 0.5
        with pytest.raises(WorkerError, match=r"^rank 1 did not end work within 0.5 s$"):
            ranks.call("work")
        processes = list(ranks._processes)
        ranks._kill()
    assert [process.exitcode for process in processes] == [-9, -9]


def test_ranks_of_mpi_whose_benchmark_is_gone_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_control, "IDLE_TIMEOUT_S", 0.01)
    path = tmp_path / "control"
    path.write_bytes(bytes(mpi_control.ControlFile.file_bytes(1)))
    control = mpi_control.ControlFile(path, 1)
    control.post("check", 0)
    assert control.next_command(0) == (1, "check", 0)
    with pytest.raises(TimeoutError, match=r"no command after 1 within 0\.01 s"):
        control.next_command(1)


class _Deaf:
    """An mpirun that ends by SIGKILL alone."""

    def __init__(self) -> None:
        self.signals: list[str] = []

    def poll(self) -> None:
        return None

    def terminate(self) -> None:
        self.signals.append("terminate")

    def kill(self) -> None:
        self.signals.append("kill")

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None
        if "kill" not in self.signals:
            raise subprocess.TimeoutExpired("mpirun", timeout)
        return -9


def test_an_mpirun_that_does_not_end_is_killed() -> None:
    peer = object.__new__(MpiPeer)
    peer._control = SimpleNamespace(post=lambda *_: 1)  # type: ignore[assignment]
    peer._process = process = _Deaf()  # type: ignore[assignment]
    peer.close()
    assert process.signals == ["terminate", "kill"]


def test_a_commit_that_git_does_not_tell_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired("git", timeout)

    monkeypatch.setattr(subprocess, "run", run)
    assert environment._commit() is None
