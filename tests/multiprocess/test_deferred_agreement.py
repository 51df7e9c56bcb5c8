"""Calls behind a caller's stream return before the host has heard all ranks: what is found, and when.

Combine, a cached dispatch and LOW_LATENCY need nothing of their peers' rows on the host. What the rows say
is told when somebody asks for it, or by a call behind which it has come; what was called before that is
refused.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import (
    Communicator,
    DispatchResult,
    EpBuffer,
    EpConfig,
    Layout,
    PeerFailedError,
    PeerTimeoutError,
)
from moe_comm.ep.backends.simt import Stream, use_stream
from moe_comm.ep.gradient_word import ENABLED, NEEDS_ROWS
from moe_comm.testing import RankContext, RankError, run_ranks
from tests.helpers.captured_graphs import Graph
from tests.helpers.configs import ep_config
from tests.helpers.failing_ranks import interrupt_when_waiting, wait_for, when_waiting

NUM_RANKS = 2
NUM_LOCAL_EXPERTS = 2
NUM_EXPERTS = NUM_RANKS * NUM_LOCAL_EXPERTS
NUM_TOKENS = 5
NUM_TOPK = 2
HIDDEN = 64
LIMIT_S = 30.0
LATER_S = 3.0
MOST_IN_FLIGHT = 32
NUM_CROSSINGS = 30

Call = Callable[[EpBuffer, DispatchResult], object]


def _config(num_experts: int = NUM_EXPERTS, num_windows: int | None = None) -> EpConfig:
    return ep_config(
        num_experts,
        NUM_TOPK,
        HIDDEN,
        NUM_TOKENS,
        dtype=torch.bfloat16,
        num_low_latency_windows=num_windows,
    )


def _buffer(context: RankContext, **options: Any) -> EpBuffer:
    communicator = Communicator(
        context.group, backend="simt", stall_timeout_s=LIMIT_S, arrival_timeout_s=LIMIT_S
    )
    return EpBuffer(communicator, _config(**options))


def _inputs(rank_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank_idx)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator)
    return x, scores.topk(NUM_TOPK, dim=1).indices


def _dispatched(buffer: EpBuffer, rank_idx: int, layout: Layout, stream: Stream) -> DispatchResult:
    """A dispatch that all ranks have ended."""
    result = buffer.dispatch(*_inputs(rank_idx), layout=layout)
    stream.synchronize()
    result.event.wait()
    return result


@contextlib.contextmanager
def _ready(
    context: RankContext, layout: Layout = Layout.EXPERT_MAJOR, **options: Any
) -> Iterator[tuple[EpBuffer, DispatchResult, Stream]]:
    """A buffer and a dispatch that all ranks have ended, on a stream; nothing is left to tell at the end."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context, **options)
        yield buffer, _dispatched(buffer, context.rank_idx, layout, stream), stream
        buffer.communicator.destroy()


def _combine(buffer: EpBuffer, result: DispatchResult) -> object:
    return buffer.combine(result.x, result.handle)


def _cached(buffer: EpBuffer, result: DispatchResult) -> object:
    x, _ = _inputs(buffer.communicator.rank_idx)
    return buffer.dispatch(x, None, handle=result.handle)


def _low_latency(buffer: EpBuffer, _: DispatchResult) -> object:
    return buffer.dispatch(*_inputs(buffer.communicator.rank_idx), layout=Layout.LOW_LATENCY)


CALLS: dict[str, tuple[Layout, Call]] = {
    "combine": (Layout.EXPERT_MAJOR, _combine),
    "combine of ranks": (Layout.RANK_MAJOR, _combine),
    "cached": (Layout.EXPERT_MAJOR, _cached),
    "low latency": (Layout.LOW_LATENCY, _low_latency),
    "low latency combine": (Layout.LOW_LATENCY, _combine),
}


def _returns_first(context: RankContext, layout: Layout, call: Call, has_returned: Any) -> None:
    with _ready(context, layout) as (buffer, result, stream):
        if context.rank_idx == 1:
            assert has_returned.wait(LIMIT_S / 2)
        call(buffer, result)
        has_returned.set()
        stream.synchronize()
        _works(buffer, stream)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_returns_before_its_peers_have_called(name: str) -> None:
    run_ranks(_returns_first, NUM_RANKS, *CALLS[name], threading.Event(), mode="threads")


