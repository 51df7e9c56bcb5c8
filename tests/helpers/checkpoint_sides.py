"""Sides of tensors that ranks hold whole or in halves, saved and loaded by threads; and processes that are killed."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import _host
from moe_comm.checkpoints import load_checkpoint, save_checkpoint
from moe_comm.errors import CheckpointError, CommunicationError
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
    """Error of every rank, which is the same for all."""

    def on_rank(context: RankContext) -> str:
        with pytest.raises(error) as found:
            run(CheckpointViews(sides[context.rank_idx]), context.group)
        return str(found.value)

    texts = run_ranks(on_rank, len(sides), mode="threads")
    assert len(set(texts)) == 1, texts
    return texts[0]


def refused_load(
    error: type[Exception],
    folder: Path,
    *version: str,
    shape: tuple[int, int] = (4, 8),
    **options: Any,
) -> str:
    """Error of a load of `a` and `b`, which leaves the target as it was."""
    sides, before = (halves(numbers(-5, a=shape, b=shape)) for _ in range(2))
    text = refused(
        error,
        sides,
        lambda side, group: load_checkpoint(side, folder, *version, group=group, **options),
    )
    for side, kept in zip(sides, before, strict=True):
        for view, other in zip(side, kept, strict=True):
            assert torch.equal(view.tensor, other.tensor), f"{view.name} was written"
    return text


def refused_save(
    error: type[Exception],
    sides: list[list[CheckpointView]],
    folder: Path,
    version: str,
    **options: Any,
) -> str:
    """Error of a save, which leaves the folder as it was."""

    def state() -> dict[str, bytes]:
        paths = sorted(path for path in folder.rglob("*") if path.name != ".lock")
        return {str(path): path.read_bytes() if path.is_file() else b"" for path in paths}

    before = state()
    text = refused(
        error,
        sides,
        lambda side, group: save_checkpoint(side, folder, version, group=group, **options),
    )
    assert state() == before
    return text


# Calls of the system by which a save changes what is on the disk.
CHANGES = [
    (_host.files, "reserve"),
    *(
        (os, name)
        for name in (
            "mkdir",
            "open",
            "ftruncate",
            "pwrite",
            "fsync",
            "rename",
            "replace",
            "rmdir",
            "unlink",
        )
    ),
]
_REFUSED = 3


def ends_at(number: int, end: Callable[[], object]) -> list[int]:
    """Let one of the calls from now on be the last; counts them."""
    count = [0]
    for module, name in CHANGES:
        call = getattr(module, name)

        def counted(*args: Any, _call: Callable[..., Any] = call, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] == number:
                end()
            return _call(*args, **kwargs)

        setattr(module, name, counted)
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


def refused_by_the_system() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def ended_anywhere(
    folder: Path, write: Callable[[Path], object], end: Callable[[], object]
) -> Iterator[Path]:
    """End what writes at every call that changes the disk, in turn, and at last at none of them.

    A writer of which a call is refused raises `CheckpointError`, if anything.

    Args:
        folder: Folder that has a folder `first`.
        write: Writes into a copy of that.
        end: Function that is called in place of a call.

    Yields:
        Each copy, in which the next one who writes is to leave nothing of what was ended.
    """
    for number in range(1, 100):
        versions = folder / str(number)
        shutil.copytree(folder / "first", versions)

        def run(number: int = number, versions: Path = versions) -> None:
            count = ends_at(number, end)
            with contextlib.suppress(CheckpointError):
                write(versions)
            os._exit(_REFUSED if count[0] >= number else 0)

        status = in_a_fork(run)
        yield versions
        assert [path.name for path in versions.glob(".*")] == [".lock"], "what was ended is left"
        if status == 0:
            return
        assert os.waitstatus_to_exitcode(status) == (-signal.SIGKILL if end is killed else _REFUSED)


def saves_ended_anywhere(
    folder: Path,
    wholes: tuple[dict[str, torch.Tensor], ...],
    options: Callable[[str], dict[str, Any]],
    end: Callable[[], object] = killed,
) -> int:
    """End a save at every call that changes the disk, in turn; and the next one is as if it had not been.

    Args:
        folder: Folder that has a folder `first`, whose latest version is "before".
        wholes: Tensors of that version, of the one whose save is ended, and of the next.
        options: Options of a save over a version.
        end: Function that is called in place of that call.

    Returns:
        Number of such calls.
    """
    before, after, later = wholes
    found = []

    def write(versions: Path) -> None:
        save_checkpoint(CheckpointViews(side_of(after)), versions, "after", **options("before"))

    for versions in ended_anywhere(folder, write, end):
        for expected in ({"before": before, "after": after}, {"after": later, "next": later}):
            target = {name: torch.full_like(tensor, -1) for name, tensor in before.items()}
            (path,) = load([side_of(target)], versions, checksums=True)
            found.append(path.name)
            assert all(torch.equal(target[name], expected[path.name][name]) for name in target)
            if "before" in expected:
                again = "next" if path.name == "after" else "after"
                save([side_of(later)], versions, again, **options(path.name))
    assert found[0] == "before" if end is killed else "before" in found
    assert found[-2:] == ["after", "next"]
    return len(found) // 2


def dying(
    context: RankContext, folder: str, kill: tuple[int, str, int], options: dict[str, Any]
) -> str:
    """One rank is killed in one of its calls, by its number, during a save; the others must hear of it."""
    dies, call, number = kill
    if context.rank_idx == dies:
        original, count = getattr(os, call), itertools.count(1)

        def counted(*args: Any) -> Any:
            if next(count) == number:
                killed()
            return original(*args)

        setattr(os, call, counted)
    side = halves(numbers(2, a=(256, 256), b=(256, 256)))[context.rank_idx]
    with pytest.raises(CommunicationError) as found:
        save_checkpoint(CheckpointViews(side), folder, "after", **options)
    return str(found.value)


def save_with_a_killed_rank(folder: Path, kill: tuple[int, str, int], **options: Any) -> None:
    texts = run_ranks(dying, 2, str(folder), kill, options, fresh=True, expect_dead=[kill[0]])
    assert texts[kill[0]] is None
    assert "a save of a checkpoint ended: the ranks could not agree whether" in texts[1 - kill[0]]
