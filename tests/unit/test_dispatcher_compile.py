"""Dispatchers for training under `torch.compile`: traced whole, and the bits of the eager ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.dispatcher import TokenDispatcher
from moe_comm.dispatcher.torchtitan import TorchtitanTokenDispatcher
from moe_comm.dispatcher.transformers import TransformersExperts
from moe_comm.peers.bootstrap import RankThreads


def plain(weight: torch.Tensor) -> Any:
    dispatcher = TokenDispatcher(4, group=RankThreads(1)[0], expert_alignment=8)

    def layer(x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        routed = dispatcher.dispatch(x, scores, topk_idx=ids)
        out = torch._grouped_mm(routed.tokens, weight, offs=routed.expert_offsets[1:])
        return dispatcher.combine((out * routed.probs[:, None]).to(x.dtype), routed)

    return layer


def torchtitan(weight: torch.Tensor) -> Any:
    dispatcher = TorchtitanTokenDispatcher.Config(
        num_experts=4, top_k=2, pad_multiple=8, non_blocking_capacity_factor=1.0
    ).build()
    dispatcher.wire_meshes(ep_mesh=None)

    def layer(x: torch.Tensor, scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows, counts, metadata = dispatcher.dispatch(x, scores, ids, None)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        out = torch._grouped_mm(rows, weight, offs=offsets)
        return dispatcher.combine(out, metadata, x)

    return layer


def transformers(weight: torch.Tensor) -> Any:
    def experts_forward(
        rows: torch.Tensor, local_ids: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        counts = torch.bincount(local_ids[:, 0], minlength=4)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        return torch._grouped_mm(rows, weight, offs=offsets) * weights

    experts = TransformersExperts(experts_forward, 4, group=RankThreads(1)[0])
    return lambda x, scores, ids: experts(x, ids, scores)


OTHERS = [pytest.param(make, marks=pytest.mark.full) for make in (torchtitan, transformers)]


@pytest.mark.parametrize("num_tokens", [7, pytest.param(0, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("make", [plain, *OTHERS])
def test_compiled_and_eager_have_the_same_bits(make: Any, compiler: str, num_tokens: int) -> None:
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(4, 32, 32, generator=draw).bfloat16().requires_grad_()
    layer = make(weight)
    x = torch.randn(num_tokens, 32, generator=draw).bfloat16()
    scores = torch.rand(num_tokens, 2, generator=draw)
    ids = torch.rand(num_tokens, 4, generator=draw).argsort(1)[:, :2]
    results = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend=compiler)):
        leaves = [x.clone().requires_grad_(), scores.clone().requires_grad_(), weight]
        y = function(*leaves[:2], ids)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    assert num_tokens == 0 or all(grad.abs().sum() > 0 for grad in results[0])
    for name, eager, compiled in zip(("y", "x", "scores", "weight"), *results, strict=True):
        if make is plain and name == "scores":
            # Summed over hidden by the layer itself, which the compiler does in another order.
            assert torch.allclose(eager, compiled, rtol=1e-5)
        else:
            assert torch.equal(eager, compiled), name
