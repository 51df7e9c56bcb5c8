"""The process group, the seeds and the printing of DeepEP's test programs."""

from __future__ import annotations

import dataclasses
import os
import random
import sys

import torch
import torch.distributed as dist

from moe_comm import env
from moe_comm.compat.deep_ep.elastic import get_logical_domain_size, get_physical_domain_size
from moe_comm.peers.bootstrap import Bootstrap

__all__ = [
    "check_nvlink_connections",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "init_dist",
    "init_seed",
]


@dataclasses.dataclass
class _Process:
    """State that the calls of this module leave for later ones."""

    local_rank: int = 0
    global_seed: int = 0
    local_seed: int = 0


_process = _Process()


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Join the default process group over Gloo, and make bfloat16 torch's default dtype.

    `MASTER_ADDR`, `MASTER_PORT`, `WORLD_SIZE` (nodes, not ranks) and `RANK` (of the node) say with whom,
    as for DeepEP; where they are not set, ranks are on this machine.

    Args:
        local_rank: Rank among this node's ranks.
        num_local_ranks: Ranks of every node.
        seed: Seed for `init_seed`.

    Returns:
        Rank, number of ranks, and a group of all of them.
    """
    num_nodes = env.launcher_world_size()
    port = os.environ.get("MASTER_PORT") or "8361"  # noqa: TID251
    node_rank = max(env.launched_ranks()[0][0], 0)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{env.master_address() or '127.0.0.1'}:{port}",
        world_size=num_nodes * num_local_ranks,
        rank=node_rank * num_local_ranks + local_rank,
    )
    torch.set_default_dtype(torch.bfloat16)
    _process.local_rank = local_rank
    init_seed(seed)
    group = dist.new_group(list(range(dist.get_world_size())))
    return dist.get_rank(), dist.get_world_size(), group


def init_seed(global_seed: int) -> None:
    """Seed torch and `random` with this number plus the rank."""
    _process.global_seed = global_seed
    _process.local_seed = global_seed + dist.get_rank()
    torch.manual_seed(_process.local_seed)
    random.seed(_process.local_seed)


def get_global_seed() -> int:
    """Seed that `init_seed` was told, equal on all ranks."""
    return _process.global_seed


def get_local_seed() -> int:
    """The seed of this rank."""
    return _process.local_seed


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Write a line from every rank, or from the first of a node alone; all ranks arrive. Collective."""
    if not once_in_node or _process.local_rank == 0:
        sys.stdout.write(f"{s}\n")
        sys.stdout.flush()
    dist.barrier()


def check_nvlink_connections(group: dist.ProcessGroup | Bootstrap | None) -> None:
    """Nothing to check: no NVLink is used."""
    del group
