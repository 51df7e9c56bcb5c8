"""Time how tokens of transformers' models get to experts and back: this package, and its all-to-all over Gloo.

Run from the root of the repository, with transformers installed (`make test-transformers` does, below
build/):

    PYTHONPATH=build/transformers python -m benchmarks.transformers_experts --json out.json

Both are what `DistributedConfig(ep_implementation=...)` names, made as transformers makes them, around
experts that return their rows: what experts compute is not timed. See docs/transformers.md.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface

from benchmarks import clients
from moe_comm.cli.bench.statistics import Interval
from moe_comm.dispatcher.transformers import register
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.testing import RankContext

ORACLE = "all_to_all_gloo"
CLIENT = "ep_implementation"
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class NoExperts(nn.Module):
    """What a layer's experts look like to an implementation; they return their rows."""

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        self.num_experts = num_experts

    def forward(self, rows: torch.Tensor, _: torch.Tensor, __: torch.Tensor) -> torch.Tensor:
        """`[M, hidden]` to the same."""
        return rows.view_as(rows)


def _with_sums(phases: dict[str, float]) -> dict[str, float]:
    return phases | {"step": sum(phases.values())}


def time_rank(context: RankContext, case: clients.ClientCase) -> clients.RankTimes:
    """Intervals of both, every repeat and phase on this rank; checked first."""
    register()
    mesh = init_device_mesh("cpu", (case.num_ranks, 1), mesh_dim_names=("ep", "tp"))
    names = {ORACLE: "all_to_all", CLIENT: "moe_comm"}
    implementations = {
        client: EPImplementationInterface()[names[client]](
            NoExperts(case.num_experts // case.num_ranks), mesh["ep"], mesh["tp"]
        )
        for client in (ORACLE, *case.clients)
    }
    given = _given(context.rank_idx, case)
    steps = {
        client: functools.partial(_step, implementation, given)
        for client, implementation in implementations.items()
    }
    found = clients.in_turns(ORACLE, case.num_repeats, steps)
    backend = group_buffers(mesh["ep"].get_group()).communicator.backend
    return clients.RankTimes(backend=backend, intervals=found)


def _given(rank_idx: int, case: clients.ClientCase) -> Given:
    draw = torch.Generator().manual_seed(rank_idx)
    x = torch.randn(case.num_tokens, case.hidden, generator=draw).bfloat16()
    weights, ids = torch.rand(case.num_tokens, case.num_experts, generator=draw).topk(case.num_topk)
    return x, ids, (weights / weights.sum(1, keepdim=True)).bfloat16()


def _step(
    implementation: EPImplementation, given: Given
) -> tuple[dict[str, Interval], dict[str, torch.Tensor]]:
    """One forward and backward; intervals and results."""
    x, ids, weights = given[0].clone(), given[1], given[2].clone()
    x.requires_grad_()
    weights.requires_grad_()
    intervals: dict[str, Interval] = {}
    start = clients.start()
    y = implementation(x, ids, weights)
    intervals["forward"] = (start, time.monotonic_ns())
    grad_y = torch.full_like(y, 2.0**-6)
    start = clients.start()
    y.backward(grad_y)
    intervals["backward"] = (start, time.monotonic_ns())
    assert x.grad is not None
    assert weights.grad is not None
    return intervals, {"y": y.detach(), "grad_x": x.grad, "grad_weights": weights.grad}


FRAMEWORK = clients.Framework(
    name="transformers",
    oracle=ORACLE,
    case=clients.ClientCase(hidden=2048, clients=(CLIENT,)),
    time_rank=time_rank,
    with_sums=_with_sums,
)


if __name__ == "__main__":
    # By its importable name: ranks are other processes.
    from benchmarks import transformers_experts

    clients.main(transformers_experts.FRAMEWORK, __doc__.splitlines()[0])
