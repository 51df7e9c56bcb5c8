"""Time Megatron's flex dispatcher over this package against its all-to-all dispatcher over Gloo.

Run from the root of the repository, with megatron-core installed:

    python -m benchmarks.megatron_flex --ranks 4 --tokens 2048 --json out.json

Every client runs the same routing and is checked against the all-to-all dispatcher before it is timed.
Clients take turns. What experts compute is not timed; see docs/megatron.md.
"""

from __future__ import annotations

import functools
import time
from typing import Any
from unittest import mock

import torch

from benchmarks import clients
from moe_comm import fused_a2a
from moe_comm.cli.bench.statistics import Interval
from moe_comm.dispatcher.megatron import MegatronManager, MegatronTokenDispatcher
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.testing import RankContext
from tests.helpers.megatron_on_cpu import Routed, make_config, make_groups, on_cpu

ORACLE = "alltoall_gloo"
CLIENTS = ("flex_manager", "flex_hybridep", "flex_deepep", "own_dispatcher")
PHASES = ("dispatch", "combine", "combine_backward", "dispatch_backward")
_FUNCTIONS = (
    "fused_combine",
    "fused_dispatch",
    "hybrid_ep_combine",
    "hybrid_ep_dispatch",
    "set_deepep_num_sms",
)


def _with_sums(phases: dict[str, float]) -> dict[str, float]:
    forward = phases["dispatch"] + phases["combine"]
    return phases | {"forward": forward, "step": sum(phases.values())}


def time_rank(context: RankContext, case: clients.ClientCase) -> clients.RankTimes:
    """Intervals of every client, repeat and phase on this rank; checked first."""
    routed = _routed(context.rank_idx, case)
    groups = make_groups(context.rank_idx, context.num_ranks, 1)
    with (
        on_cpu() as module,
        mock.patch.multiple(module, **{name: getattr(fused_a2a, name) for name in _FUNCTIONS}),
    ):
        dispatchers = {
            name: _dispatcher(module, name, case, groups, context.rank_idx)
            for name in (ORACLE, *case.clients)
        }
        steps = {
            name: functools.partial(_step, dispatcher, routed)
            for name, dispatcher in dispatchers.items()
        }
        found = clients.in_turns(ORACLE, case.num_repeats, steps)
        backend = group_buffers(groups.tp_ep).communicator.backend
    return clients.RankTimes(backend=backend, intervals=found)


def _routed(rank_idx: int, case: clients.ClientCase) -> Routed:
    generator = torch.Generator().manual_seed(rank_idx)
    shape = (case.num_tokens, case.num_experts)
    x = torch.randn(case.num_tokens, 1, case.hidden, generator=generator).bfloat16()
    choices = torch.rand(shape, generator=generator).topk(case.num_topk, dim=1).indices
    routing_map = torch.zeros(shape, dtype=torch.bool).scatter_(1, choices, True)
    return x, routing_map, (0.5 + torch.rand(shape, generator=generator)) * routing_map


def _dispatcher(
    module: Any, name: str, case: clients.ClientCase, groups: Any, rank_idx: int
) -> Any:
    options: dict[str, str] = {"moe_token_dispatcher_type": "flex"}
    if name == ORACLE:
        options = {"moe_token_dispatcher_type": "alltoall"}
    elif name == "flex_hybridep":
        options["moe_flex_dispatcher_backend"] = "hybridep"
    config = make_config(
        case.num_experts, case.num_topk, case.num_ranks, hidden=case.hidden, **options
    )
    num_local = case.num_experts // case.num_ranks
    indices = list(range(rank_idx * num_local, (rank_idx + 1) * num_local))
    if name == ORACLE:
        return module.MoEAlltoAllTokenDispatcher(num_local, indices, config, groups)
    if name == "own_dispatcher":
        return MegatronTokenDispatcher(num_local, indices, config, groups)
    dispatcher = module.MoEFlexTokenDispatcher(num_local, indices, config, groups)
    if name == "flex_manager":
        dispatcher._comm_manager = MegatronManager(groups.tp_ep, num_local)
    return dispatcher


def _step(dispatcher: Any, routed: Routed) -> tuple[dict[str, Interval], dict[str, torch.Tensor]]:
    """One forward and backward around experts that multiply by the weights; intervals and results."""
    x, routing_map, probs = routed
    x, probs = x.detach().requires_grad_(), probs.detach().requires_grad_()
    intervals: dict[str, Interval] = {}

    start = clients.start()
    hidden, token_probs = dispatcher.dispatch_preprocess(x, routing_map, probs)
    hidden, token_probs = dispatcher.token_dispatch(hidden, token_probs)
    rows, _, row_probs = dispatcher.dispatch_postprocess(hidden, token_probs)
    intervals["dispatch"] = (start, time.monotonic_ns())

    weights = row_probs.detach()
    out = (rows.detach() * weights.to(rows.dtype)[:, None]).requires_grad_()
    start = clients.start()
    y = dispatcher.combine_preprocess(out)
    y = dispatcher.combine_postprocess(dispatcher.token_combine(y))
    intervals["combine"] = (start, time.monotonic_ns())

    grad_y = torch.full_like(y, 2.0**-6)
    start = clients.start()
    y.backward(grad_y)
    intervals["combine_backward"] = (start, time.monotonic_ns())

    assert out.grad is not None
    grad_rows = out.grad * weights.to(rows.dtype)[:, None]
    grad_weights = (out.grad.float() * rows.detach().float()).sum(1).to(row_probs.dtype)
    start = clients.start()
    torch.autograd.backward([rows, row_probs], [grad_rows, grad_weights])
    intervals["dispatch_backward"] = (start, time.monotonic_ns())

    assert x.grad is not None
    assert probs.grad is not None
    return intervals, {"y": y.detach(), "grad_x": x.grad, "grad_probs": probs.grad}


FRAMEWORK = clients.Framework(
    name="megatron",
    oracle=ORACLE,
    case=clients.ClientCase(hidden=4096, clients=CLIENTS),
    time_rank=time_rank,
    with_sums=_with_sums,
)


if __name__ == "__main__":
    # By its importable name: ranks are other processes.
    from benchmarks import megatron_flex

    clients.main(megatron_flex.FRAMEWORK, __doc__.splitlines()[0])
