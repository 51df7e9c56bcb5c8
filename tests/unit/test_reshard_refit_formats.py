from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from moe_comm.resharding import refit
from moe_comm.resharding.describe.parallelism import Parallelism
from moe_comm.resharding.formats.number_formats import (
    FP8BlockTensor,
    MXFP8Tensor,
    quantize_fp8_block,
)
from moe_comm.resharding.formats.transforms import FP8BlockReshardTransform, MXFP8ReshardTransform
from moe_comm.resharding.hold import refit_pass
from moe_comm.resharding.plan.reshard_plan import ReshardPlan
from moe_comm.testing import RankContext
from tests.helpers.sharded_nets import ShardedNet
from tests.helpers.threaded_refits import error_of, nets, swap, threads
from tests.helpers.weights import same_bits

pytestmark = pytest.mark.usefixtures("no_refit_caches")


@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype"),
    list(itertools.permutations((torch.float32, torch.bfloat16, torch.float16), 2)),
)
def test_dtypes_change_on_the_way(src_dtype: torch.dtype, dst_dtype: torch.dtype) -> None:
    def rank(context: RankContext) -> None:
        src = ShardedNet(Parallelism(2, tp=2), context.rank_idx, dtype=src_dtype)
        dst = ShardedNet(Parallelism(2), context.rank_idx, dtype=dst_dtype)
        for seed in range(2):
            swap(context, src.fill(seed), dst, verify="checksum")
            assert dst.wrong(seed) == []
            assert {param.dtype for param in dst.parameters()} == {dst_dtype}

    threads(rank, 2)


def test_buffers_take_over_the_dtype_of_the_source(plans_made: list[int]) -> None:
    def rank(context: RankContext) -> None:
        dtypes = torch.bfloat16, torch.float32
        src, dst = (
            ShardedNet(
                Parallelism(2, tp=tp), context.rank_idx, buffers={"expert_bias": ((4,), dtype)}
            )
            for tp, dtype in zip((2, 1), dtypes, strict=True)
        )
        swap(context, src.fill(1), dst)
        assert dst.expert_bias.dtype == torch.bfloat16
        # A trainer keeps it in float32 from its first step on.
        src.expert_bias = src.expert_bias.float()
        for seed in (2, 3):
            swap(context, src.fill(seed), dst, verify="checksum")
            assert dst.expert_bias.dtype == torch.float32
            assert dst.wrong(seed) == []

    threads(rank, 2)
    assert len(plans_made) == 4


