"""Imports every module of the package and moves rows between two ranks: does an installation work?

    python tools/exercise.py

The checks of wheels and of the bare environment run it with the Python of the environment they mean.
It needs nothing but the package and what the package depends on, and no file beside itself.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import pkgutil
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

import moe_comm

NUM_RANKS = 2
NUM_TOKENS = 64
HIDDEN = 128


def import_all() -> list[str]:
    """The modules of the package that cannot be imported; why is printed."""
    failed: list[str] = []
    for module in pkgutil.walk_packages(moe_comm.__path__, "moe_comm.", failed.append):
        if module.name.endswith(".__main__"):
            continue
        try:
            importlib.import_module(module.name)
        # A module that is not there at all, and whatever else a module may meet, count alike.
        except Exception:  # noqa: BLE001
            traceback.print_exc()
            failed.append(module.name)
    return failed


def run_rank(rank_idx: int, store: str) -> None:
    """Dispatch and combine on one rank: every expert doubles its rows, so sums are known exactly."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank_idx, world_size=NUM_RANKS
    )
    draw = torch.Generator().manual_seed(rank_idx)
    x = torch.randint(-8, 8, (NUM_TOKENS, HIDDEN), generator=draw).bfloat16().requires_grad_()
    topk_idx = torch.rand(NUM_TOKENS, 8, generator=draw).topk(2).indices
    config = moe_comm.EpConfig(
        num_experts=8, num_topk=2, hidden=HIDDEN, num_max_tokens_per_rank=NUM_TOKENS
    )
    with moe_comm.Communicator() as communicator, moe_comm.EpBuffer(communicator, config) as buffer:
        result = moe_comm.dispatch(x, topk_idx, buffer=buffer)
        y = moe_comm.combine(2 * result.x, result.handle, buffer=buffer)
        y.float().sum().backward()
        backend = communicator.backend
    dist.destroy_process_group()
    # Each token comes back from both of its experts.
    if not torch.equal(y, 4 * x):
        raise SystemExit(f"rank {rank_idx}: 4 * x was expected, got {y} for {x}")
    if x.grad is None or not torch.equal(x.grad, torch.full_like(x, 4)):
        raise SystemExit(f"rank {rank_idx}: a gradient of 4 was expected, got {x.grad}")
    print(
        f"rank {rank_idx}: {NUM_TOKENS} tokens moved and came back, backend {backend}", flush=True
    )


def main() -> int:
    """0 where everything works, else 1."""
    version = importlib.metadata.version("moe-comm")
    print(f"moe-comm {version} at {moe_comm.__file__}, torch {torch.__version__}", flush=True)
    if failed := import_all():
        print(f"cannot be imported: {', '.join(failed)}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_rank, args=(str(Path(folder) / "store"),), nprocs=NUM_RANKS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
