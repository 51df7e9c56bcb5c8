"""Asynchronous dispatches by kernels: the receive kernel starts when somebody asks; on the emulator."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import (
    Capacity,
    Communicator,
    DispatchResult,
    EpBuffer,
    Layout,
    PeerFailedError,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.captured_graphs import Graph
from tests.helpers.configs import ep_config
from tests.helpers.failing_ranks import HANG_S, die, die_after, error_of, wait_for
from tests.helpers.on_stream import on_devices

NUM_EXPERTS = 12
NUM_TOKENS = 5
HIDDEN = 16
OK = 0


def _buffer(context: RankContext, num_local_ranks: int | None = None, **options: Any) -> EpBuffer:
    options = {"stall_timeout_s": 60.0, "arrival_timeout_s": 60.0, **options}
    comm = Communicator(context.group, backend="simt", num_local_ranks=num_local_ranks, **options)
    return EpBuffer(
        comm,
        ep_config(NUM_EXPERTS, 2, HIDDEN, NUM_TOKENS),
    )


def _inputs(buffer: EpBuffer, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + buffer.communicator.rank_idx)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    topk_idx = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(2, dim=1).indices
    return x, topk_idx


def _send(buffer: EpBuffer, seed: int, layout: Layout = Layout.LOW_LATENCY) -> DispatchResult:
    """A dispatch whose rows are on their way when this returns, or soon after."""
    result = buffer.dispatch(*_inputs(buffer, seed), layout=layout, async_op=True)
    assert isinstance(result, DispatchResult)
    return result


def _check(buffer: EpBuffer, seed: int, result: DispatchResult) -> None:
    """Every row of `result` came: experts that return their input give each token twice."""
    x, _ = _inputs(buffer, seed)
    assert torch.equal(buffer.combine(result.x, result.handle), 2 * x)


class Phases:
    """Phases of a buffer's operations, as they end."""

    def __init__(self, buffer: EpBuffer) -> None:
        backend: Any = buffer._backend
        self._endpoint = backend._endpoint
        self._endpoint.enable_trace()
        self._ended: set[tuple[int, str]] = set()

    def has_ended(self, epoch: int, phase: str) -> bool:
        self._ended |= {(record[0], record[2]) for record in self._endpoint.take_trace()}
        return (epoch, phase) in self._ended

    def await_end(self, epoch: int, phase: str) -> None:
        deadline = time.monotonic() + HANG_S
        while not self.has_ended(epoch, phase):
            assert time.monotonic() < deadline, f"phase {phase} of epoch {epoch} did not end"
            time.sleep(0.001)


def _by_whom(context: RankContext, layout: Layout) -> None:
    buffer = _buffer(context)
    phases = Phases(buffer)

    # The hook; again does nothing.
    result = _send(buffer, 1, layout)
    phases.await_end(1, "data")
    buffer.communicator.all_gather(b"all have sent")
    assert not phases.has_ended(1, "done")
    result.event.wait()
    assert phases.has_ended(1, "done")
    result.event.wait()
    assert result.event.is_complete()
    _check(buffer, 1, result)  # epoch 2

    # The first look at what only the end tells.
    result = _send(buffer, 3, layout)
    phases.await_end(3, "data")
    assert not phases.has_ended(3, "done")
    assert int(result.num_tokens_per_expert.sum()) >= 0
    assert phases.has_ended(3, "done")
    _check(buffer, 3, result)  # epoch 4

    # A caller that asks whether it has ended.
    result = _send(buffer, 5, layout)
    deadline = time.monotonic() + HANG_S
    while not result.event.is_complete():
        assert time.monotonic() < deadline, "a dispatch that is asked for its end did not end"
        time.sleep(0.001)
    assert phases.has_ended(5, "done")
    _check(buffer, 5, result)  # epoch 6

    # The next operation, of either kind.
    results = [_send(buffer, seed, layout) for seed in (7, 8)]
    phases.await_end(8, "data")
    assert phases.has_ended(7, "done")
    assert not phases.has_ended(8, "done")
    assert results[0].event.is_complete()
    _check(buffer, 7, results[0])
    assert phases.has_ended(8, "done")
    _check(buffer, 8, results[1])
    buffer.destroy()


@pytest.mark.parametrize("layout", [Layout.LOW_LATENCY, Layout.EXPERT_MAJOR])
def test_it_starts_when_somebody_asks(layout: Layout) -> None:
    run_ranks(_by_whom, 2, layout, mode="threads")


def _any_order(context: RankContext) -> None:
    buffer = _buffer(context)
    results = [_send(buffer, seed) for seed in range(3)]
    if context.rank_idx == 1:
        results.reverse()
    for result in results:
        result.event.wait()
    if context.rank_idx == 1:
        results.reverse()
    for seed, result in enumerate(results):
        _check(buffer, seed, result)
    buffer.destroy()


def test_hooks_in_any_order() -> None:
    run_ranks(_any_order, 3)


