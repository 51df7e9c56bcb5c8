"""SGLang's shape beyond the suite: phases in flight, formats, hooks, modes, what is refused."""

from __future__ import annotations

import importlib.metadata
import sys
import threading
import types
from pathlib import Path
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
from moe_comm.dispatcher.sglang_plugin import register
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.tensors.quantization import FP8_BLOCK128, Quantization
from moe_comm.testing import RankContext, RankError, run_ranks
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
        with pytest.raises(NotImplementedError, match="dispatcher_output_dtype='nvfp4'"):
            dispatcher.set_quant_config({"dispatcher_output_dtype": "nvfp4"})
        with pytest.raises(ValueError, match="got 'fp4'"):
            dispatcher.set_quant_config({"dispatcher_output_dtype": "fp4"})
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


# Keys that the quantization methods of SGLang 0.5.23 send.
SENT = [
    ({}, False, True),
    ({"weight_dtype": torch.bfloat16, "use_mxfp8": False}, False, True),
    ({"quant_type": "gguf"}, False, True),
    ({"input_global_scale": None}, False, True),
    ({"dispatcher_output_dtype": "bf16"}, False, False),
    (
        {
            "normal_dispatcher_output_dtype": "bf16",
            "low_latency_dispatcher_output_dtype": "fp8",
        },
        False,
        True,
    ),
    (
        {"dispatcher_output_dtype": "fp8", "low_latency_dispatcher_output_dtype": "bf16"},
        True,
        False,
    ),
]


def is_quantized(dispatcher: SglangDispatcher, given: Any) -> bool:
    """Return whether the rows of a dispatch came with scales; finishes the round."""
    output = dispatcher.dispatch(given.x, given)
    rows = torch.zeros(output.hidden_states.shape, dtype=torch.bfloat16)
    dispatcher.combine(output._replace(hidden_states=rows)[:1] + tuple(output[2:4]))
    return output.hidden_states_scale is not None


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_every_key_that_sglang_sends(mode: str) -> None:
    def run(dispatcher: SglangDispatcher, given: Any) -> None:
        for config, is_fp8_normal, is_fp8_low_latency in SENT:
            dispatcher.set_quant_config(config)
            assert dispatcher.quant_config == config
            is_told = any(name.endswith("output_dtype") for name in config)
            is_fp8 = is_fp8_low_latency if mode == "low_latency" else is_fp8_normal
            assert is_quantized(dispatcher, given) == (is_fp8 and is_told), config

    on_ranks(run, mode)


