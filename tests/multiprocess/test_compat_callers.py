"""Calls of programs written for DeepEP's lineages, beyond what its contract's text says."""

from __future__ import annotations

import copy
import functools
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_comm.compat.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer
from moe_comm.compat.deep_ep.utils import per_token_cast_to_fp8
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


class Exchange(torch.autograd.Function):
    """Dispatch, or with `is_back` combine, of a client that keeps a handle by its tensors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: Buffer, is_back: bool, *handle: Any) -> Any:
        ctx.buffer, ctx.is_back = buffer, is_back
        ctx.save_for_backward(*handle)
        rows, *_ = buffer.combine(x, handle) if is_back else buffer.dispatch(x, handle=handle)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        handle, call = ctx.saved_tensors, ctx.buffer
        if ctx.is_back:
            rows, *_ = call.dispatch(gradient.contiguous(), handle=handle)
        else:
            rows, *_ = call.combine(gradient.contiguous(), handle)
        return rows, None, None, *[None] * len(handle)


def copies_of(handle: tuple) -> dict[str, tuple]:
    file = io.BytesIO()
    torch.save(tuple(handle), file)
    file.seek(0)
    return {
        "its tensors": tuple(handle),
        "a list": list(handle),
        "clones": tuple(part.clone() for part in handle),
        "of its type": type(handle)(part.clone() for part in handle),
        "copied": copy.copy(handle),
        "deeply": copy.deepcopy(handle),
        "from a file": torch.load(file),
    }


def check_handles_in_parts(
    context: RankContext, case: Case, backend: str, num_worst: int, has_topk: bool
) -> None:
    mine = oracle.given(case, context.rank_idx)
    routing = functools.partial(oracle.routing, topk_idx=mine.topk_idx)
    with oracle.backend_of_group(context, backend):
        buffer = Buffer(context.group)
        topk = {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights} if has_topk else {}
        recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(
            mine.x,
            **routing(buffer, num_experts=case.num_experts),
            **topk,
            num_worst_tokens=num_worst,
        )
        rows = recv_x * 2.0**context.rank_idx
        for bias in (None, mine.x):
            right, right_weights, _ = buffer.combine(rows, handle, recv_weights, bias)
            # Another buffer, as where a model is loaded again, knows the parts as well.
            for caller in (buffer, Buffer(context.group)):
                for name, parts in copies_of(handle).items():
                    sums, weights, _ = caller.combine(rows, parts, recv_weights, bias)
                    assert torch.equal(sums, right), name
                    assert not has_topk or torch.equal(weights, right_weights), name
                    again, *_ = caller.dispatch(mine.x, handle=parts)
                    assert torch.equal(again, recv_x), name
        pair = per_token_cast_to_fp8(mine.x.float())
        expected, *_ = buffer.dispatch(pair, handle=handle)
        received, *_ = buffer.dispatch(pair, handle=tuple(handle))
        for each, other in zip(received, expected, strict=True):
            assert torch.equal(each.view(torch.uint8), other.view(torch.uint8))

        def gradient_of() -> torch.Tensor:
            x = mine.x.clone().requires_grad_()
            arrived = Exchange.apply(x, buffer, False, *handle)
            sums = Exchange.apply(arrived * 2.0**context.rank_idx, buffer, True, *handle)
            sums.backward(mine.x)
            return x.grad

        # Rows of rank r are multiplied by 2^r on their way, and gradients on theirs.
        assert torch.equal(gradient_of(), buffer.combine(rows, handle)[0])
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            assert torch.equal(gradient_of(), buffer.combine(rows, handle)[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [CASES[2], CASES[4], CASES[5]], ids=str)
@pytest.mark.parametrize("backend", ["reference", "collective", "host"])
@pytest.mark.parametrize("num_worst", [0, 64])
def test_a_handle_of_its_parts_works(case: Case, backend: str, num_worst: int) -> None:
    run_ranks(check_handles_in_parts, case.num_ranks, case, backend, num_worst, True)


def test_a_handle_of_its_parts_works_where_no_choices_travelled() -> None:
    run_ranks(check_handles_in_parts, 3, CASES[5], "host", 0, False)


def check_wrong_parts(context: RankContext, case: Case) -> None:
    mine = oracle.given(case, context.rank_idx)
    with oracle.backend_of_group(context, "host"):
        buffer = Buffer(context.group)
        recv_x, *_, handle, _ = send(buffer, case, mine, mine.x)
        wrong = {
            r"handle\[4\] must be torch.bool": (4, handle[4].int()),
            r"handle\[4\] has": (4, ~handle[4]),
            r"rows arrive, handle\[3\] has": (3, handle[3][:-1]),
            r"handle\[0\] must .*shape": (0, handle[0][:1].contiguous()),
        }
        for text, (place, tensor) in wrong.items():
            parts = list(handle)
            if context.rank_idx == 1:
                parts[place] = tensor
            for call in (
                lambda parts=parts: buffer.combine(recv_x, parts),
                lambda parts=parts: buffer.dispatch(mine.x, handle=parts),
            ):
                with pytest.raises((TypeError, ValueError), match=f"rank 1.*{text}"):
                    call()
        sums, *_ = buffer.combine(recv_x, tuple(handle))
        assert torch.equal(sums, buffer.combine(recv_x, handle)[0])
        # One rank has it whole, the other in parts.
        mixed = tuple(handle) if context.rank_idx else handle
        with pytest.raises(ValueError, match="ranks disagree"):
            buffer.combine(recv_x, mixed)
        with pytest.raises(ValueError, match="ranks disagree"):
            buffer.dispatch(mine.x, handle=mixed)
        assert torch.equal(sums, buffer.combine(recv_x, handle)[0])


def test_parts_that_are_no_handle_are_refused_on_every_rank() -> None:
    run_ranks(check_wrong_parts, 2, CASES[1])


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
