"""Megatron's `MoELayer` on CPU ranks, changed as docs/megatron.md says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import compat, fused_a2a
from moe_comm.dispatcher.megatron import MegatronManager, MegatronTokenDispatcher
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.megatron_on_cpu import make_config, make_moe_layer, on_cpu
from tests.helpers.pages import python_blocks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/megatron.md"
NUM_EXPERTS, NUM_TOPK, HIDDEN = 4, 2, 64


def step(layer: Any, rank_idx: int) -> list[torch.Tensor]:
    """Output, gradient of the tokens, gradients of the parameters."""
    generator = torch.Generator().manual_seed(rank_idx)
    x = torch.randn(8 + 3 * rank_idx, 1, HIDDEN, generator=generator).requires_grad_()
    y, _ = layer(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    assert x.grad is not None
    gradients = [parameter.grad for parameter in layer.parameters()]
    assert len(gradients) > 2
    return [y.detach(), x.grad, *gradients]


def changed_as_documented(context: RankContext, blocks: list[str]) -> None:
    install, use_dispatcher, use_manager = blocks
    exec(install, {})
    with on_cpu():
        from megatron.core.transformer.moe import moe_layer

        theirs = moe_layer.MoEFlexTokenDispatcher

        layers = {}
        for backend in ("deepep", "hybridep"):
            layers[backend] = build(context, backend)
            assert type(layers[backend].token_dispatcher) is theirs
        layers["manager"] = build(context, None)
        exec(use_manager, {"model": layers["manager"]})
        assert isinstance(layers["manager"].token_dispatcher._comm_manager, MegatronManager)
        exec(use_dispatcher, {})
        layers["dispatcher"] = build(context, None)
        assert isinstance(layers["dispatcher"].token_dispatcher, MegatronTokenDispatcher)
        compare(context, layers)


def build(context: RankContext, backend: str | None, **options: Any) -> Any:
    """A layer with the flexible dispatcher over this backend; None: what Megatron takes for it."""
    if backend is not None:
        options["moe_flex_dispatcher_backend"] = backend
    config = make_config(
        NUM_EXPERTS,
        NUM_TOPK,
        context.num_ranks,
        hidden=HIDDEN,
        use_cpu_initialization=True,
        moe_router_load_balancing_type="none",
        gradient_accumulation_fusion=False,
        moe_ffn_hidden_size=32,
        **{"moe_token_dispatcher_type": "flex", **options},
    )
    return make_moe_layer(config)


def compare(context: RankContext, layers: dict[str, Any]) -> None:
    """Every layer with the one of the all-to-all dispatcher."""
    expected = step(build(context, None, moe_token_dispatcher_type="alltoall"), context.rank_idx)
    for name, layer in layers.items():
        for found, wanted in zip(step(layer, context.rank_idx), expected, strict=True):
            # Sums of a few float32 terms, in another order.
            torch.testing.assert_close(
                found, wanted, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )


def over_the_module_of_this_package(context: RankContext) -> None:
    compat.install("megatron.core.transformer.moe.fused_a2a")
    with on_cpu() as dispatchers:
        assert dispatchers.fused_dispatch is fused_a2a.fused_dispatch
        layers = {backend: build(context, backend) for backend in ("deepep", "hybridep")}
        compare(context, layers)
        import megatron.core.parallel_state as parallel_state

        parallel_state.destroy_model_parallel()


@pytest.mark.client(
    "Megatron-Core",
    way="`moe_comm.fused_a2a` as its module",
    ran="an MoE layer, forward and backward",
)
@pytest.mark.full
def test_a_layer_over_fused_a2a_in_the_place_of_megatrons() -> None:
    """Whatever names the release imports from its module are there."""
    run_ranks(over_the_module_of_this_package, 2, fresh=True)


@pytest.mark.client(
    "Megatron-Core",
    way="each of docs/megatron.md",
    ran="an MoE layer, forward and backward",
)
@pytest.mark.full
def test_a_layer_changed_as_documented() -> None:
    blocks = python_blocks(DOCUMENT)
    assert "install" in blocks[0]
    assert all(len(block.splitlines()) <= 10 for block in blocks)
    # New processes, in which nothing has imported Megatron without a deep_ep.
    run_ranks(changed_as_documented, 2, blocks, fresh=True)
