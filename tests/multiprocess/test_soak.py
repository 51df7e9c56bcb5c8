"""Many calls: nothing grows. Large windows: nothing overflows. Small machines: nothing else is needed."""

from __future__ import annotations

import dataclasses
import gc
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from moe_comm import Communicator, EpBuffer
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.configs import ep_config
from tests.helpers.failing_ranks import (
    PROGRAM_S,
    inputs,
    make_buffer,
    num_open_fds,
    num_threads,
    resident_bytes,
    step,
)
from tests.helpers.source_tree import captured


@dataclasses.dataclass(frozen=True)
class _Usage:
    """Memory of a rank."""

    num_fds: int
    num_threads: int
    segment_bytes: int
    num_windows: int
    live_bytes: int

    @classmethod
    def of(cls, comm: Communicator) -> _Usage:
        gc.collect()
        comm.all_gather(b"")
        stats = comm.heap_stats()
        usage = cls(
            num_open_fds(),
            num_threads(),
            stats.segment_bytes,
            stats.num_windows,
            stats.live_bytes,
        )
        comm.all_gather(b"")  # a peer that has ended closes its sockets
        return usage


def _many_calls(context: RankContext, num_calls: int) -> tuple[list[_Usage], list[int]]:
    buffer = make_buffer(context, num_tokens=8)
    comm = buffer.communicator
    x, topk_idx = inputs(buffer, 1)
    usages, resident = [], []
    for part in range(3):
        for _ in range(num_calls // 10 if part == 0 else num_calls):
            result = buffer.dispatch(x, topk_idx)
            y = buffer.combine(result.x, result.handle)
        assert torch.equal(y, 2 * x)
        del result, y
        usages.append(_Usage.of(comm))
        resident.append(resident_bytes())
    buffer.destroy()
    comm.destroy()
    return usages, resident


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_calls"), [(2, 5000), (4, 100_000)])
def test_many_calls_leave_nothing(num_ranks: int, num_calls: int) -> None:
    for usages, resident in run_ranks(_many_calls, num_ranks, num_calls, timeout_s=280):
        assert usages[0] == usages[1] == usages[2]
        assert resident[2] - resident[1] < 1 << 20


def _ragged_calls(context: RankContext, num_calls: int) -> tuple[list[_Usage], list[int]]:
    """Sizes change from call to call, and results live for some calls, as in a training step."""
    buffer = make_buffer(context, num_tokens=128, hidden=256)
    comm = buffer.communicator
    generator = torch.Generator().manual_seed(context.rank_idx)
    kept: list[torch.Tensor] = []
    usages, resident = [], []
    for _ in range(3):
        for seed in range(num_calls):
            num_tokens = int(torch.randint(129, (1,), generator=generator))
            x, topk_idx = inputs(buffer, seed, num_tokens=num_tokens)
            result = buffer.dispatch(x, topk_idx)
            y = buffer.combine(result.x, result.handle)
            assert torch.equal(y, 2 * x)
            kept += [result.x, y]
            del kept[: max(0, len(kept) - 16)]
        kept.clear()
        del result, y
        usages.append(_Usage.of(comm))
        resident.append(resident_bytes())
    buffer.destroy()
    comm.destroy()
    return usages, resident


@pytest.mark.slow
def test_ragged_calls_do_not_grow_the_heap() -> None:
    for usages, resident in run_ranks(_ragged_calls, 3, 700, timeout_s=200):
        assert usages[0] == usages[1] == usages[2]
        # 16 results of at most 128 * 2 * 3 rows of 512 bytes fit in there several times.
        assert usages[2].segment_bytes <= 32 << 20
        assert resident[2] - resident[0] < 4 << 20


def _many_buffers(context: RankContext) -> list[_Usage]:
    usages = []
    with Communicator(context.group, backend="host") as comm:
        for _ in range(3):
            for seed in range(20):
                config = ep_config(2 * context.num_ranks, 2, 64, 16)
                with EpBuffer(comm, config) as buffer:
                    step(buffer, seed)
                    x, topk_idx = inputs(buffer, seed)
                    buffer.dispatch(x, topk_idx, async_op=True).event.wait()
            del buffer, x, topk_idx
            comm.all_gather(b"")  # every rank has destroyed its last one
            usages.append(_Usage.of(comm))
    return usages


@pytest.mark.slow
def test_many_buffers_leave_nothing() -> None:
    for usages in run_ranks(_many_buffers, 3):
        assert usages[0] == usages[1] == usages[2]


def _many_communicators(context: RankContext) -> list[tuple[int, int]]:
    counts = []
    for seed in range(12):
        buffer = make_buffer(context)
        step(buffer, seed)
        if seed % 2:
            buffer.communicator.destroy()
        del buffer
        gc.collect()
        counts.append((num_open_fds(), num_threads()))
    return counts


@pytest.mark.slow
def test_many_communicators_leave_nothing() -> None:
    for counts in run_ranks(_many_communicators, 2):
        assert len(set(counts)) == 1, counts


# ---------------------------------------------------------------------------------------------
# Far addresses.


def _far(context: RankContext, hidden: int) -> None:
    """Few long rows: the last ones start beyond 2**31 elements of a window."""
    num_ranks = context.num_ranks
    comm = Communicator(context.group, backend="host")
    config = ep_config(num_ranks, 1, hidden, 20, dtype=torch.uint8)
    buffer = EpBuffer(comm, config)
    # All rows go to rank 1, where those of the last rank begin far beyond 2**31.
    x = torch.empty(20, hidden, dtype=torch.uint8)
    for token_idx in range(20):
        x[token_idx] = 20 * context.rank_idx + token_idx + 1
    result = buffer.dispatch(x, torch.ones(20, 1, dtype=torch.int64))
    if context.rank_idx == 1:
        assert result.x.numel() > 2**31
        for row in range(20 * num_ranks):
            assert int(result.x[row, 0]) == int(result.x[row, -1]) == row + 1
    del result
    buffer.destroy()
    comm.destroy()


@pytest.mark.slow
def test_rows_beyond_2_to_the_31_elements() -> None:
    run_ranks(_far, 2, 1 << 26, timeout_s=280)


# ---------------------------------------------------------------------------------------------
# A machine whose /dev/shm is small.

_SMALL_SHM = """
import os, sys
sys.path.insert(0, os.getcwd())
from tests.helpers.failing_ranks import make_buffer, step
from moe_comm.testing import run_ranks
from tests.multiprocess.test_soak import use_much
if __name__ == "__main__":
    status = os.statvfs("/dev/shm")
    assert status.f_blocks * status.f_frsize <= 64 << 20
    run_ranks(use_much, 2)
    print("works")
"""


def use_much(context: RankContext) -> None:
    buffer = make_buffer(context, num_tokens=1024, hidden=4096)
    step(buffer, 0)
    buffer.communicator.reserve(128 << 20)
    assert buffer.communicator.heap_stats().resident_bytes > 128 << 20
    buffer.communicator.all_gather(b"")
    buffer.destroy()
    buffer.communicator.destroy()


@pytest.mark.full
def test_small_dev_shm(tmp_path: Path) -> None:
    script = tmp_path / "small_shm.py"
    script.write_text(_SMALL_SHM)
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")
    mount = "mount -t tmpfs -o size=64m tmpfs /dev/shm"
    in_namespace = ["unshare", "--mount", "sh", "-c"]
    if subprocess.run([*in_namespace, mount], capture_output=True, check=False).returncode != 0:
        in_namespace = ["unshare", "--mount", "--map-root-user", "sh", "-c"]
        if subprocess.run([*in_namespace, mount], capture_output=True, check=False).returncode:
            pytest.skip("a mount namespace of its own is not permitted")
    root = str(Path(__file__).parents[2])
    result = captured(
        [*in_namespace, f'{mount} && exec "{sys.executable}" "{script}"'],
        timeout=PROGRAM_S,
        cwd=root,
    )
    assert (result.returncode, result.stdout) == (0, "works\n"), result.stderr
