"""Operations captured into graphs, on the emulator: no host reads, epochs on the device."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch

from moe_comm import Capacity, Communicator, EpBuffer, Layout
from moe_comm.tensors.arithmetic import sum_rows_by_node
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.captured_graphs import Graph
from tests.helpers.configs import ep_config
from tests.helpers.failing_ranks import error_of

NUM_RANKS = 3
NUM_TOKENS = 5
NUM_EXPERTS = 12
NUM_TOPK = 2
HIDDEN = 16
OK, OVERFLOW = 0, 2


class Inputs:
    """Tensors of fixed addresses, filled anew for every replay; equal on all ranks for one turn."""

    def __init__(self, rank_idx: int) -> None:
        self.rank_idx = rank_idx
        self.x = torch.zeros(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
        self.topk_idx = torch.full((NUM_TOKENS, NUM_TOPK), -1)
        self.weights = torch.zeros(NUM_TOKENS, NUM_TOPK)

    def fill(self, turn: int) -> None:
        generator = torch.Generator().manual_seed(1000 * turn + self.rank_idx)
        self.x.copy_(torch.randn(NUM_TOKENS, HIDDEN, generator=generator))
        self.topk_idx.copy_(
            torch.randint(-1, NUM_EXPERTS, self.topk_idx.shape, generator=generator)
        )
        self.weights.copy_(torch.rand(self.weights.shape, generator=generator))


def _buffer(
    context: RankContext, num_local_ranks: int | None = None, reduction: str = ""
) -> EpBuffer:
    comm = Communicator(
        context.group, backend="simt", num_local_ranks=num_local_ranks, arrival_timeout_s=60.0
    )
    return EpBuffer(
        comm,
        ep_config(
            NUM_EXPERTS,
            NUM_TOPK,
            HIDDEN,
            NUM_TOKENS,
            node_reduction=reduction == "node",
            rank_reduction=reduction == "rank",
        ),
    )


def _check_replay(
    buffer: EpBuffer,
    everyone: list[Inputs],
    own: Inputs,
    result: Any,
    y: torch.Tensor,
    limit: int,
) -> None:
    """Rows of this rank's experts in order, and sums of rows that weights multiplied."""
    assert result.status[0] == OK
    chosen: dict[int, list[torch.Tensor]] = {e: [] for e in range(NUM_EXPERTS)}
    kept = set()
    for inputs in everyone:
        for token in range(NUM_TOKENS):
            for k in range(NUM_TOPK):
                expert_idx = int(inputs.topk_idx[token, k])
                if expert_idx >= 0:
                    chosen[expert_idx].append(inputs.x[token])
                    if len(chosen[expert_idx]) <= limit:
                        kept.add((inputs.rank_idx, token, k))
    mine = (buffer.expert_rank == buffer.communicator.rank_idx).nonzero().flatten().tolist()
    counts = [min(len(chosen[e]), limit) for e in mine]
    assert result.num_tokens_per_expert.tolist() == counts
    num_dropped = sum(max(len(chosen[e]) - limit, 0) for e in mine)
    assert int(result.status[1]) == num_dropped
    place = 0
    for expert_idx, count in zip(mine, counts, strict=True):
        for row in chosen[expert_idx][:count]:
            assert torch.equal(result.x[place], row)
            place += 1
    assert not result.x[place:].any()
    wanted = torch.zeros(NUM_TOKENS, HIDDEN)
    rows = torch.full((NUM_TOKENS, NUM_TOPK), -1)
    for token in range(NUM_TOKENS):
        for k in range(NUM_TOPK):
            if (own.rank_idx, token, k) in kept:
                wanted[token] += own.x[token].float() * own.weights[token, k]
                rows[token, k] = token
    sums = wanted.to(torch.bfloat16)
    communicator = buffer.communicator
    ranks = torch.cat((buffer.expert_rank, torch.tensor([-1])))[own.topk_idx]
    if buffer.config.rank_reduction:
        sums = sum_rows_by_node(own.x, rows, ranks, None, own.weights)
    elif buffer.config.node_reduction:
        nodes = ranks // communicator.num_local_ranks
        sums = sum_rows_by_node(own.x, rows, nodes, communicator.node_idx, own.weights)
    assert torch.equal(y, sums)


def _replay_often(
    context: RankContext,
    num_replays: int,
    num_local_ranks: int | None = None,
    reduction: str = "",
) -> list[str]:
    buffer = _buffer(context, num_local_ranks, reduction)
    rank_idx = context.rank_idx
    everyone = [Inputs(r) for r in range(context.num_ranks)]
    own = everyone[rank_idx]
    limit = 3
    roomy = context.num_ranks * NUM_TOKENS * NUM_TOPK
    capacity = Capacity(num_rows=roomy, num_rows_per_expert=limit, on_overflow="drop")
    ordinary = buffer.dispatch(own.x, own.topk_idx, own.weights)
    assert ordinary.status is None
    with Graph(buffer) as graph:
        result = buffer.dispatch(own.x, own.topk_idx, own.weights, capacity=capacity)
        y = buffer.combine(result.x, result.handle, topk_weights=own.weights)
    assert result.x.shape == (roomy, HIDDEN)
    jitter = random.Random(rank_idx)
    num_dropped = 0
    for turn in range(num_replays):
        for inputs in everyone:
            inputs.fill(turn)
        if jitter.random() < 0.02:
            time.sleep(0.005)
        graph.replay()
        _check_replay(buffer, everyone, own, result, y, limit)
        num_dropped += int(result.status[1])
    assert num_replays < 10 or num_dropped > 0
    # The host's count follows what the device has counted: one dispatch, then two epochs a replay.
    backend: Any = buffer._backend
    backend._endpoint.enable_trace()
    for turn in range(3):
        again = buffer.dispatch(own.x, own.topk_idx, own.weights)
        epochs = {record[0] for record in backend._endpoint.take_trace()}
        # The host may have heard only now of a combine before it.
        assert max(epochs) == 2 + 2 * num_replays + 4 * turn
        sums = buffer.combine(again.x.clone(), again.handle)
        backend._endpoint.take_trace()
        copies = (own.topk_idx >= 0).sum(1, keepdim=True)
        assert torch.equal(sums, (own.x.float() * copies).to(torch.bfloat16))
        graph.replay()
        _check_replay(buffer, everyone, own, result, y, limit)
    failures = [
        str(error_of(lambda: result.num_required_rows)),
        str(error_of(lambda: buffer.combine(result.x, result.handle))),
    ]
    buffer.destroy()
    return failures


