"""Plans of where experts lie, by this package and by vLLM's default policy: how even later loads are, and the time.

Run from the root of the repository, with vLLM where Python finds it (`make test-vllm` puts it below build/):

    PYTHONPATH=build/vllm python -m benchmarks.placement_plans --json out.json

See docs/replicas.md#plans-from-loads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.eplb.policy.default import DefaultEplbPolicy

from moe_comm.cli.bench.environment import collect_environment
from moe_comm.ep.placement import Placement
from moe_comm.ep.planner import plan_placement
from moe_comm.ep.replica_spec import balance

SCATTER = 0.3
NUM_WINDOW_BATCHES = 8
NUM_LATER_BATCHES = 50
EXPONENTS = (0.6, 0.9, 1.2)
Slots = Sequence[Sequence[int]]
"""Experts in the slots of every rank."""


def zipf(exponent: float, num_layers: int, num_experts: int) -> torch.Tensor:
    """Mean loads `[num_layers, num_experts]`, experts of each layer in an order of its own."""
    loads = torch.arange(1, num_experts + 1, dtype=torch.float64) ** -exponent
    order = torch.rand(num_layers, num_experts).argsort(1)
    return (loads * 1e6 / loads.sum())[order]


def batches(mean_loads: torch.Tensor, num_batches: int) -> torch.Tensor:
    """Loads `[num_batches, layers, experts]`, log-normal about their means."""
    noise = torch.randn(num_batches, *mean_loads.shape, dtype=torch.float64)
    return mean_loads * torch.exp(SCATTER * noise)


def excess_in_equal_shares(slots: Slots, loads: torch.Tensor) -> float:
    """Load of the fullest rank over the mean, less 1, where each slot of an expert gets the same."""
    table = torch.tensor(slots)
    rank_loads = (loads / table.flatten().bincount(minlength=len(loads)))[table].sum(1)
    return float(rank_loads.max() / rank_loads.mean()) - 1


def excess_shared_out(slots: Slots, loads: torch.Tensor) -> float:
    """The same where rows go to slots as the placement allows at best."""
    placement = Placement.of_table(torch.tensor(slots).flatten(), len(slots), len(loads))
    counts = loads.long().tolist()
    by_slot = torch.tensor(balance([counts], placement, len(slots)))
    return int(by_slot.view(len(slots), -1).sum(1).max()) * len(slots) / sum(counts) - 1


def vllm_plans(loads: torch.Tensor, num_ranks: int, num_slots: int) -> torch.Tensor:
    return DefaultEplbPolicy.rebalance_experts(loads, num_ranks * num_slots, 1, 1, num_ranks)


def quality(
    exponent: float, num_layers: int, num_experts: int, num_ranks: int, num_slots: int
) -> dict[str, float]:
    """Mean excess over layers and later batches, of plans from the sum of earlier ones."""
    mean_loads = zipf(exponent, num_layers, num_experts)
    seen = batches(mean_loads, NUM_WINDOW_BATCHES).sum(0)
    # These may have two slots of an expert on one rank: equal shares go to both.
    theirs = vllm_plans(seen, num_ranks, num_slots).view(-1, num_ranks, num_slots).tolist()
    ours = [plan.slots for plan in plan_placement(seen, num_ranks, num_slots)]
    later = batches(mean_loads, NUM_LATER_BATCHES)
    planned = seen[None]

    def mean(
        excess: Callable[[Slots, torch.Tensor], float], plans: Sequence[Slots], loads: torch.Tensor
    ) -> float:
        each = [excess(plans[i], batch[i]) for batch in loads for i in range(num_layers)]
        return sum(each) / len(each)

    return {
        "exponent": exponent,
        "vllm_equal_shares": mean(excess_in_equal_shares, theirs, later),
        "vllm_shared_out": mean(excess_shared_out, theirs, later),
        "moe_comm_shared_out": mean(excess_shared_out, ours, later),
        "vllm_equal_shares_of_planned": mean(excess_in_equal_shares, theirs, planned),
        "moe_comm_equal_shares_of_planned": mean(excess_in_equal_shares, ours, planned),
        "vllm_shared_out_of_planned": mean(excess_shared_out, theirs, planned),
        "moe_comm_shared_out_of_planned": mean(excess_shared_out, ours, planned),
    }


def times_ms(plans: dict[str, Callable[[], object]], num_repeats: int = 21) -> dict[str, float]:
    """Medians of this thread's own time, in turns, after one round that is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(num_repeats + 1):
        for name, plan in plans.items():
            start = time.thread_time()
            plan()
            taken[name].append(1e3 * (time.thread_time() - start))
    return {name: sorted(each[1:])[num_repeats // 2] for name, each in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="where results go")
    path: Path | None = parser.parse_args().json
    torch.set_num_threads(1)
    torch.manual_seed(0)
    document: dict[str, Any] = {"environment": collect_environment()}
    for name, sizes in {
        "64_experts_8_ranks": (16, 64, 8),
        "256_experts_32_ranks": (8, 256, 32),
    }.items():
        num_slots = sizes[1] // sizes[2] + 1
        document[name] = [quality(exponent, *sizes, num_slots) for exponent in EXPONENTS]
    loads = torch.cat([zipf(exponent, 20, 256) for exponent in EXPONENTS])[:58]
    later = batches(loads, 1)[0]
    present = plan_placement(loads, 32, 9)
    mean = float(later[0].sum()) / 32
    document["ms_of_58_layers_256_experts_32_ranks"] = times_ms(
        {
            "vllm": lambda: vllm_plans(later, 32, 9),
            "moe_comm": lambda: plan_placement(later, 32, 9),
            "moe_comm_from_present": lambda: plan_placement(later, 32, 9, present=present),
            "moe_comm_from_present_at_a_price": lambda: plan_placement(
                later, 32, 9, present=present, bytes_per_expert=1, price_per_byte=mean / 1000
            ),
        }
    )
    text = json.dumps(document, indent=1)
    print(text)
    if path is not None:
        path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
