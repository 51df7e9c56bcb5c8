"""`moe_comm.fused_a2a` against what Megatron's functions promise."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm import Communicator, fused_a2a
from moe_comm.ep.group_buffers import group_buffers, release_all
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.routed import Batch, expected_counts, expected_rows, make_batches

BACKENDS = ["host", "reference"]
NUM_EXPERTS = 6


pytestmark = pytest.mark.usefixtures("forget_groups")


def local_experts(context: RankContext, num_experts: int = NUM_EXPERTS) -> range:
    num_local = num_experts // context.num_ranks
    return range(context.rank_idx * num_local, (context.rank_idx + 1) * num_local)


def expert_factor(expert: int) -> float:
    return float(1 + expert % 3)


def factors_of(rows: list[tuple[int, int, int] | None]) -> torch.Tensor:
    return torch.tensor([0.0 if row is None else expert_factor(row[2]) for row in rows])


def expected_output(batch: Batch) -> torch.Tensor:
    factors = torch.tensor([expert_factor(e) for e in range(batch.probs.shape[1])])
    return batch.x.double() * (batch.probs.double() * factors).sum(1, keepdim=True)


def expected_gradients(batch: Batch, grad_y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of x and of probs, for `expected_output`."""
    factors = torch.tensor([expert_factor(e) for e in range(batch.probs.shape[1])]).double()
    grad_x = grad_y.double() * (batch.probs.double() * factors).sum(1, keepdim=True)
    dots = (grad_y.double() * batch.x.double()).sum(1, keepdim=True)
    return grad_x, dots * factors * batch.routing_map


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().requires_grad_()


def hybrid_layer(context: RankContext, backend: str, num_topk: int | None, pad: int | None) -> None:
    shared = group_buffers(Communicator(context.group, backend=backend))
    experts = local_experts(context)
    for seed in range(2):  # the second call finds the windows of the first
        batches = make_batches(
            [5, 0, 9][: context.num_ranks], NUM_EXPERTS, num_topk, dtype=torch.float32, seed=seed
        )
        mine = batches[context.rank_idx]
        x, probs = leaf(mine.x), leaf(mine.probs)
        hidden, row_probs, scales, tokens_per_expert, handle = fused_a2a.hybrid_ep_dispatch(
            x=x,
            routing_map=mine.routing_map,
            probs=probs,
            group=context.group,
            num_local_experts=len(experts),
            pad_multiple=pad,
        )
        rows = expected_rows(batches, experts, pad or 1)
        zero = torch.zeros(mine.x.shape[1])
        want = [zero if row is None else batches[row[0]].x[row[1]] for row in rows]
        assert torch.equal(hidden, torch.stack(want) if want else hidden.new_zeros(0, 16))
        assert row_probs.dtype is torch.float32
        assert row_probs.tolist() == [
            0.0 if row is None else batches[row[0]].probs[row[1], row[2]].item() for row in rows
        ]
        assert scales is None
        assert tokens_per_expert.dtype is torch.int64
        assert tokens_per_expert.tolist() == expected_counts(batches, experts, pad or 1)
        assert isinstance(handle, tuple)
        assert handle[-1].dtype is torch.int32
        assert handle[-1].tolist() == [0]
        out = hidden * (row_probs * factors_of(rows))[:, None]
        y = fused_a2a.hybrid_ep_combine(
            out, handle, num_permuted_tokens=tokens_per_expert.sum(), pad_multiple=pad
        )
        assert torch.equal(y.double(), expected_output(mine))
        grad_y = torch.randint(-4, 5, y.shape, generator=torch.Generator().manual_seed(seed))
        y.backward(grad_y.float())
        grad_x, grad_probs = expected_gradients(mine, grad_y)
        assert torch.equal(x.grad.double(), grad_x)
        assert torch.equal(probs.grad.double(), grad_probs)
    del shared


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("num_topk", [2, None], ids=["top2", "any"])
@pytest.mark.parametrize("pad", [None, 4])
def test_hybrid_layer(backend: str, num_topk: int | None, pad: int | None) -> None:
    run_ranks(hybrid_layer, 2, backend, num_topk, pad, mode="threads")


