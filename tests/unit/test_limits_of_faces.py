"""Rows as many as there is room for are no overflow, through the faces that set a limit themselves."""

from __future__ import annotations

import pytest
import torch

import moe_comm
from moe_comm import Capacity, CapacityError
from moe_comm.compat.deep_ep import ElasticBuffer
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.peers.bootstrap import RankThreads

NUM_EXPERTS, NUM_TOKENS, HIDDEN = 4, 8, 16


pytestmark = pytest.mark.usefixtures("fresh_compiler")


def given(num_topk: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows, scores, and different experts for each choice of a token; none is unused."""
    x = torch.arange(NUM_TOKENS * HIDDEN, dtype=torch.float32).view(NUM_TOKENS, HIDDEN)
    topk_idx = (torch.arange(NUM_TOKENS)[:, None] + torch.arange(num_topk)) % NUM_EXPERTS
    return x, torch.ones(NUM_TOKENS, num_topk), topk_idx


@pytest.mark.parametrize("has_map", [False, True])
@pytest.mark.parametrize("spare", [0, -1])
def test_token_dispatcher(spare: int, has_map: bool) -> None:
    x, probs, topk_idx = given(2)
    choices = {"topk_idx": topk_idx}
    if has_map:
        probs = torch.zeros(NUM_TOKENS, NUM_EXPERTS).scatter(1, topk_idx, probs)
        choices = {"routing_map": probs > 0}
    num_rows = topk_idx.numel()
    dispatcher = TokenDispatcher(
        NUM_EXPERTS,
        group=RankThreads(1)[0],
        capacity=Capacity(num_rows=num_rows + spare, on_overflow="drop"),
    )
    routed = dispatcher.dispatch(x, probs, **choices)
    assert routed.num_dropped_per_expert.tolist() == [0, 0, 0, -spare]
    assert routed.tokens.shape[0] == num_rows + spare
    y = dispatcher.combine(routed.tokens, routed)
    assert torch.equal(y, 2 * x) is (spare == 0)


@pytest.mark.parametrize("spare", [0, -1])
@pytest.mark.parametrize("on_overflow", ["drop", "raise"])
def test_compiled_layer(on_overflow: str, spare: int) -> None:
    x, _, topk_idx = given(3)
    num_rows = topk_idx.numel()
    capacity = Capacity(num_rows=num_rows + spare, on_overflow=on_overflow)
    dispatcher = TokenDispatcher(NUM_EXPERTS, group=RankThreads(1)[0])

    def layer(x: torch.Tensor, topk_idx: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = moe_comm.dispatch(x, topk_idx, buffer=dispatcher.buffer, capacity=capacity)
        y = moe_comm.combine(result.x, result.handle, buffer=dispatcher.buffer)
        return y, result.has_overflow, result.num_dropped_per_expert

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    if spare and on_overflow == "raise":
        with pytest.raises(CapacityError, match=str(num_rows)):
            compiled(x, topk_idx)
        return
    y, has_overflow, num_dropped = compiled(x, topk_idx)
    assert bool(has_overflow) is (spare < 0)
    assert int(num_dropped.sum()) == -spare
    assert torch.equal(y, 3 * x) is (spare == 0)


@pytest.mark.parametrize("pad_multiple", [None, 4])
@pytest.mark.parametrize("part", [8, 7], ids=lambda part: f"{part} of 8")
def test_torchtitan(part: int, pad_multiple: int | None) -> None:
    pytest.importorskip("torchtitan")
    from moe_comm.dispatcher.torchtitan import TorchtitanTokenDispatcher

    # All choices of one expert: torchtitan's worst case counts every token once for each.
    x, scores, _ = given(1)
    config = TorchtitanTokenDispatcher.Config(
        num_experts=1,
        top_k=1,
        non_blocking_capacity_factor=part / NUM_TOKENS,
        pad_multiple=pad_multiple,
    )
    dispatcher = TorchtitanTokenDispatcher(config)
    dispatcher.wire_group(RankThreads(1)[0])
    topk_idx = torch.zeros(NUM_TOKENS, 1, dtype=torch.int64)
    rows, _, metadata = dispatcher.dispatch(x, scores, topk_idx, torch.tensor([NUM_TOKENS]))
    room = part if pad_multiple is None else 12
    assert rows.shape[0] == room
    num_dropped = max(NUM_TOKENS - room, 0)
    assert metadata.num_dropped_per_expert.tolist() == [num_dropped]
    y = dispatcher.combine(rows, metadata, x)
    assert torch.equal(y[: NUM_TOKENS - num_dropped], x[: NUM_TOKENS - num_dropped])
    assert not y[NUM_TOKENS - num_dropped :].any()


@pytest.mark.parametrize("do_expand", [False, True])
def test_elastic_buffer(do_expand: bool) -> None:
    """Every token there is room for, each with a choice of every expert."""
    x, weights, topk_idx = given(NUM_EXPERTS)
    buffer = ElasticBuffer(RankThreads(1)[0], num_max_tokens_per_rank=NUM_TOKENS)
    rows, _, _, handle, _ = buffer.dispatch(
        x.bfloat16(),
        topk_idx,
        weights,
        num_experts=NUM_EXPERTS,
        do_expand=do_expand,
        do_cpu_sync=False,
    )
    assert rows.shape[0] == NUM_TOKENS * (NUM_EXPERTS if do_expand else 1)
    sums, *_ = buffer.combine(rows, handle)
    assert torch.equal(sums, x.bfloat16() * (NUM_EXPERTS if do_expand else 1))
