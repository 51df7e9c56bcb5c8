"""Quantized and open dispatches under autograd between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import moe_comm
from moe_comm import (
    FP8_BLOCK128,
    MXFP8,
    Communicator,
    EpBuffer,
    EpConfig,
    Layout,
    Quantization,
    QuantizedRows,
)
from moe_comm.testing.launch import RankContext, run_ranks
from tests.helpers.configs import ep_config
from tests.helpers.moe_layer import assert_same_bits, filled, recorded_operations

NUM_EXPERTS, HIDDEN, MAX_TOKENS = 5, 160, 8
LAYOUTS = list(Layout)
MODES = [("reference", "threads"), ("host", "processes"), ("collective", "processes")]


def open_config() -> EpConfig:
    return ep_config(NUM_EXPERTS, None, None, MAX_TOKENS, dtype=None)


def inputs(rank_idx: int, num_tokens: int, num_topk: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11 + rank_idx)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(num_topk).indices
    return [x, topk_idx, torch.rand(num_tokens, num_topk, generator=generator)]


def experts(result: Any, weight: torch.Tensor, buffer: EpBuffer, layout: Layout) -> torch.Tensor:
    """Rows times the matrix of their expert; RANK_MAJOR: times one matrix."""
    if layout is Layout.EXPERT_MAJOR:
        return torch._grouped_mm(result.x, weight, offs=result.expert_offsets[1:])
    if layout is Layout.LOW_LATENCY:
        by_expert = result.x.reshape(buffer.num_local_experts, -1, HIDDEN)
        return torch.bmm(by_expert, weight).reshape(-1, HIDDEN)
    return result.x @ weight[0]


def quantized_gradients(
    context: RankContext, backend: str, layout: Layout, quantization: Quantization | None
) -> dict[str, torch.Tensor]:
    """Forward and backward in which rank 1 has no tokens and all ranks another number of choices."""
    num_tokens, num_topk = ((7, 2), (0, 3), (5, 1))[context.rank_idx]
    x, topk_idx, topk_weights = inputs(context.rank_idx, num_tokens, num_topk)
    leaves = x.requires_grad_(), topk_weights.requires_grad_()
    with Communicator(context.group, backend=backend) as communicator:
        buffer = EpBuffer(communicator, open_config())
        how: dict[str, Any] = {
            "layout": layout,
            "expert_alignment": 1 if layout is Layout.LOW_LATENCY else 8,
        }
        expected = buffer.dispatch(
            x.detach(), topk_idx, topk_weights.detach(), **how, quantization=quantization
        )
        result = moe_comm.dispatch(
            x, topk_idx, topk_weights, **how, buffer=buffer, quantization=quantization
        )
        assert result.handle.num_recv_topk == expected.handle.num_recv_topk == 3
        if quantization is not None:
            assert isinstance(result.x, QuantizedRows)
            rows = result.x.data_fp8.view(torch.uint8), result.x_sf.view(len(result.x), -1)
            other = expected.x.view(torch.uint8), expected.x_sf.view(len(result.x), -1)
            is_filled = slice(None)
            if layout is Layout.LOW_LATENCY:
                is_filled = filled(expected, buffer)
            for mine, theirs in zip(rows, other, strict=True):
                bits = torch.uint8 if mine.itemsize == 1 else torch.int32
                assert torch.equal(mine.view(bits)[is_filled], theirs.view(bits)[is_filled])
        # The same gradient of the rows, whatever their values were.
        generator = torch.Generator().manual_seed(5)
        shape = result.x.shape
        grad_rows = torch.randn(shape, generator=generator).bfloat16() * 1e-3
        grad_weights = torch.randn(result.topk_weights.shape, generator=generator)
        unused = torch.autograd.grad(result.x, leaves, grad_rows, retain_graph=True)[1]
        assert torch.equal(unused, torch.zeros_like(topk_weights))
        grads = torch.autograd.grad(
            (result.x, result.topk_weights), leaves, (grad_rows, grad_weights)
        )
        names = ("x", "topk_weights")
        return {name: grad.clone() for name, grad in zip(names, grads, strict=True)}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("backend", "mode"), MODES)
def test_the_backward_of_a_quantized_dispatch_is_that_of_a_plain_one(
    backend: str, mode: str, layout: Layout
) -> None:
    plain = run_ranks(quantized_gradients, 3, "reference", layout, None, mode="threads")
    for quantization in (FP8_BLOCK128, MXFP8):
        quantized = run_ranks(quantized_gradients, 3, backend, layout, quantization, mode=mode)
        for actual, expected in zip(quantized, plain, strict=True):
            assert_same_bits(actual, expected)
    assert all(grad.any() for rank in plain[::2] for grad in rank.values())


def compiled_and_eager(
    context: RankContext, backend: str, compiler: dict[str, Any], layout: Layout
) -> None:
    """Compiled has the bits of eager; LOW_LATENCY rows that nothing was sent to leak nowhere."""
    with Communicator(context.group, backend=backend) as communicator:
        buffer = EpBuffer(communicator, open_config())
        local = torch.nonzero(buffer.expert_rank == context.rank_idx).flatten()
        generator = torch.Generator().manual_seed(2)
        weights = torch.randn(NUM_EXPERTS, HIDDEN, HIDDEN, generator=generator) / 8
        weight = weights[local].bfloat16().requires_grad_()

        def layer(
            x: torch.Tensor, topk_idx: torch.Tensor, topk_weights: torch.Tensor
        ) -> torch.Tensor:
            by_rank = layout is Layout.RANK_MAJOR
            result = moe_comm.dispatch(
                x,
                topk_idx,
                topk_weights if by_rank else None,
                buffer=buffer,
                layout=layout,
                expert_alignment=1 if layout is Layout.LOW_LATENCY else 8,
                quantization=MXFP8,
            )
            out = experts(result, weight, buffer, layout)
            if by_rank:
                out = out * result.topk_weights[:, :1].bfloat16()
            return moe_comm.combine(
                out, result.handle, buffer=buffer, topk_weights=None if by_rank else topk_weights
            )

        def poison() -> None:
            """NaN where later windows will lie."""
            x, topk_idx, _ = inputs(context.rank_idx, MAX_TOKENS, NUM_EXPERTS)
            x.fill_(float("nan"))
            windows = [buffer.dispatch(x, topk_idx, layout=layout) for _ in range(3)]
            assert all(len(window.x) >= 0 for window in windows)

        compiled = torch.compile(layer, fullgraph=True, **compiler)
        for num_tokens in (4 + context.rank_idx, 4 * context.rank_idx):
            answers = []
            for run in (layer, compiled):
                poison()
                x, topk_idx, topk_weights = inputs(context.rank_idx, num_tokens, 2)
                leaves = (x.requires_grad_(), topk_weights.requires_grad_(), weight)
                y = run(x, topk_idx, topk_weights)
                grads = torch.autograd.grad((y * 1e-3).sum(), leaves)
                answers.append(dict(zip(("y", "x", "w", "weight"), (y, *grads), strict=True)))
            eager = {name: tensor.detach().clone() for name, tensor in answers[0].items()}
            other = {name: tensor.detach().clone() for name, tensor in answers[1].items()}
            assert all(tensor.isfinite().all() for tensor in eager.values())
            assert_same_bits(other, eager)
            assert eager["weight"].any()
        buffer.destroy()
    torch._dynamo.reset()


EAGER_KERNELS = {"backend": "inductor", "options": {"fallback_by_default": True}}


@pytest.mark.full
@pytest.mark.parametrize(
    ("backend", "compiler", "layout"),
    [
        *(("host", {"backend": "aot_eager"}, layout) for layout in LAYOUTS),
        ("host", EAGER_KERNELS, Layout.EXPERT_MAJOR),
        ("reference", {"backend": "aot_eager"}, Layout.LOW_LATENCY),
    ],
)
def test_compiled_ranks_have_the_bits_of_eager_ones(
    backend: str, compiler: dict[str, Any], layout: Layout
) -> None:
    run_ranks(compiled_and_eager, 2, backend, compiler, layout, timeout_s=280)


def one_rank_differs(context: RankContext, backend: str, how: str) -> list[str]:
    """Rank 1 treats its quantized rows in its own way; the operations of this rank."""
    is_odd = context.rank_idx == 1
    x, topk_idx, topk_weights = inputs(context.rank_idx, 4, 2)
    if how == "receives nothing":
        topk_idx[:] = torch.tensor([0, -1])  # expert 0 lives on rank 0
    x.requires_grad_(not (is_odd and how == "needs no gradient"))
    with Communicator(context.group, backend=backend) as communicator:
        buffer = EpBuffer(communicator, open_config())
        with recorded_operations(buffer) as operations:
            result = moe_comm.dispatch(
                x, topk_idx, topk_weights, buffer=buffer, quantization=FP8_BLOCK128
            )
            out = result.x * result.topk_weights[:, None].bfloat16()
            if is_odd and how == "skips its experts":
                out = torch.zeros(result.x.shape, dtype=x.dtype)
            if is_odd and how == "detaches":
                out = out.detach()
            y = moe_comm.combine(out, result.handle, buffer=buffer)
            (y.sum() * (0.0 if is_odd else 1.0)).backward()
        buffer.destroy()
    if how == "receives nothing" and not is_odd:
        assert torch.equal(x.grad, topk_weights[:, :1].bfloat16().expand_as(x))
    return operations


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "how", ["skips its experts", "receives nothing", "detaches", "needs no gradient"]
)
@pytest.mark.parametrize(("backend", "mode"), MODES[:2])
def test_no_rank_waits_for_one_that_differs(backend: str, mode: str, how: str) -> None:
    used, skipped = run_ranks(one_rank_differs, 2, backend, how, mode=mode)
    assert used == skipped == ["dispatch", "combine", "cached dispatch", "combine"]
