"""Ranks that die while an `ExpertBalancer` moves experts, and layers on several processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_comm import Communicator, PeerFailedError, Placement
from moe_comm.replicas import ExpertBalancer
from moe_comm.testing import RankContext, RankError, run_ranks
from tests.helpers.balanced_ranks import (
    Layer,
    check_balanced,
    expert_weights,
    skewed_pair,
    start_placement,
)

DEAD = 1


def _die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in(call: str, balancer: ExpertBalancer) -> None:
    """Have this rank die where it would tell others that it is in `call`, or would send weights."""
    copies = balancer._copies
    agree: Any = copies.agree
    if call == "weights":
        copies.engine.run = _die  # type: ignore[assignment]
    copies.agree = lambda name, *said: (_die if name == call else agree)(name, *said)  # type: ignore[method-assign]


def _lose_a_rank(context: RankContext, call: str, folder: Path) -> None:
    comm = Communicator(context.group, backend="host")
    balancer = ExpertBalancer(comm, num_steps=100, layers_per_step=1)
    moved, waiting = skewed_pair(comm, balancer)
    start = start_placement(comm.num_ranks)
    assert moved.buffer.config.placement != start
    if comm.rank_idx == DEAD:
        _die_in(call, balancer)
        if call == "step":
            _die()
    phase = {"weights": "prefetch", "step": "agreement"}.get(call, call)
    where = phase if call == "step" else rf"layer \d, {phase} of experts \[\d.*\]"
    with pytest.raises(PeerFailedError, match=rf"^{where}: .*rank {DEAD}"):
        balancer.step()
    assert waiting.buffer.config.placement == start
    waiting.check_weights()
    moved.check_weights()
    assert comm.recover().failed_ranks == (DEAD,)
    balancer.recover()
    assert waiting.buffer.config.placement == start
    waiting.check_weights()
    with pytest.raises(ValueError, match="the balancer has been destroyed"):
        balancer.step()
    (folder / str(comm.rank_idx)).touch()
    comm.destroy()


@pytest.mark.parametrize(
    ("call", "num_ranks"), [("step", 2), ("prefetch", 2), ("weights", 4), ("commit", 4)]
)
def test_a_rank_that_dies_leaves_the_old_placement_whole(
    call: str, num_ranks: int, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=rf"rank {DEAD} .*(SIGKILL|-9)"):
        run_ranks(_lose_a_rank, num_ranks, call, tmp_path, mode="processes", fresh=True)
    assert {path.name for path in tmp_path.iterdir()} == {*map(str, range(num_ranks))} - {str(DEAD)}


def _lose_an_owner(context: RankContext, call: str, folder: Path) -> None:
    """An optimizer has stepped the owners; a rank dies before all replicas have their new weights."""
    comm = Communicator(context.group, backend="host")
    balancer = ExpertBalancer(comm, num_steps=100)
    placement = Placement([[0, 1, 4], [2, 3, 5], [4, 5, 2], [6, 7, 3]], 8)
    layer = Layer.of(comm, placement)
    num_kept = 2
    gradients = [torch.zeros_like(each) for each in layer.weights]
    balancer.add_layer(
        layer.buffer, layer.weights, num_kept_slots=num_kept, gradients=lambda: gradients
    )
    balancer.reduce_gradients()
    for each in layer.weights:
        each[:num_kept] += 1000
    if comm.rank_idx == DEAD:
        _die_in(call, balancer)
        if call == "step":
            _die()
    with pytest.raises(PeerFailedError, match=rf"rank {DEAD}"):
        balancer.step()
    comm.recover()
    balancer.recover()
    found = layer.buffer.config.placement
    # Rank 1 owned experts 2 and 3, and its replica of 5 went with it.
    assert found == Placement([[0, 1, 4], [2, 3, -1], [4, 5, -1], [6, 7, -1]], 8)
    experts = [expert for expert in found.slots[comm.rank_idx] if expert >= 0]
    for weights, expected in zip(layer.weights, expert_weights(experts), strict=True):
        assert torch.equal(weights[: len(experts)], expected + 1000)
    (folder / str(comm.rank_idx)).touch()
    comm.destroy()


@pytest.mark.parametrize("call", ["step", "weights"])
def test_replicas_that_are_behind_their_owners_are_not_used(call: str, tmp_path: Path) -> None:
    with pytest.raises(RankError, match=rf"rank {DEAD} .*(SIGKILL|-9)"):
        run_ranks(_lose_an_owner, 4, call, tmp_path, mode="processes", fresh=True)
    assert {path.name for path in tmp_path.iterdir()} == {"0", "2", "3"}


def _balance(context: RankContext) -> None:
    with Communicator(context.group, backend="host") as comm:
        check_balanced(comm)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_keep_their_bits_while_experts_move(num_ranks: int) -> None:
    run_ranks(_balance, num_ranks)
