#!/usr/bin/env bash
# Gloo sends and receives tensors of every dtype, and its collectives refuse most of them, also those that only
# copy. Linux, Python 3.11, two processes.
#
# One would guess that a dtype matters to sums alone, so that broadcast, gather and all-to-all move any bytes.
#
#   torch 2.13.0, float8_e4m3fn, float8_e8m0fnu, float4_e2m1fn_x2, int16, uint16, uint32, uint64:
#       send and recv move them. broadcast, all_gather, all_gather_into_tensor, all_to_all_single, scatter, gather:
#       RuntimeError: Invalid scalar type
#   complex64: gather alone is refused. bool, uint8, int8, int32, int64, bfloat16 and floats: all of them move.
#
# So quantized weights, their scale factors and tables of int16 travel in a view as bytes. Ends with 1 where that
# has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
cat >"$folder/dtypes.py" <<'PYTHON'
import os
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

warnings.simplefilter("ignore", FutureWarning)
COPYING = ["broadcast", "all_gather", "all_gather_into", "all_to_all", "scatter", "gather"]
REFUSED = {"float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "int16", "uint16", "uint32", "uint64"}
TAKEN = {"bool", "uint8", "int8", "int32", "int64", "bfloat16", "float16", "float32", "float64", "complex64"}


def filled(dtype, value, num_bytes=16):
    return torch.full((num_bytes,), value, dtype=torch.uint8).view(dtype)


def call(name, rank, dtype):
    """What comes to rank 1 from rank 0, whose bytes are 1."""
    own, came = filled(dtype, 1 - rank), filled(dtype, 0)
    if name == "send":
        dist.recv(came, 0) if rank else dist.send(own, 1)
    elif name == "broadcast":
        dist.broadcast(came if rank else own, 0)
    elif name == "all_gather":
        dist.all_gather([came, filled(dtype, 0)], own)
    elif name == "all_gather_into":
        both = filled(dtype, 0, 32)
        dist.all_gather_into_tensor(both, own)
        came = both[: len(own)]
    elif name == "all_to_all":
        halves = filled(dtype, 0)
        dist.all_to_all_single(halves, own)
        came = halves[: len(own) // 2]
    elif name == "scatter":
        dist.scatter(came, None if rank else [own, own], 0)
    else:
        dist.gather(own, [filled(dtype, 0), came] if rank else None, 1)
        return
    if rank:
        assert came.view(torch.uint8).bool().all(), (name, dtype)


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for name in sorted(REFUSED | TAKEN):
        dtype = getattr(torch, name)
        call("send", rank, dtype)
        refused = set()
        for copying in COPYING:
            try:
                call(copying, rank, dtype)
            except RuntimeError as error:
                assert "Invalid scalar type" in str(error), error
                refused.add(copying)
        expected = set(COPYING) if name in REFUSED else {"gather"} if name == "complex64" else set()
        assert refused == expected, (name, refused)
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
    mp.spawn(run, (os.path.join(sys.argv[1], "store"),), nprocs=2)
PYTHON
PYTHONPATH="$folder" "$python" "$folder/dtypes.py" "$folder"
echo "as described"
