"""`deep_ep.EPBuffer`: what V2.5 changes, beside an `ElasticBuffer`, which has an oracle of its own."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest
import torch

from moe_comm import RankThreads
from moe_comm.compat import deep_ep
from moe_comm.compat.deep_ep import ElasticBuffer, EPBuffer, EventOverlap
from moe_comm.compat.deep_ep.utils import per_token_cast_to_fp8
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import deep_ep_oracle as oracle
from tests.helpers.deep_ep_oracle import CASES, Case, Given

NUM_MAX = 16
UNIT = 4
EVENTS = {"async_with_compute_stream": True, "defer_epilogue": True}

# By name: the parameters in the order in which callers without names pass them.
ORDERS = {
    "__init__": "group num_bytes num_max_tokens_per_rank hidden num_topk use_fp8_dispatch "
    "lb_allocation_plan_or_num_bytes deterministic allow_hybrid_mode allow_multiple_reduction "
    "prefer_overlap_with_compute sl_idx num_allocated_qps num_cpu_timeout_secs num_gpu_timeout_secs "
    "explicitly_destroy",
    "dispatch": "x topk_idx topk_weights cumulative_local_expert_recv_stats num_experts "
    "num_max_tokens_per_rank expert_alignment num_sms num_qps previous_event "
    "async_with_compute_stream allocate_on_comm_stream handle do_handle_copy do_cpu_sync do_expand "
    "do_zero_padding use_tma_aligned_col_major_sf defer_epilogue",
    "combine": "x handle topk_weights bias num_sms num_qps previous_event async_with_compute_stream "
    "allocate_on_comm_stream defer_epilogue",
    "lb_prefetch_weights": "redundant_expert_weights expert_weights redundancy_mapping num_sms "
    "previous_event",
    "lb_reduce_grads": "redundant_expert_grads expert_grads redundancy_mapping num_sms previous_event",
    "barrier": "wait_comm_stream with_cpu_sync sequential",
}


@pytest.mark.parametrize("name", ORDERS)
def test_parameters_are_in_the_order_of_callers(name: str) -> None:
    parameters = list(inspect.signature(getattr(EPBuffer, name)).parameters)
    assert parameters == ["self", *ORDERS[name].split()]


def test_an_event_returns_once_what_its_hook_returned() -> None:
    event = EventOverlap(EPBuffer.capture())
    assert event.wait() is None
    event.register_hook_after_wait(lambda: 7)
    assert (event.wait(), event.wait(), event.current_stream_wait()) == (7, None, None)


def same(got: Any, right: Any) -> None:
    """Also of pairs with scales, bit for bit, with shapes, dtypes and strides."""
    if isinstance(right, tuple):
        for each, other in zip(got, right, strict=True):
            same(each, other)
    elif right is None:
        assert got is None
    else:
        assert (got.dtype, got.shape, got.stride()) == (right.dtype, right.shape, right.stride())
        assert torch.equal(
            got.contiguous().flatten().view(torch.uint8),
            right.contiguous().flatten().view(torch.uint8),
        )


def same_handles(got: deep_ep.EPHandle, right: deep_ep.EPHandle) -> None:
    for name in (
        "psum_num_recv_tokens_per_scaleup_rank",
        "psum_num_recv_tokens_per_expert",
        "num_unaligned_recv_tokens_per_expert",
        "recv_src_metadata",
        "dst_buffer_slot_idx",
    ):
        same(getattr(got, name), getattr(right, name))
    assert got.num_recv_tokens_per_expert_list == right.num_recv_tokens_per_expert_list
    assert got.num_expanded_tokens == right.num_expanded_tokens


def check_calls(context: RankContext, case: Case, backend: str, expanded: bool) -> None:
    mine = oracle.given(case, context.rank_idx)
    num_local = len(oracle.experts_of(case, context.rank_idx))
    with oracle.backend_of_group(context, backend):
        buffer = EPBuffer(context.group, None, NUM_MAX, case.hidden, case.num_topk)
        known = ElasticBuffer(context.group, num_max_tokens_per_rank=NUM_MAX)
        inputs = (mine.x, per_token_cast_to_fp8(mine.x.float()))
        for x, is_deferred, do_cpu_sync in itertools.product(inputs, (False, True), (None, False)):
            options: dict[str, Any] = {"do_expand": expanded, "do_cpu_sync": do_cpu_sync}
            options["use_tma_aligned_col_major_sf"] = isinstance(x, tuple)
            given = (mine.topk_idx, mine.topk_weights)
            right_stats, stats = torch.zeros(2, num_local, dtype=torch.int32)
            *right, right_handle, _ = known.dispatch(
                x, *given, right_stats, case.num_experts, None, UNIT, **options
            )
            events = {
                "previous_event": EPBuffer.capture(),
                "allocate_on_comm_stream": True,
                **(EVENTS if is_deferred else {}),
            }
            out = buffer.dispatch(
                x, *given, stats, case.num_experts, None, UNIT, 5, **events, **options
            )
            if is_deferred:
                assert isinstance(out, EventOverlap)
                event, out = out, (*out.wait(), None)
                assert event.wait() is None
            *got, handle, _ = out
            same(tuple(got), tuple(right))
            same_handles(handle, right_handle)
            assert handle.topk_idx is mine.topk_idx
            assert handle.num_sms == 6
            assert torch.equal(stats, right_stats)

            # The same places again, with weights, as a backward pass sends them.
            options = {"do_expand": expanded, "do_zero_padding": expanded}
            *right, _, _ = known.dispatch(
                x, None, mine.topk_weights, handle=right_handle, **options
            )
            again = buffer.dispatch(
                x,
                None,
                mine.topk_weights,
                None,
                case.num_experts,
                NUM_MAX,
                UNIT,
                handle=handle,
                **options,
                **(EVENTS if is_deferred else {}),
            )
            *got, same_handle, _ = (*again.wait(), None) if is_deferred else again
            assert same_handle is handle
            same(tuple(got), tuple(right))
        check_sums(buffer, known, case, mine, handle, right_handle)


def check_sums(
    buffer: EPBuffer,
    known: ElasticBuffer,
    case: Case,
    mine: Given,
    handle: deep_ep.EPHandle,
    right_handle: deep_ep.EPHandle,
) -> None:
    recv_x, _, recv_weights, *_ = known.dispatch(
        mine.x, None, mine.topk_weights, handle=right_handle
    )
    rows = recv_x * 2.0**buffer.rank_idx
    for bias in (None, mine.x, (mine.x, mine.x + 1)):
        for weights in (None, recv_weights):
            right = known.combine(rows, right_handle, weights, bias)[:2]
            same(buffer.combine(rows, handle, weights, bias)[:2], right)
            late = bias
            if bias is not None:
                parts = bias if isinstance(bias, tuple) else (bias,)
                late = tuple(torch.full_like(each, float("nan")) for each in parts)
            event = buffer.combine(rows, handle, weights, late, **EVENTS)
            if bias is not None:
                # A bias may be computed while rows travel.
                for each, part in zip(late, parts, strict=True):
                    each.copy_(part)
            same(event.wait(), right)
            assert event.wait() is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", [CASES[1], CASES[4]], ids=str)
@pytest.mark.parametrize("backend", ["reference", "collective", "host"])
@pytest.mark.parametrize("expanded", [False, True])
def test_calls_give_what_an_elastic_buffer_does(case: Case, backend: str, expanded: bool) -> None:
    run_ranks(check_calls, case.num_ranks, case, backend, expanded)


def check_written_choices(context: RankContext, case: Case) -> None:
    mine = oracle.given(case, context.rank_idx)
    text = "rank 1.*topk_idx must stay as it is"
    with oracle.backend_of_group(context, "host"):
        buffer = EPBuffer(context.group, None, NUM_MAX)

        def send() -> tuple:
            return buffer.dispatch(mine.x, mine.topk_idx, num_experts=case.num_experts)

        recv_x, _, _, handle, _ = send()
        if context.rank_idx == 1:
            mine.topk_idx[:1].fill_(0)  # through a view
            with pytest.raises(ValueError, match="had version 0 at the dispatch and has 1"):
                _ = handle.topk_idx
        with pytest.raises(ValueError, match=text):
            buffer.combine(recv_x, handle)
        with pytest.raises(ValueError, match=text):
            buffer.dispatch(mine.x, handle=handle)
        # Nobody has been left behind, and a dispatch of what was written is a new one.
        recv_x, _, _, handle, _ = send()
        assert buffer.combine(recv_x, handle)[0].shape == mine.x.shape
        with torch.inference_mode():
            choices = mine.topk_idx.clone()
            *_, handle, _ = buffer.dispatch(mine.x, choices, num_experts=case.num_experts)
            choices.fill_(-1)
            assert handle.topk_idx is choices


def test_choices_that_were_written_are_noticed() -> None:
    run_ranks(check_written_choices, 2, CASES[1])


def check_mistakes(context: RankContext, case: Case) -> None:
    mine = oracle.given(case, context.rank_idx)
    with oracle.backend_of_group(context, "host"):
        buffer = EPBuffer(context.group, None, NUM_MAX, allow_multiple_reduction=False)
        arguments = {"topk_idx": mine.topk_idx, "num_experts": case.num_experts}
        recv_x, _, _, handle, _ = buffer.dispatch(
            mine.x, mine.topk_idx, mine.topk_weights, num_experts=case.num_experts, do_expand=True
        )
        weights = torch.zeros(len(recv_x))
        event = EPBuffer.capture()
        wrong: list[tuple[str, dict[str, Any]]] = [
            ("do_handle_copy must be False", {**arguments, "do_handle_copy": True}),
            ("do_zero_padding needs do_expand", {**arguments, "do_zero_padding": True}),
            ("defer_epilogue needs async_with", {**arguments, "defer_epilogue": True}),
            ("needs allocate_on_comm_stream", {**arguments, "previous_event": event}),
            ("num_qps is 18, more than .* 17", {**arguments, "num_qps": 18}),
            ("do_cpu_sync must be None or False", {"handle": handle, "do_cpu_sync": True}),
            ("num_experts is 9, the handle's is 8", {"handle": handle, "num_experts": 9}),
            ("expert_alignment is 8, the handle's is 1", {"handle": handle, "expert_alignment": 8}),
            ("rank is 15, the handle's is 16", {"handle": handle, "num_max_tokens_per_rank": 15}),
            ("topk_weights must be None with do_expand", {"topk_weights": weights}),
            ("defer_epilogue needs async_with", {"defer_epilogue": True}),
        ]
        for text, change in wrong:
            is_sum = "handle" not in change and "topk_idx" not in change
            right = {"handle": handle} if "handle" in change else arguments
            given = (change if context.rank_idx == 1 else {}) if is_sum else right
            if context.rank_idx == 1 and not is_sum:
                given = change
            with pytest.raises(ValueError, match=f"rank 1.*{text}"):
                if is_sum:
                    buffer.combine(recv_x, handle, **given)
                else:
                    buffer.dispatch(mine.x, **given)
        with pytest.raises(ValueError, match=r"context_idx must be None or in \[0, 1\), .*; got 2"):
            deep_ep.comm.barrier(buffer, context_idx=2 if context.rank_idx else 0)
        deep_ep.comm.barrier(buffer, wait_comm_stream=False)
        buffer.barrier(False, True, False)


def test_a_mistake_of_one_rank_is_raised_on_all() -> None:
    run_ranks(check_mistakes, 2, CASES[1])


def test_what_a_buffer_says_of_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="num_bytes must be a multiple of 2097152, got 100"):
        EPBuffer(RankThreads(1)[0], 100)
    with pytest.raises(ValueError, match="num_bytes must be a multiple of 2097152, got 7"):
        EPBuffer(RankThreads(1)[0], lb_allocation_plan_or_num_bytes=7)
    buffer = EPBuffer(RankThreads(1)[0], 2 << 20, 8, explicitly_destroy=True)
    assert buffer.lb_get_theoretical_num_sms() == 4
    assert isinstance(buffer, deep_ep.BufferBase)
    assert (buffer.num_bytes, buffer.num_lb_bytes, buffer.num_allocated_qps) == (2 << 20, 0, 17)
    assert [buffer.get_theoretical_num_qps(n) for n in (4, 24)] == [4, 9]
    assert buffer.get_theoretical_num_sms(8, 2) == 4
    assert deep_ep.comm.get_comm_stream(buffer) == buffer.get_comm_stream()
    buffer.print_memory_usage()
    assert capsys.readouterr().out == "rank 0: EPBuffer of 2097152 bytes\n"
    assert buffer.main_context is buffer.runtime is not None
    buffer.destroy()
    buffer.destroy()
    assert buffer.main_context is None
    with pytest.raises(ValueError, match="destroyed"):
        buffer.dispatch(torch.zeros(1, 8), torch.zeros(1, 1, dtype=torch.int64), num_experts=1)
    with pytest.raises(ValueError, match="destroy"):
        EPBuffer(RankThreads(1)[0]).destroy()
