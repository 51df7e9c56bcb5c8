"""`async_op`: the same bits, in any order between buffers, and no end but one of its own."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import pytest
import torch

from moe_comm import Communicator, DispatchResult, EpBuffer, EpConfig, Layout, PeerFailedError
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.failing_ranks import SHORT_S, error_of, inputs, make_buffer, step, wait_for

MODES = ["processes", "threads"]


def _bits(result: DispatchResult) -> list[torch.Tensor]:
    parts = [result.x.view(torch.int16), result.num_tokens_per_expert, result.expert_offsets]
    parts += [part for part in (result.topk_idx, result.topk_weights) if part is not None]
    return [part.clone() for part in parts]


def _same_bits(context: RankContext) -> None:
    buffer = make_buffer(context)
    for layout in (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR):
        x, topk_idx = inputs(buffer, 1)
        weights = torch.rand(topk_idx.shape)
        blocking = buffer.dispatch(x, topk_idx, weights, layout=layout)
        sums = buffer.combine(blocking.x, blocking.handle)
        expected = _bits(blocking)
        # More than fit in flight: issuing waits, nothing else happens.
        pending = [
            buffer.dispatch(x, topk_idx, weights, layout=layout, async_op=True) for _ in range(11)
        ]
        for result in pending:
            result.event.wait()
            result.event.wait()
            assert result.event.is_complete()
            assert all(map(torch.equal, _bits(result), expected))
        combined = [buffer.combine(result.x, result.handle, async_op=True) for result in pending]
        for back in combined:
            assert not isinstance(back, torch.Tensor)
            assert torch.equal(back.x, sums)
        # A blocking call behind operations in flight keeps their order.
        behind = [buffer.dispatch(x, topk_idx, async_op=True, layout=layout) for _ in range(3)]
        last = buffer.combine(blocking.x, blocking.handle)
        assert torch.equal(last, sums)
        assert all(result.event.is_complete() for result in behind)
        # Results that nobody waits for, and inputs that nobody holds.
        for _ in range(6):
            buffer.dispatch(x.clone(), topk_idx.clone(), async_op=True, layout=layout)
    step(buffer, 2)
    buffer.destroy()
    buffer.communicator.destroy()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_same_bits(num_ranks: int, mode: str) -> None:
    run_ranks(_same_bits, num_ranks, mode=mode)


def _errors(context: RankContext) -> None:
    buffer = make_buffer(context)
    x, topk_idx = inputs(buffer, 1)
    bad_idx = topk_idx.clone()
    if context.rank_idx == 1:
        bad_idx[3, 1] = 77
    good = buffer.dispatch(x, topk_idx, async_op=True)
    bad = buffer.dispatch(x, bad_idx, async_op=True)
    later = buffer.dispatch(x, topk_idx, async_op=True)
    texts = set()
    for look in (bad.event.wait, lambda: bad.x, lambda: bad.handle, bad.event.wait):
        error = error_of(look)
        assert isinstance(error, ValueError), repr(error)
        texts.add(str(error))
    assert texts == {"rank 1: topk_idx[3, 1] = 77 is not an expert id in [-1, 4)"}
    assert torch.equal(good.x, later.x)
    step(buffer, 2)
    buffer.destroy()
    buffer.communicator.destroy()


@pytest.mark.parametrize("mode", MODES)
def test_errors_surface_at_wait_and_stay(mode: str) -> None:
    run_ranks(_errors, 2, mode=mode)


def _destroy_in_flight(context: RankContext, folder: str) -> None:
    """Destroy waits for what peers will finish, and gives up what they will not."""
    buffer = make_buffer(context)
    comm = buffer.communicator
    x, topk_idx = inputs(buffer, 1)
    expected = buffer.dispatch(x, topk_idx).x.clone()
    if context.rank_idx == 1:
        time.sleep(0.2)
    pending = [buffer.dispatch(x, topk_idx, async_op=True) for _ in range(3)]
    buffer.destroy()
    assert all(torch.equal(result.x, expected) for result in pending)
    comm.destroy()
    abandoned = make_buffer(context, stall_timeout_s=SHORT_S)
    comm = abandoned.communicator
    given_up = Path(folder) / "given up"
    if context.rank_idx == 0:
        result = abandoned.dispatch(x, topk_idx, async_op=True)
        abandoned.destroy()
        error = error_of(result.event.wait)
        given_up.touch()
    else:
        wait_for(given_up.exists)
        error = error_of(lambda: abandoned.dispatch(x, topk_idx))
    assert isinstance(error, PeerFailedError), repr(error)
    assert error.ranks == (0,)
    assert "in flight" in str(error)
    comm.recover()
    with EpBuffer(comm, buffer.config) as again:
        step(again, 1)
        comm.all_gather(b"")
    comm.destroy()


@pytest.mark.parametrize("mode", ["processes", pytest.param("threads", marks=pytest.mark.full)])
def test_destroy_with_operations_in_flight(mode: str, tmp_path: Path) -> None:
    run_ranks(_destroy_in_flight, 2, str(tmp_path), mode=mode)


def _drop_in_flight(context: RankContext) -> None:
    """Everything goes out of scope at once, buffer and communicator included."""
    for _ in range(2):
        buffer = make_buffer(context)
        x, topk_idx = inputs(buffer, 1)
        pending = [buffer.dispatch(x, topk_idx, async_op=True) for _ in range(4)]
        del buffer, x, topk_idx, pending
        gc.collect()


@pytest.mark.parametrize("mode", MODES)
def test_dropped_in_flight(mode: str) -> None:
    run_ranks(_drop_in_flight, 2, mode=mode)


def _outlive(context: RankContext) -> torch.Tensor:
    comm = Communicator(context.group, backend="host")
    config = EpConfig(num_experts=2, num_topk=1, hidden=8, num_max_tokens_per_rank=4)
    buffer = EpBuffer(comm, config)
    x = torch.full((4, 8), 1.0 + context.rank_idx, dtype=torch.bfloat16)
    result = buffer.dispatch(x, torch.tensor([[0], [1], [0], [1]]), copy_out=False)
    buffer.destroy()
    comm.destroy()
    del comm, buffer
    gc.collect()
    return result.x + 0


@pytest.mark.parametrize("mode", MODES)
def test_results_outlive_their_buffer(mode: str) -> None:
    for rows in run_ranks(_outlive, 2, mode=mode):
        assert rows[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
