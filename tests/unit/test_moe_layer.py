"""`moe_comm.nn.MoELayer` and the plain dispatcher on one rank and on several, eager and compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from moe_comm import (
    FP8_BLOCK128,
    Capacity,
    Communicator,
    EpBuffer,
    EpConfig,
    Placement,
)
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.nn import GroupedExperts, MoELayer, Routing, TopKRouter
from moe_comm.peers.bootstrap import RankThreads
from moe_comm.replicas import ExpertBalancer
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.moe_layer import assert_same_bits, forward_backward

HIDDEN, FFN, NUM_EXPERTS, NUM_TOPK = 32, 48, 6, 2


def plain_layer(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    """Result that a layer on one rank must compute, token by token and choice by choice."""
    rows = x.flatten(0, -2)
    routing = layer.router(rows)
    y = torch.zeros_like(rows)
    for token_idx, row in enumerate(rows):
        for topk_pos in range(NUM_TOPK):
            expert_idx = int(routing.topk_idx[token_idx, topk_pos])
            up, down = layer.experts.up[expert_idx], layer.experts.down[expert_idx]
            out = torch.relu(row @ up) @ down
            y[token_idx] = y[token_idx] + routing.topk_weights[token_idx, topk_pos] * out
    return y.view(x.shape)


def gradients(layer: MoELayer, y: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(y.square().sum(), list(layer.parameters())))


@pytest.mark.parametrize("weighted_by", ["experts", "combine"])
@pytest.mark.parametrize("expert_alignment", [1, 8])
def test_layer_on_one_rank_is_the_loop_over_choices(
    weighted_by: Any, expert_alignment: int
) -> None:
    dispatcher = TokenDispatcher(
        NUM_EXPERTS,
        group=RankThreads(1)[0],
        weighted_by=weighted_by,
        expert_alignment=expert_alignment,
    )
    layer = MoELayer(HIDDEN, FFN, NUM_EXPERTS, NUM_TOPK, dispatcher=dispatcher)
    x = torch.randn(2, 5, HIDDEN)
    y = layer(x)
    want = plain_layer(layer, x)
    assert torch.allclose(y, want, atol=1e-5)
    for got, expected in zip(gradients(layer, y), gradients(layer, want), strict=True):
        assert torch.allclose(got, expected, atol=1e-4)
    dispatcher.buffer.destroy()


def run_layer(context: RankContext, sizes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Output for this rank's part of one batch, and the gradients of this rank's experts."""
    x = torch.randn(sum(sizes), HIDDEN, generator=torch.Generator().manual_seed(2))
    mine = x.split(list(sizes))[context.rank_idx].clone().requires_grad_()
    buffers = group_buffers(context.group)
    layer = MoELayer(HIDDEN, FFN, NUM_EXPERTS, NUM_TOPK, group=context.group, seed=3)
    y = layer(mine)
    y.square().sum().backward()
    found = {"y": y.detach(), "x": mine.grad, "up": layer.experts.up.grad}
    found = {name: value.clone() for name, value in found.items()}
    buffers.destroy()
    return found


def test_ranks_do_not_change_the_layer() -> None:
    (alone,) = run_ranks(run_layer, 1, (9,), mode="threads")
    per_rank = run_ranks(run_layer, 3, (4, 0, 5), mode="threads")
    for name, want in alone.items():
        got = torch.cat([rank[name] for rank in per_rank])
        assert torch.allclose(got, want, atol=1e-5), name