@pytest.mark.parametrize("layout", [Layout.LOW_LATENCY, Layout.EXPERT_MAJOR])
def test_rows_are_copied_when_somebody_asks(layout: Layout) -> None:
    """On several devices a row comes once, and its copies are a matter of this phase."""
    run_ranks(on_devices, 2, _by_whom, layout, mode="threads")
    run_ranks(on_devices, 3, _any_order, mode="threads")


def _copied_out(context: RankContext) -> None:
    buffer = _buffer(context)
    result = buffer.dispatch(*_inputs(buffer, 1), copy_out=True, async_op=True)
    _check(buffer, 1, result)
    x, _ = _inputs(buffer, 2)
    again = buffer.dispatch(x, None, handle=result.handle, async_op=True)
    again.event.wait()
    assert torch.equal(buffer.combine(again.x, result.handle), 2 * x)
    buffer.destroy()


def test_copies_and_handles() -> None:
    run_ranks(_copied_out, 2, mode="threads")


def _counted(context: RankContext) -> None:
    buffer = _buffer(context)
    waited_ns = torch.zeros(2, dtype=torch.int64)
    for seed in range(3):
        if context.rank_idx == 0:
            first = _send(buffer, seed)
        buffer.communicator.all_gather(b"rank 0 has sent")
        if context.rank_idx == 1:
            time.sleep(0.02)
            first = _send(buffer, seed)
        second = _send(buffer, seed)
        second.event.wait()
        waited_ns += first.wait_ns + second.wait_ns
    assert torch.equal(buffer.wait_statistics().wait_ns, waited_ns)
    if context.rank_idx == 0:
        assert waited_ns[1] > 0
    buffer.destroy()


def test_waits_are_booked_on_their_dispatch() -> None:
    run_ranks(_counted, 2, mode="threads")


def _dropped(context: RankContext) -> None:
    buffer = _buffer(context)
    other = EpBuffer(buffer.communicator, buffer.config)
    phases = Phases(buffer)
    result = _send(buffer, 1)
    place = result.x.data_ptr()
    phases.await_end(1, "data")
    del result
    held = []
    for seed in range(3):
        x, topk_idx = _inputs(other, seed)
        held.append(other.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY))
    # Peers may be writing there until it has been received.
    assert place not in {one.x.data_ptr() for one in held}
    assert not phases.has_ended(1, "done")
    _check(buffer, 2, _send(buffer, 2))
    assert phases.has_ended(1, "done")
    _send(buffer, 3)
    buffer.destroy()
    other.destroy()


def test_a_window_is_kept_until_it_was_received() -> None:
    run_ranks(_dropped, 2, mode="threads")


def _one_never_asks(context: RankContext, num_local_ranks: int | None) -> None:
    buffer = _buffer(context, num_local_ranks)
    result = _send(buffer, 1)
    if context.rank_idx != 0:
        result.event.wait()
    buffer.communicator.all_gather(b"all others have received")
    # Rows that were sent long ago are there.
    _check(buffer, 1, result)
    _send(buffer, 2)
    buffer.destroy()


@pytest.mark.parametrize(
    ("num_ranks", "num_local_ranks"), [(3, None), (2, 1), (4, 2)], ids=["1x3", "2x1", "2x2"]
)
def test_no_peer_waits_for_a_hook(num_ranks: int, num_local_ranks: int | None) -> None:
    run_ranks(_one_never_asks, num_ranks, num_local_ranks, mode="threads")


def _destroyed(context: RankContext) -> None:
    buffer = _buffer(context)
    result = _send(buffer, 1)
    buffer.destroy()
    # It was received first.
    assert result.event.is_complete()
    result.event.wait()
    assert int(result.num_tokens_per_expert.sum()) >= 0


def test_destroy_receives_first() -> None:
    run_ranks(_destroyed, 2)


def _rejected(context: RankContext) -> list[str]:
    buffer = _buffer(context)
    first = _send(buffer, 1)
    x, topk_idx = _inputs(buffer, 2)
    if context.rank_idx == 1:
        topk_idx[0, 0] = NUM_EXPERTS
    second = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY, async_op=True)
    assert isinstance(second, DispatchResult)
    third = _send(buffer, 3)
    errors = [error_of(second.event.wait) for _ in range(2)]
    assert [type(error) for error in errors] == [ValueError, ValueError]
    _check(buffer, 1, first)
    _check(buffer, 3, third)
    buffer.destroy()
    return [str(error) for error in errors]


def test_a_rejected_dispatch_between_two() -> None:
    messages = run_ranks(_rejected, 2)
    assert messages[0] == messages[1]
    assert f"{NUM_EXPERTS}" in messages[0][0]


