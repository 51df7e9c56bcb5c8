"""Trains a small MoE language model on 4 ranks and on 1 rank, and compares the losses bit for bit.

The model reads characters of the Python standard library. Its experts are spread over the ranks by
moe_comm; everything else is replicated. The global batch is cut into 4 equal shards. Outside the
experts every shard is computed on its own, whichever rank it is on, and what is summed over shards is
summed in shard order. Inside the experts, dispatch brings the same rows in the same order on any number
of ranks. So the two runs do the same floating-point operations, and their losses are equal.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import importlib.util
import struct
import sys
import sysconfig
import tempfile
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn

import moe_comm
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.ep.routing_trace import save_routing_trace
from moe_comm.nn import MoELayer, Routing, TopKRouter
from moe_comm.output_files import check_output

NUM_SHARDS = 4
NUM_TRACED_STEPS = 4
NUM_TABLE_ROWS = 10
LINE_S = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Of the model and its training; the same in both runs."""

    num_steps: int = 300
    text_bytes: int = 1_000_000
    seed: int = 1
    num_sequences: int = 32  # per step, over all shards
    context: int = 64
    hidden: int = 64
    num_heads: int = 4
    num_layers: int = 2
    num_experts: int = 16
    num_topk: int = 2
    learning_rate: float = 3e-3
    balance_rate: float = 1e-2

    @property
    def num_shard_tokens(self) -> int:
        """Tokens of one shard in one step."""
        return self.num_sequences // NUM_SHARDS * self.context

    def make_buffer(
        self, communicator: moe_comm.Communicator, num_max_tokens: int
    ) -> moe_comm.EpBuffer:
        """For at most so many tokens of a rank. Collective."""
        config = moe_comm.EpConfig(
            num_experts=self.num_experts,
            num_topk=self.num_topk,
            hidden=self.hidden,
            num_max_tokens_per_rank=num_max_tokens,
            dtype=torch.float32,
        )
        return moe_comm.EpBuffer(communicator, config)


@dataclasses.dataclass(frozen=True)
class RunResult:
    """What a run leaves behind.

    Args:
        losses: One per step.
        topk_idx: int64 `[num_samples, num_tokens, num_topk]`: what the routers chose for the tokens of
            all shards, for every layer of a few steps.
        seconds: Of training.
    """

    losses: list[float]
    topk_idx: torch.Tensor
    seconds: float