def train_layer(
    context: RankContext, with_replicas: bool, num_kept_slots: int | None = None
) -> tuple[list[torch.Tensor], int]:
    """Outputs of some steps on this rank, then parameters by expert; and how many layers were moved.

    Where experts may move, the optimizer keeps nothing of a slot.
    """
    slots = [[0, 1, 2, -1], [3, 4, 5, -1]]
    config = EpConfig(
        num_experts=NUM_EXPERTS,
        num_topk=None,
        hidden=None,
        dtype=None,
        placement=Placement(slots, NUM_EXPERTS) if with_replicas else None,
    )
    draw = torch.Generator().manual_seed(context.rank_idx)
    num_moved = 0
    with Communicator(context.group) as comm, EpBuffer(comm, config) as buffer:
        balancer = ExpertBalancer(comm, num_steps=2) if with_replicas else None
        dispatcher = TokenDispatcher(NUM_EXPERTS, buffer=buffer, weighted_by="combine")
        layer = MoELayer(
            *(HIDDEN, FFN, NUM_EXPERTS, NUM_TOPK),
            dispatcher=dispatcher,
            balancer=balancer,
            num_kept_slots=num_kept_slots,
            seed=3,
        )
        momentum = 0.9 if num_kept_slots is None else 0.0
        optimizer = torch.optim.SGD(layer.experts.parameters(), lr=0.01, momentum=momentum)
        found = []
        for step in range(8):
            x = torch.randn(9, HIDDEN, generator=draw)
            hot = step // 4
            # Expert 0, then 1, and any other: one rank has most of the rows.
            other = torch.randint(2, NUM_EXPERTS, (9, 1), generator=draw)
            idx = torch.cat([torch.full_like(other, hot), other], dim=1)
            y = layer(x, Routing(idx, torch.full((9, 2), 0.5)))
            found.append(y.detach())
            optimizer.zero_grad()
            y.square().sum().backward()
            if balancer is not None:
                balancer.reduce_gradients()
            optimizer.step()
            if balancer is not None:
                balancer.step()
                report = balancer.last_report
                num_moved += len(report.moves) if report and report.step == step + 1 else 0
        placement = buffer.config.placement
        mine = slots[context.rank_idx][:3]
        if placement is not None:
            mine = list(placement.slots[context.rank_idx])
        weights = dict(zip(mine, layer.experts.up.detach().clone(), strict=True))
        weights.pop(-1, None)
        everywhere = {}
        for part in comm.bootstrap.all_gather({idx: up.tolist() for idx, up in weights.items()}):
            for expert_idx, up in part.items():
                torch.testing.assert_close(up, everywhere.setdefault(expert_idx, up))
        found += [torch.tensor(everywhere[idx]) for idx in range(NUM_EXPERTS)]
        if balancer is not None:
            balancer.destroy()
    return found, num_moved


@pytest.mark.parametrize("num_kept_slots", [None, 0])
def test_a_balancer_moves_experts_of_a_layer_that_trains(num_kept_slots: int | None) -> None:
    plain = run_ranks(train_layer, 2, False, num_kept_slots, mode="threads")
    moving = run_ranks(train_layer, 2, True, num_kept_slots, mode="threads")
    for (expected, _), (found, num_moved) in zip(plain, moving, strict=True):
        assert num_moved >= 2
        for here, there in zip(found, expected, strict=True):
            torch.testing.assert_close(here, there, rtol=1e-5, atol=1e-5)


def test_a_routing_map_has_a_column_for_every_id() -> None:
    placement = Placement([[0, 1, 2, 3, 4, 5, -1]], NUM_EXPERTS)
    x = torch.randn(3, HIDDEN)
    for rule, num_columns in (("balanced", 6), ("given", 7)):
        config = EpConfig(
            num_experts=NUM_EXPERTS,
            num_topk=None,
            hidden=None,
            dtype=None,
            placement=placement,
            replica_rule=rule,
        )
        with Communicator(RankThreads(1)[0]) as comm, EpBuffer(comm, config) as buffer:
            dispatcher = TokenDispatcher(NUM_EXPERTS, buffer=buffer)
            routed = dispatcher.dispatch(x, routing_map=torch.arange(num_columns).expand(3, -1) < 2)
            assert routed.num_tokens_per_expert.tolist() == [3, 3, 0, 0, 0, 0, 0]
            wrong = torch.ones(3, 13 - num_columns, dtype=torch.bool)
            with pytest.raises(
                ValueError, match=f"must have {num_columns} columns, got {13 - num_columns}"
            ):
                dispatcher.dispatch(x, routing_map=wrong)


def test_grouped_and_looped_experts_agree() -> None:
    ids = [4, 1, 7]
    offsets = torch.tensor([0, 16, 16, 24], dtype=torch.int32)
    rows = torch.randn(24, HIDDEN).bfloat16()
    results = []
    for method in ("loop", "grouped_mm"):
        experts = GroupedExperts(ids, HIDDEN, FFN, method=method, dtype=torch.bfloat16)
        assert experts.is_grouped == (method == "grouped_mm")
        y = experts(rows, offsets)
        y.float().sum().backward()
        results.append((y.float(), experts.up.grad.float()))
    for got, want in zip(*results, strict=True):
        assert torch.allclose(got, want, atol=0.1, rtol=0.05)
    assert results[0][1][1].abs().max() == 0  # an expert without rows


