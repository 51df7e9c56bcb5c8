"""Megatron's `GPTModel` trained on CPU ranks, changed as docs/megatron.md says."""

from __future__ import annotations

import importlib
import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from moe_comm import compat
from moe_comm.checkpoints import CheckingLoadPlanner, CheckpointState
from moe_comm.dispatcher.megatron import MegatronManager, MegatronTokenDispatcher
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.megatron_on_cpu import make_config, on_cpu, start_parallel_state
from tests.helpers.pages import python_blocks

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
    ),
]

BLOCKS = python_blocks(Path(__file__).resolve().parents[2] / "docs/megatron.md")
NUM_LAYERS, NUM_EXPERTS, NUM_TOPK, HIDDEN = 2, 4, 2, 64
VOCABULARY, LENGTH, BATCH, NUM_STEPS = 64, 16, 2, 20


def build(num_ranks: int, **options: Any) -> Any:
    """A model with a mixture of experts in every layer; parameters equal on every call."""
    models = importlib.import_module("megatron.core.models.gpt")
    specs = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    config = make_config(
        NUM_EXPERTS,
        NUM_TOPK,
        num_ranks,
        hidden=HIDDEN,
        num_layers=NUM_LAYERS,
        num_attention_heads=4,
        moe_ffn_hidden_size=32,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=1e-2,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # These are kernels of CUDA.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        **options,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = models.GPTModel(
            config,
            specs.get_gpt_layer_local_spec(NUM_EXPERTS, moe_grouped_gemm=False),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
        )
    first = config.num_moe_experts // num_ranks * dist.get_rank()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                # Name of an expert by its number among all.
                number = re.sub(
                    r"local_experts\.(\d+)", lambda found: f"expert {first + int(found[1])}", name
                )
                generator = torch.Generator().manual_seed(len(number) + sum(number.encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)
    return model


def train(model: Any) -> list[torch.Tensor]:
    """Losses of all steps, then the parameters. Ranks have batches of their own."""
    rank_idx, num_ranks = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(rank_idx)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    is_hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    losses = []
    for _ in range(NUM_STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)
        loss = model(tokens, positions, is_hidden, labels=(3 * tokens + 1) % VOCABULARY).mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            if getattr(parameter, "allreduce", True):  # not a parameter of an expert
                dist.all_reduce(parameter.grad)
            parameter.grad /= num_ranks
        optimizer.step()
        losses.append(loss.detach())
    assert losses[-1] < 0.8 * losses[0]
    return [torch.stack(losses), *(parameter.detach() for parameter in model.parameters())]


def trained_as_documented(context: RankContext, way: str) -> None:
    install, use_dispatcher, use_manager = BLOCKS
    if way == "fused_a2a":
        compat.install("megatron.core.transformer.moe.fused_a2a")
    exec(install, {})
    options: dict[str, Any] = {"moe_token_dispatcher_type": "flex"}
    if way in ("deepep", "hybridep"):
        options["moe_flex_dispatcher_backend"] = way
    with on_cpu():
        start_parallel_state(context.num_ranks)
        expected = train(build(context.num_ranks, moe_token_dispatcher_type="alltoall"))
        if way == "dispatcher":
            exec(use_dispatcher, {})
        model = build(context.num_ranks, **options)
        if way == "manager":
            exec(use_manager, {"model": model})
        for layer in model.decoder.layers:
            dispatcher = layer.mlp.token_dispatcher
            assert isinstance(dispatcher, MegatronTokenDispatcher) is (way == "dispatcher")
            ours = isinstance(dispatcher._comm_manager, MegatronManager)
            assert ours is (way in ("manager", "dispatcher"))
        for found, wanted in zip(train(model), expected, strict=True):
            # Sums of float32 in another order, over twenty steps of an optimizer.
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.client(
    "Megatron-Core",
    way="{way}",
    ran="a GPT model, 20 steps of an optimizer",
)
@pytest.mark.parametrize("way", ["deepep", "hybridep", "manager", "dispatcher", "fused_a2a"])
def test_a_model_is_trained_as_with_the_all_to_all_dispatcher(way: str) -> None:
    # New processes, in which nothing has imported Megatron without a deep_ep.
    run_ranks(trained_as_documented, 2, way, fresh=True)


def with_moments(model: Any, factor: float) -> torch.optim.Optimizer:
    """An optimizer that has moments of so many times the values of the parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for parameter, state in optimizer.state.items():
        state["exp_avg"].copy_(parameter.detach() * factor)
    return optimizer


def save_model(context: RankContext, folder: str) -> None:
    with on_cpu():
        start_parallel_state(context.num_ranks)
        model = build(context.num_ranks, moe_token_dispatcher_type="alltoall")
        dcp.save({"app": CheckpointState(model, with_moments(model, 2.0))}, checkpoint_id=folder)


def load_model(context: RankContext, folder: str) -> list[str]:
    with on_cpu():
        start_parallel_state(context.num_ranks)
        model, expected = (
            build(context.num_ranks, moe_token_dispatcher_type="alltoall") for _ in range(2)
        )
        for parameter in model.parameters():
            parameter.detach().fill_(7)
        optimizer = with_moments(model, 1.0)
        state = CheckpointState(model, optimizer)
        dcp.load({"app": state}, checkpoint_id=folder, planner=CheckingLoadPlanner())
        wanted = dict(expected.named_parameters())
        return [
            name
            for name, parameter in model.named_parameters()
            if not torch.equal(parameter, wanted[name])
            or not torch.equal(optimizer.state[parameter]["exp_avg"], 2 * wanted[name].detach())
        ]


@pytest.mark.client(
    "Megatron-Core",
    way="`CheckpointState`",
    ran="a GPT model and its optimizer, saved by 2 expert parallel ranks, loaded by {num_ranks}, by "
    "`torch.distributed.checkpoint`",
)
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_checkpoint_is_loaded_on_other_ranks(tmp_path: Path, num_ranks: int) -> None:
    run_ranks(save_model, 2, str(tmp_path), fresh=True)
    assert run_ranks(load_model, num_ranks, str(tmp_path), fresh=True) == [[]] * num_ranks
