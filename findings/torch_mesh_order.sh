#!/usr/bin/env bash
# A DTensor over a device mesh whose ranks do not ascend: data goes by rank, sizes by the mesh. Linux, Python
# 3.11, two processes over Gloo.
#
#   torch 2.13.0, mesh = DeviceMesh("cpu", [1, 0]), Shard(0):
#       rank 0 has coordinate (1,), and distribute_tensor(arange(4)) gives it [0, 1]; full_tensor() is
#       [0, 1, 2, 3]. from_local(full(rank)) gives [0, 0, 1, 1] by full_tensor(): parts lie by rank, as the
#       process group sorts its ranks.
#       compute_local_shape_and_global_offset, which checkpoints go by, says that rank 0 begins at 2.
#       distribute_tensor(arange(5)).full_tensor() is [0, 1, 0, 3, 4]: rank 0 is given two elements by its
#       coordinate, where the first part by rank has three. Nothing is raised.
#
# So parts are read in the order of the group, and unequal ones over such a mesh cannot be read at all. Ends
# with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
cat >"$folder/mesh_order.py" <<'PYTHON'
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.tensor import DeviceMesh, DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def run(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh, by_row = DeviceMesh("cpu", [1, 0]), [Shard(0)]
    even = distribute_tensor(torch.arange(4), mesh, by_row)
    assert mesh.get_coordinate() == [1 - rank] or mesh.get_coordinate() == (1 - rank,)
    assert even.to_local().tolist() == [[0, 1], [2, 3]][rank]
    assert even.full_tensor().tolist() == [0, 1, 2, 3]
    marked = DTensor.from_local(torch.full((2,), rank), mesh, by_row, run_check=False)
    assert marked.full_tensor().tolist() == [0, 0, 1, 1]
    assert compute_local_shape_and_global_offset((4,), mesh, by_row)[1] == ((2,), (0,))[rank]
    uneven = distribute_tensor(torch.arange(5), mesh, by_row)
    assert uneven.full_tensor().tolist() == [0, 1, 0, 3, 4], uneven.full_tensor()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
    mp.spawn(run, (os.path.join(sys.argv[1], "store"),), nprocs=2)
PYTHON
PYTHONPATH="$folder" "$python" "$folder/mesh_order.py" "$folder"
echo "as described"