def fused_layer(context: RankContext, backend: str, probs_dtype: torch.dtype) -> None:
    shared = group_buffers(Communicator(context.group, backend=backend))
    experts = local_experts(context)
    batches = make_batches([5, 0, 9][: context.num_ranks], NUM_EXPERTS, 3, dtype=torch.float32)
    choices, weights = [], []
    for batch in batches:
        topk_idx = batch.routing_map.float().topk(3, dim=1).indices
        probs = batch.probs.gather(1, topk_idx)
        is_unused = torch.arange(topk_idx.shape[0]) % 4 == 3  # some tokens choose nothing
        choices.append(topk_idx.masked_fill(is_unused[:, None], -1))
        weights.append(probs.masked_fill(is_unused[:, None], 0.0))
    mine = context.rank_idx
    x, probs = leaf(batches[mine].x), leaf(weights[mine].to(probs_dtype))
    recv_x, recv_idx, recv_probs, tokens_per_expert, handle = fused_a2a.fused_dispatch(
        x, choices[mine], probs, NUM_EXPERTS, context.group, True, True
    )
    rows = [
        (rank_idx, token)
        for rank_idx in range(context.num_ranks)
        for token in range(choices[rank_idx].shape[0])
        if any(e in experts for e in choices[rank_idx][token].tolist())
    ]
    assert torch.equal(recv_x, torch.stack([batches[r].x[t] for r, t in rows]))
    local = [[e in experts for e in choices[r][t].tolist()] for r, t in rows]
    assert recv_idx.tolist() == [
        [
            e - experts.start if is_local else -1
            for e, is_local in zip(choices[r][t].tolist(), here, strict=True)
        ]
        for (r, t), here in zip(rows, local, strict=True)
    ]
    assert recv_probs.dtype is torch.float32
    assert recv_probs.tolist() == [
        [p if is_local else 0.0 for p, is_local in zip(weights[r][t].tolist(), here, strict=True)]
        for (r, t), here in zip(rows, local, strict=True)
    ]
    assert tokens_per_expert.device.type == "cpu"
    assert tokens_per_expert.tolist() == [
        sum(int((choice == e).sum()) for choice in choices) for e in experts
    ]
    factors = torch.tensor([expert_factor(e) for e in experts])
    row_factors = (recv_probs * factors[recv_idx.clamp_min(0)]).sum(1, keepdim=True)
    y, event = fused_a2a.fused_combine(recv_x * row_factors, context.group, handle)
    assert event is None
    routed = torch.zeros(x.shape[0], NUM_EXPERTS + 1)
    routed.scatter_(1, choices[mine] % (NUM_EXPERTS + 1), weights[mine])
    routed = routed[:, :NUM_EXPERTS]
    batch = Batch(batches[mine].x, routed > 0, routed)
    assert torch.equal(y.double(), expected_output(batch))
    grad_y = torch.randint(-4, 5, y.shape, generator=torch.Generator().manual_seed(1)).float()
    y.backward(grad_y)
    grad_x, grad_dense = expected_gradients(batch, grad_y)
    assert torch.equal(x.grad.double(), grad_x)
    grad_probs = grad_dense.gather(1, choices[mine].clamp_min(0)).masked_fill(choices[mine] < 0, 0)
    assert probs.grad.dtype is probs_dtype
    assert torch.equal(probs.grad, grad_probs.to(probs_dtype))
    del shared


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("probs_dtype", [torch.float32, torch.bfloat16])
def test_fused_layer(backend: str, probs_dtype: torch.dtype) -> None:
    run_ranks(fused_layer, 3, backend, probs_dtype, mode="threads")


