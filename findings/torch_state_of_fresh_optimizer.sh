#!/usr/bin/env bash
# Asking for the state dict of an optimizer takes a step of it where it has no state yet, and asks for no state
# where a gradient is there. Linux, Python 3.11, one process.
#
# One would guess that `get_optimizer_state_dict` reads, that what it makes is what a new optimizer begins with,
# and that a load into its result restores whatever was saved.
#
#   torch 2.13.0, torch.distributed.checkpoint.state_dict:
#       after get_optimizer_state_dict of a new AdamW (lr=0.1, no decay) `step` is 1, and the first real step moves a
#       weight of 1 with gradient 1 by 0.0744 instead of 0.1. Momentum of SGD with weight decay is the decay, not 0.
#       Step hooks of the optimizer are called.
#       Where one parameter has a gradient, the result has no state: load and set_optimizer_state_dict return,
#       and the moments that were saved are not in the optimizer.
#
# So whoever saves before the first step makes the state himself, with its counters at 0, and whoever resumes
# clears gradients first. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
cat >"$folder/fresh.py" <<'PYTHON'
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

warnings.simplefilter("ignore")


def made(kind=torch.optim.AdamW, **options):
    model = torch.nn.ParameterDict({"w": torch.ones(1)})
    return model, kind(model.parameters(), **{"lr": 0.1, "weight_decay": 0.0, **options})


def moved(model, optimizer):
    before = model["w"].item()
    model["w"].grad = torch.ones(1)
    optimizer.step()
    return round(before - model["w"].item(), 4)


assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
model, optimizer = made()
hooked = []
optimizer.register_step_post_hook(lambda *given: hooked.append(1))
read = get_optimizer_state_dict(model, optimizer)
assert read["state"]["w"]["step"] == 1 and len(hooked) == 1, (read, hooked)
assert (moved(*made()), moved(model, optimizer)) == (0.1, 0.0744)
read = get_optimizer_state_dict(*made(torch.optim.SGD, momentum=0.9, weight_decay=0.5))
assert read["state"]["w"]["momentum_buffer"].item() == 0.5, read

dcp.save(get_optimizer_state_dict(model, optimizer), checkpoint_id=sys.argv[1], no_dist=True)
for has_gradient, restored in ((False, 2), (True, None)):
    resumed, its = made()
    if has_gradient:
        resumed["w"].grad = torch.zeros(1)
    state = get_optimizer_state_dict(resumed, its)
    dcp.load(state, checkpoint_id=sys.argv[1], no_dist=True)
    set_optimizer_state_dict(resumed, its, state)
    assert its.state[resumed["w"]].get("step") == restored, its.state
PYTHON
PYTHONPATH="$folder" "$python" "$folder/fresh.py" "$folder/checkpoint"
echo "as described"
