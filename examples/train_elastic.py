"""Trains the model of train_moe.py while its ranks are killed at random, and compares the losses.

Ranks are processes that find each other through a store; there is no process group. Whenever ranks
die, the survivors shrink the communicator, place all experts anew, roll back to the last snapshot that
all of them completed, and go on. For every rank that dies another is started; the living grow the
communicator by it. As sums are taken over the parts of the batch and not over ranks, the losses are
those of a run on one rank that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from train_moe import NUM_SHARDS, MoeModel, Options, bits, draw_shards, read_text

import moe_comm
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.ep.config import default_expert_rank

NUM_COPIES = 2
"""Other ranks that hold a copy of every expert: so many may die at once."""
WAIT_S = 100.0
"""How long the last steps wait for ranks that return."""


@dataclasses.dataclass
class Snapshot:
    """The model before one step, as far as this process holds it.

    Args:
        step: The step that comes next.
        losses: Of the steps before.
        holders: For every expert, the processes that hold its state, its owner first.
        experts: The state of those that this process holds.
        trunk: The state of everything else.
    """

    step: int
    losses: list[float]
    holders: list[list[int]]
    experts: dict[int, torch.Tensor]
    trunk: torch.Tensor


class Replica:
    """What one process holds of the model while the communicator stays the same."""

    def __init__(self, communicator: moe_comm.Communicator, options: Options) -> None:
        self.communicator = communicator
        self.options = options
        num_ranks = communicator.num_ranks
        # First, so that its epochs come first in `Shrunk.completed_epochs`.
        self.mover = moe_comm.EpBuffer(
            communicator,
            moe_comm.EpConfig(
                num_experts=num_ranks,
                num_topk=None,
                hidden=None,
                num_max_tokens_per_rank=None,
                dtype=torch.float32,
            ),
        )
        shard_rank = default_expert_rank(NUM_SHARDS, num_ranks).tolist()
        self.shards = [i for i, rank in enumerate(shard_rank) if rank == communicator.rank_idx]
        buffer = options.make_buffer(communicator, NUM_SHARDS * options.num_shard_tokens)
        self.expert_rank = buffer.expert_rank.tolist()
        self.experts = [
            i for i, rank in enumerate(self.expert_rank) if rank == communicator.rank_idx
        ]
        dispatcher = TokenDispatcher(options.num_experts, buffer=buffer, weighted_by="combine")
        self.model = MoeModel(options, dispatcher, num_shards=len(self.shards))
        self.optimizer = self.model.make_optimizer()
        self.trunk = list(self.model.trunk.parameters())
        num_elements = 1 + self.model.balance.numel() + sum(p.numel() for p in self.trunk)
        self.total = moe_comm.GradientSum(communicator, num_elements, part_ranks=shard_rank)
        numbers = communicator.all_gather(str(os.getpid()).encode())
        self.processes = [int(number) for number in numbers]

    def state(self, parameters: list[torch.nn.Parameter]) -> Iterator[torch.Tensor]:
        """Every parameter and its two moments."""
        for parameter in parameters:
            state = self.optimizer.state[parameter]
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            yield from (parameter.data, state["exp_avg"], state["exp_avg_sq"])

    def trunk_state(self) -> list[torch.Tensor]:
        """All that is equal on every rank."""
        return [*self.state(self.trunk), self.model.balance]

    def expert_states(self) -> list[list[torch.Tensor]]:
        """By local expert: what belongs to it, of all layers."""
        stacked = [
            list(self.state(list(layer.experts.parameters()))) for layer in self.model.layers
        ]
        return [
            [tensor[local_idx] for tensors in stacked for tensor in tensors]
            for local_idx in range(len(self.experts))
        ]

    def move(
        self, rows: list[torch.Tensor], targets: list[list[int]], num_elements: int
    ) -> list[torch.Tensor]:
        """Send rows to ranks; what came, in the order (source rank, row). Collective."""
        num_topk = max([1, *(len(ranks) for ranks in targets)])
        topk_idx = torch.full((len(rows), num_topk), -1, dtype=torch.int64)
        for row_idx, ranks in enumerate(targets[: len(rows)]):
            topk_idx[row_idx, : len(ranks)] = torch.tensor(ranks, dtype=torch.int64)
        x = torch.stack(rows) if rows else torch.zeros(0, num_elements)
        return list(self.mover.dispatch(x, topk_idx, copy_out=True).x)

    @property
    def row_elements(self) -> int:
        """Of an expert's state, filled up to what a row may be."""
        options = self.options
        num_elements = options.num_layers * 3 * 2 * options.hidden * 2 * options.hidden
        return -(-num_elements // 4) * 4

    def take_snapshot(self, step: int, losses: list[float]) -> Snapshot:
        """Give copies of this rank's experts to its neighbors, and keep those of others. Collective."""
        num_ranks = self.communicator.num_ranks
        copies = [
            [(rank + 1 + i) % num_ranks for i in range(min(NUM_COPIES, num_ranks - 1))]
            for rank in range(num_ranks)
        ]
        mine = [flatten(tensors, self.row_elements) for tensors in self.expert_states()]
        me = self.communicator.rank_idx
        came = iter(self.move(mine, [copies[me]] * len(mine), self.row_elements))
        experts = dict(zip(self.experts, mine, strict=True))
        for rank in range(num_ranks):
            if me in copies[rank]:
                for expert_idx, owner in enumerate(self.expert_rank):
                    if owner == rank:
                        experts[expert_idx] = next(came)
        holders = [
            [self.processes[rank] for rank in (owner, *copies[owner])] for owner in self.expert_rank
        ]
        return Snapshot(step, list(losses), holders, experts, flatten(self.trunk_state()))

    def restore(self, snapshot: Snapshot | None) -> Snapshot:
        """Load a snapshot, wherever its parts are; None on a process that has come. Collective."""
        told = self.communicator.all_gather(
            json.dumps(snapshot and (snapshot.step, snapshot.losses, snapshot.holders)).encode()
        )
        known = [json.loads(item) for item in told]
        first = next(rank for rank, item in enumerate(known) if item is not None)
        step, losses, holders = known[first]
        sources = []
        for expert_idx, processes in enumerate(holders):
            alive = [self.processes.index(p) for p in processes if p in self.processes]
            if not alive:
                raise RuntimeError(f"expert {expert_idx} and all its copies are lost")
            sources.append(alive[0])
        me = self.communicator.rank_idx
        mine = [i for i, rank in enumerate(sources) if rank == me]
        rows = [snapshot.experts[i] for i in mine] if snapshot is not None else []
        came = iter(self.move(rows, [[self.expert_rank[i]] for i in mine], self.row_elements))
        states = dict(zip(self.experts, self.expert_states(), strict=True))
        for rank in range(self.communicator.num_ranks):
            for expert_idx, source in enumerate(sources):
                if source == rank and expert_idx in states:
                    unflatten(next(came), states[expert_idx])
        # The trunk goes to those that have come.
        trunk = flatten(self.trunk_state()) if snapshot is None else snapshot.trunk
        width = -(-trunk.numel() // 4) * 4
        targets = [rank for rank, item in enumerate(known) if item is None]
        padded = torch.nn.functional.pad(trunk, (0, width - trunk.numel()))
        sent = self.move([padded] if me == first and targets else [], [targets], width)
        if snapshot is None:
            trunk = sent[0]
        unflatten(trunk, self.trunk_state())
        for state in self.optimizer.state.values():
            state["step"].fill_(float(step))
        return Snapshot(step, losses, holders, dict(snapshot.experts) if snapshot else {}, trunk)

    def train_step(self, batch: list[torch.Tensor]) -> float:
        """One step; the loss over all shards. Collective."""
        parts, _ = self.model.backward(self.optimizer, [batch[shard] for shard in self.shards])
        loss, load = torch.zeros(()), torch.zeros_like(self.model.balance)
        for parameter in self.trunk:
            parameter.grad = torch.empty_like(parameter)
        self.total.sum_parts(parts, [loss, load, *[p.grad for p in self.trunk]])
        self.optimizer.step()
        self.model.even_out(load)
        return loss.item() / NUM_SHARDS


def flatten(tensors: list[torch.Tensor], num_elements: int | None = None) -> torch.Tensor:
    """One vector of them all, filled up with zeros to `num_elements`."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    padding = 0 if num_elements is None else num_elements - flat.numel()
    return torch.nn.functional.pad(flat, (0, padding))


def unflatten(flat: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """Write the parts of a vector back."""
    position = 0
    for tensor in tensors:
        tensor.copy_(flat[position : position + tensor.numel()].view_as(tensor))
        position += tensor.numel()


def batch_of(step: int, text: torch.Tensor, options: Options) -> list[torch.Tensor]:
    """The shards of one step, which follow from its number."""
    draw = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    return draw_shards(text, options, draw)


def train(
    communicator: moe_comm.Communicator,
    options: Options,
    rendezvous: Any,
    report: Connection,
    *,
    has_joined: bool,
    num_wanted: int,
) -> list[float]:
    """Train until the last step, whoever dies or comes. Returns the loss of every step.

    The last steps wait a while until there are `num_wanted` ranks.
    """
    text = read_text(options.text_bytes)
    base: Snapshot | None = None  # what the survivors of any failure hold at least
    snapshots: dict[int, Snapshot] = {}  # by epoch of the mover
    is_new = has_joined
    while True:
        try:
            replica = Replica(communicator, options)
            num_moves = 0
            if base is None and not is_new:  # the beginning
                base = replica.take_snapshot(0, [])
                num_moves = 1
            restored = replica.restore(base)
            num_moves += 2
            step, losses = restored.step, restored.losses
            while True:
                taken = replica.take_snapshot(step, losses)
                num_moves += 1
                snapshots = {e: s for e, s in snapshots.items() if e == num_moves - 1}
                snapshots[num_moves] = taken
                if step == options.num_steps:
                    return losses
                waiting = 0
                if communicator.rank_idx == 0:
                    is_short = communicator.num_ranks < num_wanted
                    waiting = await_newcomers(
                        rendezvous, WAIT_S if is_short and step >= options.num_steps - 2 else 0.0
                    )
                told = communicator.all_gather(str(waiting).encode())
                if int(told[0]):
                    if communicator.rank_idx == 0:
                        rendezvous.add("come", -int(told[0]))
                    grown = communicator.grow(rendezvous, int(told[0]), timeout_s=20.0)
                    communicator, base, snapshots = grown.communicator, taken, {}
                    report.send(f"grew to {communicator.num_ranks} ranks before step {step}")
                    break
                losses.append(replica.train_step(batch_of(step, text, options)))
                step += 1
                report.send(step)
            is_new = False
        except (moe_comm.PeerFailedError, moe_comm.PeerTimeoutError) as error:
            failed = error.ranks if isinstance(error, moe_comm.PeerTimeoutError) else ()
            shrunk = communicator.shrink(failed)
            epochs = shrunk.completed_epochs
            base = snapshots.get(epochs[0] if epochs else -1, base)
            communicator, snapshots = shrunk.communicator, {}
            step = base.step if base is not None else 0
            report.send(
                f"ranks {list(shrunk.failed_ranks)} failed: {communicator.num_ranks} go on from "
                f"step {step}"
            )


def await_newcomers(rendezvous: Any, limit_s: float) -> int:
    """Processes that have come to join."""
    deadline = time.monotonic() + limit_s
    while True:
        waiting: int = rendezvous.add("come", 0)
        if waiting or time.monotonic() >= deadline:
            return waiting
        time.sleep(0.05)


def run_rank(
    rank_idx: int,
    num_ranks: int,
    options: Options,
    where: str,
    report: Connection,
    *,
    num_wanted: int,
) -> None:
    """One process: of those at the start, or (rank_idx -1) one that comes later."""
    torch.set_num_threads(1)  # more threads would add in another order
    rendezvous = dist.FileStore(where, -1)
    limits = {"stall_timeout_s": 30.0, "arrival_timeout_s": 2 * WAIT_S}
    if rank_idx == 0:
        communicator = moe_comm.Communicator(backend="host", **limits)
        if num_ranks > 1:
            communicator = communicator.grow(rendezvous, num_ranks - 1).communicator
    else:
        if rank_idx < 0:
            rendezvous.add("come", 1)
        communicator = moe_comm.Communicator.join(
            rendezvous, rank_idx=rank_idx if rank_idx > 0 else None
        ).communicator
    report.send(f"process {os.getpid()} is rank {communicator.rank_idx}")
    losses = train(
        communicator,
        options,
        rendezvous,
        report,
        has_joined=rank_idx < 0,
        num_wanted=num_wanted,
    )
    report.send(losses)
    report.close()


@dataclasses.dataclass
class Result:
    """What came out of a run: the losses that every process at the end has, and what happened."""

    losses: list[list[float]]
    events: list[str]
    num_killed: int


def run(
    num_ranks: int,
    options: Options,
    *,
    num_kills: int = 0,
    num_at_once: int = 1,
    with_return: bool = True,
    seed: int = 0,
) -> Result:
    """Train on new processes, and kill some at random moments.

    Args:
        num_ranks: At the start.
        options: Of the model.
        num_kills: How many times.
        num_at_once: Ranks that are killed each time, within a few milliseconds.
        with_return: Start another process for each that was killed.
        seed: Of the moments and the victims.
    """
    context = multiprocessing.get_context("forkserver")  # it loads torch once, for all ranks
    context.set_forkserver_preload(["__main__", "torch._dynamo"])  # which every optimizer loads
    draw = random.Random(seed)
    living: dict[Connection, Any] = {}
    silent: set[Connection] = set()  # those that are not part of it yet
    result = Result([], [], 0)
    with tempfile.TemporaryDirectory() as folder:

        def start(rank_idx: int) -> None:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=run_rank,
                args=(rank_idx, num_ranks, options, f"{folder}/store", theirs),
                kwargs={"num_wanted": num_ranks if with_return else 0},
                daemon=True,
            )
            process.start()
            theirs.close()
            living[mine] = process
            silent.add(mine)

        for rank_idx in range(num_ranks):
            start(rank_idx)
        kills = sorted(draw.sample(range(2, options.num_steps - 2), num_kills))
        furthest = 0
        while living:
            for connection in wait(list(living), timeout=60.0):
                assert isinstance(connection, Connection)
                try:
                    said = connection.recv()
                except (EOFError, ConnectionResetError):
                    process = living.pop(connection)
                    process.join()
                    if process.exitcode not in (0, -signal.SIGKILL, -signal.SIGTERM):
                        raise RuntimeError(f"a rank ended with {process.exitcode}") from None
                    continue
                silent.discard(connection)
                if isinstance(said, list):
                    result.losses.append(said)
                    for late in silent & set(living):  # it is over
                        living[late].terminate()
                elif isinstance(said, str):
                    result.events.append(said)
                else:
                    furthest = max(furthest, said)
            if kills and furthest >= kills[0]:
                kills.pop(0)
                victims = [living[c] for c in living if c not in silent]
                for process in draw.sample(victims, min(num_at_once, len(victims) - 1)):
                    time.sleep(draw.random() * 0.03)
                    os.kill(process.pid, signal.SIGKILL)
                    result.num_killed += 1
                    if with_return:
                        start(-1)
    return result


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; 0 when the losses are identical, else 1."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=4, help="at the start, at most 4")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kills", type=int, default=3, help="times that ranks are killed")
    parser.add_argument("--at-once", type=int, default=1, help="ranks that are killed each time")
    parser.add_argument("--no-return", action="store_true", help="start no others in their place")
    parser.add_argument("--text-bytes", type=int, default=200_000)
    parser.add_argument("--seed", type=int, default=0)
    parsed = parser.parse_args(arguments)
    if not 1 <= parsed.ranks <= NUM_SHARDS:
        parser.error(f"--ranks must be in [1, {NUM_SHARDS}], got {parsed.ranks}")
    if not 0 <= parsed.kills <= parsed.steps - 4:
        parser.error(f"--kills must be in [0, steps - 4], got {parsed.kills}")
    options = Options(num_steps=parsed.steps, text_bytes=parsed.text_bytes)
    disturbed = run(
        parsed.ranks,
        options,
        num_kills=parsed.kills,
        num_at_once=parsed.at_once,
        with_return=not parsed.no_return,
        seed=parsed.seed,
    )
    for event in dict.fromkeys(disturbed.events):
        print(event)
    (alone,) = run(1, options).losses
    for losses in disturbed.losses:
        for step, pair in enumerate(zip(losses, alone, strict=True)):
            if pair[0] != pair[1]:
                print(f"DIFFERENT at step {step}: {bits(pair[0])} and {bits(pair[1])}")
                return 1
    print(
        f"identical: {len(alone)} losses on {len(disturbed.losses)} ranks at the end, "
        f"{disturbed.num_killed} killed, and on 1 rank that nobody disturbed, bit for bit"
    )
    return 0 if disturbed.losses else 1


if __name__ == "__main__":
    sys.exit(main())
