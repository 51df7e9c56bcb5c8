"""Megatron's functions and manager where ranks need different gradients."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from moe_comm import fused_a2a
from moe_comm.dispatcher.megatron_manager import MegatronManager
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.routed import Batch, make_batches

NUM_EXPERTS = 6
FACES = ("fused", "hybrid", "manager")

Layer = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


pytestmark = pytest.mark.usefixtures("forget_groups")


def factors(num_local: int, first: int, counts: torch.Tensor) -> torch.Tensor:
    """Factor of every row: expert e multiplies by 1 + e."""
    local = torch.arange(first, first + num_local, dtype=torch.float32) + 1
    return torch.repeat_interleave(local, counts)


def layer_of(face: str, context: RankContext, batch: Batch, *, skips_experts: bool) -> Layer:
    """From x and dense probs to the rows that arrived and the sums."""
    num_local = NUM_EXPERTS // context.num_ranks
    first = context.rank_idx * num_local

    def experts(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(rows) if skips_experts else rows * weight[:, None]

    def hybrid(x: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, row_probs, _, counts, handle = fused_a2a.hybrid_ep_dispatch(
            x=x,
            routing_map=batch.routing_map,
            probs=probs,
            group=context.group,
            num_local_experts=num_local,
        )
        out = experts(rows, row_probs * factors(num_local, first, counts))
        return rows, fused_a2a.hybrid_ep_combine(out, handle)

    def manager(x: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        held = MegatronManager(context.group, num_local)
        held.setup_metadata(batch.routing_map, probs)
        rows = held.dispatch(x, async_finish=True)
        rows, row_probs = held.get_permuted_hidden_states_by_experts(rows)
        counts = held.get_number_of_tokens_per_expert()
        out = experts(rows, row_probs * factors(num_local, first, counts))
        return rows, held.combine(out)

    def fused(x: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        topk_idx = batch.routing_map.float().topk(2, dim=1).indices
        rows, recv_idx, recv_probs, _, handle = fused_a2a.fused_dispatch(
            x, topk_idx, probs.gather(1, topk_idx), NUM_EXPERTS, context.group
        )
        weight = torch.where(recv_idx < 0, 0.0, recv_probs * (recv_idx + first + 1.0)).sum(1)
        return rows, fused_a2a.fused_combine(experts(rows, weight), context.group, handle)[0]

    return {"fused": fused, "hybrid": hybrid, "manager": manager}[face]


def check_face(
    context: RankContext, face: str, needs: tuple[str, ...], skipping: tuple[int, ...]
) -> None:
    shared = group_buffers(context.group)
    mine = context.rank_idx
    batches = make_batches([5, 0, 4][: context.num_ranks], NUM_EXPERTS, 2, dtype=torch.float32)
    batch = batches[mine]
    x = batch.x.clone().requires_grad_(needs[mine] in ("x", "both"))
    probs = batch.probs.clone().requires_grad_(needs[mine] in ("weights", "both"))
    rows, y = layer_of(face, context, batch, skips_experts=mine in skipping)(x, probs)
    is_needed = any(need != "none" for need in needs)
    assert y.requires_grad is is_needed
    assert rows.requires_grad is (
        is_needed if face != "manager" else any(need in ("x", "both") for need in needs)
    )
    if not is_needed:
        return
    grad_y = torch.randint(-4, 5, y.shape, generator=torch.Generator().manual_seed(1)).float()
    y.backward(grad_y)
    num_local = NUM_EXPERTS // context.num_ranks
    skipped = [expert // num_local in skipping for expert in range(NUM_EXPERTS)]
    factor = torch.where(torch.tensor(skipped), 0.0, torch.arange(NUM_EXPERTS) + 1.0)
    if x.requires_grad:
        assert torch.equal(x.grad, grad_y * (batch.probs * factor).sum(1, keepdim=True))
    if probs.requires_grad:
        dots = (grad_y * batch.x).sum(1, keepdim=True)
        assert torch.equal(probs.grad, dots * factor * batch.routing_map)
    del shared


@pytest.mark.sampled(1)
@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize(
    ("needs", "skipping"),
    [
        (("both", "none"), ()),
        (("x", "none", "none"), ()),
        (("none", "none", "weights"), ()),
        (("none", "none"), ()),
        (("both", "both"), (1,)),
        (("x", "none", "weights"), (0, 2)),
    ],
)
def test_gradients_are_whole(face: str, needs: tuple[str, ...], skipping: tuple[int, ...]) -> None:
    run_ranks(check_face, len(needs), face, needs, skipping, mode="threads")


def check_disabled(context: RankContext, face: str) -> str:
    shared = group_buffers(context.group)
    batch = make_batches([3, 3], NUM_EXPERTS, 2, dtype=torch.float32)[context.rank_idx]
    layer = layer_of(face, context, batch, skips_experts=False)
    is_off = context.rank_idx == 1
    x = batch.x.clone().requires_grad_(not is_off)
    with torch.no_grad() if is_off else contextlib.nullcontext():
        with pytest.raises(ValueError, match="ranks disagree") as caught:
            layer(x, batch.probs)
        call: Any = functools.partial(layer, x.detach(), batch.probs)
        _, y = call()
    assert not y.requires_grad
    del shared
    return str(caught.value)


@pytest.mark.parametrize("face", FACES)
def test_a_rank_that_cannot_differentiate_is_named_on_every_rank(face: str) -> None:
    told = run_ranks(check_disabled, 2, face, mode="threads")
    assert told[0] == told[1]
    assert "needed on rank 0, and gradients are disabled on rank 1" in told[0]
