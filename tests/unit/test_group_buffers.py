"""The buffers that whoever works on one process group shares."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from moe_comm import RankThreads
from moe_comm.group_buffers import group_buffers


@pytest.fixture(autouse=True)
def _no_collection() -> Iterator[None]:
    """When cycles are collected differs from rank to rank; here they are not."""
    gc.disable()
    yield
    gc.enable()


def test_what_somebody_holds_is_shared() -> None:
    group = RankThreads(1)[0]
    held = group_buffers(group, backend="host")
    assert group_buffers(group) is held
    held.destroy()


def test_what_only_garbage_holds_is_not_found() -> None:
    """Else a rank whose garbage was collected makes another, and waits for those that found theirs."""
    group = RankThreads(1)[0]
    held = group_buffers(group, backend="host")
    former = weakref.ref(held)
    cycle: list[object] = [held]
    cycle.append(cycle)
    del held, cycle
    assert former() is not None
    again = group_buffers(group, backend="host")
    assert former() is None
    again.destroy()
