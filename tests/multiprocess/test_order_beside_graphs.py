"""An operation of a buffer behind another that nobody has waited for, with graphs among them, on the emulator.

They take effect in the order of the host's calls, whichever streams they are put into.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from typing import Any, NamedTuple

import pytest
import torch

from moe_comm import Capacity, Communicator, DispatchResult, EpBuffer, Layout
from moe_comm.ep.backends.simt import Stream, use_device, use_stream
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.captured_graphs import Graph
from tests.helpers.configs import ep_config

NUM_RANKS = 2
NUM_EXPERTS = 4
NUM_TOKENS = 3
NUM_TOPK = 2
HIDDEN = 16
CONFIG = ep_config(NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS)
ROUNDS = 3
SLOW_S = 0.002


class Kind(NamedTuple):
    way: str
    layout: Layout

    def __str__(self) -> str:
        return f"{self.way} {self.layout.name.lower()}"


KINDS = tuple(
    Kind(way, layout)
    for way in ("eager", "asynchronous", "captured")
    for layout in (Layout.EXPERT_MAJOR, Layout.LOW_LATENCY)
)


class Issued:
    """A dispatch, and its combine but of an asynchronous one."""

    def __init__(self, buffer: EpBuffer, rank_idx: int, kind: Kind) -> None:
        self._buffer = buffer
        self._rank_idx = rank_idx
        self._kind = kind
        self._x = torch.zeros(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
        self._topk_idx = torch.stack((torch.arange(NUM_TOKENS), torch.arange(NUM_TOKENS) + 1), 1)
        self._topk_idx %= NUM_EXPERTS
        self._graph: Graph | None = None
        self._seed = 0
        self._y: torch.Tensor | None = None
        if kind.way == "captured":
            self._graph = Graph(buffer)
            with self._graph:
                self._call()

    def _rows(self, rank_idx: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * self._seed + rank_idx)
        return torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)

    def _call(self) -> None:
        is_low_latency = self._kind.layout is Layout.LOW_LATENCY
        num_rows = NUM_RANKS * NUM_TOKENS * NUM_TOPK
        result: Any = self._buffer.dispatch(
            self._x,
            self._topk_idx,
            layout=self._kind.layout,
            capacity=None if is_low_latency else Capacity(num_rows=num_rows, on_overflow="drop"),
            async_op=self._kind.way == "asynchronous",
        )
        assert isinstance(result, DispatchResult)
        self._result = result
        if self._kind.way != "asynchronous":
            self._y = self._buffer.combine(result.x, result.handle)

    def issue(self, seed: int) -> None:
        self._seed = seed
        self._x.copy_(self._rows(self._rank_idx))
        if self._graph is None:
            self._call()
        else:
            self._graph.put()

    def join(self) -> None:
        if self._kind.way == "asynchronous":
            self._result.event.wait()
        if self._graph is not None:
            self._graph.wait()

    def check(self) -> None:
        """The rows of this rank's experts, and sums of what came back as it was."""
        mine = (self._buffer.expert_rank == self._rank_idx).nonzero().flatten().tolist()
        rows = [
            self._rows(rank_idx)[token]
            for expert_idx in mine
            for rank_idx in range(NUM_RANKS)
            for token in range(NUM_TOKENS)
            if expert_idx in self._topk_idx[token]
        ]
        x = self._result.x
        if self._kind.layout is Layout.LOW_LATENCY:
            counts = self._result.num_tokens_per_expert.tolist()
            x = x.view(len(mine), -1, HIDDEN)
            x = torch.cat([x[i, :count] for i, count in enumerate(counts)])
        assert torch.equal(x[: len(rows)], torch.stack(rows))
        if self._y is not None:
            assert torch.equal(self._y, NUM_TOPK * self._rows(self._rank_idx))


def _pairs(context: RankContext, num_streams: int, num_devices: int) -> None:
    """Every pair of kinds; with no streams the caller is the host. In turn a stream of one rank is slow."""
    rank_idx = context.rank_idx
    streams = [Stream() for _ in range(num_streams)]

    def use(stream_idx: int) -> contextlib.AbstractContextManager[object]:
        return (
            use_stream(streams[stream_idx % num_streams]) if streams else contextlib.nullcontext()
        )

    with use_device(rank_idx % num_devices), use(0):
        communicator = Communicator(context.group, backend="simt", arrival_timeout_s=30.0)
        for kinds in itertools.product(KINDS, KINDS):
            buffer = EpBuffer(communicator, CONFIG)
            first, second = (Issued(buffer, rank_idx, kind) for kind in kinds)
            for turn in range(ROUNDS):
                if streams and turn % 2 == rank_idx % 2:
                    streams[turn % 3 % num_streams].call(lambda: time.sleep(SLOW_S))
                first.issue(2 * turn)
                with use(1):
                    second.issue(2 * turn + 1)
                    second.join()
                first.join()
                for stream in streams:
                    stream.synchronize()
                try:
                    first.check()
                    second.check()
                except AssertionError as error:
                    raise AssertionError(f"{kinds[1]} behind {kinds[0]}: {error}") from error
                communicator.all_gather(b"")
            buffer.destroy()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("num_streams", [0, 1, 2])
def test_operations_take_effect_in_the_order_of_their_calls(
    num_streams: int, num_devices: int
) -> None:
    run_ranks(_pairs, NUM_RANKS, num_streams, num_devices, mode="threads")