def _is_wrong(buffer: EpBuffer, result: DispatchResult) -> None:
    """A combine that this rank alone has wrong: it hears so at once."""
    with pytest.raises(ValueError, match="contiguous"):
        buffer.combine(result.x[:, :-1], result.handle)


def _works(buffer: EpBuffer, stream: Stream) -> None:
    x, topk_idx = _inputs(buffer.communicator.rank_idx)
    result = buffer.dispatch(x, topk_idx)
    sums = buffer.combine(result.x, result.handle)
    stream.synchronize()
    assert torch.equal(sums, NUM_TOPK * x)


def _told_by_the_next(context: RankContext, next_call: Call) -> None:
    with _ready(context) as (buffer, result, stream):
        if context.rank_idx == 1:
            _is_wrong(buffer, result)
            with pytest.raises(ValueError, match=r"rank 0.*refuses this .*rank 1.*contiguous"):
                next_call(buffer, result)
        else:
            _combine(buffer, result)
            stream.synchronize()  # what the ranks say is there
            with pytest.raises(ValueError, match=r"rank 1.*contiguous") as raised:
                next_call(buffer, result)
            assert "refuses" not in str(raised.value)
        _works(buffer, stream)


def _dispatch_later(buffer: EpBuffer, _: DispatchResult) -> None:
    result = buffer.dispatch(*_inputs(buffer.communicator.rank_idx), async_op=True)
    result.event.wait()


def _dispatch(buffer: EpBuffer, _: DispatchResult) -> None:
    buffer.dispatch(*_inputs(buffer.communicator.rank_idx))


NEXT_CALLS: dict[str, Call] = {
    "combine": _combine,
    "cached": _cached,
    "dispatch": _dispatch,
    "asynchronous dispatch": _dispatch_later,
}


@pytest.mark.parametrize("name", NEXT_CALLS)
def test_what_a_peer_has_wrong_is_told_by_the_next_call(name: str) -> None:
    run_ranks(_told_by_the_next, NUM_RANKS, NEXT_CALLS[name], mode="threads")


def _told_by_the_event(context: RankContext) -> None:
    with _ready(context) as (buffer, result, stream):
        x, _ = _inputs(context.rank_idx)
        if context.rank_idx == 1:
            with pytest.raises(ValueError, match="contiguous"):
                buffer.dispatch(x[:, :-1], None, handle=result.handle)
        else:
            again = buffer.dispatch(x, None, handle=result.handle)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"rank 1.*contiguous"):
                    again.event.wait()
        # Everybody knows: nothing is refused.
        _works(buffer, stream)


def test_what_an_event_has_told_no_call_refuses() -> None:
    run_ranks(_told_by_the_event, NUM_RANKS, mode="threads")


def _told_by_destroy(context: RankContext) -> None:
    with _ready(context) as (buffer, result, stream):
        if context.rank_idx == 1:
            _is_wrong(buffer, result)
            buffer.destroy()
        else:
            _combine(buffer, result)
            with pytest.raises(ValueError, match=r"rank 1.*contiguous"):
                buffer.destroy()
        buffer.destroy()
        again = _buffer(context)
        _works(again, stream)
        again.destroy()


def test_destroying_a_buffer_tells_what_nobody_was_told() -> None:
    run_ranks(_told_by_destroy, NUM_RANKS, mode="threads")


def _refused(buffer: EpBuffer, result: DispatchResult, call: Call = _combine) -> None:
    """A call that peers made before they had heard what this rank knows."""
    with pytest.raises(
        ValueError, match=r"refused on every rank, as ranks? 0.* called it.*contiguous"
    ):
        call(buffer, result)


def _call_all(buffer: EpBuffer, result: DispatchResult, num_calls: int, wrong: set[int]) -> None:
    """Calls of rank 1, some of which it has wrong, behind as many of rank 0, which has none wrong."""
    for i in range(num_calls):
        if i in wrong:
            _is_wrong(buffer, result)
        elif i < min(wrong):
            _combine(buffer, result)
        else:
            _refused(buffer, result)


NUM_AHEAD = 20
ENDS = ("next", "destroy", "event")


