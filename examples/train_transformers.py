"""Trains a small Qwen3-MoE of transformers with its Trainer, the experts spread over ranks by moe_comm.

    torchrun --nproc-per-node 2 examples/train_transformers.py

The model reads characters of the Python standard library, first with transformers' own way to bring
tokens to experts, `"all_to_all"`, then with `"moe_comm"`, from the same parameters and on the same text.
It ends with both losses and times per step, and a text that the second continues.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from train_moe import read_text

from moe_comm.dispatcher import transformers as moe_comm_transformers

WAYS = ("all_to_all", "moe_comm")
NUM_WARM_UP_STEPS = 3
# Sums are added in another order: that changes the last bits of a step, and those grow with training.
MOST_LOSS_DIFFERENCE = 0.05


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """What the user asks for."""
    parser = argparse.ArgumentParser(
        description="Train a small Qwen3-MoE of transformers on several ranks, started by torchrun."
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--context", type=int, default=128, help="characters of a sequence")
    parser.add_argument("--sequences", type=int, default=8, help="per rank and step")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument("--text-bytes", type=int, default=1_000_000)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parsed = parser.parse_args(arguments)
    if parsed.steps <= NUM_WARM_UP_STEPS:
        parser.error(f"--steps must be > {NUM_WARM_UP_STEPS}, got {parsed.steps}")
    if parsed.text_bytes <= parsed.context:
        parser.error(f"--text-bytes must be > {parsed.context}, got {parsed.text_bytes}")
    return parsed


class Windows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Every `context` characters of a text, one after the other."""

    def __init__(self, text: torch.Tensor, context: int) -> None:
        self.rows = text[: len(text) // context * context].view(-1, context)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[idx], "labels": self.rows[idx]}


def save_first_parameters(asked: argparse.Namespace, folder: Path) -> None:
    """The checkpoint from which both ways begin."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(asked.seed)
    config = Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=asked.hidden,
        intermediate_size=2 * asked.hidden,
        moe_intermediate_size=asked.hidden,
        num_hidden_layers=asked.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=asked.hidden // 4,
        num_experts=asked.experts,
        num_experts_per_tok=asked.topk,
        norm_topk_prob=True,
        max_position_embeddings=4 * asked.context,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def train(
    way: str, asked: argparse.Namespace, text: torch.Tensor, folder: Path
) -> tuple[Any, float, float]:
    """The model, its last loss and the seconds of a step, the median."""
    from transformers import (
        AutoModelForCausalLM,
        DistributedConfig,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    num_ranks = dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(
        folder / "first",
        dtype=torch.float32,
        distributed_config=DistributedConfig(
            fsdp_size=num_ranks, ep_size=num_ranks, ep_implementation=way
        ),
    )
    marks = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            dist.barrier()
            marks.append(time.perf_counter())

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder / way),
            use_cpu=True,
            max_steps=asked.steps,
            per_device_train_batch_size=asked.sequences,
            learning_rate=asked.learning_rate,
            logging_steps=max(1, asked.steps // 10),
            save_strategy="no",
            report_to=[],
            seed=asked.seed,
        ),
        train_dataset=Windows(text, asked.context),
        callbacks=[Clock()],
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    steps = [after - before for before, after in itertools.pairwise(marks)]
    return model, float(losses[-1]), statistics.median(steps[NUM_WARM_UP_STEPS - 1 :])


def main(arguments: list[str] | None = None) -> int:
    """Train in both ways; 0 when their losses agree, else 1."""
    asked = parse_arguments(arguments)
    if not dist.is_torchelastic_launched():
        sys.exit(f"start this with: torchrun --nproc-per-node 2 {' '.join(sys.argv)}")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    moe_comm_transformers.register()
    is_first = dist.get_rank() == 0
    console = Console(quiet=not is_first)
    with tempfile.TemporaryDirectory() as own_folder:
        folders = [own_folder]
        dist.broadcast_object_list(folders)
        folder = Path(folders[0])
        if is_first:
            save_first_parameters(asked, folder / "first")
        dist.barrier()
        text = read_text(asked.text_bytes)
        table = Table(title=f"Qwen3-MoE on {dist.get_world_size()} ranks")
        for name in ("ep_implementation", "last loss", "ms per step"):
            table.add_column(name, justify="right")
        losses = []
        for way in WAYS:
            console.print(f"{way}: {asked.steps} steps")
            model, loss, seconds = train(way, asked, text, folder)
            losses.append(loss)
            table.add_row(way, f"{loss:.4f}", f"{seconds * 1e3:.1f}")
        console.print(table)
        prompt = "def __init__(self, "
        ids = torch.tensor([list(prompt.encode())])
        model.eval()
        written = model.generate(ids, max_new_tokens=60, do_sample=False)[0]
        console.print("".join(map(chr, written.tolist())), markup=False, highlight=False)
        dist.barrier()  # before the folder goes
    dist.destroy_process_group()
    difference = abs(losses[0] - losses[1])
    if not difference <= MOST_LOSS_DIFFERENCE:
        console.print(f"DIFFERENT: the losses are {difference:.4f} apart", style="bold red")
        return 1
    console.print(f"both learn the same: losses {difference:.4f} apart", style="bold green")
    return 0


if __name__ == "__main__":
    sys.exit(main())