class _Stage(torch.nn.Module):
    """Layers of a pipeline stage, numbered from 0 in the module and globally by `layer_number`."""

    def __init__(self, first: int, dtypes: list[torch.dtype]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList()
        for position, dtype in enumerate(dtypes):
            layer = torch.nn.Module()
            layer.layer_number = first + position + 1
            layer.register_buffer("bias", torch.zeros(2, dtype=dtype))
            self.layers.append(layer)


def test_buffers_of_pipeline_stages_are_known_by_their_global_layer() -> None:
    """Both modules hold one layer, which both call layer 0: rank 0 reads layer 0, has layer 1."""
    half, full = torch.bfloat16, torch.float32

    def rank(context: RankContext) -> torch.dtype:
        source = _Stage(context.rank_idx, [full if context.rank_idx == 1 else half])
        target = _Stage(1 - context.rank_idx, [half])
        plan = ReshardPlan([], [])
        refit._harmonize_buffer_dtypes(plan, source, target, context.group)
        known = plan.buffer_dtypes
        refit._harmonize_buffer_dtypes(plan, source, target, None)
        assert plan.buffer_dtypes is known
        return target.layers[0].bias.dtype

    assert threads(rank, 2) == [full, half]


WIDE = {"up": ((256, 256), 0), "down": ((256, 256), 1), "norm": ((8,), None)}


class _Engine(ShardedNet):
    """A target that holds its weights as an engine does: e4m3 data, scales beside them."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.buffers_of: dict[str, FP8BlockTensor] = {}

    def convert(self) -> FP8BlockReshardTransform:
        for name in ("up", "down"):
            param = self._parameters.pop(name)
            held = FP8BlockTensor.empty(tuple(param.shape))
            self.buffers_of[name] = held
            if name == "up":
                # One in the place of the parameter, its scales a parameter of their own.
                self.register_parameter("up", torch.nn.Parameter(held.data, requires_grad=False))
                scale = torch.nn.Parameter(held.scale, requires_grad=False)
                self.register_parameter("up_scale_inv", scale)
        return FP8BlockReshardTransform({"up", "down"}, self.buffers_of)

    def wrong_quantized(self, seed: int) -> list[str]:
        return [
            name
            for name, held in self.buffers_of.items()
            for want in [quantize_fp8_block(self.expected(name, seed))]
            if not (same_bits(held.data, want[0]) and same_bits(held.scale, want[1]))
        ]


@pytest.mark.parametrize("execution_batch_bytes", [None, 60_000])
@pytest.mark.parametrize(("src", "dst"), [("tp2", "single"), ("single", "tp2"), ("tp2", "tp2")])
def test_an_engine_of_fp8_blocks(src: str, dst: str, execution_batch_bytes: int | None) -> None:
    def rank(context: RankContext) -> None:
        source = ShardedNet(Parallelism.parse(src, 2), context.rank_idx, WIDE)
        engine = _Engine(Parallelism.parse(dst, 2), context.rank_idx, WIDE)
        options: Any = {"execution_batch_bytes": execution_batch_bytes}
        refit.prepare_swap_model_weights(source, engine, group=context.group, **options)
        transform = engine.convert()
        options.update(transform=transform, verify="checksum")
        for seed in range(3):
            if seed == 2:
                # Planned again, although the engine lists other parameters by now.
                source.norm = torch.nn.Parameter(source.norm.detach().clone().float())
            swap(context, source.fill(seed), engine, **options)
            assert engine.wrong_quantized(seed) == []
            assert torch.equal(engine.norm, engine.expected("norm", seed).bfloat16())

    threads(rank, 2)


def test_converting_a_target_spoils_no_plan(plans_made: list[int]) -> None:
    shapes = {"down": WIDE["down"], "norm": WIDE["norm"]}

    def rank(context: RankContext) -> None:
        source = ShardedNet(Parallelism(2, tp=2), context.rank_idx, shapes)
        engine = _Engine(Parallelism(2), context.rank_idx, shapes)
        refit.prepare_swap_model_weights(source, engine, group=context.group)
        held = FP8BlockTensor.empty(tuple(engine.down.shape))
        del engine.down
        engine.buffers_of["down"] = held
        transform = FP8BlockReshardTransform({"down"}, {"down": held})
        for seed in range(2):
            swap(context, source.fill(seed), engine, transform=transform)
            assert engine.wrong_quantized(seed) == []

    threads(rank, 2)
    assert sorted(plans_made) == [0, 1]


def test_an_engine_that_never_held_ordinary_weights() -> None:
    """Planned by its e4m3 data; ranks that only send have no buffers."""

    def rank(context: RankContext) -> None:
        names = {"up", "down"}
        if context.rank_idx == 0:
            source = ShardedNet(Parallelism(1), 0, WIDE, dtype=torch.float32)
            transform = FP8BlockReshardTransform(names, {})
            for seed in range(2):
                swap(context, source.fill(seed), None, transform=transform)
            return
        engine = _Engine(Parallelism(2, tp=2), context.rank_idx - 1, WIDE, rank_offset=1)
        for name, dim in (("up", 0), ("down", 1)):
            held = FP8BlockTensor.empty(tuple(engine.get_parameter(name).shape))
            data = torch.nn.Parameter(held.data, requires_grad=False)
            data.tensor_model_parallel, data.partition_dim = True, dim
            setattr(engine, name, data)
            engine.register_buffer(f"{name}_scale_inv", held.scale)
            engine.buffers_of[name] = held
        transform = FP8BlockReshardTransform(names, engine.buffers_of)
        for seed in range(2):
            swap(context, None, engine, transform=transform)
            assert engine.wrong_quantized(seed) == []
            assert torch.equal(engine.norm, engine.expected("norm", seed).bfloat16())

    threads(rank, 3)


def test_data_without_a_transform_is_refused_before_and_after_one() -> None:
    """The plan that was made with a transform is none for a refit without it."""
    shapes = {"up": WIDE["up"]}

    def rank(context: RankContext) -> list[str]:
        source = ShardedNet(Parallelism(2, tp=2), context.rank_idx, shapes)
        engine = ShardedNet(Parallelism(2), context.rank_idx, shapes)
        held = FP8BlockTensor.empty(tuple(engine.up.shape))
        engine.up = torch.nn.Parameter(held.data, requires_grad=False)
        transform = FP8BlockReshardTransform({"up"}, {"up": held})
        held.data.zero_()
        texts = [error_of(lambda: swap(context, source.fill(0), engine))]
        assert not held.data.float().any()
        for seed in (1, 2):
            swap(context, source.fill(seed), engine, transform=transform)
            want = quantize_fp8_block(engine.expected("up", seed))
            assert same_bits(held.data, want[0])
            assert same_bits(held.scale, want[1])
        texts.append(error_of(lambda: swap(context, source.fill(3), engine)))
        assert same_bits(held.data, want[0])
        return texts

    for text in itertools.chain(*threads(rank, 2)):
        assert text.startswith("PlanError: up: rank 0 holds torch.bfloat16"), text
        assert "torch.float8_e4m3fn of rank 0: values of torch.float8_e4m3fn are no" in text


class _Quantized(torch.Tensor):
    """As Transformer Engine's parameters: MXFP8 by the name of the class."""

    def dequantize(self) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).clone()


