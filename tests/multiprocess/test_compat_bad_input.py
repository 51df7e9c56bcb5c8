"""What a caller can get wrong in `deep_ep`'s calls: raised on every rank, and the buffer goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_comm.compat.deep_ep import Buffer, Config, HybridEPBuffer
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import deep_ep_oracle as oracle
from tests.helpers.deep_ep_oracle import Case

CASE = Case("bad_input", 6, 2, 64, (5, 4), share_unused=0.0)
NUM_MAX = 8
BACKENDS = ["reference", "collective", "host"]


@dataclasses.dataclass
class Calls:
    """Buffers with what a rank may pass to them."""

    v1: Buffer
    hybrid: HybridEPBuffer
    mine: oracle.Given
    routing_map: torch.Tensor
    probs: torch.Tensor
    rows: torch.Tensor
    handle: tuple
    permuted: torch.Tensor
    permuted_handle: tuple
    plain: torch.Tensor
    plain_handle: tuple
    low_latency: torch.Tensor
    low_latency_handle: tuple

    def dispatch(self, **changes: Any) -> object:
        return self.v1.dispatch(
            **{
                "x": self.mine.x,
                **oracle.routing(self.v1, self.mine.topk_idx, CASE.num_experts),
                "topk_idx": self.mine.topk_idx,
                "topk_weights": self.mine.topk_weights,
                **changes,
            }
        )

    def cached(self, **changes: Any) -> object:
        return self.v1.dispatch(**{"x": self.mine.x, "handle": self.handle, **changes})

    def combine(self, **changes: Any) -> object:
        return self.v1.combine(**{"x": self.rows, "handle": self.handle, **changes})

    def ll_dispatch(self, **changes: Any) -> object:
        arguments = {
            "x": self.mine.x,
            "topk_idx": self.mine.topk_idx,
            "num_max_dispatch_tokens_per_rank": NUM_MAX,
            "num_experts": CASE.num_experts,
            "use_fp8": False,
        }
        return self.v1.low_latency_dispatch(**{**arguments, **changes})

    def ll_combine(self, **changes: Any) -> object:
        arguments = {
            "x": self.low_latency,
            "topk_idx": self.mine.topk_idx,
            "topk_weights": self.mine.topk_weights,
            "handle": self.low_latency_handle,
        }
        return self.v1.low_latency_combine(**{**arguments, **changes})

    def hybrid_dispatch(self, **changes: Any) -> object:
        arguments = {"hidden": self.mine.x, "routing_map": self.routing_map, "probs": self.probs}
        return self.hybrid.dispatch(**{**arguments, **changes})

    def permute(self, **changes: Any) -> object:
        arguments = {"hidden": self.mine.x, "routing_map": self.routing_map, "probs": self.probs}
        return self.hybrid.dispatch_with_permute(**{**arguments, **changes})

    def hybrid_combine(self, **changes: Any) -> object:
        arguments = {"hidden": self.plain, "handle": self.plain_handle}
        return self.hybrid.combine(**{**arguments, **changes})

    def unpermute(self, **changes: Any) -> object:
        arguments = {"hidden": self.permuted, "handle": self.permuted_handle}
        return self.hybrid.combine_with_unpermute(**{**arguments, **changes})


Call = Callable[[Calls], object]

# Name: (what the others call, what one rank does, type, pieces of the message).
MISTAKES: dict[str, tuple[str, Call, type[Exception], tuple[str, ...]]] = {
    "x type": ("dispatch", lambda c: c.dispatch(x=[1.0]), TypeError, ("tensor", "list")),
    "x strides": (
        "dispatch", lambda c: c.dispatch(x=c.mine.x.T.contiguous().T), ValueError, ("contiguous",)
    ),
    "x of four": (
        "dispatch", lambda c: c.dispatch(x=(c.mine.x,) * 4), ValueError, ("pair", "4 values")
    ),
    "x wide pair": (
        "dispatch", lambda c: c.dispatch(x=(c.mine.x, c.mine.x.float())), TypeError, ("one byte", "bfloat16")
    ),
    "x scales": (
        "dispatch",
        lambda c: c.dispatch(x=(c.mine.x.view(torch.uint8), torch.zeros(1, 1))),
        ValueError,
        ("scales", "(1, 1)"),
    ),
    "no layout": ("dispatch", lambda c: c.dispatch(is_token_in_rank=None), TypeError, ("NoneType",)),
    "no counts": (
        "dispatch", lambda c: c.dispatch(num_tokens_per_expert=None), TypeError, ("num_tokens_per_expert",)
    ),
    "another layout": (
        "dispatch",
        lambda c: c.dispatch(is_token_in_rank=~c.v1.get_dispatch_layout(c.mine.topk_idx, 6)[3]),
        ValueError,
        ("is_token_in_rank[", "topk_idx["),
    ),
    "other counts": (
        "dispatch",
        lambda c: c.dispatch(num_tokens_per_expert=torch.full((6,), 99, dtype=torch.int32)),
        ValueError,
        ("99", "topk_idx has"),
    ),
    "other counts of ranks": (
        "dispatch",
        lambda c: c.dispatch(num_tokens_per_rank=torch.full((2,), 99, dtype=torch.int32)),
        ValueError,
        ("99", "topk_idx has"),
    ),
    "weights alone": (
        "dispatch", lambda c: c.dispatch(topk_idx=None), ValueError, ("go together", "topk_idx is None")
    ),
    "narrow ids": (
        "dispatch",
        lambda c: c.dispatch(topk_idx=c.mine.topk_idx.to(torch.int32)),
        TypeError,
        ("int64", "int32"),
    ),
    "expert id": (
        "dispatch", lambda c: c.dispatch(topk_idx=c.mine.topk_idx + 6), ValueError, ("[-1, 6)",)
    ),
    "alignment": (
        "dispatch", lambda c: c.dispatch(expert_alignment=0), ValueError, (">= 1", "0")
    ),
    "worst tokens": (
        "dispatch", lambda c: c.dispatch(num_worst_tokens=-1), ValueError, (">= 0", "-1")
    ),
    "too many worst tokens": (
        "dispatch", lambda c: c.dispatch(num_worst_tokens=1 << 31), ValueError, ("2147483648",)
    ),
    "odd sms": ("dispatch", lambda c: c.dispatch(config=Config(7)), ValueError, ("even", "7")),
    "config type": ("dispatch", lambda c: c.dispatch(config=7), TypeError, ("Config", "int")),
    "stream alone": (
        "dispatch",
        lambda c: c.dispatch(allocate_on_comm_stream=True),
        ValueError,
        ("previous_event", "None"),
    ),
    "event type": (
        "dispatch", lambda c: c.dispatch(previous_event=3), TypeError, ("EventOverlap", "int")
    ),
    "ranks per node": (
        "dispatch",
        lambda c: c.dispatch(num_tokens_per_rdma_rank=torch.zeros(1)),
        ValueError,
        ("num_tokens_per_rdma_rank",),
    ),
    "cached with ids": (
        "cached", lambda c: c.cached(topk_idx=c.mine.topk_idx), ValueError, ("None with a handle",)
    ),
    "handle in too few parts": (
        "cached", lambda c: c.cached(handle=tuple(c.handle)[:5]), TypeError, ("handle", "tuple")
    ),
    "rows of cached": (
        "cached", lambda c: c.cached(x=c.mine.x[:1]), ValueError, ("1 tokens",)
    ),
    "combine handle": ("combine", lambda c: c.combine(handle=None), TypeError, ("NoneType",)),
    "combine rows": (
        "combine", lambda c: c.combine(x=c.rows[:-1]), ValueError, ("x must have shape",)
    ),
    "combine bytes": (
        "combine", lambda c: c.combine(x=c.rows.view(torch.uint8)), TypeError, ("uint8",)
    ),
    "combine weights": (
        "combine", lambda c: c.combine(topk_weights=torch.zeros(1, 2)), ValueError, ("(1, 2)",)
    ),
    "one bias": (
        "combine", lambda c: c.combine(bias=c.mine.x), ValueError, ()
    ),
    "bias shape": (
        "combine", lambda c: c.combine(bias=c.mine.x[:, :8]), ValueError, ("bias",)
    ),
    "three biases": (
        "combine", lambda c: c.combine(bias=(c.mine.x,) * 3), ValueError, ("3 values",)
    ),
    "too many tokens": (
        "ll_dispatch",
        lambda c: c.ll_dispatch(
            x=torch.zeros(9, 64).bfloat16(), topk_idx=torch.zeros(9, 2, dtype=torch.int64)
        ),
        ValueError,
        ("9", "8"),
    ),
    "event and hook": (
        "ll_dispatch",
        lambda c: c.ll_dispatch(async_finish=True, return_recv_hook=True),
        ValueError,
        ("exclude",),
    ),
    "exponents alone": (
        "ll_dispatch",
        lambda c: c.ll_dispatch(use_fp8=True, use_ue8m0=True),
        ValueError,
        ("round_scale",),
    ),
    "counts dtype": (
        "ll_dispatch",
        lambda c: c.ll_dispatch(cumulative_local_expert_recv_stats=torch.zeros(3)),
        TypeError,
        ("int32", "float32"),
    ),
    "wait shape": (
        "ll_dispatch",
        lambda c: c.ll_dispatch(dispatch_wait_recv_cost_stats=torch.zeros(2, 2, dtype=torch.int64)),
        ValueError,
        ("(2, 2)",),
    ),
    "experts type": (
        "ll_dispatch", lambda c: c.ll_dispatch(num_experts=6.0), TypeError, ("num_experts", "6.0")
    ),
    "other ids": (
        "ll_combine",
        lambda c: c.ll_combine(topk_idx=c.mine.topk_idx.flip(1)),
        ValueError,
        ("that of the dispatch",),
    ),
    "low-latency handle": (
        "ll_combine", lambda c: c.ll_combine(handle=c.handle), TypeError, ("low_latency_dispatch",)
    ),
    "zero copy of nothing": (
        "ll_combine", lambda c: c.ll_combine(zero_copy=True), ValueError, ("get_next_low_latency",)
    ),
    "zero copy and logfmt": (
        "ll_combine",
        lambda c: c.ll_combine(zero_copy=True, use_logfmt=True),
        ValueError,
        ("exclude",),
    ),
    "out shape": (
        "ll_combine", lambda c: c.ll_combine(out=torch.zeros(1, 64).bfloat16()), ValueError, ("out",)
    ),
    "no routing": (
        "permute", lambda c: c.permute(routing_map=None), ValueError, ("routing_map or topk_idx",)
    ),
    "map dtype": (
        "permute", lambda c: c.permute(routing_map=c.probs), TypeError, ("bool", "float32")
    ),
    "map width": (
        "permute",
        lambda c: c.permute(routing_map=c.routing_map[:, :4].contiguous(), probs=None),
        ValueError,
        ("routing_map", "6"),
    ),
    "probs dtype": (
        "permute", lambda c: c.permute(probs=c.probs.double()), TypeError, ("float32", "float64")
    ),
    "bytes without scales": (
        "permute", lambda c: c.permute(hidden=c.mine.x.view(torch.uint8)), ValueError, ("scaling_factor",)
    ),
    "fp8 of wide rows": (
        "permute", lambda c: c.permute(use_fp8=True), ValueError, ("use_fp8", "bfloat16")
    ),
    "non-blocking": (
        "permute", lambda c: c.permute(non_blocking=True), ValueError, ("num_permuted_tokens", "None")
    ),
    "uneven limit": (
        "permute",
        lambda c: c.permute(num_permuted_tokens=10, pad_multiple=4),
        ValueError,
        ("multiple", "10"),
    ),
    "other experts": (
        "permute", lambda c: c.permute(num_of_experts=8), ValueError, ("num_of_experts", "8")
    ),
    "experts per rank": (
        "permute",
        lambda c: c.permute(num_of_experts_per_rank="3"),
        ValueError,
        ("num_of_experts_per_rank", "3"),
    ),
    "cached limit": (
        "permute",
        lambda c: c.permute(handle=c.permuted_handle, num_permuted_tokens=999),
        ValueError,
        ("999",),
    ),
    "other kind of handle": (
        "hybrid_combine", lambda c: c.hybrid_combine(handle=c.permuted_handle), ValueError, ("other kind",)
    ),
    "probs of one": (
        "hybrid_combine",
        lambda c: c.hybrid_combine(probs=torch.zeros(c.plain.shape[0], 6)),
        ValueError,
        (),
    ),
    "no handle": ("unpermute", lambda c: c.unpermute(handle=None), TypeError, ("NoneType",)),
    "other padding": (
        "unpermute", lambda c: c.unpermute(pad_multiple=4), ValueError, ("pad_multiple", "4")
    ),
    "permuted probs": (
        "unpermute", lambda c: c.unpermute(probs=torch.zeros(1)), ValueError, ("probs", "(1,)")
    ),
}  # fmt: skip


def make_calls(context: RankContext) -> Calls:
    mine = oracle.given(CASE, context.rank_idx)
    v1 = Buffer(context.group)
    hybrid = HybridEPBuffer(context.group, 64, 8, 3)
    routing_map = torch.zeros(mine.num_tokens, 6, dtype=torch.bool).scatter_(1, mine.topk_idx, True)
    calls = Calls(v1, hybrid, mine, routing_map, routing_map.float(), *[mine.x, ()] * 4)
    received: Any = calls.dispatch()
    calls.rows, calls.handle = received[0], received[4]
    received = calls.permute()
    calls.permuted, calls.permuted_handle = received[0], received[4]
    received = calls.hybrid_dispatch()
    calls.plain, calls.plain_handle = received[0], received[3]
    received = calls.ll_dispatch()
    calls.low_latency, calls.low_latency_handle = received[0], received[2]
    return calls


def check_mistakes(context: RankContext, backend: str) -> None:
    """One rank errs, the other calls what it should; then both do it right."""
    with oracle.backend_of_group(context, backend):
        calls = make_calls(context)
        for culprit in range(context.num_ranks):
            for name, (operation, mistake, kind, pieces) in MISTAKES.items():
                is_culprit = context.rank_idx == culprit
                try:
                    if is_culprit:
                        mistake(calls)
                    else:
                        getattr(calls, operation)()
                except (TypeError, ValueError) as error:
                    assert type(error) is kind, (name, error)  # noqa: PT017
                    if pieces:
                        assert f"rank {culprit}" in str(error), (name, error)  # noqa: PT017
                    for piece in pieces:
                        assert piece in str(error), (name, error)  # noqa: PT017
                else:
                    raise AssertionError(f"{name}: nothing was raised on rank {context.rank_idx}")
            for operation in sorted({each[0] for each in MISTAKES.values()}):
                getattr(calls, operation)()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mistake_of_one_rank_is_raised_on_all(backend: str) -> None:
    run_ranks(check_mistakes, 2, backend)


def check_first_call(context: RankContext) -> None:
    """Nothing is known yet of the number of experts, but every rank hears of the mistake."""
    with oracle.backend_of_group(context, "host"):
        buffer = Buffer(context.group)
        mine = oracle.given(CASE, context.rank_idx)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(mine.topk_idx, 6)
        with pytest.raises(
            ValueError, match="rank 1: num_tokens_per_expert must be an int32 tensor"
        ):
            buffer.dispatch(
                mine.x, None, per_rank, None, in_rank, None if context.rank_idx else per_expert
            )
        with pytest.raises(ValueError, match="rank 0: num_experts must be an int, got None"):
            buffer.low_latency_dispatch(
                mine.x, mine.topk_idx, NUM_MAX, 6 if context.rank_idx else None
            )
        buffer.dispatch(mine.x, None, per_rank, None, in_rank, per_expert)


def test_a_mistake_in_the_first_call() -> None:
    run_ranks(check_first_call, 2)


def give_what_cannot_be_bound(context: RankContext, has_buffer: bool) -> None:
    """Before the first buffer is made, and before another one is."""
    buffer = HybridEPBuffer(context.group, 64, NUM_MAX, 3)
    hidden = torch.ones(4, 64, dtype=torch.bfloat16)
    if has_buffer:
        buffer.dispatch_with_permute(hidden=hidden, routing_map=torch.ones(4, 6, dtype=torch.bool))
        buffer.update_template_config(num_local_experts=2)
    num_experts = context.num_ranks * (2 if has_buffer else 3)
    routing_map = torch.ones(4, num_experts, dtype=torch.bool)
    given = {"no_such_keyword": 1} if context.rank_idx == 1 else {}
    with pytest.raises(TypeError, match="no_such_keyword"):
        buffer.dispatch_with_permute(hidden=hidden, routing_map=routing_map, **given)
    arrived = buffer.dispatch_with_permute(hidden=hidden, routing_map=routing_map)
    assert arrived[0].shape[0] == 4 * num_experts


@pytest.mark.parametrize("has_buffer", [False, True])
def test_what_cannot_be_bound_is_told_before_a_buffer_is_there(has_buffer: bool) -> None:
    run_ranks(give_what_cannot_be_bound, 2, has_buffer, mode="threads")


def give_tensors_of_no_device(context: RankContext) -> None:
    buffer = HybridEPBuffer(context.group, 64, NUM_MAX, 3)
    device = "meta" if context.rank_idx == 1 else "cpu"
    hidden = torch.ones(4, 64, dtype=torch.bfloat16)
    routing_map = torch.ones(4, 6, dtype=torch.bool)
    with pytest.raises(ValueError, match="must be on cpu, got meta"):
        buffer.dispatch_with_permute(hidden=hidden.to(device), routing_map=routing_map)
    buffer.dispatch_with_permute(hidden=hidden, routing_map=routing_map)


def test_tensors_of_no_device_are_refused_on_every_rank() -> None:
    run_ranks(give_tensors_of_no_device, 2, mode="threads")


def fail_and_go_on(context: RankContext) -> None:
    """What is made before a mistake, and waits for its first call, outlives it on every rank."""
    buffer = HybridEPBuffer(context.group, 64, NUM_MAX, 3)
    with pytest.raises(ValueError, match="num_experts"):
        TokenDispatcher(0, group=context.group)
    with pytest.raises(ValueError, match="device"):
        if context.rank_idx:
            group_buffers(context.group, device="no such device")
        TokenDispatcher(6, group=context.group)
    hidden = torch.ones(4, 64, dtype=torch.bfloat16)
    buffer.dispatch_with_permute(hidden=hidden, routing_map=torch.ones(4, 6, dtype=torch.bool))
    TokenDispatcher(6, group=context.group)


@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_a_mistake_leaves_what_others_hold(mode: str) -> None:
    run_ranks(fail_and_go_on, 2, mode=mode)
