"""Scripts of ranks in the tests of failure: steps whose outcome is known, deaths, and what they leave."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import moe_comm
from moe_comm import CommunicationError, Communicator, EpBuffer, EpConfig
from moe_comm.peers.bootstrap import bootstrap_for
from moe_comm.testing import RankContext
from tests.helpers.configs import ep_config

NUM_TOPK = 2
EXPERTS_PER_RANK = 2
HANG_S = 60.0
"""Limit for what should take a second; only a hang reaches it."""
PROGRAM_S = 200.0
"""Limit for a program that a test starts: torch has to be loaded first."""
LONG_S = 1000.0
"""A limit beyond what any test may take: a rank which is told by it fails the test."""
SHORT_S = 3.0
"""A limit that tests let run out. Where no other rank may be late by it, a test is marked `clock`."""
PF_EXITING = 0x4
PACKAGE = str(Path(moe_comm.__file__).parent)


class Told(NamedTuple):
    """Part of an error of communication that travels between processes."""

    kind: str
    ranks: tuple[int, ...]
    phase: str
    epoch: int
    text: str


def config_for(num_ranks: int, num_tokens: int = 64, hidden: int = 64) -> EpConfig:
    return ep_config(EXPERTS_PER_RANK * num_ranks, NUM_TOPK, hidden, num_tokens)


def gather_pids(comm: Communicator) -> list[int]:
    return [int(pid) for pid in comm.all_gather(str(os.getpid()).encode())]


class _Experts(torch.autograd.Function):
    """Experts of a user; their backward may fail."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, fails: bool) -> torch.Tensor:
        ctx.fails = fails
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.fails:
            raise ArithmeticError("a fault of the user's")
        return gradients[0], None


def backward(buffer: EpBuffer, how: str, is_lost: bool) -> None:
    """Forward of a layer, then its backward as far as it comes; `how`: "raises" or "skips"."""
    x, topk_idx = inputs(buffer, 1)
    result = moe_comm.dispatch(x.requires_grad_(), topk_idx, buffer=buffer)
    rows = _Experts.apply(result.x, is_lost and how == "raises")
    y = moe_comm.combine(rows, result.handle, buffer=buffer)
    if not is_lost or how == "raises":
        y.float().sum().backward()


