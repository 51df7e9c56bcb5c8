#!/usr/bin/env bash
# From three ranks on, a sum over Gloo depends on where its element lies in the tensor, and on how long the tensor is.
# Linux, Python 3.11, three processes.
#
# One would guess that equal elements have equal sums, and that a tensor has the same sums alone and in a longer one.
#
#   torch 2.13.0, all_reduce, bfloat16: every element is 256 on rank 0 and 1 on ranks 1 and 2, whose sum is 258:
#       1 element                258
#       12 elements, a million   the first third is 258, the rest 256: each third is added up in an order that begins
#                                with another rank, and rounded at every step
#       float16 with 2048 and float32 with 2**24 do it too. All ranks have the same. So do reduce, and the parts of
#       reduce_scatter_tensor. With two ranks there is no such thing.
#   Normal numbers in bfloat16: a tensor of 1000, summed behind 500 others, has other sums for a sixth of its elements.
#
# So gradients that are to be compared bit for bit are summed in tensors of the same sizes (no other buckets, no other
# flattening), or in an order of one's own. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
cat >"$folder/sums.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

LARGE = {torch.bfloat16: 256.0, torch.float16: 2048.0, torch.float32: 2.0**24}


def equal_elements(rank, dtype, size):
    return torch.full((size,), LARGE[dtype] if rank == 0 else 1.0, dtype=dtype)


def expect_thirds(sums, dtype):
    """The first third is the sum, the rest the large number alone."""
    third = len(sums) // 3
    assert sums[: third - 1].eq(LARGE[dtype] + 2).all() and sums[third + 2 :].eq(LARGE[dtype]).all(), sums


def rank_main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    pair = dist.new_group([0, 1])
    for dtype, large in LARGE.items():
        sums = equal_elements(rank, dtype, 1)
        dist.all_reduce(sums)
        assert sums == large + 2, sums
        for size in (12, 1_000_000):
            sums = equal_elements(rank, dtype, size)
            dist.all_reduce(sums)
            expect_thirds(sums, dtype)
            others = sums.clone()
            dist.broadcast(others, 0)
            assert torch.equal(sums, others)
        sums = equal_elements(rank, dtype, 12)
        dist.reduce(sums, 0)
        if rank == 0:
            expect_thirds(sums, dtype)
        own = torch.empty(4, dtype=dtype)
        dist.reduce_scatter_tensor(own, equal_elements(rank, dtype, 12))
        parts = [torch.empty_like(own) for _ in range(3)]
        dist.all_gather(parts, own)
        expect_thirds(torch.cat(parts), dtype)
        if rank < 2:
            sums = torch.full((12,), large if rank == 0 else 2.0, dtype=dtype)
            dist.all_reduce(sums, group=pair)
            assert sums.eq(large + 2).all(), sums

    torch.manual_seed(rank)
    numbers = torch.randn(1500).bfloat16()
    alone, together = numbers[500:].clone(), numbers.clone()
    dist.all_reduce(alone)
    dist.all_reduce(together)
    differ = (alone != together[500:]).float().mean().item()
    if rank == 0:
        print(f"sums that differ: {differ:.0%}")
    assert 0.14 < differ < 0.2, differ
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
    mp.spawn(rank_main, (sys.argv[1],), 3)
PYTHON
PYTHONPATH="$folder" "$python" -W ignore "$folder/sums.py" "$folder"
echo "as described"
