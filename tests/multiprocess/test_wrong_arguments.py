"""Every parameter of every collective call, wrong on one rank: all ranks end alike, and go on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import moe_comm
from moe_comm import Communicator, EpBuffer, EpConfig, GradientSum, fused_a2a
from moe_comm.compat.deep_ep import Buffer, ElasticBuffer
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.peers.bootstrap import bootstrap_for
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import deep_ep_oracle as oracle
from tests.helpers import wrong_argument_families as faces
from tests.helpers.wrong_arguments import ARRIVAL_S, Entry, outcome_of, try_all

CONFIG = EpConfig(num_experts=6, num_topk=2, hidden=16, num_max_tokens_per_rank=8)
NUM_TOKENS = 4


def equal(want: torch.Tensor, found: torch.Tensor) -> None:
    assert torch.equal(found, want), (found, want)


def buffer_calls(context: RankContext, communicator: Communicator) -> Mapping[str, Entry]:
    buffer = EpBuffer(communicator, CONFIG)
    generator = torch.Generator().manual_seed(context.rank_idx)
    x = torch.randn(NUM_TOKENS, 16, generator=generator).bfloat16()
    topk_idx = torch.randint(0, 6, (NUM_TOKENS, 2), generator=generator)
    weights = torch.ones(NUM_TOKENS, 2)
    arrived = buffer.dispatch(x, topk_idx)
    want, handle = arrived.x.clone(), arrived.handle
    rows = torch.zeros_like(arrived.x)
    sums = torch.zeros(NUM_TOKENS, 16, dtype=torch.bfloat16)
    dispatcher = TokenDispatcher(6, buffer=buffer)
    tokens = dispatcher.dispatch(x, weights, topk_idx=topk_idx)
    routed = {"x": x, "topk_idx": topk_idx, "topk_weights": weights}
    again = {"x": x, "topk_idx": None, "handle": handle}
    combined = {"expert_out": rows, "handle": handle, "topk_weights": weights}
    permuted = {"hidden": x, "probs": weights, "topk_idx": topk_idx}
    unpermuted = {"expert_out": torch.zeros_like(tokens.tokens), "routed": tokens}
    rows_of = lambda result: equal(want, result.x)  # noqa: E731
    tokens_of = lambda result: equal(want, result.tokens)  # noqa: E731
    is_zero = functools.partial(equal, sums)
    return {
        "EpBuffer.dispatch": Entry(buffer.dispatch, routed, rows_of),
        "EpBuffer.dispatch, cached": Entry(buffer.dispatch, again, rows_of),
        "EpBuffer.combine": Entry(buffer.combine, {**combined, "out": sums}, is_zero),
        "dispatch": Entry(moe_comm.dispatch, {**routed, "buffer": buffer}, rows_of),
        "combine": Entry(moe_comm.combine, {**combined, "buffer": buffer}, is_zero),
        "TokenDispatcher.dispatch": Entry(dispatcher.dispatch, permuted, tokens_of),
        "TokenDispatcher.combine": Entry(dispatcher.combine, unpermuted, is_zero),
    }


def group_calls(context: RankContext, communicator: Communicator) -> Mapping[str, Entry]:
    num_ranks = context.num_ranks
    total = GradientSum(communicator, 12)
    ones = [torch.ones(3, 4)]

    def check_sums(_: object) -> None:
        equal(torch.full((3, 4), float(num_ranks)), ones[0])
        ones[0].fill_(1.0)

    made = lambda made: made.destroy()  # noqa: E731
    return {
        "Communicator.all_gather": Entry(
            communicator.all_gather,
            {"payload": b"here"},
            lambda said: None if said == [b"here"] * num_ranks else pytest.fail(repr(said)),
        ),
        "EpBuffer": Entry(EpBuffer, {"communicator": communicator, "config": CONFIG}, made),
        "GradientSum": Entry(GradientSum, {"communicator": communicator, "num_elements": 8}, made),
        "GradientSum.sum_": Entry(total.sum_, {"tensors": ones}, check_sums),
        "GradientSum.sum_parts": Entry(total.sum_parts, {"parts": [ones], "out": ones}, check_sums),
    }


FAMILIES = {"buffer": buffer_calls, "group": group_calls}


def try_family(
    context: RankContext, family: str, backend: str, step: int = 1, only: str = ""
) -> list[str]:
    with Communicator(context.group, backend=backend, arrival_timeout_s=ARRIVAL_S) as communicator:
        return try_all(
            lambda: FAMILIES[family](context, communicator),
            context.rank_idx,
            context.num_ranks,
            lambda: [communicator],
            only,
            step,
        )


def try_face(context: RankContext, family: str, step: int = 1, only: str = "") -> list[str]:
    """Faces that know their group alone."""
    with Communicator(context.group, arrival_timeout_s=ARRIVAL_S) as communicator:
        held = group_buffers(communicator)
        found = try_all(
            lambda: faces.FAMILIES[family](context),
            context.rank_idx,
            context.num_ranks,
            lambda: [communicator],
            only,
            step,
        )
        del held
    fused_a2a._buffers.clear()
    fused_a2a._hybrid_ep_buffers.clear()
    return found


# A prime number, so that each parameter meets other values than the one before.
STEPS = pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.full)])


@STEPS
@pytest.mark.parametrize("family", sorted(faces.FAMILIES))
def test_all_ranks_of_a_face_end_alike(family: str, step: int) -> None:
    assert run_ranks(try_face, 2, family, step)[0] == []


@STEPS
@pytest.mark.sampled(1)
@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("backend", ["host", "collective"])
def test_all_ranks_end_alike(family: str, backend: str, step: int) -> None:
    assert run_ranks(try_family, 2, family, backend, step)[0] == []


def miss_a_call(context: RankContext, backend: str) -> list[str]:
    """Rank 1 names no buffer, which nobody can be told; then it makes another call."""
    found = []
    for follow_up in ("dispatch", "combine", "all_gather", "EpBuffer", "buffer", "communicator"):
        with Communicator(
            context.group, backend=backend, arrival_timeout_s=ARRIVAL_S
        ) as communicator:
            buffer = EpBuffer(communicator, CONFIG)
            x, topk_idx = torch.ones(2, 16).bfloat16(), torch.tensor([[0, 5], [3, 1]])
            arrived = buffer.dispatch(x, topk_idx)
            calls: dict[str, Any] = {
                "dispatch": lambda: buffer.dispatch(x, topk_idx).x,  # noqa: B023
                "combine": lambda: buffer.combine(arrived.x, arrived.handle),  # noqa: B023
                "all_gather": lambda: communicator.all_gather(b""),
                "EpBuffer": lambda: EpBuffer(communicator, CONFIG).destroy(),
                "buffer": buffer.destroy,
                "communicator": communicator.destroy,
            }
            named: Any = buffer if context.rank_idx == 0 else "b"
            kind, text = outcome_of(lambda: moe_comm.dispatch(x, topk_idx, buffer=named))  # noqa: B023
            found.append(f"{kind}: {text}")
            if context.rank_idx == 1 or follow_up in (
                "dispatch",
                "combine",
                "all_gather",
                "EpBuffer",
            ):
                calls[follow_up]()
            if follow_up in ("dispatch", "combine", "all_gather", "EpBuffer"):
                equal(x + x, buffer.combine(arrived.x, arrived.handle))
            bootstrap_for(context.group).all_gather(None)
    return found


def test_the_next_call_tells_what_could_not_be_told() -> None:
    told, alone = run_ranks(miss_a_call, 2, "host")
    text = "buffer must be an EpBuffer, got str"
    assert alone == [f"TypeError: {text}"] * 6
    for call, found in zip(("dispatch", "combine", "all_gather", "EpBuffer"), told, strict=False):
        assert found == f"TypeError: rank 1: {text}; this is told by its next call, {call}"
    assert told[4].startswith("ValueError")
    assert "rank 1 has destroyed this buffer" in told[4]
    assert told[5].startswith("PeerFailedError")
    assert "rank 1 left" in told[5]


def ask_for_another_buffer(context: RankContext, face: str) -> tuple[str, str]:
    """Rank 1 has other experts in mind: its call makes a buffer, where its peer uses one that there is."""
    mine = oracle.given(faces.CASE, context.rank_idx)
    given = (mine.x, mine.topk_idx, mine.topk_weights)
    buffer = Buffer(context.group)

    def low_latency(num_experts: int) -> None:
        buffer.low_latency_dispatch(*given[:2], faces.NUM_MAX, num_experts, use_fp8=False)

    def fused(num_experts: int) -> None:
        fused_a2a.fused_dispatch(*given, num_experts, context.group)

    call = {"compat": low_latency, "fused": fused}[face]
    call(6)
    return outcome_of(lambda: call(6 + 6 * context.rank_idx))


@pytest.mark.parametrize("face", ["compat", "fused"])
def test_who_makes_a_buffer_alone_is_told_at_once(face: str) -> None:
    for kind, text in run_ranks(ask_for_another_buffer, 2, face):
        assert kind == "PeerTimeoutError"
        assert "ranks wait for each other" in text
        assert "rank 0 waits for rank 1 to enter dispatch" in text


def miss_a_call_and_go_on(context: RankContext, how: str) -> None:
    """Rank 1 makes a mistake that its peers hear of otherwise; nothing is left to be told afterwards."""
    communicator = Communicator(context.group, backend="host", arrival_timeout_s=ARRIVAL_S)
    named: Any = communicator if context.rank_idx == 0 else "b"
    kind, _ = outcome_of(lambda: GradientSum(named, 8) if context.rank_idx == 1 else None)
    assert kind == ("TypeError" if context.rank_idx == 1 else "")
    if how == "shrink":
        communicator = communicator.shrink().communicator
    else:
        communicator.recover()
    assert communicator.all_gather(b"x") == [b"x"] * 2
    assert communicator.all_gather(b"y") == [b"y"] * 2


@pytest.mark.parametrize("how", ["recover", "shrink"])
def test_what_peers_have_left_is_told_no_more(how: str) -> None:
    run_ranks(miss_a_call_and_go_on, 2, how)


def be_in_different_calls(context: RankContext, pair: tuple[str, str]) -> list[tuple[str, str]]:
    shared = group_buffers(context.group)
    communicator = shared.communicator
    shared.get(6)
    calls = {
        "all_gather": lambda: communicator.all_gather(b"\xff"),
        "TokenDispatcher": lambda: TokenDispatcher(6, group=context.group),
        "GradientSum": lambda: GradientSum(communicator, 8),
        "EpBuffer": lambda: EpBuffer(communicator, CONFIG),
        "barrier": ElasticBuffer(context.group).barrier,
    }
    found = [outcome_of(calls[pair[context.rank_idx]])]
    assert communicator.all_gather(b"x") == [b"x"] * 2
    return found


PAIRS = list(
    itertools.combinations(
        ["all_gather", "TokenDispatcher", "GradientSum", "EpBuffer", "barrier"], 2
    )
)


@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_ranks_in_different_calls_are_told(pair: tuple[str, str]) -> None:
    for ((kind, text),) in run_ranks(be_in_different_calls, 2, pair, mode="threads"):
        assert kind == "ValueError", text
        assert "ranks are in different calls" in text