@pytest.mark.parametrize("ffn_hidden", [4, 12, 20, 24])
def test_sizes_that_grouped_products_do_not_take_are_looped(ffn_hidden: int) -> None:
    layer = MoELayer(16, ffn_hidden, 4, 2, group=RankThreads(1)[0], dtype=torch.bfloat16)
    assert layer.experts.is_grouped == (ffn_hidden == 24)
    x = torch.randn(6, 16, generator=torch.Generator().manual_seed(1))
    y = layer(x)
    layer.experts = GroupedExperts(range(4), 16, ffn_hidden, method="loop", dtype=torch.bfloat16)
    torch.testing.assert_close(layer(x), y, rtol=2e-2, atol=2e-2)
    layer.dispatcher.buffer.destroy()


def test_experts_start_the_same_wherever_they_live() -> None:
    together = GroupedExperts([0, 1, 2], HIDDEN, FFN, seed=5)
    apart = GroupedExperts([2], HIDDEN, FFN, seed=5)
    assert torch.equal(together.up[2], apart.up[0])
    with_room = GroupedExperts([-1, 2], HIDDEN, FFN, seed=5)
    assert torch.equal(with_room.up[1], apart.up[0])
    assert not with_room.up[0].any()
    assert not torch.equal(together.up[1], together.up[2])
    assert not torch.equal(together.up, GroupedExperts([0, 1, 2], HIDDEN, FFN, seed=6).up)


