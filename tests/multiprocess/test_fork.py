"""Forked children of a rank: they cannot use its communicator, and take nothing with them."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from moe_comm import Communicator, EpBuffer, GradientSum, PeerFailedError
from moe_comm.resharding.copy_services import GlooCopyService
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import (
    PROGRAM_S,
    config_for,
    die,
    inputs,
    make_buffer,
    meet,
    step,
    steps_until_error,
    wait_for,
)
from tests.helpers.fresh_python import run_python
from tests.helpers.source_tree import ROOT


class _Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


def _loader() -> DataLoader[torch.Tensor]:
    return DataLoader(_Samples(), batch_size=2, num_workers=2, multiprocessing_context="fork")


def _die_with_workers(context: RankContext, folder: str) -> tuple[int, ...]:
    # The processes of run_ranks may have no children otherwise.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    buffer = make_buffer(context)
    step(buffer, 0)
    batches = iter(_loader())
    for seed in range(20):
        next(batches)
        step(buffer, seed)
    meet(context)
    if context.rank_idx == 1:
        workers = [worker.pid for worker in batches._workers]  # type: ignore[attr-defined]
        (Path(folder) / "workers").write_text(" ".join(map(str, workers)))
        # They look for their parent now and then: stopped, they hold what they inherited.
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        die()
    error, _ = steps_until_error(buffer)
    assert isinstance(error, PeerFailedError), repr(error)
    workers = [int(pid) for pid in (Path(folder) / "workers").read_text().split()]
    assert all(Path(f"/proc/{pid}").exists() for pid in workers)
    assert buffer.communicator.recover().failed_ranks == (1,)
    if context.rank_idx == 0:
        for pid in workers:  # who waits for the result of the dead rank waits for them, too
            os.kill(pid, signal.SIGKILL)
    for seed in range(5):
        next(batches)
        step(buffer, seed, living=[0, 2])
    return error.ranks


def test_death_is_seen_while_its_workers_live(tmp_path: Path) -> None:
    try:
        results = run_ranks(_die_with_workers, 3, str(tmp_path), fresh=True, expect_dead=[1])
    finally:
        for path in tmp_path.iterdir():
            for pid in path.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
    assert [results[0], results[2]] == [(1,)] * 2


def _in_child(call: Callable[[], object], *, by_exit: bool) -> str:
    """Error of `call` in a forked child; the child must end by itself."""
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                text = f"returned {call()!r}"
            except BaseException as error:  # noqa: BLE001 - reported to the parent
                text = repr(error)
            os.write(write_fd, text.encode())
            if by_exit:
                sys.exit(0)  # atexit, finalizers, destructors
        except SystemExit:
            _end_of_interpreter()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
        os._exit(1 if by_exit else 0)
    os.close(write_fd)
    with os.fdopen(read_fd) as reader:
        text = reader.read()
    status: list[int] = []

    def has_ended() -> bool:
        ended, code = os.waitpid(pid, os.WNOHANG)
        status.extend([code] if ended else [])
        return bool(ended)

    wait_for(has_ended)
    assert status == [0], (status, text)
    return text


def _end_of_interpreter() -> None:
    """Run what an orderly exit of Python runs, without the frames of pytest or the worker around it."""
    atexit._run_exitfuncs()
    os._exit(0)


def _fork(context: RankContext) -> list[str]:
    buffer = make_buffer(context, num_threads=2, arrival_timeout_s=100.0)
    comm = buffer.communicator
    x, topk_idx = inputs(buffer, 1)
    kept = buffer.dispatch(x, topk_idx, async_op=True)  # starts the progress thread
    kept.event.wait()
    plain = EpBuffer(Communicator(context.group, backend="collective"), config_for(2))
    copies = GlooCopyService()
    kept_rows = torch.zeros(kept.handle.num_recv_tokens, 64, dtype=torch.bfloat16)
    texts = []
    if context.rank_idx == 0:
        # The other rank is in the barrier below.
        in_flight = buffer.dispatch(x, topk_idx, async_op=True)
        for call in (
            in_flight.event.wait,
            in_flight.event.is_complete,
            lambda: in_flight.x,
            lambda: step(buffer, 1),
            lambda: buffer.dispatch(x, topk_idx, async_op=True).event.wait(),
            lambda: buffer.combine(kept_rows, kept.handle),
            lambda: comm.all_gather(b""),
            comm.recover,
            lambda: comm.reserve(1 << 20),
            comm.heap_stats,
            comm.trim,
            lambda: buffer.empty_expert_output(kept.handle),
            # A process that waits for peers here waits for ever: they do not know of this process.
            comm.shrink,
            lambda: comm.grow("127.0.0.1:1"),
            lambda: EpBuffer(comm, config_for(2)),
            lambda: GradientSum(comm, 8),
            lambda: Communicator(parent=comm),
            lambda: Communicator(backend="collective"),
            lambda: step(plain, 1),
            GlooCopyService,
            copies.run,
        ):
            texts.append(_in_child(call, by_exit=False))
        # Ends of all kinds, in the child only.
        assert _in_child(buffer.destroy, by_exit=True) == "returned None"
        assert _in_child(comm.destroy, by_exit=True) == "returned None"
        assert _in_child(lambda: None, by_exit=True) == "returned None"
    comm.all_gather(b"")
    if context.rank_idx != 0:
        in_flight = buffer.dispatch(x, topk_idx, async_op=True)
    assert torch.equal(buffer.combine(in_flight.x, in_flight.handle), 2 * x)
    for seed in range(10):
        step(buffer, seed)
    buffer.destroy()
    comm.destroy()
    return texts


def test_children_are_refused_and_disturb_nobody() -> None:
    results = run_ranks(_fork, 2, fresh=True)
    for text in results[0]:
        assert "ValueError" in text, text
        assert "fork" in text, text


_EXITING_CHILD = """
import gc, os, sys, torch, moe_comm
from tests.helpers.failing_ranks import *
comm = moe_comm.Communicator(backend="host", num_threads=2)
buffer = moe_comm.EpBuffer(comm, config_for(1))
step(buffer, 0)
pending = buffer.dispatch(*inputs(buffer, 1), async_op=True)
pending.event.wait()
child = os.fork()
if child == 0:
    del pending, buffer, comm
    gc.collect()
    sys.exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
assert status == 3, status
step(buffer, 2)
print("parent works")
"""


def test_child_that_exits_through_python() -> None:
    """All of Python's own end runs in the child: exit functions, module teardown, destructors."""
    result = run_python("-c", _EXITING_CHILD, timeout=PROGRAM_S, cwd=ROOT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "parent works\n", "")
