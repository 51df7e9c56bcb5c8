"""Memory that captured operations of one buffer share: windows, tables and sums for any number of them."""

from __future__ import annotations

from typing import Any

import torch

from moe_comm import Capacity, Communicator, EpBuffer, Layout
from moe_comm.ep.backends.simt import Stream, use_stream
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.captured_graphs import Graph
from tests.helpers.configs import ep_config

NUM_RANKS = 2
NUM_LAYERS = 58
NUM_EXPERTS = 4
NUM_TOPK = 2
NUM_TOKENS = 3
NUM_MAX_TOKENS = 32
HIDDEN = 1 << 14
WINDOW_BYTES = NUM_EXPERTS * NUM_MAX_TOKENS * HIDDEN * 2


def _buffer(context: RankContext, hidden: int = HIDDEN) -> EpBuffer:
    return EpBuffer(
        Communicator(context.group, backend="simt", arrival_timeout_s=60.0),
        ep_config(NUM_EXPERTS, NUM_TOPK, hidden, NUM_MAX_TOKENS),
    )


def _tokens(context: RankContext, seed: int, hidden: int = HIDDEN) -> tuple[torch.Tensor, ...]:
    """Rows, ids and weights that sum to one without rounding."""
    generator = torch.Generator().manual_seed(10 * seed + context.rank_idx)
    x = torch.randn(NUM_TOKENS, hidden, generator=generator).to(torch.bfloat16)
    topk_idx = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(NUM_TOPK).indices
    return x, topk_idx, torch.full((NUM_TOKENS, NUM_TOPK), 0.5)


def _num_allocations(buffer: EpBuffer) -> int:
    backend: Any = buffer._backend
    calls = backend._endpoint.device_calls()
    return int(calls["zeroed_allocations"] + calls["unset_allocations"])


def _many_layers(context: RankContext) -> None:
    """Layers that pass rows on, and whose other rows lie outside of the heap."""
    buffer = _buffer(context)
    x, topk_idx, weights = _tokens(context, 0)
    ones = torch.ones(WINDOW_BYTES // (2 * HIDDEN), HIDDEN, dtype=torch.bfloat16)
    graphs = []
    num_allocations = []
    for _ in range(2):
        before = _num_allocations(buffer)
        with Graph(buffer) as graph:
            y = x
            for _ in range(NUM_LAYERS):
                result = buffer.dispatch(y, topk_idx, weights, layout=Layout.LOW_LATENCY)
                y = buffer.combine(result.x, result.handle, topk_weights=weights)
                z = buffer.combine(ones, result.handle, topk_weights=weights)
        del result
        graphs.append((graph, y, z))
        num_allocations.append(_num_allocations(buffer) - before)
        assert buffer.communicator.heap_stats().live_bytes <= 2 * WINDOW_BYTES + (8 << 20)
    # The second graph needs sums beside those that are held of the first.
    assert num_allocations[0] < 20
    assert num_allocations[1] <= 2
    for seed in range(1, 4):
        fresh, ids, _ = _tokens(context, seed)
        x.copy_(fresh)
        topk_idx.copy_(ids)
        for graph, y, z in graphs:
            graph.replay()
            assert torch.equal(y, x)
            assert torch.equal(z, ones[:NUM_TOKENS])
    buffer.destroy()


def test_any_number_of_layers_and_graphs_share_two_windows() -> None:
    run_ranks(_many_layers, NUM_RANKS, mode="threads", timeout_s=240)


def _filled(buffer: EpBuffer, result: Any) -> list[torch.Tensor]:
    """The rows of every local expert, copied."""
    counts = result.num_tokens_per_expert.tolist()
    starts = result.expert_offsets.tolist()
    return [result.x[a : a + n].clone() for a, n in zip(starts, counts, strict=False)]


def _held(context: RankContext, layout: Layout) -> None:
    """Results that somebody has are nobody else's: neither another's of the graph or of another, nor eager."""
    buffer = _buffer(context, 16)
    options: dict[str, Any] = {"layout": layout}
    if layout is not Layout.LOW_LATENCY:
        options["capacity"] = Capacity(num_rows=64, on_overflow="drop")
    inputs = [_tokens(context, seed, 16) for seed in range(7)]
    wanted = [_filled(buffer, buffer.dispatch(*one, layout=layout)) for one in inputs]
    graphs = []
    results: list[Any] = []
    for first in (0, 3):
        with Graph(buffer) as graph:
            results += [buffer.dispatch(*one, **options) for one in inputs[first : first + 3]]
        graphs.append(graph)
    eager = buffer.dispatch(*inputs[6], layout=layout)
    for graph in reversed(graphs):
        graph.replay()
    for result, rows in zip([*results, eager], wanted, strict=True):
        for found, expected in zip(_filled(buffer, result), rows, strict=True):
            assert torch.equal(found, expected)
    buffer.destroy()


def test_results_that_are_held_share_nothing() -> None:
    for layout in (Layout.LOW_LATENCY, Layout.EXPERT_MAJOR):
        run_ranks(_held, NUM_RANKS, layout, mode="threads")


def _read_beside(context: RankContext, is_joined: bool) -> str:
    """A stream of the graph reads a result that is dropped before the next dispatch is captured."""
    with use_stream(Stream()) as stream:
        buffer = _buffer(context, 16)
        x, topk_idx, weights = _tokens(context, 0, 16)
        reader = Stream()
        text = ""
        with Graph(buffer):
            result = buffer.dispatch(x, topk_idx, weights, layout=Layout.LOW_LATENCY)
            reader.wait(stream.record())
            reader.call(lambda: None)  # by address, as kernels do
            if is_joined:
                stream.wait(reader.record())
            del result
            try:
                buffer.dispatch(x, topk_idx, weights, layout=Layout.LOW_LATENCY)
            except ValueError as error:
                text = str(error)
            stream.wait(reader.record())
        # Nobody leaves before the others have captured.
        result = buffer.dispatch(x, topk_idx, weights)
        assert int(result.num_tokens_per_expert.sum()) >= 0
        buffer.destroy()
        return text


def test_memory_that_a_stream_may_still_read_is_not_written() -> None:
    for text in run_ranks(_read_beside, NUM_RANKS, False, mode="threads"):
        assert text.startswith("this operation would write to memory of a result")
    assert run_ranks(_read_beside, NUM_RANKS, True, mode="threads") == [""] * NUM_RANKS