def _wrong_while_ahead(context: RankContext, wrong: set[int], end: str, has_run: Any) -> None:
    with _ready(context) as (buffer, result, stream):
        x, _ = _inputs(context.rank_idx)
        if context.rank_idx == 1:
            assert has_run.wait(LIMIT_S)
            _call_all(buffer, result, NUM_AHEAD, wrong)
            _refused(buffer, result, _cached)
            if end != "destroy":
                with pytest.raises(ValueError, match=r"rank 0: refuses this combine.*contiguous"):
                    _combine(buffer, result)
        else:
            sums = [buffer.combine(result.x, result.handle) for _ in range(NUM_AHEAD)]
            last = buffer.dispatch(x, None, handle=result.handle)
            has_run.set()
            stream.synchronize()
            for i in range(min(wrong)):
                assert torch.equal(sums[i], NUM_TOPK * x)
            if end == "event":
                with pytest.raises(ValueError, match=r"refused on every rank.*contiguous"):
                    last.event.wait()
            with pytest.raises(ValueError, match=r"^rank 1: .*contiguous"):
                if end == "destroy":
                    buffer.destroy()
                else:
                    _combine(buffer, result)
        if end == "destroy":
            buffer.destroy()
            buffer = _buffer(context)
        _works(buffer, stream)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("wrong", [{0}, {9}, {3, 7}, {NUM_AHEAD - 1}], ids=str)
def test_what_a_rank_has_wrong_behind_one_that_is_ahead(wrong: set[int], end: str) -> None:
    run_ranks(_wrong_while_ahead, NUM_RANKS, wrong, end, threading.Event(), mode="threads")


def _of_three(context: RankContext, has_run: Any) -> None:
    """Rank 0 is far ahead, rank 2 less so, rank 1 is wrong: calls stay matched on all of them."""
    num_calls, num_of_rank_2 = 9, 5
    with _ready(context, num_experts=3 * NUM_LOCAL_EXPERTS) as (buffer, result, stream):
        if context.rank_idx == 1:
            for _ in range(2):
                assert has_run.wait(LIMIT_S)
            _call_all(buffer, result, num_of_rank_2, {2})
            with pytest.raises(ValueError, match=r"rank 2: refuses this combine"):
                _combine(buffer, result)
            for _ in range(num_of_rank_2 + 1, num_calls):
                _refused(buffer, result)
        else:
            for _ in range(num_calls if context.rank_idx == 0 else num_of_rank_2):
                _combine(buffer, result)
            has_run.release()
            stream.synchronize()
        if context.rank_idx == 2:
            with pytest.raises(ValueError, match=r"^rank 1: .*contiguous"):
                _combine(buffer, result)
            for _ in range(num_of_rank_2 + 1, num_calls):
                _refused(buffer, result)
        with pytest.raises(ValueError, match=r"contiguous"):
            _combine(buffer, result)
        _works(buffer, stream)