def read_text(num_bytes: int) -> torch.Tensor:
    """The first `num_bytes` of the standard library's sources as ids in [0, 128); 127: not ASCII."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= num_bytes:
            break
    return torch.frombuffer(text[:num_bytes], dtype=torch.uint8).long().clamp(max=127)


class Block(nn.Module):
    """One layer without its experts: attention, and the router of its `MoELayer`."""

    router: TopKRouter

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.num_heads = options.num_heads
        self.attention_norm = nn.LayerNorm(options.hidden)
        self.qkv = nn.Linear(options.hidden, 3 * options.hidden)
        self.project = nn.Linear(options.hidden, options.hidden)
        self.expert_norm = nn.LayerNorm(options.hidden)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """`[num_sequences, context, hidden]` to the same."""
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = (part.transpose(1, 2) for part in heads.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.project(mixed.transpose(1, 2).flatten(2))


class Trunk(nn.Module):
    """Everything but the experts; replicated on every rank, and once more for every shard."""

    def __init__(self, options: Options) -> None:
        super().__init__()
        self.token = nn.Embedding(128, options.hidden)
        self.position = nn.Parameter(torch.randn(options.context, options.hidden) * 0.1)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.num_layers))
        self.norm = nn.LayerNorm(options.hidden)
        self.head = nn.Linear(options.hidden, 128)


class MoeModel:
    """The part of the model that one rank holds: trunks of its shards, and its experts.

    Args:
        options: The same on every rank.
        dispatcher: Moves rows between the ranks; shared by all layers.
        num_shards: That this rank computes; None for an equal share.
    """

    def __init__(
        self, options: Options, dispatcher: TokenDispatcher, num_shards: int | None = None
    ) -> None:
        self.options = options
        self.group = dispatcher.buffer.communicator.group
        num_ranks = dispatcher.buffer.communicator.num_ranks
        # Every rank draws the same trunk. An expert's parameters follow from its number.
        torch.manual_seed(options.seed)
        self.trunk = Trunk(options)
        self.layers = [
            MoELayer(
                options.hidden,
                2 * options.hidden,
                options.num_experts,
                options.num_topk,
                dispatcher=dispatcher,
                seed=options.seed + layer_idx,
            )
            for layer_idx in range(options.num_layers)
        ]
        # Replicated like the trunk, so that every shard gets a gradient of its own.
        for block, layer in zip(self.trunk.blocks, self.layers, strict=True):
            block.router = layer.router
        # Added to the scores when experts are chosen; raised for those that get few tokens.
        self.balance = torch.zeros(options.num_layers, options.num_experts)
        # A trunk per shard: same values in the same memory, gradients apart.
        if num_shards is None:
            num_shards = NUM_SHARDS // num_ranks
        self.shard_trunks = [copy.deepcopy(self.trunk) for _ in range(num_shards)]
        for replica in self.shard_trunks:
            for mine, shared in zip(replica.parameters(), self.trunk.parameters(), strict=True):
                mine.data = shared.data

    def parameters(self) -> list[nn.Parameter]:
        """The trunk's, then those of this rank's experts."""
        experts = [parameter for layer in self.layers for parameter in layer.experts.parameters()]
        return [*self.trunk.parameters(), *experts]

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Of all of them."""
        # One tensor after the other: an element's bits do not depend on its neighbors.
        return torch.optim.AdamW(self.parameters(), lr=self.options.learning_rate, foreach=False)

    def backward(
        self, optimizer: torch.optim.Optimizer, shards: list[torch.Tensor]
    ) -> tuple[list[list[torch.Tensor]], torch.Tensor]:
        """Compute the gradients of this rank's experts, and what is to be added over all shards.

        Returns:
            By shard of this rank: its loss, tokens of every expert, gradients of the trunk; and what
            its routers chose, as from `losses`.
        """
        optimizer.zero_grad()
        for trunk in self.shard_trunks:
            trunk.zero_grad()
        losses, topk_idx = self.losses(shards)
        torch.autograd.backward([loss / NUM_SHARDS for loss in losses])
        num_experts = self.options.num_experts
        counts = [
            torch.stack([layer.flatten().bincount(minlength=num_experts) for layer in choices])
            for choices in topk_idx.split(self.options.num_shard_tokens, dim=1)
        ]
        parts = [
            [loss.detach(), count.float(), *[p.grad for p in trunk.parameters()]]
            for loss, count, trunk in zip(losses, counts, self.shard_trunks, strict=True)
        ]
        return parts, topk_idx

    def even_out(self, load: torch.Tensor) -> None:
        """Raise the scores of experts that got few tokens of all shards, lower the others'."""
        self.balance += self.options.balance_rate * torch.sign(load.mean(1, keepdim=True) - load)

    def losses(self, shards: list[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The loss of every shard of this rank, and what its routers chose.

        Args:
            shards: int64 `[num_sequences, context + 1]` of every shard of this rank.

        Returns:
            Scalars; int64 `[num_layers, num_tokens, num_topk]`, tokens in shard order.

        Every tensor has at most two uses that send a gradient back: their sum is the same in either
        order, which may differ between one shard per rank and four.
        """
        hidden = [
            trunk.token(tokens[:, :-1]) + trunk.position
            for trunk, tokens in zip(self.shard_trunks, shards, strict=True)
        ]
        chosen = []
        for layer_idx in range(self.options.num_layers):
            hidden, topk_idx = self._layer(layer_idx, hidden)
            chosen.append(topk_idx)
        losses = []
        for trunk, x, tokens in zip(self.shard_trunks, hidden, shards, strict=True):
            logits = trunk.head(trunk.norm(x))
            losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
        return losses, torch.stack(chosen)

    def _layer(
        self, layer_idx: int, hidden: list[torch.Tensor]
    ) -> tuple[list[torch.Tensor], torch.Tensor]:
        residual, rows, routings = [], [], []
        for trunk, x in zip(self.shard_trunks, hidden, strict=True):
            block: Any = trunk.blocks[layer_idx]
            x = block.attend(x)
            normed = block.expert_norm(x).flatten(0, 1)
            residual.append(x)
            rows.append(normed)
            routings.append(block.router(normed, self.balance[layer_idx]))
        routing = Routing.cat(routings)
        y = self.layers[layer_idx](torch.cat(rows), routing)
        summed = [
            x + part.view_as(x) for x, part in zip(residual, y.chunk(len(residual)), strict=True)
        ]
        return summed, routing.topk_idx


def gather_shards(mine: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """`[num_shards_here, ...]` of every rank, as `[NUM_SHARDS, ...]` in shard order. Collective."""
    if not dist.is_initialized():
        return mine
    gathered = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, mine, group=group)
    return torch.cat(gathered)


def sum_in_order(values: torch.Tensor) -> torch.Tensor:
    """Sum over the first dimension, one addition after the other."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def draw_shards(text: torch.Tensor, options: Options, draw: torch.Generator) -> list[torch.Tensor]:
    """The next global batch: int64 `[num_sequences, context + 1]` of every shard."""
    first = torch.randint(len(text) - options.context, (options.num_sequences,), generator=draw)
    return list(text[first[:, None] + torch.arange(options.context + 1)].chunk(NUM_SHARDS))


def train_step(
    model: MoeModel, optimizer: torch.optim.Optimizer, shards: list[torch.Tensor]
) -> tuple[float, torch.Tensor]:
    """One step; the global loss, and what this rank's routers chose."""
    parts, topk_idx = model.backward(optimizer, shards)
    # What belongs to all shards: gradients of the trunk, router statistics, loss. Each shard's is
    # gathered and added in shard order; a ring would add in an order that depends on the ranks.
    mine = torch.stack([torch.cat([tensor.flatten() for tensor in part]) for part in parts])
    total = sum_in_order(gather_shards(mine, model.group))
    loss, load, gradient = total.split(
        [1, model.balance.numel(), total.numel() - 1 - model.balance.numel()]
    )
    trunk_parameters = list(model.trunk.parameters())
    pieces = gradient.split([parameter.numel() for parameter in trunk_parameters])
    for parameter, piece in zip(trunk_parameters, pieces, strict=True):
        parameter.grad = piece.view_as(parameter)
    optimizer.step()
    model.even_out(load.view_as(model.balance))
    return loss.item() / NUM_SHARDS, topk_idx


def run_rank(
    rank_idx: int, num_ranks: int, options: Options, store: str, results: SimpleQueue[Any]
) -> None:
    """Train on one rank; rank 0 reports every step's loss, then a `RunResult`."""
    torch.set_num_threads(1)  # more threads would add in another order
    if num_ranks > 1:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank_idx, world_size=num_ranks
        )
    text = read_text(options.text_bytes)
    num_shards_here = NUM_SHARDS // num_ranks
    num_tokens = num_shards_here * options.num_shard_tokens
    with (
        moe_comm.Communicator() as communicator,
        options.make_buffer(communicator, num_tokens) as buffer,
    ):
        dispatcher = TokenDispatcher(options.num_experts, buffer=buffer, weighted_by="combine")
        model = MoeModel(options, dispatcher)
        optimizer = model.make_optimizer()
        draw = torch.Generator().manual_seed(options.seed)
        traced_steps = set(range(options.num_steps)[-NUM_TRACED_STEPS:])
        losses: list[float] = []
        traces = []
        start = time.perf_counter()
        for step in range(options.num_steps):
            shards = draw_shards(text, options, draw)
            mine = shards[rank_idx * num_shards_here : (rank_idx + 1) * num_shards_here]
            loss, topk_idx = train_step(model, optimizer, mine)
            losses.append(loss)
            if step in traced_steps:
                by_token = topk_idx.transpose(0, 1).contiguous()
                traces.append(gather_shards(by_token).transpose(0, 1))
            if rank_idx == 0:
                results.put(loss)
        seconds = time.perf_counter() - start
        if rank_idx == 0:
            # numpy, because a tensor in a queue is shared memory of this process, which ends.
            results.put((losses, torch.cat(traces).numpy(), seconds))
    if num_ranks > 1:
        dist.destroy_process_group()


def run(num_ranks: int, options: Options, progress: Progress) -> RunResult:
    """Train on `num_ranks` new processes.

    Raises:
        torch.multiprocessing.ProcessRaisedException: A rank failed; the message has its traceback.
    """
    name = f"{num_ranks} rank{'s' * (num_ranks > 1)}"
    task = progress.add_task(name, total=options.num_steps, loss="starting")
    start = said_at = time.monotonic()
    if not progress.console.is_terminal:
        progress.console.print(f"{name}: starting")
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "torch._dynamo"])  # which every optimizer loads
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = torch.multiprocessing.start_processes(
            run_rank,
            args=(num_ranks, options, str(Path(folder) / "store"), results),
            nprocs=num_ranks,
            join=False,
            daemon=True,
            start_method="forkserver",  # it loads torch once, for all ranks
        )
        result = None
        num_steps = 0
        text = "starting"
        has_ended = False
        while not has_ended:
            has_ended = ranks.join(timeout=0.1)
            while not results.empty():
                item = results.get()
                if isinstance(item, float):
                    num_steps += 1
                    text = f"loss {item:.4f}"
                    progress.update(task, completed=num_steps, loss=text)
                else:
                    losses, topk_idx, seconds = item
                    result = RunResult(losses, torch.from_numpy(topk_idx), seconds)
            now = time.monotonic()
            # A bar moves on a terminal only.
            if not progress.console.is_terminal and now - said_at > LINE_S:
                said_at = now
                progress.console.print(
                    f"{name}: step {num_steps} of {options.num_steps}, {text}, {now - start:.0f} s"
                )
    assert result is not None
    return result


