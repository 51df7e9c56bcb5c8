"""Callers that are streams, on the emulator: operations follow them, and lead what comes behind.

What a stream holds is kept back by gates, so that nothing here depends on how long things take.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_comm import Communicator, DispatchResult, EpBuffer, Layout
from moe_comm.ep.backends.simt import Stream, use_stream
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.captured_graphs import Graph
from tests.helpers.configs import ep_config
from tests.helpers.on_stream import in_stream, on_devices
from tests.multiprocess import test_cuda_graphs as graphs

NUM_RANKS = 2
NUM_EXPERTS = 6
NUM_TOKENS = 5
NUM_TOPK = 2
HIDDEN = 64
CONFIG = ep_config(NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS)
GATE_S = 20.0
LAYOUTS = (Layout.EXPERT_MAJOR, Layout.RANK_MAJOR, Layout.LOW_LATENCY)


def _buffer(context: RankContext) -> EpBuffer:
    return EpBuffer(
        Communicator(context.group, backend="simt", stall_timeout_s=60.0, arrival_timeout_s=60.0),
        CONFIG,
    )


class Inputs:
    """Rows and choices that a stream writes; what is there before no operation may see."""

    def __init__(self, rank_idx: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(100 * seed + rank_idx)
        self._x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
        scores = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator)
        self._topk_idx = scores.topk(NUM_TOPK, dim=1).indices
        self.x = torch.full_like(self._x, float("nan"))
        self.topk_idx = torch.full_like(self._topk_idx, -1)

    def write(self, stream: Stream) -> None:
        stream.call(lambda: self.x.copy_(self._x))
        stream.call(lambda: self.topk_idx.copy_(self._topk_idx))

    def sums(self, layout: Layout) -> torch.Tensor:
        """Output of experts that return their input."""
        if layout is not Layout.RANK_MAJOR:
            return NUM_TOPK * self._x
        ranks = CONFIG.resolve_expert_rank(NUM_RANKS)[self._topk_idx].sort(dim=1).values
        num_distinct = 1 + (ranks[:, 1:] != ranks[:, :-1]).sum(dim=1, keepdim=True)
        return (num_distinct * self._x.float()).to(torch.bfloat16)


class Gate:
    """Streams come no further than here until the host opens it, or has failed for long."""

    def __init__(self, *streams: Stream) -> None:
        self._event = threading.Event()
        for stream in streams:
            stream.call(lambda: self._event.wait(GATE_S))

    def open(self) -> None:
        self._event.set()


def _dispatch(buffer: EpBuffer, inputs: Inputs, layout: Layout) -> DispatchResult:
    result = buffer.dispatch(
        inputs.x, inputs.topk_idx, layout=layout, copy_out=False, async_op=True
    )
    assert isinstance(result, DispatchResult)
    return result


@contextlib.contextmanager
def _launched(buffer: EpBuffer, num_kernels: int = 1) -> Iterator[None]:
    """Until an asynchronous operation has launched so many kernels, and could have run as far as it gets."""
    backend: Any = buffer._backend
    before = backend._endpoint.device_calls()["launches"]
    yield
    while backend._endpoint.device_calls()["launches"] < before + num_kernels:
        time.sleep(0.001)
    time.sleep(0.01)


def _follows(context: RankContext, layout: Layout) -> None:
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        inputs = Inputs(context.rank_idx)
        gate = Gate(stream)
        inputs.write(stream)
        with _launched(buffer):
            result = _dispatch(buffer, inputs, layout)
        # Everything the operation has to see is still to be written.
        gate.open()
        result.event.wait()

        # Sums are written by a stream, too, behind what it holds.
        out = torch.full_like(inputs.x, float("nan"))
        gate = Gate(stream)
        with _launched(buffer):
            combined = buffer.combine(result.x, result.handle, out=out, async_op=True)
        assert bool(out.isnan().all())
        gate.open()
        combined.event.wait()
        # Work that the stream is given from here on has the sums before it; the host has to ask.
        seen = torch.full_like(out, float("nan"))
        stream.call(lambda: seen.copy_(out))
        stream.synchronize()
        assert torch.equal(seen, inputs.sums(layout))
        buffer.destroy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_operations_follow_their_stream(layout: Layout) -> None:
    run_ranks(_follows, NUM_RANKS, layout, mode="threads")


def _sends_ahead(context: RankContext) -> None:
    """Number of kernels that are launched behind a stream that is kept back: what the host has not waited for."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        backend: Any = buffer._backend
        endpoint = backend._endpoint

        def launches(seed: int, num_tokens: int, num_ahead: int) -> tuple[int, int]:
            """Before rows have come, `num_ahead` at least, and in all; `num_tokens` of this rank."""
            inputs = Inputs(context.rank_idx, seed)
            before = endpoint.device_calls()["launches"]
            gate = Gate(stream)
            inputs.write(stream)
            with _launched(buffer, num_ahead):
                result = buffer.dispatch(
                    inputs.x[:num_tokens], inputs.topk_idx[:num_tokens], async_op=True
                )
            ahead = endpoint.device_calls()["launches"] - before
            gate.open()
            result.event.wait()
            total = endpoint.device_calls()["launches"] - before
            sums = buffer.combine(result.x, result.handle)
            stream.synchronize()
            wanted = inputs.sums(Layout.EXPERT_MAJOR)[:num_tokens]
            assert torch.equal(sums, wanted)
            return ahead, total

        # The exchange; then second offers, as no rank has a window, rows, receive.
        assert launches(0, 1, 1) == (1, 4)
        # Rows go to the window of the size that was needed before: too small, and they are sent again.
        assert launches(1, NUM_TOKENS, 2) == (2, 5)
        # The exchange, rows; receive.
        assert launches(1, NUM_TOKENS, 2) == (2, 3)
        buffer.destroy()