class _Semaphore:
    """Semaphore that is acquired as an event is waited for."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)
        self.release = self._semaphore.release

    def wait(self, timeout_s: float) -> bool:
        return self._semaphore.acquire(timeout=timeout_s)


def test_ranks_may_be_ahead_by_different_numbers_of_calls() -> None:
    run_ranks(_of_three, 3, _Semaphore(), mode="threads")


def _more_than_may_be_in_flight(context: RankContext, has_run: Any, returned: list[int]) -> None:
    """The host waits for a rank that is that far behind, and goes on when it comes."""
    with use_stream(Stream()) as stream:
        # The emulator holds what a combine reads until it has.
        buffer = _buffer(context, num_windows=MOST_IN_FLIGHT)
        backend: Any = buffer._backend
        x, topk_idx = _inputs(context.rank_idx)
        _dispatched(buffer, context.rank_idx, Layout.LOW_LATENCY, stream)
        before = backend._endpoint.device_calls()["host_waits"]
        if context.rank_idx == 1:
            assert has_run.wait(LIMIT_S)
            time.sleep(0.2)  # for calls that are not to return
            assert len(returned) == MOST_IN_FLIGHT
        sums = []
        for i in range(MOST_IN_FLIGHT):
            rows = (x * 2.0 ** (i % 8)).contiguous()
            result = buffer.dispatch(rows, topk_idx, layout=Layout.LOW_LATENCY)
            returned.append(context.rank_idx)
            sums.append(buffer.combine(result.x, result.handle))
            returned.append(context.rank_idx)
            if context.rank_idx == 0 and 2 * (i + 1) == MOST_IN_FLIGHT:
                assert backend._endpoint.device_calls()["host_waits"] == before
                has_run.set()
        stream.synchronize()
        for i, found in enumerate(sums):
            assert torch.equal(found, NUM_TOPK * (x * 2.0 ** (i % 8)))
        buffer.destroy()


def test_a_host_that_is_far_ahead_waits() -> None:
    run_ranks(_more_than_may_be_in_flight, NUM_RANKS, threading.Event(), [], mode="threads")


def _dies_while_others_are_ahead(context: RankContext, has_run: Path) -> None:
    with _ready(context) as (buffer, result, stream):
        if context.rank_idx == 1:
            wait_for(has_run.exists)
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(NUM_AHEAD):
            _combine(buffer, result)
        has_run.touch()
        stream.synchronize()
        with pytest.raises(PeerFailedError, match=r"rank 1 .*combine of buffer \d+, epoch 2, "):
            _combine(buffer, result)
        assert buffer.communicator.recover().failed_ranks == (1,)
        again = buffer.dispatch(*_inputs(0), layout=Layout.LOW_LATENCY)
        buffer.combine(again.x, again.handle)
        stream.synchronize()


def test_a_peer_that_dies_while_others_are_ahead_is_named(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"rank 1 .*(SIGKILL|-9)"):
        run_ranks(
            _dies_while_others_are_ahead, NUM_RANKS, tmp_path / "run", mode="processes", fresh=True
        )


def _of_another_buffer_meanwhile(context: RankContext) -> None:
    """An asynchronous combine waits for nothing that was called behind it, in whichever buffer."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        other = EpBuffer(buffer.communicator, buffer.config)
        result = _dispatched(buffer, context.rank_idx, Layout.EXPERT_MAJOR, stream)
        later = _dispatched(other, context.rank_idx, Layout.EXPERT_MAJOR, stream)
        for _ in range(NUM_CROSSINGS):
            combined = buffer.combine(result.x, result.handle, async_op=True)
            if context.rank_idx == 0:
                combined.event.wait()
            _combine(other, later)
            combined.event.wait()
            stream.synchronize()
            assert torch.equal(combined.x, NUM_TOPK * _inputs(context.rank_idx)[0])
        buffer.communicator.destroy()


def test_an_asynchronous_operation_waits_for_none_that_was_called_later() -> None:
    run_ranks(_of_another_buffer_meanwhile, NUM_RANKS, mode="threads")


def _of_one_dispatch(context: RankContext) -> None:
    """A handle is that of its dispatch on every rank, whichever have it made of tensors."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        x, topk_idx = _inputs(context.rank_idx)
        result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
        handle = result.handle
        if context.rank_idx == 1:
            handle = buffer.import_handle(handle.plan.to_tensors())
        sums = buffer.combine(result.x, handle)
        stream.synchronize()
        assert torch.equal(sums, NUM_TOPK * x)
        # The same choices, and yet another dispatch.
        again = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
        if context.rank_idx == 1:
            handle = buffer.import_handle(again.handle.plan.to_tensors())
        with pytest.raises(ValueError, match=r"ranks disagree: combine.*, handle"):
            buffer.combine(result.x, handle)
            _dispatch(buffer, result)
        buffer.communicator.destroy()


def test_handles_made_of_tensors_are_those_of_their_dispatches() -> None:
    run_ranks(_of_one_dispatch, NUM_RANKS, mode="threads")


def _eager_and_captured(context: RankContext) -> None:
    """A graph with handles of different dispatches, the first of a capture and the first of calls."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        x, topk_idx = _inputs(context.rank_idx)
        eager = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
        with Graph(buffer) as graph:
            captured = buffer.dispatch(2 * x, topk_idx, layout=Layout.LOW_LATENCY)
            result = eager if context.rank_idx == 0 else captured
            sums = buffer.combine(result.x, result.handle)
        sums.zero_()
        graph.replay()
        stream.synchronize()
        assert not sums.any(), "rows of different dispatches were added"
        buffer.communicator.destroy()


def test_a_captured_handle_is_not_taken_for_one_of_a_call() -> None:
    run_ranks(_eager_and_captured, NUM_RANKS, mode="threads")


