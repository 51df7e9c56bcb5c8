"""SGLang's shape beyond the suite: phases in flight, formats, hooks, modes, what is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from moe_comm.dispatcher.sglang import (
    CombineInputFormat,
    DeepEPLLCombineInput,
    DeepEPNormalCombineInput,
    DispatchOutputFormat,
    SglangDispatcher,
)
from moe_comm.group_buffers import group_buffers
from moe_comm.quantization import FP8_BLOCK128, Quantization
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.serving_batches import (
    HIDDEN,
    MOST_TOKENS,
    NUM_BATCHES,
    NUM_EXPERTS,
    NUM_TOPK,
    Batches,
    batch_input,
    identity_sum,
    run_in_flight,
)


def sglang(group: Any, mode: str = "normal", **options: Any) -> SglangDispatcher:
    return SglangDispatcher(
        group,
        NUM_TOPK,
        num_experts=NUM_EXPERTS,
        deepep_mode=mode,
        num_max_tokens_per_rank=MOST_TOKENS,
        **options,
    )


def combine_input(output: Any) -> Any:
    """Experts that return their input, in either format."""
    if output.format.is_deepep_ll():
        return DeepEPLLCombineInput(output.hidden_states, output.topk_ids, output.topk_weights)
    is_local = output.topk_ids >= 0
    weight = (output.topk_weights * is_local).sum(1, keepdim=True)
    rows = (output.hidden_states * weight).to(output.hidden_states.dtype)
    return DeepEPNormalCombineInput(rows, output.topk_ids, output.topk_weights)


def sglang_batches(context: RankContext, mode: str, is_one_dispatcher: bool) -> Batches:
    """Phase functions of every batch: dispatch_a, dispatch_b and combine_a, combine_b."""
    shared = sglang(context.group, mode)
    dispatchers = [shared] + [
        shared if is_one_dispatcher else sglang(context.group, mode) for _ in range(NUM_BATCHES - 1)
    ]
    sums: list[torch.Tensor] = [torch.empty(0)] * NUM_BATCHES

    def first(idx: int) -> None:
        given = batch_input(context.rank_idx, idx)
        dispatchers[idx].dispatch_a(given.x, given, tbo_subbatch_index=idx)

    def second(idx: int) -> None:
        output = dispatchers[idx].dispatch_b(tbo_subbatch_index=idx)
        dispatchers[idx].combine_a(combine_input(output), tbo_subbatch_index=idx)

    def third(idx: int) -> None:
        sums[idx] = dispatchers[idx].combine_b(tbo_subbatch_index=idx)

    return (first, second, third), sums


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize("is_one_dispatcher", [False, True])
def test_two_batches_are_in_flight(mode: str, is_one_dispatcher: bool) -> None:
    def make(context: RankContext) -> Batches:
        return sglang_batches(context, mode, is_one_dispatcher)

    errors = run_ranks(run_in_flight, 2, make, threading.Event(), mode="threads")
    assert max(error for rank in errors for error in rank) < 0.05


def run_sglang(context: RankContext, fn: Any, mode: str, options: dict[str, Any]) -> Any:
    buffers = group_buffers(context.group)
    try:
        return fn(sglang(context.group, mode, **options), batch_input(context.rank_idx, 0))
    finally:
        buffers.destroy()


def on_ranks(fn: Any, mode: str = "normal", **options: Any) -> list[Any]:
    return run_ranks(run_sglang, 2, fn, mode, options, mode="threads")


def test_formats() -> None:
    def normal(dispatcher: SglangDispatcher, given: Any) -> None:
        output = dispatcher.dispatch(given.x, given)
        assert output.format is DispatchOutputFormat.DEEPEP_NORMAL
        assert output._fields == (
            "hidden_states", "hidden_states_scale", "topk_ids", "topk_weights",
            "num_recv_tokens_per_expert",
        )  # fmt: skip
        assert isinstance(output.num_recv_tokens_per_expert, list)
        assert all(count % 16 == 0 for count in output.num_recv_tokens_per_expert)
        counts = torch.bincount(output.topk_ids[output.topk_ids >= 0], minlength=2)
        padded = -(-counts // 16) * 16
        assert output.num_recv_tokens_per_expert == padded.tolist()
        y = combine_input(output)
        assert y.format is CombineInputFormat.DEEPEP_NORMAL
        dispatcher.combine(y)

    def low_latency(dispatcher: SglangDispatcher, given: Any) -> None:
        output = dispatcher.dispatch(given.x, given)
        assert output.format is DispatchOutputFormat.DEEPEP_LL
        assert output._fields == (
            "hidden_states", "hidden_states_scale", "topk_ids", "topk_weights", "masked_m",
            "expected_m",
        )  # fmt: skip
        assert output.hidden_states.shape == (2, 2 * MOST_TOKENS, HIDDEN)
        assert output.hidden_states.dtype is torch.float8_e4m3fn
        assert output.hidden_states_scale.shape == (2, 2 * MOST_TOKENS, HIDDEN // 128)
        assert output.masked_m.dtype is torch.int32
        assert output.expected_m == (5 * 2 * NUM_TOPK + NUM_EXPERTS) // NUM_EXPERTS
        rows = torch.zeros(output.hidden_states.shape, dtype=torch.bfloat16)
        dispatcher.combine(DeepEPLLCombineInput(rows, output.topk_ids, output.topk_weights))

    on_ranks(normal, expert_alignment=16)
    on_ranks(low_latency, "low_latency", quantization=FP8_BLOCK128)


def test_column_major_scales_of_fixed_places() -> None:
    column_major = Quantization(format=FP8_BLOCK128.format, is_column_major=True)

    def run(dispatcher: SglangDispatcher, given: Any) -> None:
        scales = dispatcher.dispatch(given.x.repeat(1, 4), given).hidden_states_scale
        assert scales.shape == (2, 2 * MOST_TOKENS, 4)
        assert scales.stride(1) == 1

    on_ranks(run, "low_latency", quantization=column_major)


def test_auto_mode_follows_the_batch() -> None:
    is_extend = [True]

    def run(dispatcher: SglangDispatcher, given: Any) -> list[str]:
        found = []
        for is_extend[0] in (True, False, True):
            output = dispatcher.dispatch(given.x, given)
            found.append(output.format.value)
            dispatcher.combine(combine_input(output))
        return found

    # One rank: the flag is one for all threads.
    found = run_ranks(
        run_sglang, 1, run, "auto", {"is_extend_in_batch": lambda: is_extend[0]}, mode="threads"
    )
    assert found == [["deepep_normal", "deepep_ll", "deepep_normal"]]


def test_hooks_see_and_replace_what_passes() -> None:
    def run(dispatcher: SglangDispatcher, given: Any) -> list[str]:
        seen: list[str] = []

        def pre_dispatch(owner: Any, x: Any, topk_output: Any) -> Any:
            assert owner is dispatcher
            seen.append("pre dispatch")
            return x * 2, topk_output

        handles = [
            dispatcher.register_pre_dispatch_hook(pre_dispatch),
            dispatcher.register_deepep_dispatch_hook(lambda owner: seen.append("between")),
            dispatcher.register_post_dispatch_hook(lambda owner, out: seen.append("post dispatch")),
            dispatcher.register_pre_combine_hook(lambda owner, value: seen.append("pre combine")),
            dispatcher.register_post_combine_hook(lambda owner, y: y + 1),
        ]
        output = dispatcher.dispatch(given.x, given)
        y = dispatcher.combine(combine_input(output))
        assert torch.allclose(y.float(), 2 * identity_sum(given) + 1, atol=0.1)
        for handle in handles:
            handle.remove()
            handle.remove()
        y = dispatcher.combine(combine_input(dispatcher.dispatch(given.x, given)))
        assert torch.allclose(y.float(), identity_sum(given), atol=0.1)
        return seen

    for seen in on_ranks(run):
        assert seen == ["pre dispatch", "between", "post dispatch", "pre combine"]


def test_calls_out_of_order_are_refused() -> None:
    def run(dispatcher: SglangDispatcher, given: Any) -> None:
        for method in (dispatcher.dispatch_b, dispatcher.combine_b):
            with pytest.raises(RuntimeError, match="is called before dispatch_a"):
                method()
        dispatcher.dispatch_a(given.x, given)
        with pytest.raises(RuntimeError, match="dispatch_a is called between dispatch_a and"):
            dispatcher.dispatch_a(given.x, given)
        output = dispatcher.dispatch_b()
        with pytest.raises(RuntimeError, match="combine_b is called between dispatch_b and"):
            dispatcher.combine_b()
        dispatcher.combine(combine_input(output))

    on_ranks(run)


def test_a_mistake_of_one_rank_is_raised_on_all_and_forgotten() -> None:
    def run(dispatcher: SglangDispatcher, given: Any) -> str:
        is_first = dispatcher._buffers[False].communicator.rank_idx == 0
        x = given.x[:, : HIDDEN // 2] if is_first else given.x
        with pytest.raises(ValueError, match="rank 0: hidden_states has hidden 64") as raised:
            dispatcher.dispatch(x, given)
        dispatcher.combine(combine_input(dispatcher.dispatch(given.x, given)))
        return str(raised.value)

    assert len(on_ranks(run, hidden_size=HIDDEN)) == 2


def test_quant_config() -> None:
    def run(dispatcher: SglangDispatcher, given: Any) -> None:
        dtypes = []
        for name in ("bf16", "fp8", "mxfp8"):
            dispatcher.set_quant_config({"dispatcher_output_dtype": name, "weight_dtype": None})
            output = dispatcher.dispatch(given.x, given)
            scale = output.hidden_states_scale
            dtypes.append((output.hidden_states.dtype, None if scale is None else scale.dtype))
            rows = torch.zeros(output.hidden_states.shape, dtype=torch.bfloat16)
            dispatcher.combine(DeepEPNormalCombineInput(rows, output.topk_ids, output.topk_weights))
        e4m3 = torch.float8_e4m3fn
        assert dtypes == [
            (torch.bfloat16, None),
            (e4m3, torch.float32),
            (e4m3, torch.float8_e8m0fnu),
        ]
        with pytest.raises(ValueError, match=r"got \['color'\] as well"):
            dispatcher.set_quant_config({"color": 1})
        with pytest.raises(ValueError, match="got 'nvfp4'"):
            dispatcher.set_quant_config({"dispatcher_output_dtype": "nvfp4"})
        with pytest.raises(NotImplementedError, match="NVFP4"):
            dispatcher.set_quant_config({"input_global_scale": torch.ones(1)})
        dispatcher.set_overlap_args("signals", {"block_m": 64})
        assert (dispatcher.overlap_args, dispatcher.meta_overlap_args) == (
            "signals",
            {"block_m": 64},
        )
        dispatcher.clear_overlap_args()
        assert (dispatcher.overlap_args, dispatcher.meta_overlap_args) == (None, None)

    on_ranks(run)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"deepep_mode": "fast"}, ValueError, "deepep_mode must be"),
        ({"deepep_mode": "low_latency"}, ValueError, "num_max_tokens_per_rank is needed"),
        ({"deepep_mode": "normal", "num_experts": None}, ValueError, "num_experts is needed"),
        (
            {"deepep_mode": "normal", "num_local_experts": 3},
            ValueError,
            "num_local_experts is 3, this rank has 4",
        ),
        ({"deepep_mode": "normal", "async_finish": 1}, TypeError, "async_finish must be a bool"),
        (
            {"deepep_mode": "auto", "num_max_tokens_per_rank": 4},
            ValueError,
            "needs is_extend_in_batch",
        ),
    ],
)
def test_sglang_arguments(options: dict[str, Any], error: type[Exception], message: str) -> None:
    def run(context: RankContext) -> None:
        buffers = group_buffers(context.group)
        with pytest.raises(error, match=message):
            SglangDispatcher(context.group, NUM_TOPK, **({"num_experts": NUM_EXPERTS} | options))
        buffers.destroy()

    run_ranks(run, 1, mode="threads")