def test_rows_behind_the_last_expert_are_nobodys() -> None:
    experts = GroupedExperts([0], HIDDEN, FFN)
    rows = torch.randn(5, HIDDEN)
    out = experts(rows, torch.tensor([0, 3], dtype=torch.int32))
    assert out.shape == (5, HIDDEN)
    assert torch.equal(out[:3], experts(rows[:3], torch.tensor([0, 3], dtype=torch.int32)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routing_under_autocast_is_that_of_float32(dtype: torch.dtype) -> None:
    router = TopKRouter(HIDDEN, 64, NUM_TOPK)
    x = torch.randn(500, HIDDEN)
    with torch.autocast("cpu", dtype):
        narrow = router(x)
    want = router(x)
    assert torch.equal(narrow.topk_idx, want.topk_idx)
    assert torch.equal(narrow.topk_weights, want.topk_weights)
    cut = torch.softmax(x.to(dtype) @ router.weight.to(dtype).T, -1).topk(NUM_TOPK).indices
    assert not torch.equal(cut, want.topk_idx)  # what the narrow dtype would have chosen


def test_balance_moves_choices_and_not_weights() -> None:
    router = TopKRouter(HIDDEN, NUM_EXPERTS, 1, is_normalized=False)
    x = torch.randn(7, HIDDEN)
    plain = router(x)
    pushed = router(x, torch.tensor([0.0, 0.0, 0.0, 9.0, 0.0, 0.0]))
    assert pushed.topk_idx.flatten().tolist() == [3] * 7
    scores = torch.softmax(x @ router.weight.T, -1)
    assert torch.allclose(pushed.topk_weights, scores[:, 3:4])
    assert torch.allclose(plain.topk_weights, scores.amax(1, keepdim=True))
    both = Routing.cat([plain, pushed])
    assert both.topk_idx.shape == both.topk_weights.shape == (14, 1)


def test_routing_from_elsewhere() -> None:
    dispatcher = TokenDispatcher(NUM_EXPERTS, group=RankThreads(1)[0])
    layer = MoELayer(HIDDEN, FFN, NUM_EXPERTS, NUM_TOPK, dispatcher=dispatcher)
    x = torch.randn(4, HIDDEN)
    assert torch.equal(layer(x, layer.router(x)), layer(x))
    other = Routing(torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1))
    offsets = torch.tensor([0, 4, 4, 4, 4, 4, 4], dtype=torch.int32)
    assert torch.allclose(layer(x, other), layer.experts(x, offsets), atol=1e-6)
    dispatcher.buffer.destroy()


def test_copies_share_the_dispatcher() -> None:
    dispatcher = TokenDispatcher(NUM_EXPERTS, group=RankThreads(1)[0])
    layer = MoELayer(HIDDEN, FFN, NUM_EXPERTS, NUM_TOPK, dispatcher=dispatcher)
    twin = copy.deepcopy(layer)
    assert twin.dispatcher is dispatcher
    x = torch.randn(3, HIDDEN)
    assert torch.equal(twin(x), layer(x))
    assert set(layer.state_dict()) == {"router.weight", "experts.up", "experts.down"}
    dispatcher.buffer.destroy()


def test_quantized_and_limited() -> None:
    dispatcher = TokenDispatcher(
        NUM_EXPERTS,
        group=RankThreads(1)[0],
        weighted_by="combine",
        quantization=FP8_BLOCK128,
        capacity=Capacity(num_rows_per_expert=2, on_overflow="drop"),
    )
    layer = MoELayer(HIDDEN, FFN, NUM_EXPERTS, NUM_TOPK, dispatcher=dispatcher)
    x = torch.randn(16, HIDDEN, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert y.dtype is x.dtype
    assert x.grad.abs().sum() > 0
    full = MoELayer(
        HIDDEN,
        FFN,
        NUM_EXPERTS,
        NUM_TOPK,
        dispatcher=TokenDispatcher(
            NUM_EXPERTS, buffer=dispatcher.buffer, weighted_by="combine", quantization=FP8_BLOCK128
        ),
    )
    z = full(x.detach())
    is_kept = (z - y).abs().amax(1) < 1e-6
    assert 0 < int(is_kept.sum()) < 16  # the first tokens of each expert
    assert 0 < float((z - plain_layer(full, x.detach())).detach().abs().max()) < 0.2
    dispatcher.buffer.destroy()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda d: TokenDispatcher(3, buffer=d.buffer), ValueError, "num_experts is 3, the buffer"),
        (lambda d: TokenDispatcher(6, buffer=d.buffer, weighted_by="x"), ValueError, "got 'x'"),
        (lambda d: MoELayer(8, 8, 3, 1, dispatcher=d), ValueError, "the dispatcher has 6"),
        (
            lambda d: MoELayer(
                8, 12, 6, 1, dispatcher=d, method="grouped_mm", dtype=torch.bfloat16
            ),
            ValueError,
            "rank 0: torch._grouped_mm takes rows .* ffn_hidden must be a multiple of 8 .* got 12",
        ),
        (lambda d: TopKRouter(8, 4, 5), ValueError, r"num_topk must be in \[1, 4\], got 5"),
        (lambda d: GroupedExperts([0], 8, 8, method="x"), ValueError, "method must be"),
        (
            lambda d: GroupedExperts([0], 8, 12, method="grouped_mm", dtype=torch.bfloat16),
            ValueError,
            "rows of a multiple of 16 bytes: ffn_hidden must be a multiple of 8 .* got 12",
        ),
        (
            lambda d: GroupedExperts([0], 4, 8, method="grouped_mm", dtype=torch.bfloat16),
            ValueError,
            "hidden must be a multiple of 8 with torch.bfloat16, got 4",
        ),
        (
            lambda d: GroupedExperts([0], 8, 8, method="grouped_mm"),
            ValueError,
            "takes torch.bfloat16, got torch.float32",
        ),
    ],
)
def test_arguments(make: Any, error: type[Exception], message: str) -> None:
    dispatcher = TokenDispatcher(NUM_EXPERTS, group=RankThreads(1)[0])
    with pytest.raises(error, match=message):
        make(dispatcher)
    dispatcher.buffer.destroy()


@pytest.mark.full
def test_compiled_layer_has_the_bits_of_the_eager_one() -> None:
    dispatcher = TokenDispatcher(
        NUM_EXPERTS, group=RankThreads(1)[0], weighted_by="combine", expert_alignment=8
    )
    layer = MoELayer(
        HIDDEN,
        FFN,
        NUM_EXPERTS,
        NUM_TOPK,
        dispatcher=dispatcher,
        dtype=torch.bfloat16,
        method="grouped_mm",
    )
    # The router's softmax is compiled to another order of operations: it stays outside.
    x = torch.randn(11, HIDDEN).bfloat16()
    with torch.no_grad():
        routing = layer.router(x)
    layer.router = torch.nn.Module()
    eager = forward_backward(lambda rows: layer(rows, routing), layer, x)
    compiled = torch.compile(lambda rows: layer(rows, routing), fullgraph=True)
    assert_same_bits(forward_backward(compiled, layer, x), eager)
    dispatcher.buffer.destroy()