def _wrong_before_a_replay(context: RankContext) -> None:
    """A graph does what was recorded, whatever nobody has heard yet of operations before."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        x, _ = _inputs(context.rank_idx)
        result = _dispatched(buffer, context.rank_idx, Layout.EXPERT_MAJOR, stream)
        with Graph(buffer) as graph:
            captured = buffer.combine(result.x, result.handle)
        for _ in range(2):
            if context.rank_idx == 1:
                _is_wrong(buffer, result)
            else:
                _combine(buffer, result)
            captured.zero_()
            graph.replay()
            stream.synchronize()
            assert torch.equal(captured, NUM_TOPK * x)
            with pytest.raises(ValueError, match=r"contiguous"):
                _combine(buffer, result)
            _works(buffer, stream)
        buffer.destroy()


def test_a_replay_behind_what_nobody_has_heard_is_not_refused() -> None:
    run_ranks(_wrong_before_a_replay, NUM_RANKS, mode="threads")


def _destroyed_instead(
    context: RankContext, num_ahead: int, has_called: Any, was_told: Any
) -> None:
    with _ready(context) as (buffer, result, _):
        if context.rank_idx == 1:
            assert has_called.wait(LIMIT_S)
            buffer.destroy()
            assert was_told.wait(LIMIT_S / 2), "rank 0 waits for its arrival limit"
        else:
            for _ in range(num_ahead):
                _combine(buffer, result)
            has_called.set()
            with pytest.raises(ValueError, match=r"rank 1 .*destroyed"):
                buffer.destroy()
            was_told.set()


@pytest.mark.parametrize("num_ahead", [1, 5])
def test_a_peer_that_destroys_its_buffer_instead_is_not_waited_for(num_ahead: int) -> None:
    events = (threading.Event(), threading.Event())
    run_ranks(_destroyed_instead, NUM_RANKS, num_ahead, *events, mode="threads")


def _needs_gradients(context: RankContext) -> None:
    """A peer may need a gradient that this rank does not where they are enabled: it hears so at once."""
    with _ready(context) as (buffer, result, stream):
        needs = ENABLED | (NEEDS_ROWS if context.rank_idx == 1 else 0)
        x, _ = _inputs(context.rank_idx)
        combined = buffer.combine(result.x, result.handle, gradients=needs)
        again = buffer.dispatch(x, None, handle=result.handle, gradients=needs)
        assert combined.gradients == again.gradients == ENABLED | NEEDS_ROWS
        stream.synchronize()


def test_what_peers_need_of_gradients_is_known_at_once() -> None:
    run_ranks(_needs_gradients, NUM_RANKS, mode="threads")


def _two_buffers(context: RankContext) -> None:
    """A communicator with a buffer that has something to tell releases the other one, too."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        other = EpBuffer(buffer.communicator, buffer.config)
        result = _dispatched(buffer, context.rank_idx, Layout.EXPERT_MAJOR, stream)
        if context.rank_idx == 1:
            _is_wrong(buffer, result)
            buffer.communicator.destroy()
        else:
            _combine(buffer, result)
            with pytest.raises(ValueError, match=r"rank 1.*contiguous"):
                buffer.communicator.destroy()
        for one in (buffer, other):
            with pytest.raises(ValueError, match="destroyed"):
                one.dispatch(*_inputs(context.rank_idx))
        assert buffer.communicator.is_destroyed


def test_a_communicator_ends_though_a_buffer_has_an_error_to_tell() -> None:
    run_ranks(_two_buffers, NUM_RANKS, mode="threads")


