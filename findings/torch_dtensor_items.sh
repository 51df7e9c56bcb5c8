#!/usr/bin/env bash
# A reduction of a DTensor, asked for as a number of Python, is that of the rank's own part: `item`, `float`, `int` and
# `bool` do not add up what is pending. Linux, Python 3.11, two processes over Gloo.
#
# One would guess the number of the whole tensor, as comparisons, `torch.equal` and `clip_grad_norm_` give it, or an
# error, as `numpy` and `tolist` give.
#
#   torch 2.13.0, Shard(0) over two ranks, on rank 0 and on rank 1:
#       [1, 2, 3, 4]:    sum().item()  3 and 7   norm 2.24 and 5   max().item()  2 and 4   int((x > 1).sum())  1 and 2
#       [1, 2, 3, nan]:  bool(x.isnan().any())  False and True
#       right on both: bool(x.sum() > 5), sum().full_tensor().item(), get_total_norm([x]).item()
#
# So whoever decides by such a number (skip the step, stop, log) calls full_tensor() first; else ranks decide
# differently, and the next collective waits for those that went elsewhere. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
cat >"$folder/items.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.utils import get_total_norm


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 4.0]), mesh, [Shard(0)])
    y = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, float("nan")]), mesh, [Shard(0)])
    found = {
        "sum": x.sum().item(),
        "float of sum": float(x.sum()),
        "norm": round(torch.linalg.vector_norm(x).item(), 2),
        "max": x.max().item(),
        "count": int((x > 1).sum()),
        "is nan": bool(y.isnan().any()),
        "comparison": bool(x.sum() > 5),
        "equal": torch.equal(x, y),
        "sum of whole": x.sum().full_tensor().item(),
        "total norm": round(get_total_norm([x]).item(), 2),
    }
    of_ranks = [None, None]
    dist.all_gather_object(of_ranks, found)
    for name in found:
        print(name, *(each[name] for each in of_ranks)) if rank == 0 else None
    assert of_ranks[0] == {
        **{"sum": 3, "float of sum": 3, "norm": 2.24, "max": 2, "count": 1, "is nan": False},
        **{"comparison": True, "equal": False, "sum of whole": 10, "total norm": 5.48},
    }, of_ranks
    assert of_ranks[1] == of_ranks[0] | {
        **{"sum": 7, "float of sum": 7, "norm": 5, "max": 4, "count": 2, "is nan": True},
    }, of_ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
    mp.spawn(run, (os.path.join(sys.argv[1], "store"),), nprocs=2)
PYTHON
PYTHONPATH="$folder" "$python" "$folder/items.py" "$folder"
echo "as described"
