"""Every message of a rail is awaited: one after the other is held back, and nobody ends before it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_comm import Communicator, EpBuffer
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.configs import ep_config
from tests.helpers.failing_ranks import HANG_S
from tests.helpers.scripted_rails import Message, ScriptedRails

NUM_RANKS = 2  # on two nodes
OPERATIONS = ("dispatch", "combine")
# A rank that would not wait is through in a fraction of it; one that waits is not held to it.
LOOK_S = 0.05


class _Gate:
    """Holds one message of a rail until somebody has looked who waits for it."""

    def __init__(self) -> None:
        self.is_held = threading.Event()
        self.may_go = threading.Event()
        self.chosen: tuple[Message, str] | None = None

    def hold(self, message: Message, end: str) -> None:
        if self.chosen == (message, end):
            self.is_held.set()
            assert self.may_go.wait(HANG_S)

    def choose(self, message: Message, end: str) -> None:
        self.is_held.clear()
        self.may_go.clear()
        self.chosen = (message, end)


def _buffer(context: RankContext, node_reduction: bool) -> EpBuffer:
    comm = Communicator(context.group, backend="host", num_local_ranks=1)
    config = ep_config(4, 2, 16, 3, node_reduction=node_reduction)
    return EpBuffer(comm, config)


def _operations(buffer: EpBuffer, seed: int) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    """A dispatch, and the combine of what it gave; every token goes to an expert of either rank."""
    generator = torch.Generator().manual_seed(10 * seed + buffer.communicator.rank_idx)
    x = torch.randn(3, 16, generator=generator).to(torch.bfloat16)

    def combine(result: Any) -> None:
        assert torch.equal(buffer.combine(result.x, result.handle), 2 * x)

    return lambda: buffer.dispatch(x, torch.tensor([[0, 2], [1, 3], [3, 0]])), combine


def _hold_each(
    context: RankContext, rails: ScriptedRails, gate: _Gate, node_reduction: bool
) -> int:
    """Steps of both ranks, in each of which one message of one end is held.

    Returns:
        How many were held.
    """
    buffer = _buffer(context, node_reduction)
    comm, rank_idx = buffer.communicator, context.rank_idx
    is_leader = rank_idx == 0

    def num_moved() -> list[int]:
        """By source rank."""
        return [len(rails.sizes.get((src, 1 - src), [])) for src in range(NUM_RANKS)]

    # The first step makes second offers; the next one sends what every later one does.
    marks = []
    result = None
    for seed in range(2):
        dispatch, combine = _operations(buffer, seed)
        for operation in OPERATIONS:
            result = dispatch() if operation == "dispatch" else combine(result)
            comm.all_gather(b"")
            marks.append(num_moved())
    per_step = [marks[3][src] - marks[1][src] for src in range(NUM_RANKS)]
    plan = [
        (operation, src, number, end)
        for operation, before, after in zip(OPERATIONS, marks[1:3], marks[2:], strict=True)
        for src in range(NUM_RANKS)
        for number in range(before[src], after[src])
        for end in ("source", "target")
    ]
    for step, (held_in, src, number, end) in enumerate(plan, start=1):
        waiting = src if end == "source" else 1 - src
        comm.all_gather(b"")  # nobody is in the step before
        if is_leader:
            gate.choose((src, 1 - src, step * per_step[src] + number), end)
        comm.all_gather(b"")
        dispatch, combine = _operations(buffer, step + 1)
        result = None
        for operation in OPERATIONS:
            has_ended = threading.Event()
            watcher = None
            if operation == held_in and rank_idx == waiting:
                watcher = _Watcher(gate, has_ended)
                watcher.start()
            result = dispatch() if operation == "dispatch" else combine(result)
            has_ended.set()
            if watcher is not None:
                watcher.join()
                assert watcher.was_held, (held_in, src, number, end)
                assert not watcher.was_early, (held_in, src, number, end)
    buffer.destroy()
    comm.destroy()
    return len(plan)


class _Watcher(threading.Thread):
    """Looks whether an operation ends while a message that it has to wait for is held."""

    def __init__(self, gate: _Gate, has_ended: threading.Event) -> None:
        super().__init__(daemon=True)
        self._gate = gate
        self._has_ended = has_ended
        self.was_held = False
        self.was_early = False

    def run(self) -> None:
        self.was_held = self._gate.is_held.wait(HANG_S)
        self.was_early = self._has_ended.wait(LOOK_S)
        self._gate.may_go.set()


@pytest.mark.parametrize("node_reduction", [False, True])
def test_every_message_is_awaited(node_reduction: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = _Gate()
    rails = ScriptedRails(monkeypatch, hold=gate.hold)
    num_held = run_ranks(_hold_each, NUM_RANKS, rails, gate, node_reduction, mode="threads")
    # Rows, headers and chunks; rows, requests and replies: both ways, at both ends.
    assert num_held == [24, 24]