def first_difference(spread: RunResult, alone: RunResult) -> int | None:
    """The first step whose losses are not equal, or None."""
    steps = range(len(alone.losses))
    return next((step for step in steps if spread.losses[step] != alone.losses[step]), None)


def bits(loss: float) -> str:
    """Sign, exponent and fraction of a float32 number, in hexadecimal."""
    return struct.pack(">f", loss).hex()


def show(console: Console, num_ranks: int, spread: RunResult, alone: RunResult) -> None:
    """Print the two curves side by side, every digit of them."""
    table = Table(title="training loss", caption="bits: of the float32 number")
    table.add_column("step", justify="right")
    for name in (f"{num_ranks} ranks", "1 rank"):
        table.add_column(name, justify="right")
        table.add_column("bits", style="dim")
    table.add_column("")
    last = len(alone.losses) - 1
    for step in sorted({round(last * row / NUM_TABLE_ROWS) for row in range(NUM_TABLE_ROWS + 1)}):
        pair = (spread.losses[step], alone.losses[step])
        cells = [text for loss in pair for text in (f"{loss:.6f}", bits(loss))]
        table.add_row(str(step), *cells, "==" if pair[0] == pair[1] else "!=")
    console.print(table)
    seconds = f"{spread.seconds:.1f} s on {num_ranks} ranks, {alone.seconds:.1f} s on 1 rank"
    console.print(f"{len(alone.losses)} steps: {seconds}")


