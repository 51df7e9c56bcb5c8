"""Gradients, compiled steps, dispatchers and HybridEP where ranks lie on several nodes.

What they do is tested beside what they stand on; here the same functions run as a launcher would start
them with fewer processes a node.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from moe_comm import Communicator, EpBuffer, EpConfig
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.dispatcher_cases import DISPATCHER_CASES, DispatcherCase
from tests.helpers.dispatcher_conformance import DispatcherTarget, _run_rank, can_run
from tests.helpers.dispatcher_targets import DISPATCHERS
from tests.helpers.moe_layer import assert_same_bits
from tests.helpers.node_ranks import launched
from tests.multiprocess import test_autograd as autograd
from tests.multiprocess import test_compat_hybrid_ep as hybrid_ep


def run_on_nodes(fn: Any, num_ranks: int, num_local_ranks: int, *args: Any) -> list[Any]:
    assert num_ranks > num_local_ranks
    return run_ranks(launched, num_ranks, num_local_ranks, fn, *args, timeout_s=280.0)


def describe(context: RankContext) -> tuple[int, tuple[int, int]]:
    with Communicator(context.group) as communicator:
        assert communicator.backend == "host"
        config = EpConfig(num_experts=4, num_topk=1, hidden=16, num_max_tokens_per_rank=4)
        with EpBuffer(communicator, config) as buffer:
            x = torch.ones(4, 16, dtype=config.dtype)
            # To the rank of equal local index on the other node.
            peer = (context.rank_idx + 2) % 4
            buffer.dispatch(x, torch.full((4, 1), peer))
            return communicator.num_nodes, buffer._backend.internode_bytes()


def test_what_runs_here_crosses_nodes() -> None:
    for num_nodes, (sent, received) in run_on_nodes(describe, 4, 2):
        assert num_nodes == 2
        assert sent == received > 4 * 16 * 2


def test_gradients_have_the_same_bits_as_on_one_rank() -> None:
    (alone,) = run_ranks(autograd.layer_gradients, 1, "reference", 24, mode="threads")
    together = run_on_nodes(autograd.layer_gradients, 4, 2, "host", 24)
    assert_same_bits({name: torch.cat([rank[name] for rank in together]) for name in alone}, alone)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", autograd.PLACES)
def test_gradients_across_nodes(case: autograd.Case) -> None:
    run_on_nodes(autograd.check_gradient, len(case.num_tokens), 1, "host", case)


@pytest.mark.full
@pytest.mark.parametrize(
    ("num_ranks", "num_local_ranks", "compiler"),
    [(2, 1, "aot_eager"), (4, 2, "aot_eager"), (4, 2, "inductor")],
)
def test_compiled_steps(num_ranks: int, num_local_ranks: int, compiler: str) -> None:
    run_on_nodes(autograd.compiled_and_eager, num_ranks, num_local_ranks, "host", compiler, 3)


def test_no_rank_waits_for_one_that_differs() -> None:
    for operations in run_on_nodes(autograd.one_rank_differs, 2, 1, "host", "skips its experts"):
        assert operations == ["dispatch", "combine", "cached dispatch", "combine"]


DISPATCHER_RUNS = [
    pytest.param(target, case, id=f"{target.name}-{case.name}")
    for target in DISPATCHERS
    for case in DISPATCHER_CASES
    if can_run(target, case) and case.num_ranks > 1
]


@pytest.mark.sampled(1, of=("target",))
@pytest.mark.parametrize(("target", "case"), DISPATCHER_RUNS)
def test_dispatchers(target: DispatcherTarget, case: DispatcherCase) -> None:
    num_local_ranks = 2 if case.num_ranks == 4 else 1
    found = run_on_nodes(_run_rank, case.num_ranks, num_local_ranks, target, case, "host", 2)
    assert [text for faults in found for text in faults] == []


@pytest.mark.sampled(1)
@pytest.mark.parametrize("check", [hybrid_ep.check_permute, hybrid_ep.check_plain])
@pytest.mark.parametrize(
    "case", [case for case in hybrid_ep.CASES if case.num_ranks > 1], ids=lambda case: case.name
)
def test_hybrid_ep(check: Any, case: Any) -> None:
    num_local_ranks = math.gcd(case.num_ranks, 2) if case.num_ranks > 2 else 1
    run_on_nodes(check, case.num_ranks, num_local_ranks, case, "host")