def fused_without_probs(context: RankContext) -> None:
    mine = make_batches([4, 4], NUM_EXPERTS, 2)[context.rank_idx]
    topk_idx = mine.routing_map.float().topk(2, dim=1).indices
    x = leaf(mine.x)
    recv_x, _, recv_probs, _, handle = fused_a2a.fused_dispatch(
        x, topk_idx.int(), None, NUM_EXPERTS, context.group
    )
    assert recv_probs is None
    y, _ = fused_a2a.fused_combine(recv_x, context.group, handle)
    y.backward(torch.ones_like(y))
    num_copies = torch.tensor([len({e // 3 for e in token}) for token in topk_idx.tolist()])
    assert torch.equal(y, mine.x * num_copies[:, None])
    assert torch.equal(x.grad, num_copies[:, None].expand_as(x).to(x.dtype))


def test_fused_dispatch_without_probs() -> None:
    run_ranks(fused_without_probs, 2, mode="threads")


def budgeted(context: RankContext, backend: str) -> None:
    shared = group_buffers(Communicator(context.group, backend=backend))
    experts = local_experts(context)
    batches = make_batches([8, 8], NUM_EXPERTS, 3, dtype=torch.float32)
    mine = batches[context.rank_idx]
    rows = expected_rows(batches, experts, 4)
    budget = (len(rows) // 2) // 4 * 4 if context.rank_idx == 0 else len(rows)
    x, probs = leaf(mine.x), leaf(mine.probs)
    hidden, row_probs, _, tokens_per_expert, handle = fused_a2a.hybrid_ep_dispatch(
        x, mine.routing_map, probs, context.group, len(experts), None, None, budget, 4
    )
    assert handle[-1].tolist() == [int(context.rank_idx == 0)]
    assert handle.num_required_rows == len(rows)
    kept = rows[:budget]
    assert hidden.shape[0] == budget
    want = [torch.zeros(16) if row is None else batches[row[0]].x[row[1]] for row in kept]
    assert torch.equal(hidden, torch.stack(want))
    ends = torch.tensor(expected_counts(batches, experts, 4)).cumsum(0).clamp_max(budget)
    assert tokens_per_expert.tolist() == ends.diff(prepend=torch.tensor([0])).tolist()
    assert row_probs is not None
    # Their results are a case of the dispatchers' conformance: "rows of a rank".
    fused_a2a.hybrid_ep_combine(hidden, handle, num_permuted_tokens=budget, pad_multiple=4)
    del shared


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_budget_drops_what_lies_beyond_it(backend: str) -> None:
    run_ranks(budgeted, 2, backend, mode="threads")


def orders(context: RankContext) -> None:
    batches = make_batches([4, 4], NUM_EXPERTS, 2)
    mine = batches[context.rank_idx]
    fixed = (mine.x, mine.routing_map, mine.probs, context.group, 3)
    plain = fused_a2a.HybridEPDispatch.apply(*fixed)[0]
    budget = 16
    tails: dict[str, tuple[Any, ...]] = {
        "r0.16": (24, 24, budget, 8),
        "r0.17": (None, None, 16, 16, False, budget, 8),
        "main": (None, None, None, None, True, budget, 8, 108),
    }
    for tail in tails.values():
        x = leaf(mine.x)
        args = (x, *fixed[1:], *tail)
        hidden, _, _, counts, handle = fused_a2a.HybridEPDispatch.apply(*args)
        assert hidden.shape[0] == budget
        assert all(count % 8 == 0 for count in counts.tolist())
        fused_a2a.HybridEPCombine.apply(hidden, handle, budget, 8).sum().backward()
        assert x.grad is not None
        assert torch.equal(fused_a2a.hybrid_ep_dispatch(*args)[0], hidden)
    assert fused_a2a.HybridEPDispatch.apply(*fixed, 24, 24)[0].shape == plain.shape
    for num_tail in (5, 6, 9):
        with pytest.raises(TypeError, match=f"got {5 + num_tail}"):
            fused_a2a.HybridEPDispatch.apply(*fixed, *([None] * num_tail))
        with pytest.raises(TypeError, match=f"got {5 + num_tail}"):
            fused_a2a.hybrid_ep_dispatch(*fixed, *([None] * num_tail))
    # A keyword replaces what the position says.
    by_keyword = fused_a2a.hybrid_ep_dispatch(
        *fixed, 24, 24, 99, 5, pad_multiple=8, num_permuted_tokens=24
    )
    assert by_keyword[0].shape[0] == 24
    with pytest.raises(TypeError, match="no argument 'pad'"):
        fused_a2a.hybrid_ep_dispatch(*fixed, pad=8)
    with pytest.raises(TypeError, match="needs num_local_experts"):
        fused_a2a.hybrid_ep_dispatch(*fixed[:4])


def test_positional_orders_of_all_releases() -> None:
    run_ranks(orders, 2, mode="threads")


class _Context:
    """As autograd hands it to forward and backward."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self.needs_input_grad = [isinstance(arg, torch.Tensor) for arg in args]


def by_hand(function: Any, *args: Any) -> tuple[Any, Any]:
    context = _Context(args)
    return context, function.forward(context, *args)


def gradient_counts(context: RankContext) -> None:
    mine = make_batches([4, 4], NUM_EXPERTS, 2)[context.rank_idx]
    topk_idx = mine.routing_map.float().topk(2, dim=1).indices
    probs = mine.probs.gather(1, topk_idx)
    for flags in ((), (False,), (False, False)):
        args = (mine.x, topk_idx, probs, NUM_EXPERTS, context.group, *flags)
        ctx, (rows, _, row_probs, _, handle) = by_hand(fused_a2a.FusedDispatch, *args)
        gradients = fused_a2a.FusedDispatch.backward(ctx, rows, None, row_probs, None, None)
        assert len(gradients) == len(args)
        assert [i for i, g in enumerate(gradients) if g is not None] == [0, 2]
        args = (rows, context.group, handle, *flags)
        ctx, (sums, _) = by_hand(fused_a2a.FusedCombine, *args)
        assert len(fused_a2a.FusedCombine.backward(ctx, sums, None)) == len(args)
    for tail in ((), (None,) * 4, (None, None, None, None, False, None, None)):
        args = (mine.x, mine.routing_map, mine.probs, context.group, 3, *tail)
        ctx, (rows, row_probs, _, _, handle) = by_hand(fused_a2a.HybridEPDispatch, *args)
        gradients = fused_a2a.HybridEPDispatch.backward(ctx, rows, row_probs, None, None, None)
        assert len(gradients) == len(args)
        assert [i for i, g in enumerate(gradients) if g is not None] == [0, 2]
    for tail in ((), (None, None), (None, None, False)):
        ctx, sums = by_hand(fused_a2a.HybridEPCombine, rows, handle, *tail)
        assert len(fused_a2a.HybridEPCombine.backward(ctx, sums)) == 2 + len(tail)


def second_derivatives(context: RankContext) -> None:
    mine = make_batches([4, 4], NUM_EXPERTS, 2, dtype=torch.float32)[context.rank_idx]
    topk_idx = mine.probs.topk(2).indices
    x = leaf(mine.x)
    fused, *_, fused_handle = fused_a2a.fused_dispatch(
        x, topk_idx, None, NUM_EXPERTS, context.group
    )
    permuted, *_, permuted_handle = fused_a2a.hybrid_ep_dispatch(
        x, mine.routing_map, None, context.group, 3
    )
    for y in (
        fused_a2a.fused_combine(fused, context.group, fused_handle)[0],
        fused_a2a.hybrid_ep_combine(permuted, permuted_handle),
    ):
        # Without the path through the ranks, x itself would still give a gradient: a wrong one.
        (grad,) = torch.autograd.grad((x * y).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def exchange(context: RankContext, x: torch.Tensor, probs: torch.Tensor, *, hybrid: bool) -> Any:
    """Rows, their probabilities and sums, by either pair of functions."""
    routing_map = probs.detach().argsort().argsort() >= NUM_EXPERTS - 2
    if hybrid:
        arrived = fused_a2a.hybrid_ep_dispatch(x, routing_map, probs, context.group, 3)
        rows, row_probs, _, _, handle = arrived
        return rows, row_probs, fused_a2a.hybrid_ep_combine(rows * row_probs[:, None], handle)
    topk_idx = routing_map.nonzero()[:, 1].view(-1, 2)
    arrived = fused_a2a.fused_dispatch(
        x, topk_idx, probs.gather(1, topk_idx), NUM_EXPERTS, context.group
    )
    rows, _, row_probs, _, handle = arrived
    weighted = rows * row_probs.sum(1, keepdim=True)
    return rows, row_probs, fused_a2a.fused_combine(weighted, context.group, handle)[0]


def inputs(context: RankContext) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(context.rank_idx)
    return torch.randn(4, 16, generator=draw), torch.rand(4, NUM_EXPERTS, generator=draw)


def one_needs_a_gradient(context: RankContext, *, hybrid: bool) -> None:
    x, probs = inputs(context)
    with torch.inference_mode(context.rank_idx == 0):
        odd = x.clone()
    for given in ((odd, leaf(probs)), (leaf(x), probs)):
        rows, row_probs, sums = exchange(context, *given, hybrid=hybrid)
        assert rows.requires_grad
        assert row_probs.requires_grad
        fused_a2a._buffers.clear()
        fused_a2a._hybrid_ep_buffers.clear()
        release_all()  # the graph keeps what its backward needs
        sums.sum().backward()
        for tensor in given:
            assert (tensor.grad is not None) is tensor.requires_grad


@pytest.mark.parametrize("hybrid", [False, True])
def test_all_outputs_have_a_gradient_where_one_input_has(hybrid: bool) -> None:
    run_ranks(functools.partial(one_needs_a_gradient, hybrid=hybrid), 2)


def transform_on_rank_0(context: RankContext, *, hybrid: bool) -> None:
    x, probs = inputs(context)

    def rows(x: torch.Tensor) -> torch.Tensor:
        return exchange(context, x, probs, hybrid=hybrid)[0]

    rows(x)
    with pytest.raises(ValueError, match="rank 0: a transform of torch"):
        torch.func.vmap(rows)(x[None]) if context.rank_idx == 0 else rows(x)
    rows(x)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_transform_of_functions_is_refused_on_every_rank(hybrid: bool) -> None:
    run_ranks(functools.partial(transform_on_rank_0, hybrid=hybrid), 2)


class CountedDispatch(fused_a2a.FusedDispatch):
    num_calls = 0

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        CountedDispatch.num_calls += 1
        return fused_a2a.FusedDispatch.forward(ctx, *args)


def use_a_subclass(context: RankContext) -> None:
    x, probs = inputs(context)
    topk = probs.topk(2)
    x = leaf(x)
    rows, *_ = CountedDispatch.apply(x, topk.indices, topk.values, NUM_EXPERTS, context.group)
    assert CountedDispatch.num_calls == 1
    rows.sum().backward()
    assert x.grad is not None


def test_a_subclass_has_a_forward_of_its_own() -> None:
    run_ranks(use_a_subclass, 2, fresh=True)


def test_a_second_derivative_is_refused() -> None:
    run_ranks(second_derivatives, 2, mode="threads")


def test_backward_returns_a_gradient_for_every_argument() -> None:
    run_ranks(gradient_counts, 2, mode="threads")


def announcing(context: RankContext) -> None:
    group = context.group
    common: tuple[Any, ...] = (group, 64, 16, 3)
    fused_a2a.init_hybrid_ep_buffer(*common, 24, 24, True)
    held = fused_a2a._hybrid_ep_buffers[id(group)]
    assert held.group is group
    assert (held.rank, held.group_size) == (context.rank_idx, context.num_ranks)
    assert (held.hidden_dim, held.max_num_of_tokens_per_rank) == (64, 16)
    assert (held.num_local_experts, held.use_fp8) == (3, True)
    fused_a2a.init_hybrid_ep_buffer(*common, 24, 24, 8, 8, False, 108)
    assert not held.use_fp8
    fused_a2a.init_hybrid_ep_buffer(group, 32, seq_len=8, num_local_experts=3, fp8_dispatch=True)
    assert held.use_fp8
    fused_a2a.init_hybrid_ep_buffer(*common)
    assert not held.use_fp8
    with pytest.raises(TypeError, match="fp8_dispatch"):
        fused_a2a.init_hybrid_ep_buffer(*common, fp8_dispatch=1)
    with pytest.raises(ValueError, match="-1"):
        fused_a2a.init_hybrid_ep_buffer(*common, -1)
    with pytest.raises(TypeError, match="needs num_local_experts"):
        fused_a2a.init_hybrid_ep_buffer(*common[:3])
    mine = make_batches([40, 40], NUM_EXPERTS, 2, hidden=128)[context.rank_idx]
    fused_a2a.hybrid_ep_dispatch(mine.x, mine.routing_map, mine.probs, group, 3)
    assert (held.hidden_dim, held.max_num_of_tokens_per_rank) == (128, 40)
    buffer = fused_a2a.get_buffer(group, 256)
    assert fused_a2a.get_buffer(group, 64) is buffer
    assert buffer.num_nvl_bytes == 256
    fused_a2a.get_buffer(group, 1024)
    assert buffer.num_nvl_bytes == 1024


def test_buffers_of_a_group_grow() -> None:
    run_ranks(announcing, 2, mode="threads")
    assert fused_a2a._buffer is not None
    assert fused_a2a._hybrid_ep_buffer is not None
    fused_a2a.reset_hybrid_ep_buffer()
    assert fused_a2a._hybrid_ep_buffer is None


def bad_call(context: RankContext, what: str) -> None:
    is_bad = context.rank_idx == 1
    mine = make_batches([4, 4], NUM_EXPERTS, 2)[context.rank_idx]
    routing_map: Any = mine.routing_map
    probs, options = mine.probs, {}
    if what == "map" and is_bad:
        routing_map = routing_map[:, :5]
    if what == "dtype" and is_bad:
        routing_map = routing_map.int()
    if what == "probs" and is_bad:
        probs = probs[:3]
    if what == "sms" and is_bad:
        options = {"num_sms_dispatch_api": -3}
    if what == "alignment" and is_bad:
        options = {"num_permuted_tokens": 13, "pad_multiple": 4}
    fused_a2a.hybrid_ep_dispatch(mine.x, routing_map, probs, context.group, 3, **options)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("map", r"\(4, 6\), got \(4, 5\)"),
        ("dtype", "torch.int32"),
        ("probs", r"\(3, 6\)"),
        ("sms", "got -3"),
        ("alignment", "num_permuted_tokens must be a multiple of pad_multiple = 4, got 13"),
    ],
)
def test_a_mistake_of_one_rank_is_raised_on_all(what: str, message: str) -> None:
    def rank_main(context: RankContext) -> str:
        with pytest.raises((TypeError, ValueError), match=message) as raised:
            bad_call(context, what)
        # The buffer stays usable.
        bad_call(context, "nothing")
        return str(raised.value)

    texts = run_ranks(rank_main, 2, mode="threads")
    assert all("rank 1" in text for text in texts)


def combine_mistakes(context: RankContext) -> None:
    mine = make_batches([4, 4], NUM_EXPERTS, 2)[context.rank_idx]
    hidden, _, _, _, handle = fused_a2a.hybrid_ep_dispatch(
        mine.x, mine.routing_map, mine.probs, context.group, 3, pad_multiple=4
    )
    with pytest.raises(ValueError, match="pad_multiple is 8, the handle's is 4"):
        fused_a2a.hybrid_ep_combine(hidden, handle, None, 8 if context.rank_idx == 0 else 4)
    with pytest.raises(ValueError, match="num_permuted_tokens is 1"):
        fused_a2a.hybrid_ep_combine(hidden, handle, 1)
    with pytest.raises(TypeError, match="PermutedHandle"):
        fused_a2a.hybrid_ep_combine(hidden, (handle,))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="FusedHandle"):
        fused_a2a.fused_combine(hidden, context.group, handle)  # type: ignore[arg-type]
    assert fused_a2a.hybrid_ep_combine(hidden, handle, hidden.shape[0], 4).shape == mine.x.shape


def test_mistakes_in_combine() -> None:
    run_ranks(combine_mistakes, 2, mode="threads")


def types_of_one_rank(context: RankContext) -> list[str]:
    mine = make_batches([4, 4], NUM_EXPERTS, 2)[context.rank_idx]
    is_bad = context.rank_idx == 1
    topk_idx = mine.probs.topk(2).indices

    def fused(num_experts: Any = NUM_EXPERTS, ids: torch.Tensor = topk_idx) -> Any:
        return fused_a2a.fused_dispatch(mine.x, ids, None, num_experts, context.group)

    def hybrid(num_local_experts: Any = 3) -> Any:
        return fused_a2a.hybrid_ep_dispatch(
            mine.x, mine.routing_map, mine.probs, context.group, num_local_experts
        )

    fused_rows, *_, fused_handle = fused()
    hidden, *_, handle = hybrid()
    texts = []
    for call in (
        lambda: fused("6" if is_bad else NUM_EXPERTS),
        lambda: fused(0 if is_bad else NUM_EXPERTS),
        lambda: fused(ids=topk_idx.float() if is_bad else topk_idx),
        lambda: hybrid(None if is_bad else 3),
        lambda: hybrid(3.0 if is_bad else 3),
        lambda: fused_a2a.fused_combine(
            fused_rows, context.group, handle if is_bad else fused_handle
        ),
        lambda: fused_a2a.hybrid_ep_combine(hidden, fused_handle if is_bad else handle),
        lambda: fused_a2a.hybrid_ep_combine([1.0] if is_bad else hidden, handle),  # type: ignore[arg-type]
    ):
        with pytest.raises((TypeError, ValueError), match="rank 1") as raised:
            call()
        texts.append(f"{raised.type.__name__}: {raised.value}")
    assert hybrid()[0].shape == hidden.shape
    assert fused()[0].shape == fused_rows.shape
    return texts


def test_a_wrong_type_on_one_rank_is_raised_on_all() -> None:
    for texts in run_ranks(types_of_one_rank, 2):
        assert texts == [
            "TypeError: rank 1: num_experts must be an int, got '6'",
            "ValueError: rank 1: num_experts must be >= 1, got 0",
            "TypeError: rank 1: token_indices must be integers, got torch.float32",
            "TypeError: rank 1: num_local_experts must be an int, got None",
            "TypeError: rank 1: num_local_experts must be an int, got 3.0",
            "TypeError: rank 1: handle must be a FusedHandle, got PermutedHandle",
            "TypeError: rank 1: handle must be a PermutedHandle, got FusedHandle",
            "TypeError: rank 1: rows must be a tensor, got list",
        ]


def test_names_of_the_imitated_module() -> None:
    functions = [
        fused_a2a.get_hidden_bytes,
        fused_a2a.get_buffer,
        fused_a2a.FusedDispatch.apply,
        fused_a2a.FusedCombine.apply,
        fused_a2a.fused_dispatch,
        fused_a2a.fused_combine,
        fused_a2a.set_deepep_num_sms,
        fused_a2a.init_hybrid_ep_buffer,
        fused_a2a.reset_hybrid_ep_buffer,
        fused_a2a.HybridEPDispatch.apply,
        fused_a2a.HybridEPCombine.apply,
        fused_a2a.hybrid_ep_dispatch,
        fused_a2a.hybrid_ep_combine,
    ]
    assert all(map(callable, functions))
    assert fused_a2a.HAVE_DEEP_EP
    assert fused_a2a.HAVE_HYBRIDEP
    assert fused_a2a.HYBRIDEP_TOKEN_ALIGNMENT == 64
    assert hasattr(fused_a2a, "_buffer")
    assert hasattr(fused_a2a, "_hybrid_ep_buffer")
    backward = inspect.signature(fused_a2a.FusedCombine.backward)
    assert list(backward.parameters) == ["ctx", "grad_output", "previous_event"]
    assert fused_a2a.get_hidden_bytes(torch.zeros(2, 24, dtype=torch.uint8)) == 48
    assert fused_a2a.get_hidden_bytes(torch.zeros(2, 24)) == 96
    fused_a2a.set_deepep_num_sms(21)
    with pytest.raises(TypeError, match="num_sms"):
        fused_a2a.set_deepep_num_sms("20")  # type: ignore[arg-type]


def destroyed_group(context: RankContext) -> None:
    group = dist.new_group(range(context.num_ranks))
    mine = make_batches([4, 4], NUM_EXPERTS, 2)[context.rank_idx]
    routing = (mine.x, mine.routing_map, mine.probs)
    fused_a2a.hybrid_ep_dispatch(*routing, group, 3)
    fused_a2a.get_buffer(group, 64)
    held = [fused_a2a._buffers, fused_a2a._hybrid_ep_buffers]
    assert all(id(group) in buffers for buffers in held)
    dist.destroy_process_group(group)
    fused_a2a.hybrid_ep_dispatch(*routing, context.group, 3)
    fused_a2a.get_buffer(context.group, 64)
    assert not any(id(group) in buffers for buffers in held)


def test_the_buffer_of_a_destroyed_group_is_dropped() -> None:
    run_ranks(destroyed_group, 2)


def begin_with_a_mistake(context: RankContext) -> None:
    x = torch.ones(3, 64, dtype=torch.bfloat16)
    idx = torch.zeros(3, 1, dtype=torch.int64)
    wrong = 0 if context.rank_idx == 1 else NUM_EXPERTS
    with pytest.raises(ValueError, match="rank 1: num_experts must be >= 1, got 0"):
        fused_a2a.fused_dispatch(x, idx, None, wrong, context.group)
    fused_a2a.fused_dispatch(x, idx, None, NUM_EXPERTS, context.group)


def test_a_mistake_in_the_first_call_of_a_group_is_told_to_all() -> None:
    run_ranks(begin_with_a_mistake, 2, fresh=True)
