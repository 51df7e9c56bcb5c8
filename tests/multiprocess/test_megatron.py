"""Megatron's own code on CPU ranks over this package, against its all-to-all dispatcher over Gloo."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
import torch.distributed as dist

import moe_comm.compat
from moe_comm import fused_a2a
from moe_comm.dispatcher.megatron import MegatronManager, MegatronTokenDispatcher
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.megatron_on_cpu import Experts, make_config, make_groups, on_cpu, run_layer

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)

HIDDEN = 64


def routing(rank_idx: int, num_tokens: int, num_experts: int, num_topk: int) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(100 + rank_idx)
    x = torch.randn(num_tokens, 1, HIDDEN, generator=generator)
    choices = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :num_topk]
    return _routed(x, choices, num_experts, generator)


def even_routing(
    rank_idx: int, num_tokens: int, num_experts: int, num_topk: int
) -> tuple[Any, ...]:
    """Every rank sends as many rows to every expert: Gloo gathers equal sizes only."""
    generator = torch.Generator().manual_seed(100 + rank_idx)
    x = torch.randn(num_tokens, 1, HIDDEN, generator=generator)
    first = torch.arange(num_tokens)[:, None] + rank_idx
    choices = (first + torch.arange(num_topk)) % num_experts
    return _routed(x, choices, num_experts, generator)


def _routed(
    x: torch.Tensor, choices: torch.Tensor, num_experts: int, generator: torch.Generator
) -> tuple[Any, ...]:
    routing_map = torch.zeros(x.shape[0], num_experts, dtype=torch.bool)
    routing_map.scatter_(1, choices, True)
    probs = (0.1 + torch.rand(routing_map.shape, generator=generator)) * routing_map
    return x, routing_map, probs


def dispatcher_of(module: Any, kind: str, *args: Any) -> Any:
    """A dispatcher of Megatron or of this package, by name."""
    if kind == "moe_comm":
        return MegatronTokenDispatcher(*args)
    flex = module.MoEFlexTokenDispatcher(*args)
    if kind == "manager":
        flex._comm_manager = MegatronManager(flex.tp_ep_group, flex.num_local_experts)
    return flex


def point_at_fused_a2a(module: Any, patch: pytest.MonkeyPatch) -> None:
    """Megatron's managers call the functions of `moe_comm.fused_a2a`."""
    for name in (
        "fused_combine",
        "fused_dispatch",
        "hybrid_ep_combine",
        "hybrid_ep_dispatch",
        "set_deepep_num_sms",
    ):
        patch.setattr(module, name, getattr(fused_a2a, name))


def against_all_to_all(
    context: RankContext, kind: str, backend: str, tp_size: int, num_tokens: tuple[int, ...]
) -> None:
    num_experts, num_topk = 8, 3
    route = even_routing if tp_size > 1 else routing
    groups = make_groups(context.rank_idx, context.num_ranks, tp_size)
    ep_rank, tp_rank = divmod(context.rank_idx, tp_size)
    num_local = num_experts * tp_size // context.num_ranks
    indices = list(range(ep_rank * num_local, (ep_rank + 1) * num_local))
    experts = Experts(indices, HIDDEN, tp_rank)
    with on_cpu() as module, pytest.MonkeyPatch.context() as patch:
        oracle_config = make_config(
            num_experts, num_topk, context.num_ranks, tp_size, moe_token_dispatcher_type="alltoall"
        )
        oracle = module.MoEAlltoAllTokenDispatcher(num_local, indices, oracle_config, groups)
        point_at_fused_a2a(module, patch)
        config = make_config(
            num_experts,
            num_topk,
            context.num_ranks,
            tp_size,
            moe_token_dispatcher_type="flex",
            moe_flex_dispatcher_backend=backend,
        )
        dispatcher = dispatcher_of(module, kind, num_local, indices, config, groups)
        for step in range(2):
            inputs = route(
                context.rank_idx + 7 * step, num_tokens[context.rank_idx], num_experts, num_topk
            )
            expected = run_layer(oracle, experts, inputs)
            found = run_layer(dispatcher, experts, inputs)
            compare(expected, found)


def compare(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]) -> None:
    assert found["tokens_per_expert"].tolist() == expected["tokens_per_expert"].tolist()
    for name in ("y", "grad_x", "grad_probs", "grad_weight"):
        assert found[name].shape == expected[name].shape, name
        # Sums of a few float32 terms, in another order.
        torch.testing.assert_close(
            found[name],
            expected[name],
            rtol=1e-5,
            atol=1e-5,
            msg=lambda text, n=name: f"{n}: {text}",
        )


