"""Ranks for tests: threads of this process, or processes that live on between calls."""

from __future__ import annotations

import dataclasses
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from moe_comm.ep import group_buffers
from moe_comm.peers import cuda_devices
from moe_comm.peers.bootstrap import Bootstrap, RankThreads
from moe_comm.testing.pool import GRACE_S, Outcome, WorkerPool

ResultT = TypeVar("ResultT")


class RankError(RuntimeError):
    """A rank raised; the message has its rank and traceback, `__cause__` is its exception."""


class RankTimeoutError(RuntimeError):
    """Ranks did not end in time; the message has the stacks of every one that was still running."""


@dataclasses.dataclass(frozen=True)
class RankContext:
    """Context that a rank is given.

    Args:
        rank_idx: This rank.
        num_ranks: Ranks.
        group: Argument for `Communicator`: None (the default process group) or a `Bootstrap`.
    """

    rank_idx: int
    num_ranks: int
    group: dist.ProcessGroup | Bootstrap | None


_shared_pool = WorkerPool()


def close_workers() -> None:
    """End the worker processes of this process; the next `run_ranks` starts new ones."""
    _shared_pool.close()


def run_ranks(
    fn: Callable[..., ResultT],
    num_ranks: int,
    *args: Any,
    mode: str = "processes",
    timeout_s: float = 300.0,
    fresh: bool = False,
    expect_dead: Collection[int] = (),
) -> list[ResultT]:
    """Call `fn(context, *args)` on every rank and return the results in rank order.

    Args:
        fn: Function at the top of an importable module (processes), or any callable (threads).
        num_ranks: Ranks.
        args: Given to every rank; picklable (processes).
        mode: "threads": ranks are threads of this process. "processes": every rank is a process with
            one intra-op thread and a default gloo group of these ranks; `fn` must not destroy the group.
            Both take the GPUs of the machine in turn, where it has some.
        timeout_s: Limit for all ranks together.
        fresh: Start new processes for this call and end them after it: for ranks that die or change
            their process.
        expect_dead: Ranks (processes) that may die; their result is None.

    Raises:
        RankError: Some rank raised. The others have `GRACE_S` to end, then they are ended.
        RankTimeoutError: The time is over.
        ValueError: `mode` is unknown.
    """
    if mode == "threads":
        return _results(_run_threads(fn, num_ranks, args, timeout_s), timeout_s)
    if mode != "processes":
        raise ValueError(f'mode must be "threads" or "processes", got {mode!r}')
    pool = WorkerPool() if fresh else _shared_pool
    try:
        outcomes = pool.run(_call, num_ranks, (fn, args), timeout_s, expect_dead)
    finally:
        if fresh:
            pool.close()
    return _results(outcomes, timeout_s)


def _call(rank_idx: int, num_ranks: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    try:
        if torch.cuda.is_available():
            cuda_devices.take_device(rank_idx)
        return fn(RankContext(rank_idx, num_ranks, None), *args)
    finally:
        # The process goes on to another call, with the same group.
        group_buffers.release_all()


def _run_threads(
    fn: Callable[..., Any], num_ranks: int, args: tuple[Any, ...], timeout_s: float
) -> list[Outcome]:
    ranks = RankThreads(num_ranks)
    outcomes = [Outcome(is_running=True) for _ in range(num_ranks)]
    has_ended = threading.Condition()

    def main(rank_idx: int) -> None:
        outcome = Outcome()
        try:
            if torch.cuda.is_available():
                cuda_devices.take_stream(rank_idx)
            outcome.result = fn(RankContext(rank_idx, num_ranks, ranks[rank_idx]), *args)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            outcome = Outcome(error=error, trace=traceback.format_exc())
            ranks.abort()
        with has_ended:
            outcomes[rank_idx] = outcome
            has_ended.notify()

    threads = [
        threading.Thread(target=main, args=(rank_idx,), name=f"rank {rank_idx}", daemon=True)
        for rank_idx in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    with has_ended:
        while any(outcome.is_running for outcome in outcomes):
            if any(outcome.error is not None for outcome in outcomes):
                deadline = min(deadline, time.monotonic() + GRACE_S)
            if not has_ended.wait(deadline - time.monotonic()):
                break
        final = list(outcomes)
    frames = sys._current_frames()
    for thread, outcome in zip(threads, final, strict=True):
        if outcome.is_running and thread.ident in frames:
            outcome.trace = "".join(traceback.format_stack(frames[thread.ident]))
    return final


def _results(outcomes: Sequence[Outcome], timeout_s: float) -> list[Any]:
    """Return the result of every rank, or raise the first error that is not the echo of another."""
    raised = [
        (isinstance(outcome.error, threading.BrokenBarrierError), rank_idx)
        for rank_idx, outcome in enumerate(outcomes)
        if outcome.error is not None
    ]
    running = [rank_idx for rank_idx, outcome in enumerate(outcomes) if outcome.is_running]
    stacks = "".join(f"\n--- rank {rank} is running:\n{outcomes[rank].trace}" for rank in running)
    if raised:
        _, rank_idx = min(raised)
        first = outcomes[rank_idx]
        others = "".join(
            f"\n--- rank {rank}: {outcomes[rank].error!r}" for _, rank in raised if rank != rank_idx
        )
        raise RankError(
            f"rank {rank_idx} raised {first.error!r}\n{first.trace}{others}{stacks}"
        ) from first.error
    if running:
        raise RankTimeoutError(f"ranks {running} did not end in {timeout_s} s{stacks}")
    return [outcome.result for outcome in outcomes]