class FakeSglang:
    """The functions of SGLang that are asked, in `sys.modules` for a test."""

    def __init__(self, patch: pytest.MonkeyPatch, server_dtype: str | None = None) -> None:
        self.server_dtype = server_dtype
        self.asked: list[tuple[str, Any]] = []
        utils = types.SimpleNamespace(get_deepep_output_dtype=self.output_dtype)
        self.deep_gemm = types.SimpleNamespace(
            ENABLE_JIT_DEEPGEMM=False, DEEPGEMM_BLACKWELL=False, DEEPGEMM_SCALE_UE8M0=False
        )
        patch.setitem(sys.modules, "sglang.srt.layers.moe.utils", utils)
        patch.setitem(sys.modules, "sglang.srt.layers.deep_gemm_wrapper", self.deep_gemm)

    def output_dtype(self, dispatcher: Any) -> Any:
        mode = dispatcher.dispatch_mode.value
        self.asked.append((mode, dispatcher.runner_backend))
        told = dispatcher.quant_config.get("dispatcher_output_dtype")
        told = dispatcher.quant_config.get(f"{mode}_dispatcher_output_dtype", told)
        return types.SimpleNamespace(value=self.server_dtype or told or "fp8")


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
def test_sglang_chooses_where_it_says_for_which_experts(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeSglang(monkeypatch)

    def run(dispatcher: SglangDispatcher, given: Any) -> None:
        assert (dispatcher.runner_backend, dispatcher.expert_mask_gpu) == ("triton", None)
        # Rows of the normal mode are FP8 for DeepGEMM alone.
        assert is_quantized(dispatcher, given) == (mode == "low_latency")
        for config, is_fp8_normal, is_fp8_low_latency in SENT:
            dispatcher.set_quant_config(config)
            is_fp8 = is_fp8_low_latency if mode == "low_latency" else is_fp8_normal
            is_fp8 = is_fp8 and mode == "low_latency"
            assert is_quantized(dispatcher, given) == is_fp8, config

    on_ranks(run, mode, runner_backend="triton")
    assert {"normal", "low_latency"} == {asked for asked, _ in fake.asked}
    assert {backend for _, backend in fake.asked} == {"triton"}
    fake.deep_gemm.ENABLE_JIT_DEEPGEMM = True
    quantized = on_ranks(is_quantized, mode, runner_backend="triton")
    assert quantized == [True, True]

    def scales(dispatcher: SglangDispatcher, given: Any) -> tuple[torch.dtype, bool]:
        found = dispatcher.dispatch(given.x, given).hidden_states_scale
        return found.dtype, found.stride(-1) == 1

    assert on_ranks(scales, mode, runner_backend="triton") == [(torch.float32, True)] * 2
    # Scales as DeepGEMM's kernels of Blackwell read them.
    fake.deep_gemm.DEEPGEMM_BLACKWELL = fake.deep_gemm.DEEPGEMM_SCALE_UE8M0 = True
    packed = [(torch.int32, mode == "normal")] * 2
    assert on_ranks(scales, mode, runner_backend="triton") == packed
    fake.server_dtype = "bf16"
    assert on_ranks(is_quantized, mode, runner_backend="triton") == [False, False]
    quantized = on_ranks(is_quantized, mode, runner_backend="triton", quantization=FP8_BLOCK128)
    assert quantized == [True, True]
    fake.server_dtype = "int8"
    with pytest.raises(RankError, match="'int8': such rows are not offered"):
        on_ranks(is_quantized, mode, runner_backend="triton")


def test_the_limit_of_sglangs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def places(context: RankContext) -> int:
        dispatcher = SglangDispatcher(
            context.group, NUM_TOPK, num_experts=NUM_EXPERTS, deepep_mode="low_latency"
        )
        given = batch_input(context.rank_idx, 0)
        try:
            return int(dispatcher.dispatch(given.x, given).hidden_states.shape[1])
        finally:
            group_buffers(context.group).destroy()

    name = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
    monkeypatch.delenv(name, raising=False)
    assert run_ranks(places, 2, mode="threads") == [256, 256]
    monkeypatch.setenv(name, "24")
    assert run_ranks(places, 2, mode="threads") == [48, 48]
    monkeypatch.setenv(name, "many")
    with pytest.raises(RankError, match="'many'"):
        run_ranks(places, 2, mode="threads")


def test_the_plugin_replaces_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[tuple[Any, ...]] = []
    registry = types.SimpleNamespace(register=lambda *given: registered.append(given))
    module = types.SimpleNamespace(
        HookRegistry=registry, HookType=types.SimpleNamespace(REPLACE="replace")
    )
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", module)
    for names in ("", "other"):
        monkeypatch.setenv("SGLANG_PLUGINS", names)
        register()
    assert registered == []
    monkeypatch.setenv("SGLANG_PLUGINS", "other, moe_comm")
    register()
    (replaced,) = registered
    assert replaced == (
        "sglang.srt.layers.moe.token_dispatcher.deepep.DeepEPDispatcher",
        SglangDispatcher,
        "replace",
    )


def test_the_entry_point_leads_to_the_plugin() -> None:
    text = Path(__file__).resolve().parents[2].joinpath("pyproject.toml").read_text()
    _, _, rest = text.partition('[project.entry-points."sglang.srt.plugins"]\n')
    name, _, value = rest.partition("\n")[0].partition(" = ")
    assert name == "moe_comm"  # which SGLANG_PLUGINS names
    point = importlib.metadata.EntryPoint(name, value.strip('"'), "sglang.srt.plugins")
    assert point.load() is register


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"deepep_mode": "fast"}, ValueError, "deepep_mode must be"),
        ({"deepep_mode": "low_latency", "num_max_tokens_per_rank": -1}, ValueError, "got -1"),
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


MAPS = [[0, 1, 2, 3, 0, -1], [3, 1, 0, 2, 0, 3], [0, 1, 1, 2, 3, -1]]
"""Logical experts of physical ones, on two ranks; the last has one twice on a rank."""


def mapped(context: RankContext, mode: str, rule: str, table: Any = MAPS[0]) -> SglangDispatcher:
    return SglangDispatcher(
        context.group,
        NUM_TOPK,
        num_experts=6,
        num_local_experts=3,
        deepep_mode=mode,
        num_max_tokens_per_rank=MOST_TOKENS,
        physical_to_logical_map=table,
        replica_rule=rule,  # type: ignore[arg-type]
    )


def scaled_by_expert(output: Any, own: torch.Tensor) -> Any:
    """Experts that multiply by one more than their logical id, in either format."""
    factor = own + 1.0
    if output.format.is_deepep_ll():
        rows = (output.hidden_states * factor[:, None, None]).bfloat16()
        return DeepEPLLCombineInput(rows, output.topk_ids, output.topk_weights)
    local = output.topk_ids
    weight = (output.topk_weights * factor[local.clamp(0)] * (local >= 0)).sum(1, keepdim=True)
    rows = (output.hidden_states * weight).bfloat16()
    return DeepEPNormalCombineInput(rows, local, output.topk_weights)


