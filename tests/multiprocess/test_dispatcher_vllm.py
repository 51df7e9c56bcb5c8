"""vLLM's shape beyond the suite: micro-batches in flight, formats, quantization, the manager."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest
import torch

from moe_comm.dispatcher.vllm import (
    FusedMoEActivationFormat,
    VllmPrepareAndFinalize,
    weight_and_reduce,
)
from moe_comm.dispatcher.vllm_manager import VllmAll2AllManager
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.peers.bootstrap import RankThreads
from moe_comm.resharding.formats.number_formats import unswizzle_scales
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


def vllm_batches(context: RankContext, is_batched: bool) -> Batches:
    """The same of one VllmPrepareAndFinalize, whose micro-batches are numbered."""
    current = [0]
    most = MOST_TOKENS if is_batched else None
    buffer = group_buffers(context.group).get(NUM_EXPERTS, num_max_tokens_per_rank=most)
    shape = VllmPrepareAndFinalize(buffer, is_batched=is_batched, ubatch_id=lambda: current[0])
    sums = [torch.full((5, HIDDEN), float("nan"), dtype=torch.bfloat16) for _ in range(NUM_BATCHES)]
    pending: list[Any] = [None] * NUM_BATCHES
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

    return (first, second, third), sums


@pytest.mark.parametrize("is_batched", [False, True])
def test_two_batches_are_in_flight(is_batched: bool) -> None:
    def make(context: RankContext) -> Batches:
        return vllm_batches(context, is_batched)

    errors = run_ranks(run_in_flight, 2, make, threading.Event(), mode="threads")
    assert max(error for rank in errors for error in rank) < 0.05


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


def test_ids_are_local_where_experts_take_no_map() -> None:
    def run(context: RankContext) -> None:
        manager = VllmAll2AllManager(context.group)
        experts = manager.get_handle({"num_experts": NUM_EXPERTS, "expert_rank": [0, 1, 1, 0]})
        shape = VllmPrepareAndFinalize(experts, has_local_ids=True)
        given = batch_input(context.rank_idx, 0)
        expert_map = torch.tensor([[0, -1, -1, 1], [-1, 0, 1, -1]], dtype=torch.int32)
        arguments = (given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS)
        rows, _, metadata, ids, weights = shape.prepare(
            *arguments, expert_map[context.rank_idx], False, BF16_CONFIG
        )
        counts = metadata.expert_num_tokens
        assert ids.dtype is torch.int32
        assert ids.tolist() == [[0]] * int(counts[0]) + [[1]] * int(counts[1])
        assert weights.dtype is torch.float32
        assert weights.shape == ids.shape
        scale = 1 + ids + 2 * context.rank_idx
        output = torch.full_like(given.x, float("nan"))
        shape.finalize(output, (rows * weights * scale).to(rows.dtype), weights, ids, False)
        factors = torch.tensor([1.0, 3.0, 4.0, 2.0])[given.topk_ids] * given.topk_weights
        assert torch.allclose(output.float(), given.x.float() * factors.sum(1)[:, None], rtol=0.02)
        with pytest.raises(ValueError, match=r"rank 1: expert_map must be \[-1, 0, 1, -1\], where"):
            shape.prepare(*arguments, expert_map[0], False, BF16_CONFIG)
        with pytest.raises(ValueError, match=r"rank 0: expert_map must be .*, got \[0, 0, -1\]"):
            shape.prepare(*arguments, torch.tensor([0, 0, -1]), False, BF16_CONFIG)
        with pytest.raises(ValueError, match="is_batched and has_local_ids are both True"):
            most = {"num_experts": NUM_EXPERTS, "max_num_tokens_per_rank": MOST_TOKENS}
            VllmPrepareAndFinalize(manager.get_handle(most), is_batched=True, has_local_ids=True)
        manager.destroy()

    run_ranks(run, 2, mode="threads")


@pytest.mark.parametrize("is_batched", [False, True])
@pytest.mark.parametrize("rounds", [False, True])
def test_scales_are_those_that_the_experts_take(
    monkeypatch: pytest.MonkeyPatch, is_batched: bool, rounds: bool
) -> None:
    deep_gemm = types.SimpleNamespace(is_deep_gemm_e8m0_used=lambda: rounds)
    monkeypatch.setattr("moe_comm.dispatcher.vllm.vllm_module", lambda name: deep_gemm)

    def run(shape: VllmPrepareAndFinalize, given: Any) -> list[Any]:
        found: list[Any] = []
        for is_packed in (False, True):
            experts = types.SimpleNamespace(supports_packed_ue8m0_act_scales=lambda v=is_packed: v)
            shape.post_init_setup(experts)
            _, scales, *_ = shape.prepare(
                given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, False, FP8_CONFIG
            )
            found += [scales.clone(), scales.stride(-1)]
        return found

    for plain, _, packed, stride in on_vllm_ranks(run, is_batched=is_batched):
        assert (plain.dtype, packed.dtype) == (torch.float32, torch.int32)
        assert (stride > 1) == is_batched  # from column to column, of which there is one
        are_powers = torch.frexp(plain)[0].eq(0.5)
        assert is_batched or bool(are_powers.all()) == rounds


def test_how_rows_are_quantized() -> None:
    def run(shape: VllmPrepareAndFinalize, given: Any) -> None:
        def prepare(config: Any, defer: bool = False) -> Any:
            return shape.prepare(
                given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, False, config, defer
            )

        mx = types.SimpleNamespace(
            quant_dtype="mxfp8", block_shape=[1, 32], is_scale_swizzled=False
        )
        rows, scales, *_ = prepare(mx)
        assert scales.dtype is torch.uint8
        assert scales.shape == (*rows.shape[:-1], rows.shape[-1] // 32)
        mx.is_scale_swizzled = True
        if shape.is_batched:
            with pytest.raises(NotImplementedError, match="cannot be swizzled in the batched"):
                prepare(mx)
        else:
            swizzled = prepare(mx)[1]
            assert swizzled.dtype is torch.uint8
            assert torch.equal(unswizzle_scales(swizzled, *scales.shape), scales)
        assert prepare(FP8_CONFIG, defer=True)[0].dtype is torch.bfloat16
        nvfp4 = types.SimpleNamespace(quant_dtype="nvfp4", block_shape=None)
        with pytest.raises(
            NotImplementedError, match="cannot be quantized to nvfp4 with blocks None"
        ):
            prepare(nvfp4)
        assert prepare(nvfp4, defer=True)[0].dtype is torch.bfloat16

    on_vllm_ranks(run)
    on_vllm_ranks(run, is_batched=True)


@pytest.mark.parametrize("dtype", [torch.int8, "nvfp4"])
def test_vllm_quantizes_received_rows_where_scales_do_not_travel(
    monkeypatch: pytest.MonkeyPatch, dtype: Any
) -> None:
    scales = {"nvfp4": torch.tensor(4.0), torch.int8: torch.tensor(0.5)}

    def quantize(rows: torch.Tensor, scale: torch.Tensor, **given: Any) -> Any:
        assert given == {
            "quant_dtype": dtype,
            "per_act_token_quant": False,
            "block_shape": None,
            "is_scale_swizzled": True,
        }
        return (rows.float() / scale).round().to(torch.int8), scale

    utils = types.SimpleNamespace(moe_kernel_quantize_input=quantize)
    monkeypatch.setattr("moe_comm.dispatcher.vllm.vllm_module", lambda name: utils)
    config = types.SimpleNamespace(
        quant_dtype=dtype,
        block_shape=None,
        a1_scale=scales[torch.int8],
        a1_gscale=scales["nvfp4"],
        per_act_token_quant=False,
        is_scale_swizzled=True,
    )

    def run(shape: VllmPrepareAndFinalize, given: Any) -> None:
        rows, *_ = shape.prepare(
            given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, False, BF16_CONFIG
        )
        quantized, scale, _, ids, _ = shape.prepare(
            given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, False, config
        )
        assert scale is scales[dtype]
        assert torch.equal(quantized, (rows.float() / scale).round().to(torch.int8))
        assert ids.shape == (rows.shape[0], NUM_TOPK)
        # There is nothing to quantize where nobody has a token.
        nothing = (given.x[:0], given.topk_weights[:0], given.topk_ids[:0])
        assert shape.prepare(*nothing, NUM_EXPERTS, None, False, config)[1] is None

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

        with pytest.raises(RuntimeError, match="finalized before it is prepared"):
            shape.finalize(given.x, given.x, given.topk_weights, given.topk_ids, False)
        with pytest.raises(ValueError, match="num_experts is 5, the buffer has 4"):
            prepare(5, False)
        with pytest.raises(ValueError, match="needs 1 choice per token, got 2"):
            prepare(NUM_EXPERTS, True)
        is_first = shape.buffer.communicator.rank_idx == 0
        ids = given.topk_ids.float() if is_first else given.topk_ids
        with pytest.raises(TypeError, match="rank 0: topk_idx must be integers"):
            shape.prepare(given.x, given.topk_weights, ids, NUM_EXPERTS, None, False, BF16_CONFIG)
        rows, _, _, ids, weights = shape.prepare(
            given.x, given.topk_weights, given.topk_ids, NUM_EXPERTS, None, False, BF16_CONFIG
        )
        by_choice = rows[:, None].expand(-1, NUM_TOPK, -1)
        with pytest.raises(
            ValueError, match=r"rank 0: topk_weights must have shape \(\d+, 2\), got"
        ):
            shape.finalize(
                torch.empty_like(given.x),
                by_choice,
                weights[:1] if is_first else weights,
                ids,
                False,
            )
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


def test_manager_over_a_store_and_for_the_experts_of_the_model(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("moe_comm.dispatcher.vllm_manager.num_experts_of_model", lambda: 6)

    def run(context: RankContext, ranks: RankThreads) -> None:
        mine = context.rank_idx
        store_group = types.SimpleNamespace(
            rank=mine, world_size=2, all_gather_obj=ranks[mine].all_gather
        )
        manager = VllmAll2AllManager(None, store_group)
        assert manager.tcp_store_group is store_group
        assert (manager.rank, manager.world_size) == (mine, 2)
        assert manager.get_handle({}) is manager.get_handle({"num_experts": 6})
        manager.destroy()

    run_ranks(run, 2, RankThreads(2), mode="threads")


def test_manager() -> None:
    def run(context: RankContext) -> None:
        manager = VllmAll2AllManager(context.group, dp_world_size=1, dp_rank=0)
        assert (manager.rank, manager.world_size, manager.internode) == (context.rank_idx, 2, False)
        handle = manager.get_handle({"num_experts": 4, "num_local_experts": 2, "num_ep_ranks": 2})
        assert manager.get_handle({"num_global_experts": 4}) is handle
        assert manager.get_handle({"num_experts": 4, "max_num_tokens_per_rank": 3}) is not handle
        for arguments, error, message in (
            ({}, ValueError, "get_handle needs num_experts where vLLM has no model"),
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
        with pytest.raises(TypeError, match="rank 0: tcp_store_group must have rank, world_size"):
            VllmAll2AllManager(context.group, object())
        manager.destroy()

    run_ranks(run, 2, mode="threads")