def _used_though_wrong(context: RankContext) -> None:
    """Ranks disagree in a dispatch whose handle they have: it has no rows that a combine could read."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        x, topk_idx = _inputs(context.rank_idx)
        weights = torch.rand(NUM_TOKENS, NUM_TOPK) if context.rank_idx == 0 else None
        result = buffer.dispatch(x, topk_idx, weights, layout=Layout.LOW_LATENCY)
        handle = result.handle
        with pytest.raises(ValueError, match="ranks disagree"):
            result.event.wait()
        rows = torch.zeros(NUM_EXPERTS * NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"rank 0: this handle has no rows.*disagree"):
                buffer.combine(rows, handle)
        _works(buffer, stream)
        buffer.destroy()


def test_the_handle_of_a_dispatch_that_was_wrong_is_refused() -> None:
    run_ranks(_used_though_wrong, NUM_RANKS, mode="threads")


def _interrupted(context: RankContext, is_other: bool, was_interrupted: Path) -> None:
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        other = _buffer(context) if is_other else buffer
        result = _dispatched(buffer, context.rank_idx, Layout.EXPERT_MAJOR, stream)
        next_result = _dispatched(other, context.rank_idx, Layout.EXPERT_MAJOR, stream)
        if context.rank_idx == 0:
            _combine(buffer, result)
            interrupt_when_waiting()
            with pytest.raises(KeyboardInterrupt):
                for _ in range(1 if is_other else MOST_IN_FLIGHT):
                    _combine(other, next_result)
            was_interrupted.touch()
            with pytest.raises(PeerFailedError, match="interrupted"):
                _combine(buffer, result)
        else:
            wait_for(was_interrupted.exists)
            with pytest.raises(PeerFailedError, match=r"rank 0 gave up combine.*interrupted"):
                _combine(buffer, result)
                stream.synchronize()
                _combine(buffer, result)
        buffer.communicator.destroy()


@pytest.mark.parametrize("is_other", [False, True])
def test_an_interrupt_is_raised_where_the_operation_before_is_waited_for(
    is_other: bool, tmp_path: Path
) -> None:
    was_interrupted = tmp_path / "interrupted"
    run_ranks(_interrupted, NUM_RANKS, is_other, was_interrupted, mode="processes", fresh=True)


def _destroyed_by_a_handler(context: RankContext, is_handled: Path) -> None:
    with _ready(context) as (buffer, result, stream):
        x, _ = _inputs(context.rank_idx)
        if context.rank_idx == 0:
            again = buffer.dispatch(x, None, handle=result.handle)

            def handle(*_: object) -> None:
                is_handled.touch()
                buffer.destroy()

            signal.signal(signal.SIGALRM, handle)
            when_waiting(lambda: os.kill(os.getpid(), signal.SIGALRM))
            again.event.wait()
            assert buffer.is_destroyed
        else:
            wait_for(is_handled.exists)
            buffer.dispatch(x, None, handle=result.handle).event.wait()
        stream.synchronize()


def test_a_handler_of_a_signal_may_destroy_the_buffer_that_is_waited_for(tmp_path: Path) -> None:
    run_ranks(
        _destroyed_by_a_handler, NUM_RANKS, tmp_path / "handled", mode="processes", fresh=True
    )


def _read_by_a_child(context: RankContext, has_ended: Path) -> None:
    with use_stream(Stream()):
        buffer = _buffer(context)
        inputs = _inputs(context.rank_idx)
        if context.rank_idx == 0:
            handle = buffer.dispatch(*inputs, layout=Layout.LOW_LATENCY).handle
            child = os.fork()
            if child == 0:
                try:
                    handle.num_recv_tokens  # noqa: B018
                except ValueError as error:
                    os._exit(0 if "forked child" in str(error) else 2)
                os._exit(1)
            assert os.waitpid(child, 0)[1] == 0
            has_ended.touch()
            assert handle.num_recv_tokens > 0
        else:
            wait_for(has_ended.exists)
            buffer.dispatch(*inputs, layout=Layout.LOW_LATENCY)
        buffer.destroy()


def test_a_forked_child_hears_nothing(tmp_path: Path) -> None:
    run_ranks(_read_by_a_child, NUM_RANKS, tmp_path / "ended", mode="processes", fresh=True)


def _leaves_by_another_error(context: RankContext) -> None:
    with use_stream(Stream()) as stream:

        def leave(owner: EpBuffer | Communicator, buffer: EpBuffer) -> None:
            with owner:
                result = _dispatched(buffer, context.rank_idx, Layout.EXPERT_MAJOR, stream)
                if context.rank_idx == 1:
                    _is_wrong(buffer, result)
                else:
                    _combine(buffer, result)
                raise RuntimeError("of the caller")

        communicator = _buffer(context).communicator
        buffer = EpBuffer(communicator, _config())
        for owner in (buffer, communicator):
            if owner is communicator:
                buffer = EpBuffer(communicator, _config())
            with pytest.raises(RuntimeError, match="of the caller"):
                leave(owner, buffer)
            assert owner.is_destroyed


def test_what_nobody_was_told_takes_no_error_of_the_caller_away() -> None:
    run_ranks(_leaves_by_another_error, NUM_RANKS, mode="threads")


def _destroyed_behind_graphs(context: RankContext, has_called: Any, was_told: Any) -> None:
    with _ready(context) as (buffer, result, stream):
        with Graph(buffer) as graph:
            _combine(buffer, result)
        graph.replay()
        if context.rank_idx == 1:
            assert has_called.wait(LIMIT_S)
            buffer.destroy()
            assert was_told.wait(LIMIT_S / 2), "rank 0 waits for its arrival limit"
        else:
            _combine(buffer, result)
            has_called.set()
            stream.synchronize()
            was_told.set()
            with pytest.raises(ValueError, match=r"rank 1 .*destroyed"):
                buffer.destroy()


def test_behind_graphs_a_peer_that_destroys_its_buffer_is_not_waited_for() -> None:
    events = (threading.Event(), threading.Event())
    run_ranks(_destroyed_behind_graphs, NUM_RANKS, *events, mode="threads")


def _heard_before_it_left(context: RankContext, has_left: Any, counts: Any) -> None:
    """Words of a rank from before it left count, whether somebody asked before recover() or not."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context, num_experts=3 * NUM_LOCAL_EXPERTS)
        _dispatched(buffer, context.rank_idx, Layout.EXPERT_MAJOR, stream)
        result = buffer.dispatch(*_inputs(context.rank_idx), layout=Layout.LOW_LATENCY)
        stream.synchronize()
        if context.rank_idx == 2:
            result.event.wait()
            buffer.communicator.destroy()
            has_left.set()
            return
        if context.rank_idx == 0:
            result.event.wait()
        assert has_left.wait(LIMIT_S)
        recovery = buffer.communicator.recover()
        assert recovery.failed_ranks == (2,)
        assert recovery.completed_epochs == (2,)
        counts[context.rank_idx] = int(result.num_tokens_per_expert.sum())
        buffer.communicator.destroy()