def _dead_after_sending(context: RankContext, folder: Path) -> None:
    buffer = _buffer(context)
    comm = buffer.communicator
    phases = Phases(buffer)
    results = [_send(buffer, 1)]
    phases.await_end(1, "data")
    comm.all_gather(b"all have sent")
    if context.rank_idx == 2:
        die()
    time.sleep(0.5)  # longer than anybody looks at a peer that is gone
    # Its rows are whole.
    results[0].event.wait()
    assert int(results[0].num_tokens_per_expert.sum()) >= 0
    (folder / f"received by {context.rank_idx}").touch()
    wait_for(lambda: len(list(folder.iterdir())) == 2)  # nobody aborts before
    results.append(_send(buffer, 2))
    errors = [error_of(results[1].event.wait) for _ in range(2)]
    assert all(isinstance(error, PeerFailedError) for error in errors), errors
    assert str(errors[0]) == str(errors[1])
    assert comm.recover().failed_ranks == (2,)
    results[0].event.wait()
    buffer.destroy()


def test_a_peer_that_died_after_sending_is_received(tmp_path: Path) -> None:
    run_ranks(_dead_after_sending, 3, tmp_path, fresh=True, expect_dead=[2])


def _dead_while_sending(context: RankContext) -> None:
    comm = Communicator(
        context.group, backend="simt", stall_timeout_s=600.0, arrival_timeout_s=600.0
    )
    hidden, num_tokens = 4096, 32
    config = ep_config(NUM_EXPERTS, 2, hidden, num_tokens)
    buffer = EpBuffer(comm, config)
    # Rows of the victim take long: it dies before, between or behind its phases.
    comm.all_gather(b"every rank has its buffer")
    count = num_tokens if context.rank_idx == 1 else 1
    x = torch.ones(count, hidden, dtype=torch.bfloat16)
    topk_idx = torch.arange(2 * count).view(count, 2) % NUM_EXPERTS
    if context.rank_idx == 1:
        die_after(0.3)
    deadline = time.monotonic() + HANG_S
    while True:
        assert time.monotonic() < deadline, "nobody missed a rank that is dead"
        open_one, last = (
            buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY, async_op=True) for _ in range(2)
        )
        assert isinstance(open_one, DispatchResult)
        assert isinstance(last, DispatchResult)
        try:
            last.event.wait()
        except PeerFailedError as error:
            message = str(error)
            break
    assert str(error_of(last.event.wait)) == message
    assert comm.recover().failed_ranks == (1,)
    # It was ended, well or not.
    assert open_one.event.is_complete()
    # Experts of the ranks that live.
    x = torch.ones(1, hidden, dtype=torch.bfloat16)
    result = buffer.dispatch(
        x, torch.tensor([[0, NUM_EXPERTS - 1]]), layout=Layout.LOW_LATENCY, async_op=True
    )
    assert torch.equal(buffer.combine(result.x, result.handle), 2 * x)
    buffer.destroy()


def test_a_peer_that_dies_while_it_sends_is_named() -> None:
    run_ranks(_dead_while_sending, 3, fresh=True, expect_dead=[1])


def _captured(context: RankContext, num_local_ranks: int | None) -> None:
    buffer = _buffer(context, num_local_ranks)
    x, topk_idx = (part.clone() for part in _inputs(buffer, 0))
    capacity = Capacity(num_rows=NUM_TOKENS * 2 * context.num_ranks, on_overflow="drop")
    before = _send(buffer, 99)  # the capture starts behind it
    with Graph(buffer) as blocking:
        buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
    with Graph(buffer) as unasked:
        lost = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY, async_op=True)
    # All but the receive kernel; without its place in the graph nobody may rely on the rows.
    assert unasked.num_nodes == blocking.num_nodes - 1
    error = error_of(lost.event.wait)
    assert isinstance(error, ValueError), repr(error)
    assert "its end has to be waited for in the capture" in str(error)
    with Graph(buffer) as graph:
        first = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY, async_op=True)
        first.event.wait()
        first.event.wait()
        y = buffer.combine(first.x, first.handle)
        # The next operation is behind it, too.
        second = buffer.dispatch(x, topk_idx, capacity=capacity, async_op=True)
        third = buffer.dispatch(x, topk_idx, capacity=capacity, async_op=True)
        z = buffer.combine(third.x, third.handle)
        with pytest.raises(ValueError, match="async_op has no meaning in a capture"):
            buffer.combine(third.x, third.handle, async_op=True).event.wait()
    for seed in range(5):
        for place, part in zip((x, topk_idx), _inputs(buffer, seed), strict=True):
            place.copy_(part)
        graph.replay()
        assert [int(one.status[0]) for one in (first, second, third)] == [OK] * 3
        assert torch.equal(y, 2 * x)
        assert torch.equal(z, 2 * x)
        assert torch.equal(second.x, third.x)
    unasked.replay()
    graph.replay()
    assert torch.equal(y, 2 * x)
    _check(buffer, 99, before)
    buffer.destroy()


@pytest.mark.parametrize("num_local_ranks", [None, 1], ids=["one-node", "two-nodes"])
def test_captured_where_it_is_waited_for(num_local_ranks: int | None) -> None:
    run_ranks(_captured, 2, num_local_ranks, mode="threads")