def plot(path: Path, num_ranks: int, spread: RunResult, alone: RunResult) -> None:
    """Draw both curves."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    axes.plot(alone.losses, linewidth=4, alpha=0.4, label="1 rank")
    axes.plot(spread.losses, linewidth=1, label=f"{num_ranks} ranks")
    axes.set(xlabel="step", ylabel="loss", title="The same model on one rank and on several")
    axes.legend()
    figure.savefig(path)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """What the user asks for."""
    defaults = Options()
    parser = argparse.ArgumentParser(
        description="Train a small MoE language model on several ranks and on one; compare the losses."
    )
    parser.add_argument(
        "--ranks", type=int, choices=(2, 4), default=4, help="ranks to compare with 1"
    )
    parser.add_argument("--steps", type=int, default=defaults.num_steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument(
        "--text-bytes",
        type=int,
        default=defaults.text_bytes,
        help="of the standard library to read",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        default=Path("trace.npz"),
        help="file for the router's decisions (moe-comm bench --routing)",
    )
    parser.add_argument("--plot", type=Path, help="image file for the curves; needs matplotlib")
    parsed = parser.parse_args(arguments)
    if parsed.steps < 1:
        parser.error(f"--steps must be >= 1, got {parsed.steps}")
    if parsed.text_bytes <= defaults.context + 1:
        parser.error(f"--text-bytes must be > {defaults.context + 1}, got {parsed.text_bytes}")
    try:
        check_output("--trace", parsed.trace)
        check_output("--plot", parsed.plot)
    except ValueError as error:
        parser.error(str(error))
    if parsed.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    return parsed


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; 0 when the losses are identical, else 1."""
    parsed = parse_arguments(arguments)
    options = Options(num_steps=parsed.steps, text_bytes=parsed.text_bytes, seed=parsed.seed)
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[loss]}"),
    )
    with Progress(*columns, console=console) as progress:
        spread = run(parsed.ranks, options, progress)
        alone = run(1, options, progress)
    show(console, parsed.ranks, spread, alone)
    save_routing_trace(
        parsed.trace, spread.topk_idx, num_experts=options.num_experts, num_ranks=parsed.ranks
    )
    console.print(f"routing of the last steps: {parsed.trace}")
    if parsed.plot is not None:
        plot(parsed.plot, parsed.ranks, spread, alone)
        console.print(f"curves: {parsed.plot}")
    step = first_difference(spread, alone)
    if step is not None:
        pair = f"{bits(spread.losses[step])} and {bits(alone.losses[step])}"
        console.print(f"DIFFERENT from step {step} on: {pair}", style="bold red")
        return 1
    if not torch.equal(spread.topk_idx, alone.topk_idx):
        console.print("DIFFERENT routing in the last steps", style="bold red")
        return 1
    console.print(
        f"identical: {len(alone.losses)} losses on {parsed.ranks} ranks and on 1 rank, bit for bit",
        style="bold green",
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
