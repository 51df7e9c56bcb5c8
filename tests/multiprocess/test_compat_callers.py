"""What programs written for DeepEP's lineages pass and read, beyond what its contract's text says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_comm.compat.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import deep_ep_oracle as oracle
from tests.helpers.deep_ep_oracle import CASES, Case, Given

NUM_MAX = 16


def send(buffer: Buffer, case: Case, mine: Given, x: Any, *, has_topk: bool = True) -> tuple:
    topk = {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights} if has_topk else {}
    routing = oracle.routing(buffer, mine.topk_idx, case.num_experts)
    return buffer.dispatch(x, **routing, **topk)


def check_weights_are_summed(context: RankContext, case: Case) -> None:
    mine = oracle.given(case, context.rank_idx)
    in_rank = oracle.layout(case, mine)[2].to(torch.float32)
    column = torch.arange(case.num_topk, dtype=torch.float32)
    powers = torch.exp2(torch.arange(case.num_ranks, dtype=torch.float32))
    expected = (in_rank * powers).sum(1, keepdim=True) + in_rank.sum(1, keepdim=True) * column
    with oracle.backend_of_group(context, "host"):
        buffer = Buffer(context.group)
        recv_x, recv_idx, _, _, handle, _ = send(buffer, case, mine, mine.x)
        # Also where the choice is another rank's.
        given = (powers[context.rank_idx] + column).expand(recv_idx.shape).contiguous()
        for bias in (None, mine.x):
            for is_async in (False, True):
                sums, weights, event = buffer.combine(
                    recv_x, handle, given, bias, async_finish=is_async
                )
                if is_async:
                    event.current_stream_wait()
                assert torch.equal(weights, expected)
                assert sums.shape == mine.x.shape


def test_weights_of_a_combine_are_added_over_ranks() -> None:
    run_ranks(check_weights_are_summed, 3, CASES[5])


def check_triples(context: RankContext, case: Case) -> None:
    random = torch.Generator().manual_seed(7)
    inputs = oracle.all_given(case)
    triples = [
        (
            torch.randint(-(2**31), 2**31, (n, 8), generator=random).to(torch.int32),
            torch.randint(-(2**31), 2**31, (2, n), generator=random).to(torch.int32).T,
            torch.randn(n, 1, generator=random),
        )
        for n in case.num_tokens
    ]
    rows = oracle.arrivals(case, inputs, context.rank_idx)
    expected = [torch.stack([triples[s][part][t] for s, t in rows]) for part in range(3)]
    mine = inputs[context.rank_idx]
    with oracle.backend_of_group(context, "host"):
        buffer = Buffer(context.group)
        for has_topk in (True, False):
            recv_x, *_, handle, _ = send(
                buffer, case, mine, triples[context.rank_idx], has_topk=has_topk
            )
            again, *_ = buffer.dispatch(triples[context.rank_idx], handle=handle)
            for received in (recv_x, again):
                for part, right in zip(received, expected, strict=True):
                    assert part.dtype is right.dtype
                    assert torch.equal(part, right)


def test_rows_of_four_bits_travel_as_they_are() -> None:
    run_ranks(check_triples, 3, CASES[5])


def check_orders(context: RankContext, case: Case) -> None:
    mine = oracle.given(case, context.rank_idx)
    num_local_experts = len(oracle.experts_of(case, context.rank_idx))
    with oracle.backend_of_group(context, "host"):
        buffer = Buffer(context.group)
        stats = torch.zeros(num_local_experts, dtype=torch.int32)
        costs = torch.zeros(case.num_ranks, dtype=torch.int64)
        call = functools.partial(
            buffer.low_latency_dispatch, mine.x, mine.topk_idx, NUM_MAX, case.num_experts
        )
        scale = torch.ones(())
        counts, *_ = call(use_fp8=False)[1:]
        orders: dict[str, tuple] = {
            "of DeepEP": (stats, costs, False, False, False, True),
            "of SGLang's build": (stats, costs, scale, False, False, False, False, True),
            "and nothing measured": (None, None, scale, False, False, False, False, True),
            "of hybrid-ep": (None, stats, costs, scale, *[False] * 5, True),
            "and no scale": (None, stats, costs, None, *[0] * 5, 1),
        }
        num_counted = 0
        for order in orders.values():
            recv_x, recv_count, _, event, hook = call(*order)
            assert hook is None
            event.current_stream_wait()
            assert recv_x.dtype is mine.x.dtype
            assert torch.equal(recv_count, counts)
            num_counted += any(each is stats for each in order)
            assert torch.equal(stats, num_counted * counts)
        assert num_counted == 4
        *_, event, hook = call(None, stats, costs, None, *[False] * 6, True)
        hook()
        assert (event.event, int(stats.sum())) == (None, 5 * int(counts.sum()))
        with pytest.raises(NotImplementedError, match="topk_weights=a tensor"):
            call(mine.topk_weights, stats)
        with pytest.raises(TypeError, match="use_fp8 must be a bool, got 'x'"):
            call(stats, costs, "x")
        with pytest.raises(TypeError, match="use_fp8"):
            call(stats, costs, scale, False, use_fp8=False)


def test_a_low_latency_dispatch_takes_the_order_of_any_lineage() -> None:
    run_ranks(check_orders, 2, CASES[1])


def check_ints(context: RankContext, case: Case) -> None:
    mine = oracle.given(case, context.rank_idx)
    with oracle.backend_of_group(context, "host"):
        buffer = ElasticBuffer(context.group, num_max_tokens_per_rank=NUM_MAX, deterministic=1)
        assert buffer.deterministic is True
        dispatch = functools.partial(
            buffer.dispatch, mine.x, mine.topk_idx, num_experts=case.num_experts
        )
        *_, handle, event = dispatch(do_cpu_sync=0, do_handle_copy=0, async_with_compute_stream=1)
        assert handle.num_recv_tokens_per_expert_list == []
        assert handle.topk_idx.data_ptr() == mine.topk_idx.data_ptr()
        event.current_stream_wait()
        *_, handle, event = dispatch(do_cpu_sync=1, do_expand=1, async_with_compute_stream=0)
        assert len(handle.num_recv_tokens_per_expert_list) > 0
        assert (handle.do_expand, event.event) == (True, None)
        old = Buffer(context.group, 0, 0, 1, explicitly_destroy=1)
        assert old.low_latency_mode is True
        old.get_dispatch_layout(mine.topk_idx, case.num_experts, None, 1)[-1].current_stream_wait()
        hybrid = HybridEPBuffer(context.group, case.hidden, NUM_MAX, 4, 0, use_shared_buffer=1)
        assert hybrid.configurer.instance().token_data_type == "UINT16"
        with pytest.raises(TypeError, match="rank 1: do_expand must be a bool, got 2"):
            dispatch(do_expand=1 + context.rank_idx)


def test_ints_do_for_bools() -> None:
    run_ranks(check_ints, 2, CASES[1])


def check_both_forms(context: RankContext, case: Case) -> None:
    mine = oracle.given(case, context.rank_idx)
    routing_map = torch.zeros(mine.num_tokens, case.num_experts, dtype=torch.bool)
    routing_map[:, context.rank_idx] = True  # not what topk_idx says
    probs = torch.rand(routing_map.shape) * routing_map
    with oracle.backend_of_group(context, "host"):
        buffer = HybridEPBuffer(
            context.group, case.hidden, NUM_MAX, case.num_experts // case.num_ranks
        )
        index_form = {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights}
        calls: tuple[Callable[..., tuple], ...] = (buffer.dispatch, buffer.dispatch_with_permute)
        for call in calls:
            for weights in (None, probs):
                alone = call(hidden=mine.x, routing_map=routing_map, probs=weights)
                both = call(hidden=mine.x, routing_map=routing_map, probs=weights, **index_form)
                assert torch.equal(both[0], alone[0])
                if weights is None:
                    assert both[1] is None
                else:
                    assert torch.equal(both[1], alone[1])


def test_a_routing_map_goes_before_an_index() -> None:
    run_ranks(check_both_forms, 2, CASES[1])


def check_default_dtype(context: RankContext, case: Case) -> None:
    mine = oracle.given(case, context.rank_idx)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with oracle.backend_of_group(context, "host"):
            buffer = ElasticBuffer(context.group, num_max_tokens_per_rank=NUM_MAX)
            recv_x, _, weights, handle, _ = buffer.dispatch(
                mine.x, mine.topk_idx, mine.topk_weights, num_experts=case.num_experts
            )
            for is_async in (False, True):
                _, back, event = buffer.combine(
                    recv_x, handle, weights, async_with_compute_stream=is_async
                )
                if is_async:
                    event.current_stream_wait()
                assert torch.equal(back, mine.topk_weights.masked_fill(mine.topk_idx < 0, 0))
            old = Buffer(context.group)
            recv_x, _, weights, _, given, _ = send(old, case, mine, mine.x)
            _, back, _ = old.combine(recv_x, given, weights)
            assert torch.equal(back, mine.topk_weights.masked_fill(mine.topk_idx < 0, 0))
    finally:
        torch.set_default_dtype(torch.float32)


def test_weights_keep_their_bits_whatever_the_default_dtype() -> None:
    run_ranks(check_default_dtype, 2, CASES[1])


def check_order_of_sums(context: RankContext) -> None:
    """Sums of ranks cancel, so that what is added first shows."""
    big = 2.0**30
    x = torch.ones(4, 4)
    # The first token is 2 by the last choices, 0 by the first ones, and 1 where every row is added alone.
    topk_idx = torch.tensor([[2, 0, 4, 3], [2, 4, 5, 0], [0, -1, 4, 2], [0, 1, 2, 4]])
    factor = [big, 1.0, -big][context.rank_idx]
    with oracle.backend_of_group(context, "host"):
        for reduces in (True, False):
            buffer = ElasticBuffer(
                context.group, num_max_tokens_per_rank=4, allow_multiple_reduction=reduces
            )
            recv_x, _, _, handle, _ = buffer.dispatch(x, topk_idx, num_experts=6, do_expand=True)
            sums, _, _ = buffer.combine(recv_x * factor, handle)
            zero = torch.zeros((), dtype=torch.float32)
            of_rank = torch.tensor([big, 1.0, -big])
            for choices, row in zip(topk_idx.tolist(), sums, strict=True):
                terms: dict[int, torch.Tensor] = {}
                for k, expert_idx in enumerate(choices):
                    if expert_idx >= 0:
                        rank_idx = expert_idx // 2
                        key = rank_idx if reduces else k
                        terms[key] = terms.pop(key, zero) + of_rank[rank_idx]
                total = zero
                for term in terms.values():
                    total = total + term
                assert row.tolist() == [float(total)] * 4, (reduces, choices)


def test_sums_of_ranks_are_added_by_the_last_choice() -> None:
    run_ranks(check_order_of_sums, 3)