def meet(context: RankContext, living: Collection[int] | None = None) -> None:
    """Return once all ranks, or all of `living`, have come; by no communicator.

    So none of them is in a call of one any more. A rank may be in an `all_gather` that another has left,
    and there it hears of what that one does next.
    """
    if context.group is not None:  # ranks that are threads
        bootstrap_for(context.group).all_gather(None)
        return
    ranks = sorted(range(context.num_ranks) if living is None else living)
    store = dist.distributed_c10d._get_default_store()
    key = f"meet {ranks}"
    num_meetings = -(-int(store.add(key, 1)) // len(ranks))
    wait_for(lambda: int(store.add(key, 0)) >= num_meetings * len(ranks))


def inputs(
    buffer: EpBuffer,
    seed: int,
    living: Collection[int] | None = None,
    num_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows, and choices among the experts of `living` ranks only."""
    config, comm = buffer.config, buffer.communicator
    generator = torch.Generator().manual_seed(1000 * seed + comm.rank_idx)
    num_tokens = config.num_max_tokens_per_rank if num_tokens is None else num_tokens
    x = torch.randn(num_tokens, config.hidden, generator=generator).to(config.dtype)
    ranks = torch.tensor(sorted(living if living is not None else range(comm.num_ranks)))
    experts = (ranks[:, None] * EXPERTS_PER_RANK + torch.arange(EXPERTS_PER_RANK)).flatten()
    choices = torch.randint(len(experts), (num_tokens, config.num_topk), generator=generator)
    return x, experts[choices]


def step(
    buffer: EpBuffer,
    seed: int,
    living: Collection[int] | None = None,
    num_tokens: int | None = None,
) -> None:
    """Dispatch and combine with experts that return their input; the sum is known exactly."""
    x, topk_idx = inputs(buffer, seed, living, num_tokens)
    result = buffer.dispatch(x, topk_idx)
    y = buffer.combine(result.x, result.handle)
    if not torch.equal(y, NUM_TOPK * x):
        wrong = int((y != NUM_TOPK * x).any(1).sum())
        raise AssertionError(f"step {seed}: {wrong} of {len(x)} sums are wrong")


def work(comm: Communicator, num_steps: int = 5) -> None:
    """Steps with a buffer of its own."""
    with EpBuffer(comm, config_for(comm.num_ranks)) as buffer:
        for seed in range(num_steps):
            step(buffer, seed)
        comm.all_gather(b"")


def steps_until_error(
    buffer: EpBuffer, limit_s: float = HANG_S, living: Collection[int] | None = None
) -> tuple[Exception, float]:
    """Steps until one raises; the error and when it was raised (CLOCK_MONOTONIC)."""
    deadline = time.monotonic() + limit_s
    seed = 0
    while time.monotonic() < deadline:
        seed += 1
        try:
            step(buffer, seed, living)
        except AssertionError:
            raise
        except Exception as error:  # noqa: BLE001 - the test looks at it
            # Its frames would keep tensors alive.
            return error.with_traceback(None), time.monotonic()
    raise AssertionError(f"{seed} steps without an error in {limit_s} s")


def error_of(call: Callable[[], Any]) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001 - the test looks at it
        return error.with_traceback(None)
    raise AssertionError("raised nothing")


def told(error: BaseException) -> Told:
    assert isinstance(error, CommunicationError), repr(error)
    return Told(type(error).__name__, error.ranks, error.phase, error.epoch, str(error))


def assert_all_told(results: Sequence[Any], kind: type[Exception], culprit: int) -> None:
    """Every other rank, and each was told of the culprit in an error of this kind."""
    for rank_idx, result in enumerate(results):
        if rank_idx != culprit:
            assert result[:2] == (kind.__name__, (culprit,)), result
            assert f"rank {culprit} " in result.text


def die(when: Path | None = None) -> None:
    """SIGKILL this process; first write down when."""
    if when is not None:
        when.write_text(repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(delay_s: float, when: Path | None = None) -> None:
    """Die while the calling thread goes on."""
    threading.Timer(delay_s, die, (when,)).start()


def when_waiting(act: Callable[[], object]) -> None:
    """Let another thread `act` once the calling one stays at one place of the package: it waits there."""
    ident = threading.get_ident()

    def place() -> tuple[int, int] | None:
        frame = sys._current_frames().get(ident)
        if frame is None or not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        return id(frame), frame.f_lasti

    def watch() -> None:
        deadline = time.monotonic() + HANG_S
        last, num_equal = None, 0
        while num_equal < 6:
            if time.monotonic() > deadline:
                raise AssertionError(f"nothing of the package was waited in for {HANG_S} s")
            time.sleep(0.02)
            now = place()
            num_equal = num_equal + 1 if now is not None and now == last else 0
            last = now
        act()

    threading.Thread(target=watch, daemon=True).start()


def interrupt_when_waiting() -> None:
    """Do what Ctrl-C does, once the calling thread, the main one, waits in the package."""
    # A program that has started this process may have had it ignored, as shells do for what runs behind.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    when_waiting(lambda: os.kill(os.getpid(), signal.SIGINT))


def has_stopped(pid: int) -> bool:
    """Return whether every thread of the process has been stopped."""
    try:
        stats = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread has just ended
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


def num_open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_threads(name: str = "") -> int:
    """Threads of this process, or those of that name; without those that are ending.

    The system lists a thread for a moment after it was joined.
    """
    num_alive = 0
    for stat in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            own_name, _, fields = stat.read_text().partition(" (")[2].rpartition(") ")
            num_alive += name in ("", own_name) and not int(fields.split()[6]) & PF_EXITING
    return num_alive


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_buffer(
    context: RankContext, num_tokens: int = 64, hidden: int = 64, **options: Any
) -> EpBuffer:
    options = {"backend": "host", "stall_timeout_s": 20.0, "arrival_timeout_s": 40.0, **options}
    comm = Communicator(context.group, **options)
    return EpBuffer(comm, config_for(context.num_ranks, num_tokens, hidden))


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        if time.monotonic() > deadline:
            # A bound method says what it is; of a lambda, the line does.
            code = getattr(condition, "__code__", None)
            where = f" (line {code.co_firstlineno} of {code.co_filename})" if code else ""
            raise AssertionError(f"{condition!r}{where} did not come true in {HANG_S} s")
        time.sleep(0.01)


def own_sockets() -> list[str]:
    """Names of the abstract sockets that this process has open."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile, as this listing's own is
            target = os.readlink(fd)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    fields = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return sorted({line[7] for line in fields if len(line) > 7 and line[6] in inodes})
