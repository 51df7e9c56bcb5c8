"""Quantized dispatch under autograd and torch.compile, on one rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import moe_comm
from moe_comm import (
    FP8_BLOCK128,
    MXFP8,
    Communicator,
    EpBuffer,
    Layout,
    Quantization,
    QuantizationFormat,
    QuantizedRows,
)
from moe_comm.ep.autograd import operators
from moe_comm.ep.call_options import DispatchOptions, encode_dispatch, encode_quantization
from moe_comm.testing import case_list
from tests.helpers.configs import ep_config
from tests.helpers.moe_layer import assert_same_bits, filled, recorded_operations

NUM_EXPERTS, NUM_TOPK, HIDDEN = 4, 2, 160  # the last block of 128 is shorter
BACKENDS = ["host", "reference"]

QUANTIZATIONS = [
    pytest.param(
        each,
        id=f"{each.format.name}-{each.scale_format.name}"
        + ("-column_major" if each.is_column_major else ""),
    )
    for each in case_list.QUANTIZATIONS
    if each.scale_format is not None
]
LAYOUTS = list(Layout)


pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.fixture(params=BACKENDS)
def buffer(request: pytest.FixtureRequest) -> Iterator[EpBuffer]:
    config = ep_config(NUM_EXPERTS, NUM_TOPK, HIDDEN, 16)
    with Communicator(backend=request.param) as communicator:
        with EpBuffer(communicator, config) as buffer:
            yield buffer


def alignment(layout: Layout) -> int:
    return 1 if layout is Layout.LOW_LATENCY else 8


def inputs(num_tokens: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, HIDDEN).bfloat16().requires_grad_()
    topk_idx = torch.randint(-1, NUM_EXPERTS, (num_tokens, NUM_TOPK))
    return x, topk_idx, torch.rand(num_tokens, NUM_TOPK, requires_grad=True)


def to_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_forward_has_the_bits_of_the_buffer_and_backward_those_without_quantization(
    buffer: EpBuffer, quantization: Quantization, layout: Layout
) -> None:
    x, topk_idx, topk_weights = inputs()
    how: dict[str, Any] = {"layout": layout, "expert_alignment": alignment(layout)}
    arguments = (x.detach(), topk_idx, topk_weights.detach())
    expected = buffer.dispatch(*arguments, **how, quantization=quantization)
    actual = moe_comm.dispatch(
        x, topk_idx, topk_weights, **how, buffer=buffer, quantization=quantization
    )
    assert isinstance(actual.x, QuantizedRows)
    assert actual.x is actual.x
    assert actual.x.sf.data_ptr() == actual.x_sf.data_ptr()
    assert actual.x_sf.shape == expected.x_sf.shape
    assert actual.x_sf.stride() == expected.x_sf.stride()
    data, scales, weights = expected.x, expected.x_sf, expected.topk_weights
    if layout is Layout.LOW_LATENCY:
        is_filled = filled(expected, buffer)
        data.view(torch.uint8)[~is_filled] = 0
        scale_bits = scales.view(torch.uint8 if scales.itemsize == 1 else torch.int32)
        scale_bits[~is_filled.view(scales.shape[:2])] = 0
        weights[~is_filled] = 0
    assert torch.equal(to_bytes(actual.x.data_fp8), to_bytes(data))
    assert torch.equal(to_bytes(actual.x_sf), to_bytes(scales))
    assert torch.equal(actual.topk_weights, weights)
    assert actual.x.data_fp8.dtype is torch.float8_e4m3fn
    assert actual.x_sf.dtype is quantization.sf_dtype

    grad_rows = torch.randn(actual.x.shape).bfloat16()
    grad_weights = torch.randn(actual.topk_weights.shape)
    plain = moe_comm.dispatch(x, topk_idx, topk_weights, **how, buffer=buffer)
    grads = [
        torch.autograd.grad(
            (result.x, result.topk_weights), (x, topk_weights), (grad_rows, grad_weights)
        )
        for result in (actual, plain)
    ]
    assert grads[0][0].dtype is torch.bfloat16
    assert torch.equal(grads[0][0], grads[1][0])
    assert torch.equal(grads[0][1], grads[1][1])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("quantization", [FP8_BLOCK128, MXFP8])
def test_a_small_gradient_arrives_as_it_is(
    buffer: EpBuffer, quantization: Quantization, is_compiled: bool
) -> None:
    def loss(x: torch.Tensor, topk_idx: torch.Tensor) -> torch.Tensor:
        result = moe_comm.dispatch(x, topk_idx, buffer=buffer, quantization=quantization)
        return (result.x * 1e-3).sum()

    x, topk_idx, _ = inputs()
    topk_idx[:, 1] = -1
    topk_idx[:, 0] = 2
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if is_compiled else loss
    run(x, topk_idx).backward()
    # FP8 would make it 2e-3.
    assert torch.equal(x.grad, torch.full_like(x, 1e-3))


def test_operations_read_dequantized_values(buffer: EpBuffer) -> None:
    x, topk_idx, _ = inputs()
    rows = moe_comm.dispatch(x, topk_idx, buffer=buffer, quantization=FP8_BLOCK128).x
    values = rows.dequantize()
    expected = moe_comm.dequantize(rows.data_fp8, rows.sf, FP8_BLOCK128, torch.bfloat16)
    assert rows.dtype is values.dtype is torch.bfloat16
    assert type(values) is torch.Tensor
    assert torch.equal(values, expected)
    for function in (torch.relu, torch.t, lambda rows: rows[1:3], lambda rows: rows @ rows.t()):
        assert type(function(rows)) is torch.Tensor
        assert torch.equal(function(rows), function(expected))
    assert rows.detach().data_fp8.data_ptr() == rows.data_fp8.data_ptr()
    assert not rows.detach().requires_grad
    assert "FP8_BLOCK128" in repr(rows)
    assert torch.autograd.grad(values.sum(), x)[0].dtype is torch.bfloat16


def test_autograd_saves_the_quantized_form(buffer: EpBuffer) -> None:
    x, topk_idx, _ = inputs()
    weight = torch.ones(HIDDEN, 8, requires_grad=True, dtype=torch.bfloat16)
    rows = moe_comm.dispatch(x, topk_idx, buffer=buffer, quantization=FP8_BLOCK128).x
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        out = rows @ weight
    assert any(isinstance(tensor, QuantizedRows) for tensor in saved)
    out.sum().backward()
    assert torch.equal(weight.grad, rows.dequantize().t() @ torch.ones_like(out))


def test_quantized_rows_cannot_be_written(buffer: EpBuffer) -> None:
    x, topk_idx, _ = inputs()
    rows = moe_comm.dispatch(x, topk_idx, buffer=buffer, quantization=FP8_BLOCK128).x
    with pytest.raises(RuntimeError, match="modified inplace"):
        rows.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        rows[1:].zero_()
    with torch.no_grad():
        with pytest.raises(TypeError, match="cannot be written in place"):
            rows.mul_(2)
        with pytest.raises(TypeError, match="cannot be written in place"):
            torch.add(rows, 1, out=rows)


def test_nobody_reads_the_address_of_quantized_rows(buffer: EpBuffer) -> None:
    x, topk_idx, _ = inputs()
    result = moe_comm.dispatch(x, topk_idx, buffer=buffer, quantization=FP8_BLOCK128)
    with pytest.raises(RuntimeError, match="Cannot access data pointer"):
        result.x.data_ptr()
    with pytest.raises(TypeError, match="memory of its own, got QuantizedRows"):
        buffer.combine(result.x, result.handle)
    with pytest.raises(TypeError, match="memory of its own, got QuantizedRows"):
        buffer.dispatch(result.x, torch.zeros(len(result.x), NUM_TOPK, dtype=torch.int64))
    expected = buffer.combine(result.x.dequantize().detach(), result.handle)
    assert torch.equal(moe_comm.combine(result.x, result.handle, buffer=buffer), expected)


@pytest.mark.parametrize("quantization", [FP8_BLOCK128, MXFP8])
def test_nan_spreads_over_its_block_and_not_into_gradients(
    buffer: EpBuffer, quantization: Quantization
) -> None:
    x, topk_idx, _ = inputs()
    topk_idx[:] = torch.tensor([1, -1])
    with torch.no_grad():
        x[2, 40] = float("nan")
    rows = moe_comm.dispatch(x, topk_idx, buffer=buffer, quantization=quantization).x
    block = quantization.format.block
    expected = torch.zeros(len(x), HIDDEN, dtype=torch.bool)
    expected[2, 40 // block * block : (40 // block + 1) * block] = True
    assert torch.equal(rows.dequantize().isnan(), expected)
    (grad,) = torch.autograd.grad(rows.sum(), x)
    assert torch.equal(grad, torch.ones_like(x))


class ScaledByBlock(torch.autograd.Function):
    """A kernel of its own that reads data and sf."""

    @staticmethod
    def forward(ctx: Any, rows: QuantizedRows) -> torch.Tensor:
        factors = rows.sf.repeat_interleave(128, dim=1)[:, : rows.shape[1]]
        return (rows.data_fp8.float() * factors).bfloat16()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


class Layer(torch.nn.Module):
    """Experts on quantized rows; weights applied by the combine."""

    def __init__(
        self, buffer: EpBuffer, quantization: Quantization, layout: Layout, reads: str = "values"
    ) -> None:
        super().__init__()
        self.buffer, self.quantization, self.layout = buffer, quantization, layout
        self.reads = reads
        self.weight = torch.nn.Parameter((torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN) / 8).bfloat16())

    def forward(
        self, x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> torch.Tensor:
        by_rank = self.layout is Layout.RANK_MAJOR
        result = moe_comm.dispatch(
            x,
            topk_idx,
            topk_weights if by_rank else None,
            buffer=self.buffer,
            layout=self.layout,
            expert_alignment=alignment(self.layout),
            quantization=self.quantization,
        )
        rows = result.x
        if self.reads == "kernel":
            rows = ScaledByBlock.apply(rows)
        elif self.reads == "dequantize":
            rows = rows.dequantize()
        if by_rank:
            out = (rows @ self.weight[0]) * result.topk_weights[:, :1].bfloat16()
        elif self.layout is Layout.LOW_LATENCY:
            by_expert = rows.reshape(NUM_EXPERTS, -1, HIDDEN)
            out = torch.bmm(by_expert, self.weight).reshape(-1, HIDDEN).relu()
        else:
            out = torch._grouped_mm(rows, self.weight, offs=result.expert_offsets[1:]).relu()
        return moe_comm.combine(
            out, result.handle, buffer=self.buffer, topk_weights=None if by_rank else topk_weights
        )


def outputs_and_gradients(function: Any, layer: Layer, num_tokens: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(num_tokens)
    x, topk_idx, topk_weights = inputs(num_tokens)
    layer.zero_grad()
    y = function(x, topk_idx, topk_weights)
    (y * 1e-3).sum().backward()
    tensors = {"y": y, "x": x.grad, "topk_weights": topk_weights.grad, "weight": layer.weight.grad}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


EAGER_KERNELS = {"backend": "inductor", "options": {"fallback_by_default": True}}
COLUMN_MAJOR = Quantization(format=QuantizationFormat.MXFP8, is_column_major=True)
COMPILED = [
    *(
        (case.values[0], LAYOUTS[position % 3], {"backend": "aot_eager"})
        for position, case in enumerate(QUANTIZATIONS)
    ),
    (QUANTIZATIONS[1].values[0], Layout.EXPERT_MAJOR, EAGER_KERNELS),
    (MXFP8, Layout.RANK_MAJOR, EAGER_KERNELS),
    (COLUMN_MAJOR, Layout.LOW_LATENCY, EAGER_KERNELS),
]


@pytest.mark.full
@pytest.mark.parametrize("buffer", ["host"], indirect=True)
@pytest.mark.parametrize(("quantization", "layout", "compiler"), COMPILED)
def test_a_compiled_layer_has_the_bits_of_the_eager_one(
    buffer: EpBuffer, quantization: Quantization, layout: Layout, compiler: dict[str, object]
) -> None:
    layer = Layer(buffer, quantization, layout)
    compiled = torch.compile(layer, fullgraph=True, **compiler)
    for num_tokens in (5, 0):
        expected = outputs_and_gradients(layer, layer, num_tokens)
        assert_same_bits(outputs_and_gradients(compiled, layer, num_tokens), expected)
        assert bool(expected["x"].any()) == (num_tokens > 0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("buffer", ["host"], indirect=True)
@pytest.mark.parametrize("reads", ["kernel", "dequantize"])
@pytest.mark.parametrize("compiler", [{"backend": "aot_eager"}, EAGER_KERNELS])
def test_compiled_code_may_read_the_quantized_form(
    buffer: EpBuffer, reads: str, compiler: dict[str, object]
) -> None:
    layer = Layer(buffer, FP8_BLOCK128, Layout.EXPERT_MAJOR, reads)
    implicit = Layer(buffer, FP8_BLOCK128, Layout.EXPERT_MAJOR)
    implicit.load_state_dict(layer.state_dict())
    expected = outputs_and_gradients(implicit, implicit, 6)
    eager = outputs_and_gradients(layer, layer, 6)
    assert torch.equal(eager["y"], expected["y"])
    assert torch.equal(eager["x"], expected["x"]) == (reads == "dequantize")
    compiled = torch.compile(layer, fullgraph=True, **compiler)
    assert_same_bits(outputs_and_gradients(compiled, layer, 6), eager)


@pytest.mark.parametrize("buffer", ["host"], indirect=True)
def test_results_cross_graphs_and_rows_do_not(buffer: EpBuffer) -> None:
    compiled = functools.partial(torch.compile, fullgraph=True, backend="aot_eager")

    def send(x: torch.Tensor, topk_idx: torch.Tensor) -> Any:
        return moe_comm.dispatch(x, topk_idx, buffer=buffer, quantization=MXFP8)

    def give_back(result: Any) -> torch.Tensor:
        return moe_comm.combine(result.x * 3, result.handle, buffer=buffer)

    def double(rows: torch.Tensor) -> torch.Tensor:
        return rows * 2

    x, topk_idx, _ = inputs()
    answers = []
    for first in (send, compiled(send)):
        for second in (give_back, compiled(give_back)):
            result = first(x, topk_idx)
            y = second(result)
            answers.append((y.detach(), *torch.autograd.grad(y.sum(), x)))
            assert torch.equal(compiled(double)(result.x), double(result.x))
    for y, grad in answers[1:]:
        assert torch.equal(y, answers[0][0])
        assert torch.equal(grad, answers[0][1])
    with pytest.raises(RuntimeError, match="cannot leave a compiled region"):
        compiled(lambda x, topk_idx: send(x, topk_idx).x)(x, topk_idx)
    with torch.no_grad():
        rows = compiled(lambda x, topk_idx: send(x, topk_idx).x)(x, topk_idx)
    assert torch.equal(to_bytes(rows.data_fp8), to_bytes(result.x.data_fp8))


def selective() -> object:
    return create_selective_checkpoint_contexts(list(moe_comm.SAVED_OPERATORS))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_selective_checkpointing_does_not_communicate_again(
    buffer: EpBuffer, is_compiled: bool
) -> None:
    layer = Layer(buffer, FP8_BLOCK128, Layout.EXPERT_MAJOR)
    recomputed = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=selective)
    if is_compiled:
        recomputed = torch.compile(recomputed, fullgraph=True, backend="aot_eager")
    with recorded_operations(buffer) as expected_operations:
        expected = outputs_and_gradients(layer, layer, 6)
    with recorded_operations(buffer) as operations:
        actual = outputs_and_gradients(recomputed, layer, 6)
    assert operations == expected_operations
    assert_same_bits(actual, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("with_weights", [False, True])
@pytest.mark.parametrize("is_column_major", [False, True])
def test_a_pair_has_no_gradient_and_its_weights_have(
    buffer: EpBuffer, is_column_major: bool, with_weights: bool, is_compiled: bool
) -> None:
    x, topk_idx, topk_weights = inputs()
    pair = moe_comm.quantize(x.detach(), FP8_BLOCK128)
    how = Quantization(format=QuantizationFormat.FP8_BLOCK128, is_column_major=is_column_major)

    def layer(
        data: torch.Tensor, sf: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
    ) -> Any:
        result = moe_comm.dispatch(
            (data, sf),
            topk_idx,
            topk_weights if with_weights else None,
            buffer=buffer,
            quantization=how,
        )
        rows = result.x.bfloat16()
        if with_weights:
            rows = (rows * result.topk_weights[:, None]).bfloat16()
        return result.x, result.x_sf, moe_comm.combine(rows, result.handle, buffer=buffer)

    run = torch.compile(layer, fullgraph=True, backend="aot_eager") if is_compiled else layer
    data, scales, y = run(*pair, topk_idx, topk_weights)
    expected = buffer.dispatch(pair, topk_idx, quantization=how)
    assert type(data) is torch.Tensor
    assert not data.requires_grad
    assert torch.equal(to_bytes(data), to_bytes(expected.x))
    assert torch.equal(scales, expected.x_sf)
    assert scales.stride() == expected.x_sf.stride()
    with recorded_operations(buffer) as operations:
        y.sum().backward() if y.requires_grad else None
    if with_weights:
        assert operations == ["cached dispatch", "combine weights"]
        sums = pair[0].float().sum(1, keepdim=True)
        torch.testing.assert_close(
            topk_weights.grad, torch.where(topk_idx < 0, 0.0, sums), rtol=1e-2, atol=1e-2
        )
    else:
        assert set(operations) <= {"cached dispatch"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_opcheck(buffer: EpBuffer, quantization: Quantization, layout: Layout) -> None:
    x, topk_idx, topk_weights = (tensor.detach() for tensor in inputs())
    encoded = encode_dispatch(DispatchOptions(layout, alignment(layout), quantization))
    sizes = [1, NUM_EXPERTS, NUM_EXPERTS, NUM_TOPK, 16]
    utilities = ("test_faketensor",)  # that of the schema cannot compare FP8
    arguments = (topk_idx, topk_weights, buffer.id_tensor, sizes, *encoded, 0, None)
    torch.library.opcheck(operators.DISPATCH, (x, None, *arguments), test_utils=utilities)
    data, scales = moe_comm.quantize(x, quantization)
    torch.library.opcheck(operators.DISPATCH, (data, scales, *arguments), test_utils=utilities)
    torch.library.opcheck(
        torch.ops.moe_comm.dequantize_rows.default,
        (data, scales, encode_quantization(quantization), torch.bfloat16),
        test_utils=utilities,
    )