KINDS = [
    pytest.param("megatron", "deepep", id="megatron-deepep"),
    pytest.param("megatron", "hybridep", id="megatron-hybridep"),
    pytest.param("manager", "hybridep", id="manager-in-megatron"),
    pytest.param("moe_comm", "hybridep", id="own-dispatcher"),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("kind", "backend"), KINDS)
def test_against_the_all_to_all_dispatcher(kind: str, backend: str) -> None:
    run_ranks(against_all_to_all, 2, kind, backend, 1, (12, 7))


@pytest.mark.sampled(1, of=("backend",))
@pytest.mark.parametrize(("kind", "backend"), KINDS)
def test_with_tensor_parallel_experts(kind: str, backend: str) -> None:
    run_ranks(against_all_to_all, 4, kind, backend, 2, (16, 16, 16, 16))


def over_the_deep_ep_module(context: RankContext) -> None:
    """Megatron's `fused_a2a` and its managers, unchanged, over the module that `install` provides."""
    moe_comm.compat.install("deep_ep")
    num_experts, num_topk = 8, 3
    with on_cpu() as module:
        from megatron.core.transformer.moe import fused_a2a as theirs

        assert theirs.HAVE_DEEP_EP
        assert theirs.HAVE_HYBRIDEP
        assert module.fused_dispatch is theirs.fused_dispatch
        groups = make_groups(context.rank_idx, context.num_ranks, 1)
        num_local = num_experts // context.num_ranks
        indices = list(range(context.rank_idx * num_local, (context.rank_idx + 1) * num_local))
        experts = Experts(indices, HIDDEN, 0)
        config = make_config(
            num_experts, num_topk, context.num_ranks, 1, moe_token_dispatcher_type="alltoall"
        )
        oracle = module.MoEAlltoAllTokenDispatcher(num_local, indices, config, groups)
        for backend in ("deepep", "hybridep"):
            config = make_config(
                num_experts,
                num_topk,
                context.num_ranks,
                1,
                moe_token_dispatcher_type="flex",
                moe_flex_dispatcher_backend=backend,
            )
            flex = module.MoEFlexTokenDispatcher(num_local, indices, config, groups)
            for step in range(2):
                inputs = routing(context.rank_idx + 7 * step, 16, num_experts, num_topk)
                compare(run_layer(oracle, experts, inputs), run_layer(flex, experts, inputs))


@pytest.mark.full
def test_megatron_over_the_deep_ep_module() -> None:
    # New processes, in which nothing has imported Megatron without a deep_ep.
    run_ranks(over_the_deep_ep_module, 2, fresh=True)


def padded_capacity(context: RankContext) -> None:
    """Drop and pad: Megatron's router sends every expert the same number of rows."""
    num_experts, capacity = 4, 3
    groups = make_groups(context.rank_idx, context.num_ranks, 1)
    num_local = num_experts // context.num_ranks
    indices = list(range(context.rank_idx * num_local, (context.rank_idx + 1) * num_local))
    experts = Experts(indices, HIDDEN, 0)
    generator = torch.Generator().manual_seed(context.rank_idx)
    x = torch.randn(6, 1, HIDDEN, generator=generator)
    scores = torch.rand(6, num_experts, generator=generator)
    routing_map = torch.zeros(6, num_experts, dtype=torch.bool)
    routing_map.scatter_(0, scores.topk(capacity, dim=0).indices, True)
    options = {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
    with on_cpu() as module, pytest.MonkeyPatch.context() as patch:
        point_at_fused_a2a(module, patch)
        configs = [
            make_config(
                num_experts,
                2,
                context.num_ranks,
                1,
                moe_token_dispatcher_type=kind,
                moe_flex_dispatcher_backend="hybridep",
                **options,
            )
            for kind in ("alltoall", "flex")
        ]
        oracle = module.MoEAlltoAllTokenDispatcher(num_local, indices, configs[0], groups)
        flex = module.MoEFlexTokenDispatcher(num_local, indices, configs[1], groups)
        own = MegatronTokenDispatcher(num_local, indices, configs[1], groups)
        inputs = (x, routing_map, scores * routing_map)
        expected = run_layer(oracle, experts, inputs)
        compare(expected, run_layer(flex, experts, inputs))
        compare(expected, run_layer(own, experts, inputs))


def test_padded_capacity() -> None:
    run_ranks(padded_capacity, 2)


def test_the_oracle_sees_a_wrong_row() -> None:
    expected = {name: torch.ones(4, 3) for name in ("y", "grad_x", "grad_probs", "grad_weight")}
    expected["tokens_per_expert"] = torch.tensor([2, 2])
    wrong = dict(expected, grad_x=expected["grad_x"].clone())
    wrong["grad_x"][3, 1] = 1.001
    with pytest.raises(AssertionError, match="grad_x"):
        compare(expected, wrong)
    assert not dist.is_initialized()
