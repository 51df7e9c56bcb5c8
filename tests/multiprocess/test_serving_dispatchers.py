"""SGLang's and vLLM's shapes beyond the suite: phases in flight, hooks, formats, what is refused."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
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
from moe_comm.dispatcher.vllm import (
    FusedMoEActivationFormat,
    VllmPrepareAndFinalize,
    weight_and_reduce,
)
from moe_comm.dispatcher.vllm_manager import VllmAll2AllManager
from moe_comm.group_buffers import group_buffers
from moe_comm.quantization import FP8_BLOCK128, MXFP8, Quantization
from moe_comm.testing import RankContext, run_ranks

NUM_EXPERTS, NUM_TOPK, HIDDEN, MOST_TOKENS = 4, 2, 128, 8
BATCHES = 2


def batch_input(rank_idx: int, batch_idx: int, num_tokens: int = 5) -> Any:
    draw = torch.Generator().manual_seed(10 * rank_idx + batch_idx)
    return types.SimpleNamespace(
        x=torch.randn(num_tokens, HIDDEN, generator=draw).bfloat16(),
        topk_ids=torch.rand(num_tokens, NUM_EXPERTS, generator=draw).argsort(1)[:, :NUM_TOPK],
        topk_weights=torch.rand(num_tokens, NUM_TOPK, generator=draw),
    )


def identity_sum(given: Any) -> torch.Tensor:
    """What a layer gives whose experts return their input."""
    return given.x.float() * given.topk_weights.sum(1, keepdim=True)


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


Begin = Callable[[int], None]


def sglang_batches(
    context: RankContext, mode: str, is_one_dispatcher: bool
) -> tuple[list[Begin], list[Begin], list[Begin], list[torch.Tensor]]:
    """Phase functions of every batch: dispatch_a, dispatch_b and combine_a, combine_b."""
    shared = sglang(context.group, mode)
    dispatchers = [shared] + [
        shared if is_one_dispatcher else sglang(context.group, mode) for _ in range(BATCHES - 1)
    ]
    sums: list[torch.Tensor] = [torch.empty(0)] * BATCHES

    def first(idx: int) -> None:
        given = batch_input(context.rank_idx, idx)
        dispatchers[idx].dispatch_a(given.x, given, tbo_subbatch_index=idx)

    def second(idx: int) -> None:
        output = dispatchers[idx].dispatch_b(tbo_subbatch_index=idx)
        dispatchers[idx].combine_a(combine_input(output), tbo_subbatch_index=idx)

    def third(idx: int) -> None:
        sums[idx] = dispatchers[idx].combine_b(tbo_subbatch_index=idx)

    return [first] * BATCHES, [second] * BATCHES, [third] * BATCHES, sums


def vllm_batches(
    context: RankContext, is_batched: bool
) -> tuple[list[Begin], list[Begin], list[Begin], list[torch.Tensor]]:
    """The same of one VllmPrepareAndFinalize, whose micro-batches are numbered."""
    current = [0]
    most = MOST_TOKENS if is_batched else None
    buffer = group_buffers(context.group).get(NUM_EXPERTS, num_max_tokens_per_rank=most)
    shape = VllmPrepareAndFinalize(buffer, is_batched=is_batched, ubatch_id=lambda: current[0])
    sums = [torch.full((5, HIDDEN), float("nan"), dtype=torch.bfloat16) for _ in range(BATCHES)]
    pending: list[Any] = [None] * BATCHES
    config = types.SimpleNamespace(quant_dtype=None, block_shape=None)

    def first(idx: int) -> None:
        current[0] = idx
        given = batch_input(context.rank_idx, idx)
        pending[idx] = shape.prepare_async(
            given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, False, config
        )

    def second(idx: int) -> None:
        current[0] = idx
        hook, receiver = pending[idx]
        hook()
        rows, _, _, ids, weights = receiver()
        given = batch_input(context.rank_idx, idx)
        if is_batched:
            ids, weights, out = given.topk_ids, given.topk_weights, rows
        else:
            out = rows[:, None].expand(-1, NUM_TOPK, -1)
        pending[idx] = shape.finalize_async(sums[idx], out, weights, ids, False)

    def third(idx: int) -> None:
        hook, receiver = pending[idx]
        hook()
        receiver()

    return [first] * BATCHES, [second] * BATCHES, [third] * BATCHES, sums


def run_in_flight(context: RankContext, make: Any, is_begun: threading.Event) -> list[float]:
    """Rank 0 begins both batches before rank 1 enters the first: beginning must not wait."""
    buffers = group_buffers(context.group)
    first, second, third, sums = make(context)
    if context.rank_idx != 0:
        assert is_begun.wait(60)
    for idx, begin in enumerate(first):
        begin(idx)
    is_begun.set()
    for functions in (second, third):
        for idx, function in enumerate(functions):
            function(idx)
    errors = [
        float((sums[idx].float() - identity_sum(batch_input(context.rank_idx, idx))).abs().max())
        for idx in range(BATCHES)
    ]
    buffers.destroy()
    return errors


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda c: sglang_batches(c, "normal", False), id="sglang-normal"),
        pytest.param(lambda c: sglang_batches(c, "normal", True), id="sglang-normal-shared"),
        pytest.param(lambda c: sglang_batches(c, "low_latency", False), id="sglang-ll"),
        pytest.param(lambda c: sglang_batches(c, "low_latency", True), id="sglang-ll-shared"),
        pytest.param(lambda c: vllm_batches(c, False), id="vllm-standard"),
        pytest.param(lambda c: vllm_batches(c, True), id="vllm-batched"),
    ],
)
def test_two_batches_are_in_flight(make: Any) -> None:
    errors = run_ranks(run_in_flight, 2, make, threading.Event(), mode="threads")
    assert max(error for rank in errors for error in rank) < 0.05


# ---------------------------------------------------------------------------------------------
# SGLang


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


# ---------------------------------------------------------------------------------------------
# vLLM

FP8_CONFIG = types.SimpleNamespace(quant_dtype=torch.float8_e4m3fn, block_shape=[128, 128])
BF16_CONFIG = types.SimpleNamespace(quant_dtype=None, block_shape=None)


def run_vllm(context: RankContext, fn: Any, is_batched: bool, num_topk: int) -> Any:
    manager = VllmAll2AllManager(context.group)
    arguments = {"num_global_experts": NUM_EXPERTS, "token_hidden_size": HIDDEN}
    if is_batched:
        arguments["max_num_tokens_per_dp_rank"] = MOST_TOKENS
    shape = VllmPrepareAndFinalize(manager.get_handle(arguments), is_batched=is_batched)
    given = batch_input(context.rank_idx, 0)
    given.topk_ids = given.topk_ids[:, :num_topk]
    given.topk_weights = given.topk_weights[:, :num_topk]
    try:
        return fn(shape, given)
    finally:
        manager.destroy()


def on_vllm_ranks(fn: Any, *, is_batched: bool = False, num_topk: int = NUM_TOPK) -> list[Any]:
    return run_ranks(run_vllm, 2, fn, is_batched, num_topk, mode="threads")


@pytest.mark.parametrize("is_batched", [False, True])
def test_properties(is_batched: bool) -> None:
    def run(shape: VllmPrepareAndFinalize, given: Any) -> None:
        formats = FusedMoEActivationFormat
        wanted = formats.BatchedExperts if is_batched else formats.Standard
        assert shape.activation_format is wanted
        assert shape.topk_indices_dtype() is torch.int64
        assert shape.max_num_tokens_per_rank() == (MOST_TOKENS if is_batched else None)
        assert shape.num_dispatchers() == 2
        assert shape.output_is_reduced()
        assert shape.supports_async()
        assert not shape.supports_deferred_moe_finalize()
        assert shape.maybe_roundup_layer_hidden_size(2880, torch.bfloat16) == 2880
        assert shape.maybe_roundup_layer_hidden_size(2881, torch.bfloat16) == 2888

    on_vllm_ranks(run, is_batched=is_batched)


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("out", ["in place", "other dtype", "strided"])
def test_weights_on_input_and_any_output(is_batched: bool, out: str) -> None:
    def run(shape: VllmPrepareAndFinalize, given: Any) -> None:
        rows, _, metadata, ids, weights = shape.prepare(
            given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, True, BF16_CONFIG
        )
        if is_batched:
            assert ids is None
            ids, weights, expert_out = given.topk_ids, given.topk_weights, rows
            assert metadata.expert_num_tokens.dtype is torch.int32
        else:
            expert_out = rows[:, None]
            assert metadata.expert_num_tokens.sum() == rows.shape[0]
        output = torch.full_like(given.x, float("nan"))
        if out == "other dtype":
            output = output.float()
        elif out == "strided":
            output = output.repeat(1, 2)[:, ::2]
        shape.finalize(output, expert_out, weights, ids, True)
        assert torch.allclose(output.float(), identity_sum(given), atol=0.05)

    on_vllm_ranks(run, is_batched=is_batched, num_topk=1)


def test_ids_are_global_and_of_an_expert_elsewhere() -> None:
    def run(shape: VllmPrepareAndFinalize, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        given.topk_ids[0, 0] = -1
        _, _, _, ids, weights = shape.prepare(
            given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, False, BF16_CONFIG
        )
        return ids, weights

    for rank_idx, (ids, weights) in enumerate(on_vllm_ranks(run)):
        is_here = ids // 2 == rank_idx
        assert ids.min() >= 0
        assert ids.max() < NUM_EXPERTS
        assert torch.equal(weights != 0, is_here)


def test_packed_scales_where_the_experts_take_them() -> None:
    def run(shape: VllmPrepareAndFinalize, given: Any) -> list[torch.dtype]:
        dtypes = []
        for is_packed in (False, True):
            experts = types.SimpleNamespace(supports_packed_ue8m0_act_scales=lambda v=is_packed: v)
            shape.post_init_setup(experts)
            _, scales, *_ = shape.prepare(
                given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, False, FP8_CONFIG
            )
            assert scales is not None
            dtypes.append(scales.dtype)
        return dtypes

    assert on_vllm_ranks(run) == [[torch.float32, torch.int32]] * 2


def test_how_rows_are_quantised() -> None:
    def run(shape: VllmPrepareAndFinalize, given: Any) -> None:
        def prepare(config: Any, defer: bool = False) -> Any:
            return shape.prepare(
                given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, False, config, defer
            )

        mx = types.SimpleNamespace(quant_dtype="mxfp8", block_shape=[1, 32])
        assert prepare(mx)[1].dtype is MXFP8.sf_dtype
        assert prepare(FP8_CONFIG, defer=True)[0].dtype is torch.bfloat16
        nvfp4 = types.SimpleNamespace(quant_dtype="nvfp4", block_shape=None)
        with pytest.raises(NotImplementedError, match="cannot be quantised to nvfp4"):
            prepare(nvfp4)
        assert prepare(nvfp4, defer=True)[0].dtype is torch.bfloat16

    on_vllm_ranks(run)


def test_weight_and_reduce_of_vllm_is_called() -> None:
    class Impl:
        def apply(self, output: Any, fused_expert_output: Any, **given: Any) -> torch.Tensor:
            assert output is None
            assert set(given) == {"topk_weights", "topk_ids", "apply_router_weight_on_input"}
            return weight_and_reduce(
                fused_expert_output, given["topk_weights"], apply_router_weight_on_input=False
            )

    def run(shape: VllmPrepareAndFinalize, given: Any) -> None:
        rows, _, _, ids, weights = shape.prepare(
            given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, False, BF16_CONFIG
        )
        output = torch.empty_like(given.x)
        by_choice = rows[:, None].expand(-1, NUM_TOPK, -1)
        shape.finalize(output, by_choice, weights, ids, False, Impl())
        assert torch.allclose(output.float(), identity_sum(given), atol=0.05)

    on_vllm_ranks(run)


def test_vllm_mistakes() -> None:
    def run(shape: VllmPrepareAndFinalize, given: Any) -> None:
        def prepare(num_experts: int, on_input: bool) -> None:
            shape.prepare(
                given.x,
                given.topk_weights,
                given.topk_ids,
                num_experts,
                None,
                on_input,
                BF16_CONFIG,
            )

        with pytest.raises(RuntimeError, match="finalised before it is prepared"):
            shape.finalize(given.x, given.x, given.topk_weights, given.topk_ids, False)
        with pytest.raises(ValueError, match="num_experts is 5, the buffer has 4"):
            prepare(5, False)
        with pytest.raises(ValueError, match="needs 1 choice per token, got 2"):
            prepare(NUM_EXPERTS, True)
        with pytest.raises(ValueError, match="needs a buffer with num_max_tokens_per_rank"):
            VllmPrepareAndFinalize(shape.buffer, is_batched=True)

    on_vllm_ranks(run)


def test_weight_and_reduce_leaves_out_what_is_elsewhere() -> None:
    out = torch.tensor([[[1.0, 2.0], [float("nan"), 4.0]]])
    weights = torch.tensor([[0.5, 0.0]])
    for on_input, want in ((False, [0.5, 1.0]), (True, [1.0, 2.0])):
        got = weight_and_reduce(out, weights, apply_router_weight_on_input=on_input)
        assert got.tolist() == [want]


def gather_and_scatter(context: RankContext) -> None:
    manager = VllmAll2AllManager(context.group)
    sizes = (3, 0, 5)
    draw = torch.Generator().manual_seed(1)
    hidden = [torch.randn(size, 8, generator=draw) for size in sizes]
    logits = [torch.randn(size, 5, generator=draw).bfloat16() for size in sizes]
    flags = [torch.rand(size, generator=draw) > 0.5 for size in sizes]
    ids = [torch.randint(9, (size, 3), generator=draw) for size in sizes]
    mine = context.rank_idx
    rows, got_logits, extra = manager.dispatch_router_logits(
        hidden[mine], logits[mine], extra_tensors=[flags[mine]]
    )
    for got, want in ((rows, hidden), (got_logits, logits), (extra[0], flags)):
        assert torch.equal(got, torch.cat(want))
    y = manager.combine(rows * (mine + 1))
    assert torch.allclose(y, hidden[mine] * 6)
    rows, weights, got_ids = manager.dispatch(hidden[mine], ids[mine].float(), ids[mine])
    assert torch.equal(got_ids, torch.cat(ids))
    assert torch.equal(weights, torch.cat(ids).float())
    assert torch.allclose(manager.combine(rows), hidden[mine] * 3)
    with pytest.raises(RuntimeError, match="combine is called before dispatch"):
        manager.combine(rows)
    manager.destroy()
    manager.destroy()


def test_manager_gathers_and_scatters_whole_batches() -> None:
    run_ranks(gather_and_scatter, 3, mode="threads")


def test_manager() -> None:
    def run(context: RankContext) -> None:
        manager = VllmAll2AllManager(context.group, dp_world_size=1, dp_rank=0)
        assert (manager.rank, manager.world_size, manager.internode) == (context.rank_idx, 2, False)
        handle = manager.get_handle({"num_experts": 4, "num_local_experts": 2, "num_ep_ranks": 2})
        assert manager.get_handle({"num_global_experts": 4}) is handle
        assert manager.get_handle({"num_experts": 4, "max_num_tokens_per_rank": 3}) is not handle
        for arguments, error, message in (
            ({}, ValueError, "get_handle needs num_experts"),
            ({"num_experts": 4, "num_ep_ranks": 3}, ValueError, "num_ep_ranks is 3"),
            ({"num_experts": 4, "num_local_experts": 1}, ValueError, "num_local_experts is 1"),
            ({"num_experts": 4, "speed": 1}, TypeError, r"does not know \['speed'\]"),
        ):
            with pytest.raises(error, match=message):
                manager.get_handle(arguments)
        with pytest.raises(NotImplementedError, match="1 data-parallel ranks share"):
            manager.dispatch_router_logits(torch.ones(1, 8), torch.ones(1, 4))
        rows, _ = manager.dispatch_router_logits(torch.ones(1, 8), torch.ones(1, 4), True)
        assert rows.shape == (2, 8)
        manager.set_num_sms(8)
        with pytest.raises(ValueError, match="num_sms must be an int >= 0, got -1"):
            manager.set_num_sms(-1)
        assert manager.max_sms_used() is None
        assert not manager.support_fault_tolerance
        with pytest.raises(ValueError, match="tcp_store_group must be None"):
            VllmAll2AllManager(context.group, object())
        manager.destroy()

    run_ranks(run, 2, mode="threads")
