"""Sides of tensors that ranks hold whole or in halves, saved and loaded by threads; and processes that are killed."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm.checkpoints import load_checkpoint, save_checkpoint
from moe_comm.resharding import CheckpointView, CheckpointViews
from moe_comm.resharding.describe.intervals import Interval, whole
from moe_comm.testing import RankContext, run_ranks


def folder_in_memory() -> Iterator[Path]:
    """Give a folder where syncing is quick, and remove it."""
    in_memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    path = tempfile.mkdtemp(prefix="checkpoints-", dir=in_memory)
    yield Path(path)
    shutil.rmtree(path)


def save(
    sides: list[list[CheckpointView]], folder: Path, version: str, **options: Any
) -> list[Path]:
    def run(context: RankContext) -> Path:
        side = CheckpointViews(sides[context.rank_idx])
        return save_checkpoint(side, folder, version, group=context.group, **options)

    return run_ranks(run, len(sides), mode="threads")


def load(sides: list[list[CheckpointView]], folder: Path, *args: Any, **options: Any) -> list[Path]:
    def run(context: RankContext) -> Path:
        side = CheckpointViews(sides[context.rank_idx])
        return load_checkpoint(side, folder, *args, group=context.group, **options)

    return run_ranks(run, len(sides), mode="threads")


def side_of(tensors: dict[str, torch.Tensor]) -> list[CheckpointView]:
    """One rank that holds tensors whole."""
    return [
        CheckpointView(name, tuple(tensor.shape), tuple(map(whole, tensor.shape)), tensor)
        for name, tensor in tensors.items()
    ]


def halves(tensors: dict[str, torch.Tensor]) -> list[list[CheckpointView]]:
    """Two ranks that hold half of the columns each."""
    sides: list[list[CheckpointView]] = [[], []]
    for rank, side in enumerate(sides):
        for name, tensor in tensors.items():
            rows, columns = tensor.shape
            width = columns // 2
            part = tensor[:, rank * width : (rank + 1) * width].clone()
            dims = (whole(rows), (Interval(rank * width, 0, width),))
            side.append(CheckpointView(name, (rows, columns), dims, part))
    return sides


def numbers(first: float = 0.0, **shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape) + first
        for name, shape in shapes.items()
    }


def refused(
    error: type[Exception],
    sides: list[list[CheckpointView]],
    run: Callable[[CheckpointViews, Any], object],
) -> str:
    """What every rank says, which is the same for all."""

    def on_rank(context: RankContext) -> str:
        with pytest.raises(error) as found:
            run(CheckpointViews(sides[context.rank_idx]), context.group)
        return str(found.value)

    texts = run_ranks(on_rank, len(sides), mode="threads")
    assert len(set(texts)) == 1, texts
    return texts[0]


# Calls of the system by which a save changes what is on the disk.
CHANGES = ("mkdir", "open", "ftruncate", "pwrite", "fsync", "rename", "replace", "rmdir", "unlink")


def ends_at(number: int, end: Callable[[], object]) -> list[int]:
    """Let one of the calls from now on be the last; counts them."""
    count = [0]
    for name in CHANGES:
        call = getattr(os, name)

        def counted(*args: Any, _call: Callable[..., Any] = call, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                end()
            return _call(*args, **kwargs)

        setattr(os, name, counted)
    return count


def in_a_fork(run: Callable[[], None]) -> int:
    """The status of a forked process that runs something."""
    child = os.fork()
    if not child:
        try:
            run()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