@pytest.mark.parametrize("mode", ["normal", "low_latency"])
@pytest.mark.parametrize("rule", ["given", "balanced", "nearest", "hash"])
def test_physical_experts_are_where_the_map_says(mode: str, rule: str) -> None:
    def run(context: RankContext) -> list[list[int]]:
        buffers = group_buffers(context.group)
        dispatcher = mapped(context, mode, rule)
        other = mapped(context, mode, rule, MAPS[1])  # of another layer: nothing is shared
        received = []
        for step, rows in enumerate([*MAPS, MAPS[0]]):
            table = torch.tensor(rows, dtype=torch.int32)
            if step:
                dispatcher.replace_physical_to_logical_map(table)
            given = batch_input(context.rank_idx, step)
            logical = given.topk_ids
            if rule == "given":  # the last physical expert of each: copies, too
                given.topk_ids = torch.tensor(
                    [max(p for p, e in enumerate(rows) if e == expert) for expert in range(4)]
                )[logical].int()
            output = dispatcher.dispatch(given.x, given)
            counts = (
                output.masked_m.tolist()
                if mode == "low_latency"
                else output.num_recv_tokens_per_expert
            )
            received.append(counts)
            own = table.view(2, 3)[context.rank_idx]
            y = dispatcher.combine(scaled_by_expert(output, own))
            expected = given.x * (given.topk_weights * (logical + 1.0)).sum(1, keepdim=True)
            assert float((y.float() - expected).abs().max()) < 0.1, (step, rows)
        given = batch_input(context.rank_idx, 0)
        if rule != "given":
            output = other.dispatch(given.x, given)
            own = torch.tensor(MAPS[1]).view(2, 3)[context.rank_idx]
            y = other.combine(scaled_by_expert(output, own))
            expected = given.x * (given.topk_weights * (given.topk_ids + 1.0)).sum(1, keepdim=True)
            assert float((y.float() - expected).abs().max()) < 0.1
        buffers.destroy()
        return received

    received = run_ranks(run, 2, mode="threads")
    for step, rows in enumerate([*MAPS, MAPS[0]]):
        chosen = torch.cat([batch_input(rank_idx, step).topk_ids for rank_idx in range(2)])
        loads = chosen.flatten().bincount(minlength=4).tolist()
        fixed = [
            sum(load for expert, load in enumerate(loads) if expert not in rows[3 * other :][:3])
            for other in (1, 0)
        ]
        counts = [sum(of_rank[step]) for of_rank in received]
        assert sum(counts) == sum(loads)
        if rule == "balanced":
            assert max(counts) == max(*fixed, sum(loads) // 2), (step, rows)


def test_a_map_that_cannot_be_is_refused_on_every_rank() -> None:
    def run(context: RankContext) -> None:
        buffers = group_buffers(context.group)
        is_last = context.rank_idx == 1
        for table, rule, message in (
            (MAPS[0][:4], "given", "must have num_experts = 6 physical experts, got 4"),
            (MAPS[is_last], "given", "num_experts=4"),
            ([0, 1, 2, 4, 0, -1], "given", "expert 3"),
            (MAPS[0], "fastest", "replica_rule must be one of"),
            (None, "balanced", "replica_rule needs a physical_to_logical_map"),
        ):
            with pytest.raises(ValueError, match=message):
                mapped(context, "normal", rule, table)
        dispatcher = mapped(context, "normal", "given")
        given = batch_input(context.rank_idx, 0)
        for wrong in (5, 6, -2):
            ids = given.topk_ids.clone()
            if is_last:
                ids[1, 0] = wrong
            chosen = types.SimpleNamespace(topk_ids=ids, topk_weights=given.topk_weights)
            message = f"= {wrong} is not a slot that holds an expert in .-1, 6."
            with pytest.raises(ValueError, match=message):
                dispatcher.dispatch(given.x, chosen)
        for table, message in (
            (MAPS[1][:4] if is_last else MAPS[1], "physical experts, got 4"),
            (MAPS[1 + is_last], "ranks have different placements"),
            ([0, 1, 2, 0, 1, 2], "placement must have num_experts = 4, got 3"),
        ):
            with pytest.raises(ValueError, match=message):
                dispatcher.replace_physical_to_logical_map(table)
        plain = sglang(context.group)
        with pytest.raises(ValueError, match="made without a physical_to_logical_map"):
            plain.replace_physical_to_logical_map(MAPS[0])
        dispatcher.combine(combine_input(dispatcher.dispatch(given.x, given)))  # all is as it was
        buffers.destroy()

    run_ranks(run, 2, mode="threads")
