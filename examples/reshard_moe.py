"""Trains a small MoE on 4 ranks, reshards it twice, and generates the same text everywhere, bit for bit.

The model is that of `train_moe.py`. It is trained with its experts spread over 4 processes (ep4). After
every round of training its weights go to a model that is cut differently on the same processes (tp2.ep2:
tensor and expert parallel), and to one on 2 processes of their own (tp2), and all three generate text.
Logits and text must be those of the source model, bit for bit.

`laid_out_moe.py` has the model and says how generation is made to give the same bits under any layout.
So bits differ where a weight differs, and only there.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from laid_out_moe import LaidOutModel, generate
from rich.console import Console
from rich.table import Table
from rich.text import Text
from train_moe import NUM_SHARDS, MoeModel, Options, draw_shards, read_text, train_step

import moe_comm
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.resharding import Parallelism, Refit, clear_all_caches

NUM_TRAINERS = 4
NUM_SEQUENCES = 4
NUM_PROMPT_CHARACTERS = 24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Of one run.

    Args:
        options: Of the model and its training.
        num_rounds: Times that the model is trained, resharded and asked for text.
        num_new: Characters to generate.
        collocated: Layout on the training processes.
        apart: Layout on processes of their own.
        num_apart: Those processes.
        refit_method: Of both `Refit`s.
    """

    options: Options
    num_rounds: int
    num_new: int
    collocated: str
    apart: str
    num_apart: int
    refit_method: str

    def __post_init__(self) -> None:
        for text, num_ranks in ((self.collocated, NUM_TRAINERS), (self.apart, self.num_apart)):
            layout = Parallelism.parse(text, num_ranks)
            if layout.pp > 1:
                raise ValueError(f"generation here has no pipeline, got pp{layout.pp}")
            for name, size, divisor in (
                ("heads", self.options.num_heads, layout.tp),
                ("sequences", NUM_SEQUENCES, num_ranks // layout.tp),
                ("experts", self.options.num_experts, layout.ep),
                ("columns of an expert", self.options.hidden, layout.etp),
            ):
                if size % divisor:
                    raise ValueError(f"{size} {name} cannot be divided by {divisor} for {text}")


@dataclasses.dataclass(frozen=True)
class Generated:
    """What one model gave in one round.

    Args:
        logits: float32 `[NUM_SEQUENCES, num_new, 128]`.
        characters: int64 `[NUM_SEQUENCES, num_new]`.
        refit_ms: Time of the refit before, of its slowest rank; 0.0 for the source.
    """

    logits: torch.Tensor
    characters: torch.Tensor
    refit_ms: float


class Trainer:
    """The training of one rank, as in `train_moe.py`."""

    def __init__(self, settings: Settings, text: torch.Tensor, group: dist.ProcessGroup) -> None:
        options = self.options = settings.options
        self.text = text
        self.rank = group.rank()
        self.communicator = moe_comm.Communicator(group)
        num_tokens = NUM_SHARDS // NUM_TRAINERS * options.num_shard_tokens
        self.buffer = options.make_buffer(self.communicator, num_tokens)
        dispatcher = TokenDispatcher(options.num_experts, buffer=self.buffer, weighted_by="combine")
        self.model = MoeModel(options, dispatcher)
        self.optimizer = self.model.make_optimizer()
        self.draw = torch.Generator().manual_seed(options.seed)

    def train(self, num_steps: int) -> float:
        """Go on for some steps; the last loss. Collective."""
        loss = float("nan")
        shards_here = NUM_SHARDS // NUM_TRAINERS
        for _ in range(num_steps):
            shards = draw_shards(self.text, self.options, self.draw)
            mine = shards[self.rank * shards_here : (self.rank + 1) * shards_here]
            loss, _ = train_step(self.model, self.optimizer, mine)
        return loss

    def close(self) -> None:
        """Collective."""
        self.buffer.destroy()
        self.communicator.destroy()


def run_rank(rank: int, settings: Settings, store: str, results: SimpleQueue[Any]) -> None:
    """One process: a trainer and part of the collocated model, or part of the model apart."""
    torch.set_num_threads(1)
    num_processes = NUM_TRAINERS + settings.num_apart
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=num_processes
    )
    options = settings.options
    trainers = dist.new_group(list(range(NUM_TRAINERS)))
    text = read_text(options.text_bytes)
    starts = torch.arange(NUM_SEQUENCES) * (len(text) // NUM_SEQUENCES)
    prompts = text[starts[:, None] + torch.arange(NUM_PROMPT_CHARACTERS)]

    def say(round_idx: int, name: str, model: LaidOutModel, refit_ms: float) -> None:
        logits, characters = generate(model, prompts, settings.num_new)
        if model.reports:
            # numpy, because a tensor in a queue is shared memory of this process, which ends.
            part = (logits.numpy(), characters.numpy(), refit_ms)
            results.put(("part", round_idx, name, model.part_idx, part))

    trainer = source = collocated = apart = None
    if rank < NUM_TRAINERS:
        trainer = Trainer(settings, text, trainers)
        source = LaidOutModel(options, Parallelism(NUM_TRAINERS, ep=NUM_TRAINERS), 0, NUM_SEQUENCES)
        source.adopt(trainer.model)
        layout = Parallelism.parse(settings.collocated, NUM_TRAINERS)
        collocated = LaidOutModel(options, layout, 0, NUM_SEQUENCES)
    else:
        layout = Parallelism.parse(settings.apart, settings.num_apart)
        apart = LaidOutModel(options, layout, NUM_TRAINERS, NUM_SEQUENCES)
    into_apart = Refit(source, apart, settings.refit_method)
    into_collocated = None
    if rank < NUM_TRAINERS:
        into_collocated = Refit(source, collocated, settings.refit_method, trainers)
    for round_idx in range(settings.num_rounds):
        if not (trainer is None or source is None or collocated is None or into_collocated is None):
            loss = trainer.train(options.num_steps)
            if rank == 0:
                results.put(("loss", round_idx, loss))
            say(round_idx, "source", source, 0.0)
            refit_ms = timed(into_collocated, trainers)
            say(round_idx, "collocated", collocated, refit_ms)
        refit_ms = timed(into_apart, None)
        if apart is not None:
            say(round_idx, "apart", apart, refit_ms)
    clear_all_caches()
    for used in (trainer, source, collocated, apart):
        if used is not None:
            used.close()
    dist.barrier()
    dist.destroy_process_group()


def timed(refit: Refit, group: dist.ProcessGroup | None) -> float:
    """Run a refit; milliseconds. Collective over `group`, its ranks."""
    dist.barrier(group)  # some are still generating
    start = time.perf_counter()
    refit.run()
    return (time.perf_counter() - start) * 1e3


def run(settings: Settings, console: Console) -> tuple[list[float], list[dict[str, Generated]]]:
    """Start the processes; the loss of every round, and what every model generated in it."""
    losses: list[float] = []
    parts: list[dict[str, dict[int, Any]]] = [{} for _ in range(settings.num_rounds)]
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch._dynamo"])  # which every optimizer loads
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder, console.status("starting") as status:
        ranks = torch.multiprocessing.start_processes(
            run_rank,
            args=(settings, str(Path(folder) / "store"), results),
            nprocs=NUM_TRAINERS + settings.num_apart,
            join=False,
            daemon=True,
            start_method="forkserver",  # it loads torch once, for all ranks
        )
        has_ended = False
        while not has_ended:
            has_ended = ranks.join(timeout=0.1)
            while not results.empty():
                kind, round_idx, *rest = results.get()
                if kind == "loss":
                    losses.append(rest[0])
                    status.update(f"round {round_idx}: loss {rest[0]:.4f}")
                else:
                    name, part_idx, part = rest
                    parts[round_idx].setdefault(name, {})[part_idx] = part
    return losses, [
        {name: assemble(by_part) for name, by_part in of_round.items()} for of_round in parts
    ]


def assemble(by_part: dict[int, Any]) -> Generated:
    """One model's sequences, from what its ranks reported."""
    in_order = [by_part[part_idx] for part_idx in range(len(by_part))]
    return Generated(
        logits=torch.cat([torch.from_numpy(logits) for logits, _, _ in in_order]),
        characters=torch.cat([torch.from_numpy(characters) for _, characters, _ in in_order]),
        refit_ms=max(refit_ms for _, _, refit_ms in in_order),
    )


def difference(ours: Generated, source: Generated) -> str | None:
    """Where a model's output is not the source's bit for bit, or None."""
    is_other = ours.logits.view(torch.int32) != source.logits.view(torch.int32)
    if is_other.any():
        sequence, step, character = is_other.nonzero()[0].tolist()
        pair = (float(model.logits[sequence, step, character]) for model in (ours, source))
        return (
            f"{int(is_other.sum())} of {is_other.numel()} logits, first in sequence {sequence}, "
            f"step {step}, character {character}: " + " and ".join(f"{value!r}" for value in pair)
        )
    if not torch.equal(ours.characters, source.characters):
        return "text"
    if not bool(torch.isfinite(ours.logits).all()):
        return "logits that are not finite, in both"
    return None


def show(console: Console, settings: Settings, losses: list[float], rounds: Any) -> None:
    """Print what every model wrote."""
    titles = {
        "source": f"ep{NUM_TRAINERS} on {NUM_TRAINERS} processes, trained",
        "collocated": f"{settings.collocated} on the same processes",
        "apart": f"{settings.apart} on {settings.num_apart} others",
    }
    table = Table(title="the first of the generated texts", show_lines=True)
    for name, justify in (("round", "right"), ("loss", "right"), ("model", "left")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("refit ms", justify="right")
    table.add_column("text")
    table.add_column("logits")
    for round_idx, of_round in enumerate(rounds):
        for name, title in titles.items():
            generated = of_round[name]
            text = bytes(generated.characters[0].tolist()).decode("ascii")
            is_source = name == "source"
            table.add_row(
                str(round_idx),
                f"{losses[round_idx]:.4f}" if is_source else "",
                title,
                "" if is_source else f"{generated.refit_ms:.1f}",
                Text(repr(text)),
                "" if is_source else "!=" if difference(generated, of_round["source"]) else "==",
            )
    console.print(table)


def parse_arguments(arguments: list[str] | None) -> Settings:
    """What the user asks for."""
    parser = argparse.ArgumentParser(
        description="Train a small MoE, reshard it to other layouts, compare what they generate."
    )
    parser.add_argument("--steps", type=int, default=120, help="of training in every round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--characters", type=int, default=32, help="to generate")
    parser.add_argument("--to", default="tp2.ep2", help="layout on the training processes")
    parser.add_argument("--apart", default="tp2", help="layout on processes of their own")
    parser.add_argument("--apart-ranks", type=int, default=2, help="those processes")
    parser.add_argument("--refit-method", default="symmetric")
    parser.add_argument("--seed", type=int, default=Options.seed)
    parser.add_argument("--text-bytes", type=int, default=Options.text_bytes)
    parsed = parser.parse_args(arguments)
    for name, least in (("steps", 1), ("rounds", 1), ("characters", 1), ("text_bytes", 1000)):
        if getattr(parsed, name) < least:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be >= {least}, got {getattr(parsed, name)}")
    options = Options(num_steps=parsed.steps, text_bytes=parsed.text_bytes, seed=parsed.seed)
    try:
        return Settings(
            options=options,
            num_rounds=parsed.rounds,
            num_new=parsed.characters,
            collocated=parsed.to,
            apart=parsed.apart,
            num_apart=parsed.apart_ranks,
            refit_method=parsed.refit_method,
        )
    except ValueError as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; 0 when all outputs are identical, else 1."""
    settings = parse_arguments(arguments)
    console = Console()
    start = time.perf_counter()
    losses, rounds = run(settings, console)
    show(console, settings, losses, rounds)
    console.print(f"{time.perf_counter() - start:.1f} s")
    code = 0
    for round_idx, of_round in enumerate(rounds):
        for name in ("collocated", "apart"):
            different = difference(of_round[name], of_round["source"])
            if different is not None:
                where = f"DIFFERENT in round {round_idx}, model {name}"
                console.print(f"{where}: {different}", style="bold red")
                code = 1
    if code == 0:
        num_logits = sum(of_round["source"].logits.numel() for of_round in rounds)
        console.print(
            f"identical: {num_logits} logits and {settings.num_rounds} x {NUM_SEQUENCES} texts under "
            f"3 layouts, bit for bit",
            style="bold green",
        )
    return code


if __name__ == "__main__":
    sys.exit(main())