def test_what_a_rank_said_before_it_left_counts() -> None:
    counts: dict[int, int] = {}
    run_ranks(_heard_before_it_left, 3, threading.Event(), counts, mode="threads")
    chosen_ranks = torch.cat([_inputs(rank_idx)[1] for rank_idx in range(3)]) // NUM_LOCAL_EXPERTS
    assert counts == {rank_idx: int((chosen_ranks == rank_idx).sum()) for rank_idx in range(2)}


def _crosses(context: RankContext, num_ahead: int) -> str:
    """Rank 0 is in combines that have returned when it calls what rank 1 waits in already."""
    with use_stream(Stream()) as stream:
        communicator = Communicator(
            context.group, backend="simt", stall_timeout_s=1000.0, arrival_timeout_s=1000.0
        )
        config = _config()
        buffer, other = EpBuffer(communicator, config), EpBuffer(communicator, config)
        result = _dispatched(buffer, context.rank_idx, Layout.EXPERT_MAJOR, stream)
        for _ in range(num_ahead if context.rank_idx == 0 else 0):
            _combine(buffer, result)
        with pytest.raises(PeerTimeoutError) as raised:
            _dispatch(other, result)
        communicator.destroy()
        return str(raised.value)


@pytest.mark.parametrize("num_ahead", [1, 5])
def test_operations_of_two_buffers_in_opposite_order_are_told_soon(num_ahead: int) -> None:
    for text in run_ranks(_crosses, NUM_RANKS, num_ahead, mode="threads"):
        assert "rank 0 waits for rank 1 to enter combine of buffer" in text
        assert "rank 1 waits for rank 0 to enter dispatch of buffer" in text


def _late_peer(context: RankContext) -> None:
    """A peer that is later than a stall may last, in an operation that a rank leaves by destroy()."""
    with use_stream(Stream()) as stream:
        communicator = Communicator(
            context.group, backend="simt", stall_timeout_s=LATER_S / 1.5, arrival_timeout_s=LIMIT_S
        )
        buffer = EpBuffer(communicator, _config())
        result = _dispatched(buffer, context.rank_idx, Layout.EXPERT_MAJOR, stream)
        if context.rank_idx == 1:
            time.sleep(LATER_S)
        _combine(buffer, result)
        buffer.destroy()
        communicator.destroy()


@pytest.mark.clock(usual_s=LATER_S, limit_s=LIMIT_S)
def test_destroy_waits_as_long_as_the_call_would_have() -> None:
    run_ranks(_late_peer, NUM_RANKS, mode="threads")