_Quantized.__name__ = "MXFP8Tensor"


class _Config:
    transformer_impl = "inference_optimized"
    fp8_recipe = "mxfp8"
    num_moe_experts = None
    inference_grouped_gemm_backend = "torch"


def test_a_target_that_asks_for_mxfp8_is_converted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sources know no transform, and yet what the target holds is proven."""
    spoil: list[bool] = []
    verify = refit_pass.prove_refit

    def spoiled(plan: Any, source: Any, target: Any, *args: Any, **options: Any) -> Any:
        if spoil:
            target.decoder.up.data.view(torch.uint8)[5, 7] ^= 1
        return verify(plan, source, target, *args, **options)

    monkeypatch.setattr(refit_pass, "prove_refit", spoiled)
    shapes = {"decoder.up": ((64, 128), 0), "decoder.norm": ((8,), None)}

    def rank(context: RankContext) -> None:
        source, target = torch.nn.Module(), torch.nn.Module()
        inner, outer = (
            ShardedNet(
                Parallelism(2, tp=tp),
                context.rank_idx,
                {"up": shapes["decoder.up"], "norm": shapes["decoder.norm"]},
            )
            for tp in (2, 1)
        )
        source.decoder, source.pg_collection = inner, inner.pg_collection
        target.decoder, target.pg_collection = outer, outer.pg_collection
        quantized = torch.nn.Parameter(
            outer.up.detach().as_subclass(_Quantized), requires_grad=False
        )
        outer._parameters["up"] = quantized
        target.config = _Config()
        refit.prepare_swap_model_weights(source, target, group=context.group)
        held = target.decoder.up
        assert "up" not in outer._parameters
        assert isinstance(held, MXFP8Tensor) or type(held).__name__ == "MXFP8Tensor"
        refit.prepare_swap_model_weights(source, target, group=context.group)
        refitting = refit.Refit(source, target, "symmetric", context.group, verify="checksum")
        assert target.decoder.up is held
        for seed in range(4):
            if seed == 2:
                # All plan again; the target stays what it was converted to.
                inner.norm = torch.nn.Parameter(inner.norm.detach().float())
            inner.fill(seed)
            addresses = held.data.data_ptr(), held.scale.data_ptr()
            if seed % 2:
                refitting.run()
            else:
                swap(context, source, target, verify="checksum")
            want = MXFP8Tensor.from_bf16(outer.expected("up", seed), backend="triton")
            assert same_bits(held.data, want.data)
            assert same_bits(held.scale, want.scale)
            assert addresses == (held.data.data_ptr(), held.scale.data_ptr())
        inner.fill(9)
        spoil.append(True)
        text = error_of(refitting.run)
        assert "decoder.up, piece " in text
        assert "data: the source has checksum" in text

    threads(rank, 2)


def test_a_plan_with_a_transform_is_not_converted_again() -> None:
    plan = ReshardPlan([], [], transform=MXFP8ReshardTransform(set(), {}))
    known = plan.transform
    net = ShardedNet(Parallelism(1), 0)
    net.config = _Config()
    refit._setup_mxfp8_transform_on_plan(plan, net)
    assert plan.transform is known
    assert refit._needs_mxfp8_conversion([net])
    assert not refit._needs_mxfp8_conversion(None)


def test_kernels_that_take_no_mxfp8_are_named_on_every_rank() -> None:
    def rank(context: RankContext) -> str:
        src, dst = nets(context, "tp2", "single")
        if context.rank_idx == 1:
            dst.config = _Config()
            dst.config.inference_grouped_gemm_backend = "cutlass"
        return error_of(lambda: refit.prepare_swap_model_weights(src, dst, group=context.group))

    for text in threads(rank, 2):
        assert text.startswith("ValueError")
        assert "got 'cutlass'" in text
