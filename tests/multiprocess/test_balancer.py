"""Ranks that die while an `ExpertBalancer` moves experts, and layers on several processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from moe_comm import Communicator, PeerFailedError
from moe_comm.replicas import ExpertBalancer
from moe_comm.testing import RankContext, RankError, run_ranks
from tests.helpers.balanced_ranks import check_balanced, skewed_pair, start_placement

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


def _balance(context: RankContext) -> None:
    with Communicator(context.group, backend="host") as comm:
        check_balanced(comm)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_sums_keep_their_bits_while_experts_move(num_ranks: int) -> None:
    run_ranks(_balance, num_ranks)
