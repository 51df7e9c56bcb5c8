"""Megatron's `MoELayer` on CPU ranks, changed as docs/megatron.md says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import compat, fused_a2a
from moe_comm.dispatcher.megatron import (
    MegatronManager,
    MegatronTokenDispatcher,
    balance_experts,
)
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


def whole_numbers(shape: tuple[int, ...], most: int, seed: int) -> torch.Tensor:
    """Few enough, and small enough, for all sums of products to be exact in float32, in any order."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, shape, generator=draw).float()


def with_main_grads(layer: Any) -> None:
    """Gradients where Megatron's data parallel wrapper has them: in `main_grad`, of another dtype."""
    for parameter in layer.experts.parameters():
        parameter.main_grad = torch.zeros(parameter.shape, dtype=torch.float64)

        def keep(held: Any) -> None:
            held.main_grad += held.grad
            held.grad = None

        parameter.register_post_accumulate_grad_hook(keep)


def choose_by_halves(router: Any) -> None:
    """Let every choice weigh 1/2, so that products are exact; gradients are those of the probabilities."""
    choose = router.forward

    def halved(*given: Any, **options: Any) -> Any:
        probs, routing_map = choose(*given, **options)
        return (probs - probs.detach()) + routing_map.to(probs.dtype) / 2, routing_map

    router.forward = halved


def with_replicas(context: RankContext, has_main_grads: bool) -> int:
    """A layer with replicas has the bits of one without, while all tokens want few experts; counts steps."""
    with on_cpu():
        from megatron.core.transformer.moe import moe_layer

        options = {"activation_func": torch.relu}
        plain = build(context, None, moe_token_dispatcher_type="alltoall", **options)
        moe_layer.MoEFlexTokenDispatcher = MegatronTokenDispatcher
        balanced = build(context, None, **options)
        for layer in (plain, balanced):
            with torch.no_grad():
                for idx, parameter in enumerate(layer.experts.parameters()):
                    # The seed of the expert, not of the rank.
                    expert = layer.local_expert_indices[idx // 2]
                    parameter.copy_(whole_numbers(tuple(parameter.shape), 1, 10 * expert + idx % 2))
            choose_by_halves(layer.router)
            if has_main_grads:
                with_main_grads(layer)
        balancer = balance_experts(balanced, num_steps=2)
        names = [name for name, _ in plain.named_parameters()]
        assert names == [name for name, _ in balanced.named_parameters()]
        num_with_replicas = 0
        for step in range(8):
            placement = balanced.token_dispatcher._comm_manager.buffer.config.placement
            num_with_replicas += placement.has_replicas
            num_tokens = (40, 5, 24, 1)[(step + context.rank_idx) % 4]
            x = whole_numbers((num_tokens, 1, HIDDEN), 1, step + 50 * context.rank_idx)
            # Tokens that are nearly the column of one expert in the router choose that.
            x[: num_tokens * 3 // 4] = plain.router.weight[step // 4].detach().sign()
            found = []
            for layer in (plain, balanced):
                mine = x.clone().requires_grad_()
                y, _ = layer(mine)
                y.backward(whole_numbers(tuple(y.shape), 1, step))
                if layer is balanced:
                    balancer.reduce_gradients()
                own = [*layer.experts.parameters()]
                grads = [held.main_grad if has_main_grads else held.grad for held in own]
                found.append([y.detach(), mine.grad, layer.router.weight.grad, *grads])
                with torch.no_grad():
                    for held, grad in zip(own, grads, strict=True):
                        held.sub_(grad.sign()).clamp_(-1, 1)
                        grad.zero_()
                layer.router.weight.grad = None
            for idx, (ours, expected) in enumerate(zip(*reversed(found), strict=True)):
                assert torch.equal(ours, expected), (step, idx)
            balancer.step()
        with pytest.raises(ValueError, match="the layers have spare slots already"):
            balance_experts(balanced)
        with pytest.raises(
            ValueError, match=r"MegatronTokenDispatcher or MegatronManager, got none"
        ):
            balance_experts(torch.nn.Linear(1, 1))
        if context.rank_idx == 1:
            own[0].data = own[0].data.clone()
        with pytest.raises(
            ValueError, match=r"a parameter of an expert has moved since balance_expe"
        ):
            balancer.reduce_gradients()
        return num_with_replicas


@pytest.mark.client(
    "Megatron-Core",
    way="`balance_experts`",
    ran="an MoE layer with replicas, trained: the same bits as without",
)
@pytest.mark.full
@pytest.mark.parametrize("has_main_grads", [False, True])
def test_a_layer_with_replicas_has_the_bits_of_one_without(has_main_grads: bool) -> None:
    for num_with_replicas in run_ranks(with_replicas, 2, has_main_grads, fresh=True):
        assert num_with_replicas >= 4


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
