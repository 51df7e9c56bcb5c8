#!/usr/bin/env bash
# torchtitan leaves weights out of what it writes for transformers and reads from it: all experts of gpt-oss, and the
# routing bias of Qwen3-MoE. Linux, Python 3.11, one process.
#
# One would guess that what has no name on the other side is an error, as in its adapter of DeepSeek-V3.
#
#   torchtitan 0.3.0, state dict adapters of the debug models:
#       gpt-oss: to_hf returns 10.5 of 81.5 million elements, and no tensor of an expert. A load of a checkpoint that
#       has every tensor of ones, experts as MXFP4, ends without an error; attention and router are ones, and the
#       experts what they were before.
#       Qwen3-MoE, trained with load_balance_coeff 1e-3 by its own configuration: to_hf leaves expert_bias_E out.
#       Without biases of 10 such steps, up or down, a router chooses other experts for 95 % of the tokens.
#       DeepSeek-V3: nothing is left out.
#
# So names and elements are counted on both sides of an export. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" \
  torch==2.13.0 numpy==2.4.6 torchtitan==0.3.0 triton==3.7.1 safetensors==0.8.0
cat >"$folder/left_out.py" <<'PYTHON'
import importlib
import importlib.metadata
import json
import pathlib
import sys
import types

import torch
from safetensors.torch import save_file
from torchtitan.components.checkpointer.base import MODEL, ModelWrapper
from torchtitan.components.checkpointer.dcp import CheckpointManager

BLOCKS = {"gate_up_proj": "mlp1_weight_EGD", "down_proj": "mlp2_weight_EDF"}
BIASES = {"gate_up_proj_bias": "mlp1_bias_EG", "down_proj_bias": "mlp2_bias_ED"}


def made(family, flavor, device):
    spec = importlib.import_module(f"torchtitan.models.{family}").model_registry(flavor, attn_backend="flex")
    with torch.device(device):
        model = spec.model.build()
    return model, spec.state_dict_adapter(spec.model, None)


def num_elements(tensors):
    return sum(tensor.numel() for tensor in tensors.values())


def of_ones(state, for_transformers):
    """A checkpoint as the published ones of gpt-oss: experts are MXFP4, whose code 2 is a one."""
    tensors = {name: torch.ones(tensor.shape) for name, tensor in for_transformers.items()}
    layers = {name.split(".")[1] for name in state if ".moe." in name}
    for layer in layers:
        experts, its = f"model.layers.{layer}.mlp.experts", f"layers.{layer}.moe.routed_experts.inner_experts"
        for name, weight in BLOCKS.items():
            *rows, columns = state[f"{its}.{weight}"].shape
            tensors[f"{experts}.{name}_blocks"] = torch.full((*rows, columns // 32, 16), 0x22, dtype=torch.uint8)
            tensors[f"{experts}.{name}_scales"] = torch.full((*rows, columns // 32), 127, dtype=torch.uint8)
        for name, bias in BIASES.items():
            tensors[f"{experts}.{name}"] = torch.ones(state[f"{its}.{bias}"].shape)
    return tensors


assert importlib.metadata.version("torchtitan") == "0.3.0"
folder = pathlib.Path(sys.argv[1])

model, adapter = made("gpt_oss", "debugmodel", "cpu")
with torch.no_grad():
    for tensor in model.state_dict().values():
        tensor.fill_(7)
state = model.state_dict()
for_transformers = adapter.to_hf(state)
assert not [name for name in for_transformers if "experts" in name]
counts = num_elements(state), num_elements(for_transformers)
assert counts == (81489472, 10518048), counts
tensors = of_ones(state, for_transformers)
save_file(tensors, folder / "model.safetensors")
index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
(folder / "model.safetensors.index.json").write_text(json.dumps(index))
manager = types.SimpleNamespace(sd_adapter=adapter, states={MODEL: ModelWrapper(model)})
CheckpointManager.dcp_load(manager, state, str(folder), from_hf=True, from_quantized=True)
for name, tensor in model.state_dict().items():
    expected = 7 if "experts" in name or "expert_bias" in name else 1
    assert (tensor == expected).all(), (name, tensor.flatten()[:4])

model, adapter = made("qwen3", "debugmodel_moe", "meta")
state = model.state_dict()
assert "layers.1.moe.expert_bias_E" in state
left = num_elements(state) - num_elements(adapter.to_hf(state))
biases = {name: tensor for name, tensor in state.items() if name.endswith("expert_bias_E")}
assert left == num_elements(biases) > 0, left
model, _ = made("qwen3", "debugmodel_moe", "cpu")
torch.manual_seed(0)
moe = model.layers["1"].moe
torch.nn.init.normal_(moe.router.gate.weight, std=moe.router.gate.weight.shape[1] ** -0.5)
x = torch.randn(1, 4096, moe.router.gate.weight.shape[1])
bias = 1e-3 * 10 * torch.randn(moe.router.num_experts).sign()
trained, exported = (moe.router(x, given)[1].sort(-1).values for given in (bias, torch.zeros_like(bias)))
others = (trained != exported).any(-1).float().mean().item()
print(f"gpt-oss: {counts[1]} of {counts[0]} elements are written; Qwen3-MoE: {others:.0%} of tokens with other experts")
assert others > 0.9, others

model, adapter = made("deepseek_v3", "debugmodel", "meta")
state = model.state_dict()
assert num_elements(adapter.to_hf(state)) == num_elements(state)
PYTHON
PYTHONPATH="$folder" "$python" "$folder/left_out.py" "$folder"
echo "as described"
