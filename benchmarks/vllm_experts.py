"""Time an MoE layer of vLLM on CPUs, with its own kernels: tokens sent to their experts, and whole batches gathered.

Run from the root of the repository, with vLLM installed (`make test-vllm` does, below build/):

    PYTHONPATH=build/vllm python -m benchmarks.vllm_experts --json out.json

Whole batches, gathered over Gloo or by this package, are what vLLM's own prepare and finalize bring to
every rank; choices of experts elsewhere are then computed with weight 0, as the kernels take no other
mark. See docs/vllm.md.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from vllm._custom_ops import cpu_fused_moe, cpu_prepack_moe_weight
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.platforms import current_platform

from benchmarks import clients
from moe_comm.cli.bench.statistics import Interval
from moe_comm.dispatcher.vllm import VllmPrepareAndFinalize
from moe_comm.dispatcher.vllm_manager import VllmAll2AllManager
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.testing import RankContext

ORACLE = "whole_batches_gloo"
GATHERS = "whole_batches"
CLIENT = "expert_parallel"
# Of an expert of Qwen3-30B-A3B, whose other sizes are those of the default case.
INTERMEDIATE = 768
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Rows, weights and local ids for the kernels; then what ranks do with the kernels' output.
Exchange = tuple[Callable[..., Given], Callable[[torch.Tensor, Given], torch.Tensor]]


class Experts:
    """This rank's experts, in the kernels that vLLM would choose here.

    Args:
        context: This rank.
        case: Sizes.
    """

    def __init__(self, context: RankContext, case: clients.ClientCase) -> None:
        current_platform.import_kernels()
        self._isa = _kernels().isa
        first, last = _local_experts(context.rank_idx, case)
        w13, w2 = [], []
        for expert in range(first, last):
            draw = torch.Generator().manual_seed(1000 + expert)
            w13.append(
                torch.randn(2 * INTERMEDIATE, case.hidden, generator=draw) / case.hidden**0.5
            )
            w2.append(torch.randn(case.hidden, INTERMEDIATE, generator=draw) / INTERMEDIATE**0.5)
        self._w13, self._w2 = (
            cpu_prepack_moe_weight(torch.stack(weights).bfloat16(), self._isa)
            for weights in (w13, w2)
        )

    def __call__(
        self, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """`[M, hidden]`, `[M, K]` and int32 `[M, K]` to `[M, hidden]`, summed over the choices."""
        out = torch.empty_like(rows)
        if rows.shape[0]:
            experts = (self._w13, self._w2, None, None)
            cpu_fused_moe(out, rows, *experts, weights, ids, "silu", self._isa)
        return out


def _kernels() -> type[cpu_moe.CPUUnquantizedExperts]:
    return next(
        kernels
        for kernels in (
            cpu_moe.X86CPUUnquantizedExperts,
            cpu_moe.ArmCPUUnquantizedExperts,
            cpu_moe.PowerCPUUnquantizedExperts,
            cpu_moe.CPUUnquantizedExperts,
        )
        if kernels._supports_current_device()
    )


def _local_experts(rank_idx: int, case: clients.ClientCase) -> tuple[int, int]:
    num_local = case.num_experts // case.num_ranks
    return rank_idx * num_local, (rank_idx + 1) * num_local


def _exchanges(context: RankContext, case: clients.ClientCase) -> dict[str, Exchange]:
    """Every way to bring tokens to experts and back."""
    manager = VllmAll2AllManager(context.group)
    to_experts = VllmPrepareAndFinalize(
        manager.get_handle({"num_experts": case.num_experts}), has_local_ids=True
    )
    first, last = _local_experts(context.rank_idx, case)

    def as_local(rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Given:
        is_local = (ids >= first) & (ids < last)
        local_ids = torch.where(is_local, ids - first, 0).to(torch.int32)
        return rows, torch.where(is_local, weights, 0), local_ids

    def all_gather(tensor: torch.Tensor) -> torch.Tensor:
        parts = tensor.new_empty(case.num_ranks * tensor.shape[0], *tensor.shape[1:])
        dist.all_gather_into_tensor(parts, tensor)
        return parts

    def gather_gloo(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Given:
        return as_local(all_gather(x), all_gather(weights), all_gather(ids))

    def scatter_gloo(expert_out: torch.Tensor, _: Given) -> torch.Tensor:
        y = torch.empty_like(expert_out[: case.num_tokens])
        dist.reduce_scatter_tensor(y, expert_out)
        return y

    def gather(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Given:
        return as_local(*manager.dispatch(x, weights, ids))

    def scatter(expert_out: torch.Tensor, _: Given) -> torch.Tensor:
        return manager.combine(expert_out)

    def prepare(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> Given:
        rows, _, _, local_ids, local_weights = to_experts.prepare(
            x, weights, ids, case.num_experts, None, False, None, defer_input_quant=True
        )
        assert local_ids is not None
        assert local_weights is not None
        return rows, local_weights, local_ids

    def finalize(expert_out: torch.Tensor, came: Given) -> torch.Tensor:
        y = torch.empty(case.num_tokens, case.hidden, dtype=expert_out.dtype)
        to_experts.finalize(y, expert_out, came[1], came[2], False)
        return y

    return {
        ORACLE: (gather_gloo, scatter_gloo),
        GATHERS: (gather, scatter),
        CLIENT: (prepare, finalize),
    }


def _with_sums(phases: dict[str, float]) -> dict[str, float]:
    return phases | {"layer": sum(phases.values())}


def time_rank(context: RankContext, case: clients.ClientCase) -> clients.RankTimes:
    """Intervals of every way, repeat and phase on this rank; checked first."""
    experts = Experts(context, case)
    ways = _exchanges(context, case)
    given = _given(context.rank_idx, case)
    steps = {
        way: functools.partial(_layer, ways[way], experts, given) for way in (ORACLE, *case.clients)
    }
    intervals = clients.in_turns(ORACLE, case.num_repeats, steps)
    backend = group_buffers(context.group).communicator.backend
    return clients.RankTimes(backend=backend, intervals=intervals)


def _given(rank_idx: int, case: clients.ClientCase) -> Given:
    draw = torch.Generator().manual_seed(rank_idx)
    x = torch.randn(case.num_tokens, case.hidden, generator=draw).bfloat16()
    weights, ids = torch.rand(case.num_tokens, case.num_experts, generator=draw).topk(case.num_topk)
    return x, weights / weights.sum(1, keepdim=True), ids


def _layer(
    exchange: Exchange, experts: Experts, given: Given
) -> tuple[dict[str, Interval], dict[str, torch.Tensor]]:
    """One layer; intervals and the result."""
    bring, take_back = exchange
    intervals: dict[str, Interval] = {}
    start = clients.start()
    came = bring(*given)
    intervals["prepare"] = (start, time.monotonic_ns())
    start = clients.start()
    expert_out = experts(*came)
    intervals["experts"] = (start, time.monotonic_ns())
    start = clients.start()
    y = take_back(expert_out, came)
    intervals["finalize"] = (start, time.monotonic_ns())
    return intervals, {"y": y}


FRAMEWORK = clients.Framework(
    name="vllm",
    oracle=ORACLE,
    case=clients.ClientCase(
        num_ranks=2, num_tokens=256, hidden=2048, num_experts=128, clients=(GATHERS, CLIENT)
    ),
    time_rank=time_rank,
    with_sums=_with_sums,
)


if __name__ == "__main__":
    # By its importable name: ranks are other processes.
    from benchmarks import vllm_experts

    clients.main(vllm_experts.FRAMEWORK, __doc__.splitlines()[0])