def test_rows_are_sent_before_the_host_has_read_their_counts() -> None:
    run_ranks(_sends_ahead, NUM_RANKS, mode="threads")


def _across_streams(context: RankContext) -> None:
    """Inputs of one stream, operations of two, results read in a fourth; joined by events alone."""
    source, first, second, sink = (Stream() for _ in range(4))
    with use_stream(first):
        buffer = _buffer(context)
    for turn in range(4):
        inputs = Inputs(context.rank_idx, turn)
        gate = Gate(source)
        inputs.write(source)
        with use_stream(first):
            first.wait(source.record())
            pending = _dispatch(buffer, inputs, Layout.EXPERT_MAJOR)
        opener = threading.Timer(0.002, gate.open)
        opener.start()
        pending.event.wait()
        with use_stream(second):
            second.wait(first.record())
            sums = buffer.combine(pending.x, pending.handle)
            sink.wait(second.record())
        seen = torch.full_like(inputs.x, float("nan"))
        sink.call(lambda seen=seen, sums=sums: seen.copy_(sums))
        sink.synchronize()
        opener.join()
        assert torch.equal(seen, inputs.sums(Layout.EXPERT_MAJOR))
    buffer.destroy()


def test_the_callers_stream_may_change() -> None:
    run_ranks(_across_streams, NUM_RANKS, mode="threads")


def _window_in_use(context: RankContext) -> None:
    """A result that is dropped while its stream has yet to read it."""
    reader, writer = Stream(), Stream()
    with use_stream(reader):
        buffer = _buffer(context)
    with use_stream(writer):
        other = EpBuffer(buffer.communicator, CONFIG)
    inputs = Inputs(context.rank_idx)
    inputs.write(reader)
    with use_stream(reader):
        result = _dispatch(buffer, inputs, Layout.EXPERT_MAJOR)
        result.event.wait()
        reader.synchronize()
    rows = result.x
    place, num_bytes = rows.data_ptr(), rows.numel() * rows.element_size()
    wanted, seen = rows.clone(), torch.full_like(rows, float("nan"))
    gate = Gate(reader)
    # By address: a function that had the tensor would keep it.
    reader.call(lambda: ctypes.memmove(seen.data_ptr(), place, num_bytes))
    del rows, result
    held = []
    with use_stream(writer):
        for seed in range(1, 6):
            inputs = Inputs(context.rank_idx, seed)
            inputs.write(writer)
            held.append(_dispatch(other, inputs, Layout.EXPERT_MAJOR))
            held[-1].event.wait()
    window = range(place, place + num_bytes)
    assert not any(_overlaps(one.x, window) for one in held)
    writer.synchronize()
    num_windows = buffer.communicator.heap_stats().num_windows
    gate.open()
    reader.synchronize()
    assert torch.equal(seen, wanted)
    # Then it goes back.
    assert buffer.communicator.heap_stats().num_windows == num_windows - 1
    buffer.destroy()
    other.destroy()


def _overlaps(rows: torch.Tensor, place: range) -> bool:
    num_bytes = rows.numel() * rows.element_size()
    return rows.data_ptr() < place.stop and place.start < rows.data_ptr() + num_bytes


def _low_latency_window_in_use(context: RankContext) -> None:
    """The same of a window of the buffer, which a dispatch from another stream writes to."""
    reader, writer = Stream(), Stream()
    with use_stream(reader):
        buffer = _buffer(context)
        inputs = Inputs(context.rank_idx)
        inputs.write(reader)
        result = _dispatch(buffer, inputs, Layout.LOW_LATENCY)
        result.event.wait()
        reader.synchronize()
    rows = result.x.view(torch.int16)
    place, num_bytes = rows.data_ptr(), rows.numel() * rows.element_size()
    wanted, seen = rows.clone(), torch.zeros_like(rows)
    gate = Gate(reader)
    reader.call(lambda: ctypes.memmove(seen.data_ptr(), place, num_bytes))
    del rows, result
    with use_stream(writer):
        inputs = Inputs(context.rank_idx, 1)
        inputs.write(writer)
        with _launched(buffer, 2):
            result = _dispatch(buffer, inputs, Layout.LOW_LATENCY)
        assert result.x.data_ptr() == place
        gate.open()
        result.event.wait()
        sums = buffer.combine(result.x, result.handle)
        writer.synchronize()
    reader.synchronize()
    assert torch.equal(seen, wanted)
    assert torch.equal(sums, inputs.sums(Layout.LOW_LATENCY))
    buffer.destroy()


