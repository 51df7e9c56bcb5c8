"""`Layout.LOW_LATENCY` between CPU ranks: fixed shapes, windows that are counted, masks, deaths."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from moe_comm import (
    FP8_BLOCK128,
    CapacityError,
    Communicator,
    EpBuffer,
    Layout,
    PeerFailedError,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.configs import ep_config
from tests.helpers.failing_ranks import die, meet


def _error_after(call: Callable[[], object], limit: int = 4000) -> Exception:
    """Error of `call`, called again and again."""
    try:
        for _ in range(limit):
            call()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return error.with_traceback(None)
    raise AssertionError(f"raised nothing in {limit} calls")


EXPERTS_PER_RANK = 2
NUM_TOKENS = 6
HIDDEN = 128
MODES = ["processes", "threads"]


def _buffer(context: RankContext, backend: str = "host", **options: int) -> EpBuffer:
    comm = Communicator(context.group, backend=backend, arrival_timeout_s=60.0, **options)
    config = ep_config(EXPERTS_PER_RANK * comm.num_ranks, 2, HIDDEN, NUM_TOKENS)
    return EpBuffer(comm, config)


def _inputs(buffer: EpBuffer, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + buffer.communicator.rank_idx)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    scores = torch.rand(NUM_TOKENS, buffer.config.num_experts, generator=generator)
    weights, topk_idx = scores.topk(2, dim=1)
    return x, topk_idx, weights


def _filled(buffer: EpBuffer, rows: torch.Tensor, counts: torch.Tensor) -> list[torch.Tensor]:
    per_expert = buffer.communicator.num_ranks * NUM_TOKENS
    return [
        rows[e * per_expert : e * per_expert + count].clone()
        for e, count in enumerate(counts.tolist())
    ]


def _many_alive(context: RankContext) -> None:
    buffer = _buffer(context)
    alive = []
    for seed in range(7):
        x, topk_idx, _ = _inputs(buffer, seed)
        expected = buffer.dispatch(x, topk_idx)
        result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
        num_ranks = buffer.communicator.num_ranks
        assert result.x.shape == (EXPERTS_PER_RANK * num_ranks * NUM_TOKENS, HIDDEN)
        assert torch.equal(result.num_tokens_per_expert, expected.num_tokens_per_expert)
        alive.append((result, list(expected.x.split(expected.num_tokens_per_expert.tolist()))))
    assert len({result.x.data_ptr() for result, _ in alive}) == len(alive)
    for result, rows in alive:
        found = _filled(buffer, result.x, result.num_tokens_per_expert)
        assert all(map(torch.equal, found, [part.clone() for part in rows]))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_any_number_of_results_may_be_alive(num_ranks: int, mode: str) -> None:
    run_ranks(_many_alive, num_ranks, mode=mode)


def _early(context: RankContext) -> None:
    buffer = _buffer(context)
    comm = buffer.communicator
    x, topk_idx, weights = _inputs(buffer, 1)
    expected = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY, quantization=FP8_BLOCK128)
    if comm.rank_idx == 1:
        comm.all_gather(b"rank 0 holds its tensors")
    result = buffer.dispatch(
        x,
        topk_idx,
        weights,
        layout=Layout.LOW_LATENCY,
        quantization=FP8_BLOCK128,
        async_op=True,
    )
    early = result.x, result.x_sf, result.topk_weights
    if comm.rank_idx == 0:
        assert not result.event.is_complete()
        comm.all_gather(b"rank 0 holds its tensors")
    result.event.wait()
    assert early[0].data_ptr() == result.x.data_ptr()
    assert early[1].data_ptr() == result.x_sf.data_ptr()
    for counts in (result.num_tokens_per_expert, expected.num_tokens_per_expert):
        pairs = zip(
            _filled(buffer, result.x.view(torch.uint8), counts),
            _filled(buffer, expected.x.view(torch.uint8), counts),
            strict=True,
        )
        assert all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.parametrize("mode", MODES)
def test_tensors_are_there_before_the_peers(mode: str) -> None:
    run_ranks(_early, 2, mode=mode)


def _statistics(context: RankContext, backend: str) -> None:
    buffer = _buffer(context, backend)
    x, topk_idx, _ = _inputs(buffer, 5)
    waited_ns = torch.zeros(2, dtype=torch.int64)
    for step in range(6):
        if context.rank_idx == 1:
            time.sleep(0.05)
        result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
        waited_ns += result.wait_ns
        operation = buffer.combine(result.x, result.handle, async_op=True)
        waited_ns += operation.wait_ns
        if step == 0:
            first = buffer.wait_statistics()
            assert torch.equal(first.wait_ns, waited_ns)
    total = buffer.wait_statistics(reset=True)
    # Every wait of every operation, and no other; on the late rank alone.
    assert waited_ns[context.rank_idx] == 0 or backend == "simt"
    assert torch.equal(total.wait_ns, waited_ns)
    assert bool((total.wait_ns >= first.wait_ns).all())
    assert torch.equal(total.num_waits > 0, total.wait_ns > 0)
    if context.rank_idx == 0:
        assert total.wait_ns[1] > 0
    after = buffer.wait_statistics()
    assert not after.wait_ns.any()
    assert not after.num_waits.any()
    result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
    assert torch.equal(buffer.wait_statistics().wait_ns, result.wait_ns)
    buffer.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        buffer.wait_statistics()


@pytest.mark.parametrize("backend", ["host", "simt"])
def test_waits_add_up_to_the_statistics(backend: str) -> None:
    run_ranks(_statistics, 2, backend)


def _no_statistics(context: RankContext) -> None:
    buffer = _buffer(context, "collective")
    x, topk_idx, _ = _inputs(buffer, 6)
    assert not buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY).wait_ns.any()
    assert buffer.wait_statistics(reset=True).wait_ns.tolist() == [0, 0]
    assert buffer.wait_statistics().num_waits.tolist() == [0, 0]


def test_a_backend_that_cannot_tell_has_zeros() -> None:
    run_ranks(_no_statistics, 2)


def _masked(context: RankContext) -> None:
    buffer = _buffer(context)
    x, topk_idx, weights = _inputs(buffer, 3)
    if buffer.communicator.rank_idx == 0:
        buffer.mask_ranks([2])  # one rank says so, all leave it out
        assert buffer.masked_ranks == (2,)
    result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
    y = buffer.combine(result.x, result.handle, topk_weights=weights)
    if buffer.communicator.rank_idx == 2:
        assert int(result.num_tokens_per_expert.sum()) == 0
        assert int(result.num_dropped_per_expert.sum()) > 0
        assert not y.any()
    else:
        stays = topk_idx < 2 * EXPERTS_PER_RANK
        assert torch.equal(result.handle.dropped_choices(), ~stays)
        products = weights[:, :, None] * x.float()[:, None, :]
        sums = torch.zeros_like(x, dtype=torch.float32)
        for k in range(2):
            sums = torch.where(stays[:, k, None], sums + products[:, k], sums)
        assert torch.equal(y, sums.to(torch.bfloat16))
    buffer.mask_ranks([])
    result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
    assert int(result.num_dropped_per_expert.sum()) == 0
    # A layout that hides nothing takes no notice.
    buffer.mask_ranks([1])
    assert int(buffer.dispatch(x, topk_idx).num_dropped_per_expert.sum()) == 0


def test_a_masked_rank_takes_no_part() -> None:
    run_ranks(_masked, 3)


def _after_a_death(context: RankContext) -> int:
    buffer = _buffer(context)
    x, topk_idx, _ = _inputs(buffer, 4)
    buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
    meet(context)
    if context.rank_idx == 2:
        die()
    error = _error_after(lambda: buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY))
    assert isinstance(error, PeerFailedError), repr(error)
    buffer.communicator.recover()
    result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
    y = buffer.combine(result.x, result.handle)
    lost = (topk_idx >= 2 * EXPERTS_PER_RANK).sum(dim=1, keepdim=True)
    assert torch.equal(y, ((2 - lost) * x.float()).to(torch.bfloat16))
    return int(lost.sum())


def test_a_dead_rank_is_masked_after_recovery() -> None:
    lost = run_ranks(_after_a_death, 3, fresh=True, expect_dead=[2])
    assert lost[0] > 0
    assert lost[1] > 0


def _out_of_windows(context: RankContext) -> None:
    buffer = _buffer(context, max_heap_bytes=8 << 20)
    x, topk_idx, _ = _inputs(buffer, 5)
    held = []

    def hold() -> None:
        held.append(buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY))
        if context.rank_idx == 1:
            held.clear()

    error = _error_after(hold)
    # Rank 1 had room: it learned from rank 0 that a window was missing there.
    assert isinstance(error, CapacityError), repr(error)
    assert error.ranks == (0,)
    held.clear()
    result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
    assert torch.equal(buffer.combine(result.x, result.handle), 2 * x)


def test_no_free_window_is_an_error_on_every_rank() -> None:
    run_ranks(_out_of_windows, 2)
