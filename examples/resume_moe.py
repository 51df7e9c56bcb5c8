"""Trains the model of train_moe.py over restarts on other numbers of ranks, and compares the losses.

Four ranks train and save every few steps, until one of them is killed while it saves. Three ranks go on
from the last version that is whole, then one. A checkpoint has whole tensors by name (weights, moments of
the optimizer, the step); each rank writes and reads its experts and a share of what is replicated. As
sums are taken over the parts of the batch and not over ranks, the losses are those of a run on one rank
that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from train_elastic import Replica, batch_of
from train_moe import NUM_SHARDS, Options, bits, read_text

import moe_comm
from moe_comm.checkpoints import load_checkpoint, save_checkpoint
from moe_comm.resharding import CheckpointView, CheckpointViews
from moe_comm.resharding.describe.intervals import Interval, whole

MOMENTS = ("exp_avg", "exp_avg_sq")


class Training:
    """One rank's part of the model and its optimizer, as a checkpoint has them.

    Args:
        communicator: Of all ranks of this run.
        options: Of the model.

    Attributes:
        replica: Makes the steps.
        step: int64 scalar: the one that comes next.
        views: What this rank holds, by the names of the checkpoint.
    """

    def __init__(self, communicator: moe_comm.Communicator, options: Options) -> None:
        self.replica = Replica(communicator, options)
        self.step = torch.zeros((), dtype=torch.int64)
        self.views = CheckpointViews(list(self._describe()))

    def _describe(self) -> Iterator[CheckpointView]:
        model = self.replica.model
        for name, parameter in model.trunk.named_parameters():
            for full_name, tensor in self._with_moments(name, parameter):
                yield _replicated(full_name, tensor)
        for layer_idx, layer in enumerate(model.layers):
            for name, parameter in layer.experts.named_parameters():
                stacked = f"blocks.{layer_idx}.experts.{name}"
                for full_name, tensor in self._with_moments(stacked, parameter):
                    yield self._of_experts(full_name, tensor)
        yield _replicated("balance", model.balance)
        yield _replicated("step", self.step)

    def _with_moments(
        self, name: str, parameter: torch.nn.Parameter
    ) -> Iterator[tuple[str, torch.Tensor]]:
        names = (name, *(f"optimizer.{moment}.{name}" for moment in MOMENTS))
        return zip(names, self.replica.state([parameter]), strict=True)

    def _of_experts(self, name: str, tensor: torch.Tensor) -> CheckpointView:
        """`[num_local_experts, ...]` as a part of `[num_experts, ...]`."""
        experts = tuple(
            Interval(expert_idx, local_idx, 1)
            for local_idx, expert_idx in enumerate(self.replica.experts)
        )
        shape = (self.replica.options.num_experts, *tensor.shape[1:])
        return CheckpointView(name, shape, (experts, *map(whole, shape[1:])), tensor)

    def save(self, folder: Path) -> None:
        """Write a version of its own. Collective."""
        save_checkpoint(self.views, folder, f"step-{int(self.step):06d}")

    def load(self, folder: Path) -> None:
        """Read the latest version. Collective."""
        load_checkpoint(self.views, folder, checksums=True)
        for state in self.replica.optimizer.state.values():
            state["step"].fill_(float(self.step))

    def take_step(self, text: torch.Tensor) -> float:
        """One step; the loss over the whole batch. Collective."""
        loss = self.replica.train_step(batch_of(int(self.step), text, self.replica.options))
        self.step += 1
        return loss


def _replicated(name: str, tensor: torch.Tensor) -> CheckpointView:
    return CheckpointView(name, tuple(tensor.shape), tuple(map(whole, tensor.shape)), tensor)


@dataclasses.dataclass(frozen=True)
class Part:
    """One start of the program.

    Args:
        num_ranks: That train.
        last_step: After which they end.
        killed_step: A rank is killed at some moment of the save behind that many steps; None for nobody.
    """

    num_ranks: int
    last_step: int
    killed_step: int | None = None


@dataclasses.dataclass
class Outcome:
    """What became of a part.

    Args:
        first_step: Where it went on.
        losses: By step.
        saves_s: Seconds of every save that ended.
        error: Of a rank that was not killed, or "".
    """

    first_step: int = 0
    losses: dict[int, float] = dataclasses.field(default_factory=dict)
    saves_s: list[float] = dataclasses.field(default_factory=list)
    error: str = ""


def run_rank(
    rank_idx: int,
    part: Part,
    options: Options,
    folder: str,
    every: int,
    store: str,
    told: Connection,
) -> None:
    """Train on one rank; rank 0 tells of steps, all of errors."""
    torch.set_num_threads(1)  # more threads would add in another order
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank_idx, world_size=part.num_ranks
    )
    text = read_text(options.text_bytes)
    versions = Path(folder)
    try:
        with moe_comm.Communicator() as communicator:
            training = Training(communicator, options)
            if versions.exists():
                training.load(versions)
            told.send(("begins", int(training.step)))
            while int(training.step) < part.last_step:
                step = int(training.step)
                told.send(("loss", step, training.take_step(text)))
                if (step + 1) % every == 0 or step + 1 == part.last_step:
                    told.send(("saves", step + 1))
                    start = time.perf_counter()
                    training.save(versions)
                    told.send(("saved", time.perf_counter() - start))
    except (moe_comm.CommunicationError, RuntimeError) as error:
        told.send(("error", f"{type(error).__name__}: {str(error).splitlines()[0]}"))
        os._exit(1)  # the group is broken: there is nothing to leave in good order
    dist.destroy_process_group()


def run(
    part: Part, options: Options, folder: Path, every: int, draw: random.Random, progress: Progress
) -> Outcome:
    """Train one part on new processes.

    Args:
        part: Ranks and steps.
        options: Of the model.
        folder: Of the versions; that of a fresh start is not there.
        every: Steps from one save to the next.
        draw: Chooses who is killed, and when.
        progress: Shown meanwhile.

    Raises:
        RuntimeError: A rank that was not meant to ended otherwise than well.
    """
    name = f"{part.num_ranks} rank{'s' * (part.num_ranks > 1)}"
    task = progress.add_task(name, total=part.last_step, text="starting")
    context = multiprocessing.get_context("forkserver")  # it loads torch once, for all ranks
    context.set_forkserver_preload(["__main__", "torch._dynamo"])  # which every optimizer loads
    outcome = Outcome()
    ranks: dict[Connection, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for rank_idx in range(part.num_ranks):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=run_rank,
                args=(rank_idx, part, options, str(folder), every, f"{scratch}/store", theirs),
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks[mine] = process
        first, processes = next(iter(ranks)), list(ranks.values())
        codes = []
        while ranks:
            for told in wait(list(ranks)):
                assert isinstance(told, Connection)
                try:
                    kind, *said = told.recv()
                except (EOFError, ConnectionResetError):
                    process = ranks.pop(told)
                    process.join()
                    codes.append(process.exitcode)
                    continue
                if kind == "error":
                    outcome.error = outcome.error or said[0]
                if told is not first:
                    continue
                if kind == "begins":
                    outcome.first_step = said[0]
                elif kind == "loss":
                    step, loss = said
                    outcome.losses[step] = loss
                    progress.update(task, completed=step + 1, text=f"loss {loss:.4f}")
                elif kind == "saved":
                    outcome.saves_s.append(said[0])
                elif kind == "saves" and said[0] == part.killed_step:
                    time.sleep(draw.random() * (outcome.saves_s or [0.05])[-1])
                    os.kill(draw.choice(processes).pid, signal.SIGKILL)
    if (part.killed_step is not None) != any(codes):
        raise RuntimeError(f"{name}: exit codes {codes}, {outcome.error or 'without an error'}")
    return outcome


def show(console: Console, parts: list[Part], outcomes: list[Outcome]) -> None:
    """Print what happened in every part."""
    table = Table(title="starts of the program")
    for column in ("ranks", "from step", "to step", "saves", "a save takes", "ended"):
        table.add_column(column, justify="right")
    for part, outcome in zip(parts, outcomes, strict=True):
        saves = sorted(outcome.saves_s)
        table.add_row(
            str(part.num_ranks),
            str(outcome.first_step),
            str(1 + max(outcome.losses, default=outcome.first_step - 1)),
            str(len(saves)),
            f"{1e3 * saves[len(saves) // 2]:.0f} ms" if saves else "",
            "well" if part.killed_step is None else f"killed in save {part.killed_step}",
        )
    console.print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; 0 when the losses are identical, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", default="4,3,1", help="of each start, at most 4")
    parser.add_argument("--steps", type=int, default=60, help="of all starts together")
    parser.add_argument("--every", type=int, default=4, help="steps from one save to the next")
    parser.add_argument("--text-bytes", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0, help="of who is killed, and when")
    parsed = parser.parse_args(arguments)
    ranks = [int(word) for word in parsed.ranks.split(",")]
    if not ranks or any(not 1 <= each <= NUM_SHARDS for each in ranks):
        parser.error(f"--ranks must be numbers in [1, {NUM_SHARDS}], got {parsed.ranks}")
    if not 1 <= parsed.every <= parsed.steps // len(ranks) // 2:
        parser.error(f"--every must leave each start two saves, got {parsed.every}")
    options = Options(num_steps=parsed.steps, text_bytes=parsed.text_bytes)
    share = parsed.steps // len(ranks) // parsed.every * parsed.every
    # The first would go on, were it not for what happens to it.
    parts = [
        Part(each, parsed.steps, killed_step=share)
        if idx == 0 and each > 1
        else Part(each, parsed.steps if idx == len(ranks) - 1 else share * (idx + 1))
        for idx, each in enumerate(ranks)
    ]
    draw = random.Random(parsed.seed)
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with (
        tempfile.TemporaryDirectory() as scratch,
        Progress(*columns, TextColumn("{task.fields[text]}"), TimeElapsedColumn()) as progress,
    ):
        folder = Path(scratch) / "versions"
        outcomes = [run(part, options, folder, parsed.every, draw, progress) for part in parts]
        whole_run = Part(1, parsed.steps)
        alone = run(whole_run, options, Path(scratch) / "alone", parsed.steps, draw, progress)
    show(console, parts, outcomes)
    for part, outcome in zip(parts, outcomes, strict=True):
        if outcome.error:
            console.print(f"{part.num_ranks} ranks: {outcome.error}", highlight=False, markup=False)
        for step, loss in outcome.losses.items():
            if loss != alone.losses[step]:
                print(f"DIFFERENT at step {step}: {bits(loss)} and {bits(alone.losses[step])}")
                return 1
    steps = {step for outcome in outcomes for step in outcome.losses}
    if steps != set(alone.losses):
        print(f"MISSING steps {sorted(set(alone.losses) - steps)}")
        return 1
    num_again = sum(len(outcome.losses) for outcome in outcomes) - len(steps)
    print(
        f"identical: {len(steps)} losses over starts on {parsed.ranks} ranks and on 1 rank that nobody "
        f"disturbed, bit for bit; {num_again} steps made again"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
