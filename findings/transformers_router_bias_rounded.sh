#!/usr/bin/env bash
# transformers rounds the biases by which some families choose experts to bfloat16, and keeps those of others in
# float32. Linux, Python 3.11, one process.
#
# One would guess that a family whose routing bias is float32 in its file has it in float32 after from_pretrained, as
# vLLM has, and as transformers has for DeepSeek-V3.
#
#   transformers 5.24.0, models saved in float32, from_pretrained(dtype=torch.bfloat16):
#       DeepSeek-V3, GLM-4 MoE, Ernie 4.5 MoE, LFM2 MoE, AFMoE    bias float32
#       MiniMax-M2, LongCat-Flash, Laguna                         bias bfloat16
#   MiniMax-M2, 64 experts, 8 of them, biases of 1 and up to 50 steps of 0.001: 8 % of the tokens get other experts
#   in a layer than by the float32 bias. save_pretrained then writes the rounded ones.
#   model.to(torch.bfloat16) rounds them in every family. Of Zaya's balancing_biases, float32 too, the last one of each
#   layer is -1 after from_pretrained, whatever the file has.
#
# So biases of routers are compared by dtype and bits where a model passes through transformers. Ends with 1 where that
# has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" \
  torch==2.13.0 numpy==2.4.6 transformers==5.24.0 accelerate==1.15.0
cat >"$folder/rounded.py" <<'PYTHON'
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 8, "moe_intermediate_size": 32},
}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPED = {"n_routed_experts": 64, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
FAMILIES = {
    "deepseek_v3": (torch.float32, {**GROUPED, **LATENT}),
    "glm4_moe": (torch.float32, GROUPED),
    "ernie4_5_moe": (torch.float32, {"moe_num_experts": 64, "moe_k": 8}),
    "lfm2_moe": (torch.float32, {"num_experts": 64, "num_dense_layers": 1, "layer_types": ["full_attention"] * 2}),
    "afmoe": (torch.float32, {"num_experts": 64, "num_dense_layers": 1}),
    "minimax_m2": (torch.bfloat16, {"num_local_experts": 64}),
    "longcat_flash": (torch.bfloat16, {"num_layers": 1, "n_routed_experts": 64, "zero_expert_num": 0, **LATENT}),
    "laguna": (torch.bfloat16, {"num_experts": 64}),
}


def biases(model):
    tensors = dict((*model.named_parameters(), *model.named_buffers()))
    return {name: tensor for name, tensor in tensors.items() if name.endswith(("correction_bias", "expert_bias"))}


assert transformers.__version__ == "5.24.0", transformers.__version__
torch.manual_seed(0)
for family, (expected, sizes) in FAMILIES.items():
    folder = pathlib.Path(sys.argv[1]) / family
    config = AutoConfig.for_model(family, **{**SIZES, **sizes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for bias in biases(model).values():
            bias.copy_(1 + torch.randint(-50, 50, bias.shape) / 1000)
    model.save_pretrained(folder)
    stored = [tensor for name, tensor in load_file(folder / "model.safetensors").items() if name in biases(model)]
    assert all(tensor.dtype == torch.float32 for tensor in stored)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    dtypes = {bias.dtype for bias in biases(loaded).values()}
    print(family, *dtypes)
    assert dtypes == {expected}, (family, dtypes)
    if family == "minimax_m2":
        block, exact = loaded.model.layers[0].mlp, model.model.layers[0].mlp.e_score_correction_bias
        torch.nn.init.normal_(block.gate.weight, std=SIZES["hidden_size"] ** -0.5)
        hidden = torch.randn(4096, SIZES["hidden_size"], dtype=torch.bfloat16)
        biases_of_both = block.e_score_correction_bias, exact
        by_rounded, by_exact = (block.gate(hidden, bias)[2].sort(-1).values for bias in biases_of_both)
        others = (by_rounded != by_exact).any(-1).float().mean().item()
        print(f"tokens with other experts: {others:.0%}")
        assert others > 0.05, others
    assert {bias.dtype for bias in biases(loaded.to(torch.bfloat16)).values()} == {torch.bfloat16}

folder = pathlib.Path(sys.argv[1]) / "zaya"
config = AutoConfig.for_model("zaya", **SIZES | {"num_experts_per_tok": 1, "pad_token_id": 0})
model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
name, bias = next(each for each in model.named_buffers() if each[0].endswith("balancing_biases"))
bias.fill_(0.5)
model.save_pretrained(folder)
assert load_file(folder / "model.safetensors")[name].eq(0.5).all()
loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).get_buffer(name)
assert loaded[:-1].eq(0.5).all() and loaded[-1] == -1, loaded
PYTHON
PYTHONPATH="$folder" "$python" "$folder/rounded.py" "$folder/models"
echo "as described"
