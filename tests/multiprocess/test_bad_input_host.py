"""Mistakes that only ranks as processes with a heap can make; `test_bad_input.py` has those of any backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import CapacityError, Communicator, EpBuffer
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.configs import ep_config
from tests.helpers.failing_ranks import (
    config_for,
    error_of,
    inputs,
    interrupt_when_waiting,
    make_buffer,
    step,
    wait_for,
)


def _destroy_one(context: RankContext, options: dict[str, Any]) -> list[str]:
    """Rank 1 destroys its buffer while the others wait in a dispatch, and go on calling."""
    buffer = make_buffer(context, **options)
    other = EpBuffer(buffer.communicator, buffer.config)
    step(buffer, 0)
    texts = []
    if context.rank_idx == 1:
        time.sleep(0.2)
        buffer.destroy()
    else:
        for seed in range(12):  # more than fit the ring of operations in flight
            error = error_of(lambda seed=seed: step(buffer, seed))  # type: ignore[misc]
            assert type(error) is ValueError, repr(error)
            texts.append(str(error))
    for seed in range(3):
        step(other, seed)
    with EpBuffer(buffer.communicator, buffer.config) as again:
        step(again, 0)
        buffer.communicator.all_gather(b"")
    buffer.communicator.destroy()
    return texts


@pytest.mark.parametrize(
    "options", [{}, {"num_local_ranks": 1, "rail": "sockets"}], ids=["one node", "three nodes"]
)
def test_buffer_destroyed_on_one_rank(options: dict[str, Any]) -> None:
    results = run_ranks(_destroy_one, 3, options)
    for rank_idx in (0, 2):
        assert len(results[rank_idx]) == 12
        assert all("rank 1 has destroyed this buffer" in text for text in results[rank_idx])


A_LAMBDA = "a lambda"


def _make(context: RankContext, options: dict[str, Any]) -> str:
    changed = options if context.rank_idx == 1 else {}
    # It cannot be sent to the ranks, nor by them.
    changed = {
        name: (lambda: None) if given == A_LAMBDA else given for name, given in changed.items()
    }
    error = error_of(lambda: Communicator(context.group, **{"backend": "host", **changed}))
    assert type(error) is ValueError, repr(error)
    with Communicator(context.group, backend="host") as comm:
        assert comm.all_gather(b"x") == [b"x"] * 2
    return str(error)


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"device": "cuda:1"}, ("cuda:1", "among the 0")),
        ({"device": "nonsense"}, ("nonsense",)),
        ({"stall_timeout_s": 0}, ("stall_timeout_s", "> 0")),
        ({"arrival_timeout_s": float("nan")}, ("arrival_timeout_s", "nan")),
        ({"stall_timeout_s": "x"}, ("stall_timeout_s", "a number", "'x'")),
        ({"num_threads": 0}, (">= 1", "0")),
        ({"num_threads": 1.5}, ("num_threads", "1.5")),
        ({"with_huge_pages": 2}, ("with_huge_pages", "a bool", "2")),
        ({"num_threads": 1 << 31}, ("num_threads", "4096")),
        ({"max_heap_bytes": 1 << 64}, ("max_heap_bytes", str(1 << 64))),
        ({"parent": 3}, ("parent", "3")),
        ({"backend": A_LAMBDA}, ("backend", "<lambda>")),
        ({"num_local_ranks": A_LAMBDA}, ("num_local_ranks", "<lambda>")),
        ({"no_such_option": 1}, ("no_such_option",)),
        ({"num_sms": 4}, ("num_sms", "GPU", "4")),
        ({"rail": []}, ("rail", "[]")),
        ({"max_heap_bytes": -5}, ("max_heap_bytes", "-5")),
        ({"num_local_ranks": 3}, ("num_local_ranks", "2", "3")),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_of_one_rank(options: dict[str, Any], pieces: tuple[str, ...]) -> None:
    for text in run_ranks(_make, 2, options):
        assert text.startswith("rank 1: "), text
        assert all(piece in text for piece in pieces), text


def _make_buffers(context: RankContext) -> list[str]:
    comm = Communicator(context.group, backend="host")
    is_wrong = context.rank_idx == 1
    calls: list[Callable[[], EpBuffer]] = [
        lambda: EpBuffer(comm, config_for(2, num_tokens=64 + is_wrong)),
        lambda: EpBuffer(comm, config_for(2), **({"backend": "host"} if is_wrong else {})),
        lambda: EpBuffer(comm, "nonsense" if is_wrong else config_for(2)),  # type: ignore[arg-type]
        lambda: EpBuffer(
            comm,
            ep_config(2, 1, 8, 1, expert_rank=[0, 5 if is_wrong else 1]),
        ),
    ]
    texts = []
    for call in calls:
        error = error_of(call)
        assert isinstance(error, (ValueError, TypeError)), repr(error)
        texts.append(f"{type(error).__name__}: {error}")
        with EpBuffer(comm, config_for(2)) as buffer:
            step(buffer, 1)
            comm.all_gather(b"")
    comm.destroy()
    return texts


def test_configuration_of_one_rank() -> None:
    by_rank = run_ranks(_make_buffers, 2)
    pieces = [
        ("64", "65"),
        ("backend", "an argument of Communicator(group, backend=...)"),
        ("EpConfig", "str"),
        ("5",),
    ]
    for texts in by_rank:
        for text, expected in zip(texts, pieces, strict=True):
            assert all(piece in text for piece in expected), text


def _overfill(context: RankContext) -> list[tuple[int, int, tuple[int, ...]]]:
    """All rows go to rank 1, whose heap cannot hold them; and the user keeps what it can hold."""
    buffer = make_buffer(context, num_tokens=512, hidden=1024, max_heap_bytes=4 << 20)
    found = []
    x, topk_idx = inputs(buffer, 1, living=[1])
    for _ in range(3):
        error = error_of(lambda: buffer.dispatch(x, topk_idx))
        assert isinstance(error, CapacityError), repr(error)
        found.append((error.needed_bytes, error.available_bytes, error.ranks))
        assert sum(error.needed_rows) == 512 * 2 * context.num_ranks
        step(buffer, 2, num_tokens=16)
    # Results that the caller holds on to are copied out before the heap is full.
    kept = []
    even = torch.arange(64 * 2).reshape(64, 2) % buffer.config.num_experts
    for seed in range(40):
        x, _ = inputs(buffer, seed, num_tokens=64)
        result = buffer.dispatch(x, even)
        kept.append((result.x, result.x.clone()))
    assert all(torch.equal(x, copy) for x, copy in kept)
    assert buffer.communicator.heap_stats().resident_bytes <= 4 << 20
    # Results that may not be copied fill it, on whichever rank; every rank hears of it alike.
    held: list[object] = []

    def hold() -> None:
        for seed in range(200):
            x, _ = inputs(buffer, seed, num_tokens=64)
            held.append(buffer.dispatch(x, even, copy_out=False).x)

    error = error_of(hold)
    assert isinstance(error, CapacityError), repr(error)
    held.clear()
    kept.clear()
    step(buffer, 3, num_tokens=64)
    buffer.communicator.destroy()
    return found


def test_full_heap_is_raised_on_every_rank_alike() -> None:
    results = run_ranks(_overfill, 3)
    assert results[0] == results[1] == results[2]
    for needed, available, ranks in results[0]:
        assert ranks == (1,)
        assert needed >= 512 * 2 * 3 * 2048
        assert 0 < available < needed


def _interrupt_a_queue(context: RankContext, folder: str) -> None:
    """A blocking call behind operations in flight is interrupted; what it was to send still arrives."""
    buffer = make_buffer(context, num_tokens=4096)
    step(buffer, 0)
    done = Path(folder) / "done"
    to_rank_1 = torch.full((4096, 2), 2)
    if context.rank_idx == 0:
        pending = buffer.dispatch(*inputs(buffer, 1), async_op=True)
        rows = [torch.full((4096, 64), 3.0).bfloat16()]
        interrupt_when_waiting()
        error = error_of(lambda: buffer.dispatch(rows.pop(), to_rank_1.clone()))
        assert isinstance(error, KeyboardInterrupt), repr(error)
        # A thread that gets the memory of the interrupted caller's tensors writes to it.
        others = [torch.full((4096, 64), 9.0).bfloat16() for _ in range(8)]
        done.touch()
        pending.event.wait()
        del others
    else:
        wait_for(done.exists)
        buffer.dispatch(*inputs(buffer, 1))
        result = buffer.dispatch(torch.full((4096, 64), 5.0).bfloat16(), to_rank_1)
        assert bool((result.x[: 2 * 4096] == 3.0).all())
        assert bool((result.x[2 * 4096 :] == 5.0).all())
        del result
    buffer.communicator.all_gather(b"")
    step(buffer, 3)
    buffer.communicator.destroy()


def test_interrupted_queue(tmp_path: Path) -> None:
    run_ranks(_interrupt_a_queue, 2, str(tmp_path))