@pytest.mark.parametrize("mode", [pytest.param("processes", marks=pytest.mark.full), "threads"])
def test_replays_advance_by_themselves(mode: str) -> None:
    num_replays = 1000 if mode == "processes" else 50
    for failures in run_ranks(_replay_often, NUM_RANKS, num_replays, mode=mode, timeout_s=240):
        assert "the host does not know num_required_rows" in failures[0]
        assert "this handle was made in a capture" in failures[1]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reduction", ["", "node"])
def test_replays_across_nodes(reduction: str) -> None:
    run_ranks(_replay_often, 4, 20, 2, reduction, mode="threads", timeout_s=240)


def test_replays_where_ranks_add_first() -> None:
    run_ranks(_replay_often, 3, 20, None, "rank", mode="threads", timeout_s=240)


def _overflow(context: RankContext) -> None:
    buffer = _buffer(context)
    own = Inputs(context.rank_idx)
    with Graph(buffer) as graph:
        result = buffer.dispatch(
            own.x,
            own.topk_idx,
            own.weights,
            layout=Layout.RANK_MAJOR,
            capacity=Capacity(num_rows=NUM_TOKENS + 1, on_overflow="raise"),
        )
        y = buffer.combine(result.x, result.handle)
    graph.replay()
    assert result.status.tolist() == [OK, 0]
    assert not y.any()
    own.fill(3)
    own.topk_idx.fill_(0)
    graph.replay()
    assert result.status[0] == OVERFLOW
    own.topk_idx[1:] = -1
    graph.replay()
    assert result.status.tolist() == [OK, 0]
    assert torch.equal(y[0], own.x[0])
    assert not y[1:].any()
    buffer.destroy()


def test_too_many_rows_move_nothing() -> None:
    run_ranks(_overflow, NUM_RANKS)


def _low_latency(context: RankContext, num_local_ranks: int | None = None) -> None:
    buffer = _buffer(context, num_local_ranks)
    own = Inputs(context.rank_idx)
    others = torch.ones_like(own.x)
    with Graph(buffer) as graph:
        result = buffer.dispatch(own.x, own.topk_idx, own.weights, layout=Layout.LOW_LATENCY)
        cached = buffer.dispatch(others, None, handle=result.handle)
        y = buffer.combine(result.x, result.handle)
    for turn in range(20):
        own.fill(turn)
        graph.replay()
        assert result.status[0] == cached.status[0] == OK
        copies = (own.topk_idx >= 0).sum(1, keepdim=True)
        assert torch.equal(y, (own.x.float() * copies).to(torch.bfloat16))
    buffer.destroy()


@pytest.mark.parametrize("num_local_ranks", [None, 1])
def test_low_latency_and_cached(num_local_ranks: int | None) -> None:
    run_ranks(_low_latency, NUM_RANKS, num_local_ranks)


def _refused(context: RankContext) -> list[str]:
    buffer = _buffer(context)
    own = Inputs(context.rank_idx)
    messages = []
    graph = Graph(buffer)
    with graph:
        for options in (
            {},
            {"capacity": Capacity(num_rows=8)},
            {"capacity": Capacity(num_rows_per_expert=8, on_overflow="drop")},
            {"capacity": Capacity(num_rows=8), "async_op": True},
            {"capacity": Capacity(num_rows=8, on_overflow="drop"), "expert_alignment": 0},
        ):
            arguments: dict[str, Any] = dict(options)
            error = error_of(
                lambda arguments=arguments: buffer.dispatch(own.x, own.topk_idx, **arguments).x
            )
            messages.append(f"{type(error).__name__}: {error}")
    # Nothing was recorded, and peers heard of nothing.
    own.fill(0)
    assert buffer.dispatch(own.x, own.topk_idx).x.shape[1] == HIDDEN
    buffer.destroy()
    return messages


def test_captures_that_cannot_be() -> None:
    for messages in run_ranks(_refused, 2):
        unfixed = "ValueError: a dispatch in a capture has a result of fixed size"
        assert messages[0].startswith(unfixed)
        assert messages[0].endswith('got num_rows = -1 (-1 for none) and on_overflow "grow"')
        assert messages[1].endswith('got num_rows = 8 (-1 for none) and on_overflow "grow"')
        assert messages[2].endswith('got num_rows = -1 (-1 for none) and on_overflow "drop"')
        assert messages[3] == messages[1]
        assert messages[4].startswith("ValueError: expert_alignment")
