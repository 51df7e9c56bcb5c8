from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moe_comm.testing import RankContext, RankError, RankTimeoutError, close_workers, run_ranks
from tests.helpers.failing_ranks import SHORT_S, wait_for

MODES = ["threads", "processes"]
is_over = threading.Event()
"""Lets a hanging thread end with its test."""


def describe(context: RankContext, offset: int) -> tuple[int, int, int]:
    return context.rank_idx + offset, context.num_ranks, os.getpid()


def gather(context: RankContext) -> list[object]:
    gathered: list[object] = [None] * context.num_ranks
    dist.all_gather_object(gathered, context.rank_idx)
    return gathered


def fail_on_one(context: RankContext) -> None:
    if context.rank_idx == 1:
        raise KeyError("lost")


def hang_on_one(context: RankContext, marker: str) -> None:
    if context.rank_idx == 1:
        wait_for_nothing()
    Path(marker).touch()


def wait_for_nothing() -> None:
    is_over.wait(60.0)


def die_on_one(context: RankContext) -> int:
    if context.rank_idx == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return context.rank_idx


def return_rows(context: RankContext) -> torch.Tensor:
    return torch.full((2, 3), float(context.rank_idx)).bfloat16()


@pytest.mark.parametrize("mode", MODES)
def test_results_come_in_rank_order(mode: str) -> None:
    results = run_ranks(describe, 3, 10, mode=mode)
    assert [result[:2] for result in results] == [(10, 3), (11, 3), (12, 3)]
    assert len({pid for _, _, pid in results}) == (1 if mode == "threads" else 3)


def test_processes_live_on_and_form_groups_of_any_size() -> None:
    first = run_ranks(describe, 3, 0)
    for num_ranks in (2, 4, 1, 3):
        assert run_ranks(gather, num_ranks) == [list(range(num_ranks))] * num_ranks
    assert run_ranks(describe, 3, 0) == first
    assert run_ranks(describe, 3, 0, fresh=True) != first


def test_tensors_come_back() -> None:
    rows = run_ranks(return_rows, 2)
    assert [float(row.float().sum()) for row in rows] == [0.0, 6.0]
    assert rows[0].dtype is torch.bfloat16


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_is_raised_with_its_rank(mode: str) -> None:
    with pytest.raises(
        RankError, match=r"rank 1 raised KeyError\('lost'\)[^$]*fail_on_one"
    ) as info:
        run_ranks(fail_on_one, 3, mode=mode)
    assert isinstance(info.value.__cause__, KeyError)
    assert len(run_ranks(describe, 3, 0, mode=mode)) == 3


@pytest.mark.clock(usual_s=0.2, limit_s=SHORT_S)
@pytest.mark.parametrize("mode", MODES)
def test_a_hanging_rank_shows_its_stack(mode: str, tmp_path: Path) -> None:
    marker = tmp_path / "others are done"
    is_over.clear()
    run_ranks(describe, 2, 0, mode=mode)  # processes may have to be started
    with pytest.raises(RankTimeoutError, match=r"ranks \[1\] did not end[^$]*wait_for_nothing"):
        run_ranks(hang_on_one, 2, str(marker), mode=mode, timeout_s=SHORT_S)
    is_over.set()
    assert marker.exists()
    assert len(run_ranks(describe, 2, 0, mode=mode)) == 2


def test_a_death_is_an_error_unless_expected() -> None:
    with pytest.raises(RankError, match=r"rank 1 raised .*exit code -9"):
        run_ranks(die_on_one, 2)
    assert run_ranks(die_on_one, 3, fresh=True, expect_dead=[1]) == [0, None, 2]


def test_no_process_is_left() -> None:
    pids = [pid for _, _, pid in run_ranks(describe, 2, 0)]
    close_workers()
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="'fibers'"):
        run_ranks(describe, 2, 0, mode="fibers")
