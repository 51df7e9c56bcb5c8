"""Mistakes of a caller in `deep_ep`'s calls: raised on every rank, and the buffer goes on."""

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
from tests.helpers.wrong_arguments import missing_of, told_by

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


Change = Callable[[Calls], dict[str, Any]]

# By what all ranks call and what all are told, the type and pieces: what one rank does otherwise.
BY_CALL: dict[str, dict[str, Change]] = {
    "dispatch": {
        "TypeError: tensor .. list": lambda c: {"x": [1.0]},
        "ValueError: contiguous": lambda c: {"x": c.mine.x.T.contiguous().T},
        "ValueError: pair .. 4 values": lambda c: {"x": (c.mine.x,) * 4},
        "TypeError: one byte .. bfloat16": lambda c: {"x": (c.mine.x, c.mine.x.float())},
        "ValueError: scales .. (1, 1)": lambda c: {
            "x": (c.mine.x.view(torch.uint8), torch.zeros(1, 1))
        },
        "TypeError: NoneType": lambda c: {"is_token_in_rank": None},
        "TypeError: num_tokens_per_expert": lambda c: {"num_tokens_per_expert": None},
        "ValueError: is_token_in_rank[ .. topk_idx[": lambda c: {
            "is_token_in_rank": ~c.v1.get_dispatch_layout(c.mine.topk_idx, 6)[3]
        },
        "ValueError: num_tokens_per_expert .. 99 .. topk_idx has": lambda c: {
            "num_tokens_per_expert": torch.full((6,), 99, dtype=torch.int32)
        },
        "ValueError: num_tokens_per_rank .. 99 .. topk_idx has": lambda c: {
            "num_tokens_per_rank": torch.full((2,), 99, dtype=torch.int32)
        },
        "ValueError: go together .. topk_idx is None": lambda c: {"topk_idx": None},
        "TypeError: int64 .. int32": lambda c: {"topk_idx": c.mine.topk_idx.to(torch.int32)},
        "ValueError: [-1, 6)": lambda c: {"topk_idx": c.mine.topk_idx + 6},
        "ValueError: >= 1 .. 0": lambda c: {"expert_alignment": 0},
        "ValueError: >= 0 .. -1": lambda c: {"num_worst_tokens": -1},
        "ValueError: 2147483648": lambda c: {"num_worst_tokens": 1 << 31},
        "ValueError: even .. 7": lambda c: {"config": Config(7)},
        "TypeError: Config .. int": lambda c: {"config": 7},
        "ValueError: previous_event .. None": lambda c: {"allocate_on_comm_stream": True},
        "TypeError: EventOverlap .. int": lambda c: {"previous_event": 3},
        "ValueError: num_tokens_per_rdma_rank": lambda c: {
            "num_tokens_per_rdma_rank": torch.zeros(1)
        },
    },
    "cached": {
        "ValueError: None with a handle": lambda c: {"topk_idx": c.mine.topk_idx},
        "TypeError: handle .. tuple": lambda c: {"handle": tuple(c.handle)[:5]},
        "ValueError: 1 tokens": lambda c: {"x": c.mine.x[:1]},
    },
    "combine": {
        "TypeError: NoneType": lambda c: {"handle": None},
        "ValueError: x must have shape": lambda c: {"x": c.rows[:-1]},
        "TypeError: uint8": lambda c: {"x": c.rows.view(torch.uint8)},
        "ValueError: (1, 2)": lambda c: {"topk_weights": torch.zeros(1, 2)},
        "ValueError": lambda c: {"bias": c.mine.x},
        "ValueError: bias": lambda c: {"bias": c.mine.x[:, :8]},
        "ValueError: 3 values": lambda c: {"bias": (c.mine.x,) * 3},
    },
    "ll_dispatch": {
        "ValueError: 9 .. 8": lambda c: {
            "x": torch.zeros(9, 64).bfloat16(),
            "topk_idx": torch.zeros(9, 2, dtype=torch.int64),
        },
        "ValueError: exclude": lambda c: {"async_finish": True, "return_recv_hook": True},
        "ValueError: round_scale": lambda c: {"use_fp8": True, "use_ue8m0": True},
        "TypeError: int32 .. float32": lambda c: {
            "cumulative_local_expert_recv_stats": torch.zeros(3)
        },
        "ValueError: (2, 2)": lambda c: {
            "dispatch_wait_recv_cost_stats": torch.zeros(2, 2, dtype=torch.int64)
        },
        "TypeError: num_experts .. 6.0": lambda c: {"num_experts": 6.0},
    },
    "ll_combine": {
        "ValueError: that of the dispatch": lambda c: {"topk_idx": c.mine.topk_idx.flip(1)},
        "TypeError: low_latency_dispatch": lambda c: {"handle": c.handle},
        "ValueError: get_next_low_latency": lambda c: {"zero_copy": True},
        "ValueError: exclude": lambda c: {"zero_copy": True, "use_logfmt": True},
        "ValueError: out": lambda c: {"out": torch.zeros(1, 64).bfloat16()},
    },
    "permute": {
        "ValueError: routing_map or topk_idx": lambda c: {"routing_map": None},
        "TypeError: bool .. float32": lambda c: {"routing_map": c.probs},
        "ValueError: routing_map .. 6": lambda c: {
            "routing_map": c.routing_map[:, :4].contiguous(),
            "probs": None,
        },
        "TypeError: float32 .. float64": lambda c: {"probs": c.probs.double()},
        "ValueError: scaling_factor": lambda c: {"hidden": c.mine.x.view(torch.uint8)},
        "ValueError: use_fp8 .. bfloat16": lambda c: {"use_fp8": True},
        "ValueError: num_permuted_tokens .. None": lambda c: {"non_blocking": True},
        "ValueError: multiple .. 10": lambda c: {"num_permuted_tokens": 10, "pad_multiple": 4},
        "ValueError: num_of_experts .. 8": lambda c: {"num_of_experts": 8},
        "ValueError: num_of_experts_per_rank .. 3": lambda c: {"num_of_experts_per_rank": "3"},
        "ValueError: 999": lambda c: {"handle": c.permuted_handle, "num_permuted_tokens": 999},
    },
    "hybrid_combine": {
        "ValueError: other kind": lambda c: {"handle": c.permuted_handle},
        "ValueError": lambda c: {"probs": torch.zeros(c.plain.shape[0], 6)},
    },
    "unpermute": {
        "TypeError: NoneType": lambda c: {"handle": None},
        "ValueError: pad_multiple .. 4": lambda c: {"pad_multiple": 4},
        "ValueError: probs .. (1,)": lambda c: {"probs": torch.zeros(1)},
    },
}


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
            for call, mistakes in BY_CALL.items():
                for wanted, change in mistakes.items():
                    is_culprit = context.rank_idx == culprit
                    told = told_by(calls, call, change if is_culprit else None)
                    assert missing_of(told, culprit, wanted) == [], (call, told)
                getattr(calls, call)()


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
    """An object that is made before a mistake, and waits for its first call, outlives it on every rank."""
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
