"""Small models of transformers, from their own configurations, loaded onto ranks by its own means."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, DistributedConfig

from moe_comm.testing import RankContext

VOCABULARY = 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}

_GROUPED = {
    **SIZES,
    "num_hidden_layers": 3,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

# Name: configuration. Their experts modules differ in layout, biases, gate and activation.
CONFIGS: dict[str, Callable[[], Any]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES, head_dim=16, intermediate_size=64, moe_intermediate_size=32, num_experts=8
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **SIZES, head_dim=16, intermediate_size=32, num_local_experts=4
    ),
    # Groups of experts, a shared expert, a layer without experts, and latent attention.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **_GROUPED,
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    ),
    # Transposed weights with biases, gate and up interleaved, a clamped activation.
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=16, intermediate_size=32, num_local_experts=4, sliding_window=8
    ),
    # Experts without a gate, between layers of other kinds.
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **SIZES, head_dim=16, intermediate_size=64, moe_intermediate_size=32, n_routed_experts=8
    ),
}

_DENSE = {name: size for name, size in SIZES.items() if name != "num_experts_per_tok"}

# More, which are only looked at.
VIEWED_CONFIGS: dict[str, Callable[[], Any]] = {
    # Transposed weights, gate and up one after the other.
    "llama4": lambda: transformers.Llama4TextConfig(
        **SIZES, head_dim=16, intermediate_size=32, intermediate_size_mlp=64, num_local_experts=4
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**_GROUPED, head_dim=16),
    # No experts; tied embeddings, and not.
    "qwen3": lambda: transformers.Qwen3Config(
        **_DENSE, head_dim=16, intermediate_size=64, tie_word_embeddings=True
    ),
    "llama": lambda: transformers.LlamaConfig(**_DENSE, head_dim=16, intermediate_size=64),
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Spread of a model.

    Args:
        ep_size: Ranks with different experts.
        tp_size: Ranks with one batch.
    """

    ep_size: int
    tp_size: int = 1

    def __str__(self) -> str:
        return f"ep{self.ep_size}.tp{self.tp_size}"


def save_model(name: str, folder: Path) -> str:
    """A checkpoint of a random model."""
    quiet()
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config((CONFIGS | VIEWED_CONFIGS)[name]())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() < 2 or not parameter.any():  # those that begin as 0 or 1
                parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    return str(folder)


class Folders(dict[str, str]):
    """The folder of every model, made when it is asked for."""

    def __init__(self, temporary: pytest.TempPathFactory) -> None:
        self._temporary = temporary

    def __missing__(self, name: str) -> str:
        self[name] = save_model(name, Path(self._temporary.mktemp(name)))
        return self[name]


def on_disk(folder: str | Path) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint by their names in its files."""
    disk: dict[str, torch.Tensor] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        disk |= load_file(path)
    return disk


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    warnings.filterwarnings("ignore", message=".*barrier.*")


def load(
    checkpoint: str,
    implementation: str,
    context: RankContext,
    layout: Layout,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Any:
    """The model on these ranks, as `plan_of` says."""
    config = plan_of(implementation, context, layout)
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=dtype, distributed_config=config, **options
    )


def plan_of(implementation: str, context: RankContext, layout: Layout) -> DistributedConfig:
    """The parallel plan of a layout; what it leaves over is FSDP."""
    quiet()
    return DistributedConfig(
        tp_size=layout.tp_size,
        fsdp_size=context.num_ranks // layout.tp_size,
        ep_size=layout.ep_size,
        ep_implementation=implementation,
    )


def batch(batch_idx: int, num_tokens: int) -> torch.Tensor:
    """int64 `[2, num_tokens]`; the same for the ranks of a TP group, which share a `batch_idx`."""
    draw = torch.Generator().manual_seed(100 + batch_idx)
    return torch.randint(1, VOCABULARY, (2, num_tokens), generator=draw)


def step_and_text(
    model: Any, batches: list[torch.Tensor], own: int, *, run: Any = None
) -> dict[str, torch.Tensor]:
    """Loss, whole gradients and the text that greedy generation continues with. Collective.

    Args:
        model: Model on these ranks, or alone.
        batches: Batches whose losses are averaged: that of this rank, or alone those of all ranks.
        own: Index of this rank's batch; generates one token more than the batch before, so that
            ranks end at different times.
        run: Function that is called for the loss; None for the model.
    """
    run = model if run is None else run
    model.train()
    losses = [run(input_ids=tokens, labels=tokens).loss for tokens in batches]
    torch.stack(losses).mean().backward()
    grads = {
        name: whole(parameter.grad)
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.eval()
    idx = own if len(batches) > 1 else 0
    text = model.generate(batches[idx], max_new_tokens=4 + own, do_sample=False)
    return {"loss": losses[idx].detach(), "text": text, **grads}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Whole tensor of all shards. Collective."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Difference relative to the norm; where 0 is expected, the norm of what was found; infinite for another shape."""
    if found.shape != expected.shape:
        return float("inf")
    found, expected = found.detach().double(), expected.detach().double()
    error = (found - expected).norm()
    return float(error / expected.norm()) if expected.any() else float(error)