def test_a_window_of_the_buffer_waits_for_streams_that_called() -> None:
    run_ranks(_low_latency_window_in_use, NUM_RANKS, mode="threads")


def test_a_window_is_kept_until_its_stream_has_read_it() -> None:
    run_ranks(_window_in_use, NUM_RANKS, mode="threads")


def _inputs_kept(context: RankContext) -> None:
    """Tensors that a caller drops as soon as the call returns."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        gate = Gate(stream)
        rows = torch.ones(4, HIDDEN, dtype=torch.bfloat16)
        gradient = torch.full_like(rows, 2.0)
        weights = torch.arange(4.0)
        dropped = [weakref.ref(rows), weakref.ref(weights)]
        dots = buffer.weighted_gradient(gradient, rows, weights)
        del rows, weights
        assert all(one() is not None for one in dropped)
        assert bool((gradient == 2.0).all())
        gate.open()
        stream.synchronize()
        assert all(one() is None for one in dropped)
        assert dots.tolist() == [2.0 * HIDDEN] * 4
        assert torch.equal(gradient[:, 0].float(), 2 * torch.arange(4.0))
        buffer.destroy()


def test_inputs_are_kept_until_they_were_read() -> None:
    run_ranks(_inputs_kept, 1, mode="threads")


def _captured(context: RankContext) -> None:
    """A graph of the caller's stream, with work of the caller's own in it."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context)
        x = torch.full((NUM_TOKENS, HIDDEN), float("nan"), dtype=torch.bfloat16)
        topk_idx = torch.full((NUM_TOKENS, NUM_TOPK), -1)
        now: dict[str, Any] = {}

        def read() -> None:
            x.copy_(now["inputs"]._x)
            topk_idx.copy_(now["inputs"]._topk_idx)

        with Graph(buffer) as graph:
            stream.call(read)
            result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY, async_op=True)
            result.event.wait()
            y = buffer.combine(result.x, result.handle)
            stream.call(lambda: now["seen"].copy_(y))
        for turn in range(5):
            now["inputs"] = Inputs(context.rank_idx, turn)
            now["seen"] = torch.full_like(x, float("nan"))
            graph.replay()
            assert torch.equal(now["seen"], now["inputs"].sums(Layout.LOW_LATENCY))
            # And an eager operation behind it.
            again = buffer.dispatch(x, topk_idx)
            sums = buffer.combine(again.x, again.handle)
            stream.synchronize()
            assert torch.equal(sums, now["inputs"].sums(Layout.EXPERT_MAJOR))
        assert int(result.status[0]) == graphs.OK
        buffer.destroy()


def test_graphs_of_the_callers_stream() -> None:
    run_ranks(_captured, NUM_RANKS, mode="threads")


@pytest.mark.parametrize(
    ("body", "num_ranks", "arguments"),
    [
        pytest.param(graphs._replay_often, 3, (5,), id="replays"),
        pytest.param(graphs._replay_often, 4, (3, 2, True), id="replays across nodes"),
        pytest.param(graphs._overflow, 3, (), id="overflow"),
        pytest.param(graphs._low_latency, 3, (None,), id="low latency"),
        pytest.param(graphs._refused, 2, (), id="refused"),
    ],
)
def test_graphs_of_callers_that_are_the_host(
    body: Callable[..., object], num_ranks: int, arguments: tuple[Any, ...]
) -> None:
    """The tests of graphs, with a stream as their caller."""
    run_ranks(in_stream, num_ranks, body, *arguments, mode="threads")


@pytest.mark.parametrize("body", [in_stream, None])
def test_graphs_of_ranks_on_several_devices(body: Callable[..., object] | None) -> None:
    """The same where rows are copied by who receives them."""
    bodies = (graphs._replay_often,) if body is None else (body, graphs._replay_often)
    run_ranks(on_devices, 3, *bodies, 5, mode="threads")
    bodies = (graphs._low_latency,) if body is None else (body, graphs._low_latency)
    run_ranks(on_devices, 3, *bodies, None, mode="threads")
    # Between nodes a row is fanned out into every slot, whatever the devices.
    bodies = (graphs._replay_often,) if body is None else (body, graphs._replay_often)
    run_ranks(on_devices, 4, *bodies, 3, 2, False, mode="threads")


def _what_a_stream_throws(_: RankContext) -> None:
    stream = Stream()
    stream.call(lambda: {}["missing"])
    ran = []
    stream.call(lambda: ran.append(1))
    for wait in (stream.synchronize, stream.record().is_complete, lambda: stream.call(print)):
        with pytest.raises(RuntimeError, match="KeyError: 'missing'"):
            wait()
    assert ran == []


def test_what_a_stream_throws_is_heard_by_who_waits() -> None:
    run_ranks(_what_a_stream_throws, 1, mode="threads")
