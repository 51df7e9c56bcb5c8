"""Serves batches whose hot experts change, on ranks whose experts a balancer moves after them.

    python examples/balanced_moe.py --ranks 4 --steps 120

Every rank has room for one expert more than its share. For each rearrangement it prints what the fullest rank had in
the last steps, and what it would have had by the new placement.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import moe_comm
from moe_comm.replicas import ExpertBalancer

NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS = 16, 2, 64, 256


def route(step: int, generator: torch.Generator) -> torch.Tensor:
    """Choices of a router that prefers other experts every 40 steps, int64 `[NUM_TOKENS, NUM_TOPK]`."""
    odds = 1 / (1.0 + torch.arange(NUM_EXPERTS)) ** 1.2
    odds = odds.roll(5 * (step // 40))
    return torch.multinomial(odds.expand(NUM_TOKENS, -1), NUM_TOPK, generator=generator)


def serve(rank_idx: int, num_ranks: int, num_steps: int, store: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank_idx, world_size=num_ranks)
    share = NUM_EXPERTS // num_ranks
    experts = [[*range(first, first + share), -1] for first in range(0, NUM_EXPERTS, share)]
    config = moe_comm.EpConfig(
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        dtype=torch.float32,
        placement=moe_comm.Placement(experts, NUM_EXPERTS),
    )
    generator = torch.Generator().manual_seed(rank_idx)
    with moe_comm.Communicator() as comm, moe_comm.EpBuffer(comm, config) as buffer:
        weight = torch.stack(
            [torch.eye(HIDDEN) * (2 + expert) for expert in experts[rank_idx]]
        )  # [slots, hidden, hidden]
        with ExpertBalancer(comm, num_steps=20, price_per_byte=0.005) as balancer:
            balancer.add_layer(buffer, [weight])
            for step in range(num_steps):
                x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
                topk_idx = route(step, generator)
                result = buffer.dispatch(x, topk_idx)
                parts = result.x.split(result.expert_offsets.diff().tolist())
                out = torch.cat([rows @ weight[slot] for slot, rows in enumerate(parts)])
                sums = buffer.combine(out, result.handle)
                expected = x * (2.0 + topk_idx).sum(1, keepdim=True)  # wherever the experts lie
                torch.testing.assert_close(sums, expected)
                balancer.step()
                report = balancer.last_report
                for move in report.moves if report and report.step == step + 1 else ():
                    if rank_idx == 0:
                        print(
                            f"step {report.step}: fullest rank {move.rows_before} -> {move.rows_after} rows "
                            f"(mean {move.mean_rows:.0f}), {move.num_moves} experts moved"
                        )
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4, choices=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, default=120)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        mp.spawn(serve, (given.ranks, given.steps, store), nprocs=given.ranks)
