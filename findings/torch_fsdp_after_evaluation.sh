#!/usr/bin/env bash
# An optimizer that is made after an evaluation does not train the outermost parameters of a model of fully_shard, and
# says nothing. Linux, Python 3.11, two processes over Gloo.
#
# One would guess that `parameters()` of a sharded model gives the shards whenever it is asked.
#
#   torch 2.13.0, Sequential(Linear, Linear), the first one and the whole sharded by fully_shard:
#       after a forward under no_grad the first weight is a DTensor, the second a plain Parameter, whole: the outermost
#       module keeps what it has gathered for a backward, which does not come. After a backward both are DTensors.
#       SGD made between the two: three steps later the first weight has moved, the second has not.
#       SGD made before: get_optimizer_state_dict raises KeyError after an evaluation.
#       What is copied into the whole Parameter is in the next forward, and gone after the next backward.
#       state_dict(), or reshard() of the outermost module, brings the shards back.
#
# So whoever has run a forward alone calls reshard() before he asks for parameters. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
cat >"$folder/shards.py" <<'PYTHON'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def evaluated(mesh):
    """A model that has run one forward, and the same without it."""
    models = []
    for _ in range(2):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        for layer in model:
            nn.init.ones_(layer.weight)
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        models.append(model)
    with torch.no_grad():
        models[0](torch.eye(4))
    return models


def are_shards(model):
    return [isinstance(weight, DTensor) for weight in model.parameters()]


def trained(model, optimizer):
    """Whether three steps move each weight."""
    for _ in range(3):
        model(torch.eye(4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [bool((weight.full_tensor() != 1).all()) for weight in model.parameters()]


def rank_main(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    late, early = evaluated(mesh)
    assert (are_shards(late), are_shards(early)) == ([True, False], [True, True])
    moved = [trained(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in (late, early)]
    if rank == 0:
        print("moved:", moved, flush=True)
    assert moved == [[True, False], [True, True]], moved
    assert are_shards(late) == [True, True]

    model = evaluated(mesh)[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trained(model, optimizer)
    get_optimizer_state_dict(model, optimizer)
    with torch.no_grad():
        model(torch.eye(4))
    try:
        raise SystemExit(f"changed: expected KeyError, got {get_optimizer_state_dict(model, optimizer)['state'].keys()}")
    except KeyError:
        pass

    model = evaluated(mesh)[0]
    with torch.no_grad():
        model[1].weight.fill_(2)
        assert model(torch.eye(4)).eq(8).all()
    model(torch.eye(4)).sum().backward()
    assert model(torch.eye(4)).eq(4).all()
    for bring_back in (nn.Module.state_dict, type(model).reshard):
        model = evaluated(mesh)[0]
        bring_back(model)
        assert are_shards(model) == [True, True]
    dist.destroy_process_group()


if __name__ == "__main__":
    assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
    mp.spawn(rank_main, (sys.argv[1],), 2)
PYTHON
PYTHONPATH="$folder" "$python" -W ignore "$folder/shards.py" "$folder"
echo "as described"
