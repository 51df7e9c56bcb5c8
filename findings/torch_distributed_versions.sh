#!/usr/bin/env bash
# Collectives of torch.distributed write into tensors that autograd has saved, and most of them do not count
# the write in `Tensor._version`: the backward then uses the new values without a word, where an operation
# in place would be "modified by an inplace operation". Linux, Python 3.11, two processes over Gloo.
#
#   torch 2.13.0, how much `_version` of the receiving tensor grows by one call:
#       recv, irecv, batch_isend_irecv, broadcast, all_reduce, reduce, scatter, all_to_all_single   0
#       all_gather                                                                                  1
#       reduce_scatter_tensor                                                                       1
#       all_gather_into_tensor                                                                      2
#   y = (w * x).sum() with x = 3, then recv of 5 into x, then y.backward(): w.grad is 5, and nothing is raised.
#
# So whoever receives into tensors of a caller counts the write himself
# (`torch.autograd.graph.increment_version`). Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
cat >"$folder/versions.py" <<'PYTHON'
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

warnings.simplefilter("ignore", FutureWarning)
EXPECTED = {
    "recv": 0,
    "irecv": 0,
    "batch_isend_irecv": 0,
    "broadcast": 0,
    "all_reduce": 0,
    "reduce": 0,
    "scatter": 0,
    "all_to_all_single": 0,
    "all_gather": 1,
    "reduce_scatter_tensor": 1,
    "all_gather_into_tensor": 2,
}


def call(name, rank, tensor):
    fives = torch.full((4,), 5.0)
    if name == "recv":
        dist.recv(tensor, 0) if rank else dist.send(fives, 1)
    elif name == "irecv":
        dist.irecv(tensor, 0).wait() if rank else dist.send(fives, 1)
    elif name == "batch_isend_irecv":
        op = dist.P2POp(dist.irecv, tensor, 0) if rank else dist.P2POp(dist.isend, fives, 1)
        for work in dist.batch_isend_irecv([op]):
            work.wait()
    elif name == "broadcast":
        dist.broadcast(tensor if rank else fives, 0)
    elif name == "all_reduce":
        dist.all_reduce(tensor)
    elif name == "reduce":
        dist.reduce(tensor, 1)
    elif name == "scatter":
        dist.scatter(tensor, None if rank else [fives, fives], 0)
    elif name == "all_to_all_single":
        dist.all_to_all_single(tensor, fives)
    elif name == "all_gather":
        dist.all_gather([tensor, torch.zeros(4)], fives)
    elif name == "reduce_scatter_tensor":
        dist.reduce_scatter_tensor(tensor, torch.full((8,), 5.0))
    else:
        dist.all_gather_into_tensor(tensor, torch.full((2,), 5.0))


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name, expected in EXPECTED.items():
        tensor = torch.ones(4)
        before = tensor._version
        call(name, rank, tensor)
        if rank == 1:
            assert tensor[0] != 1, name
            assert tensor._version - before == expected, (name, tensor._version - before)
    weight, x = torch.ones(4, requires_grad=True), torch.full((4,), 3.0)
    y = (weight * x).sum()
    call("recv", rank, x)
    if rank == 1:
        y.backward()
        assert weight.grad.tolist() == [5.0] * 4, weight.grad
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
    mp.spawn(run, (os.path.join(sys.argv[1], "store"),), nprocs=2)
PYTHON
PYTHONPATH="$folder" "$python" "$folder/versions.py" "$folder"
echo "as described"
