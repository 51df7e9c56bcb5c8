#!/usr/bin/env bash
# `num_local_experts` in the raw configuration of a transformers model is the number of all experts of a
# layer, not of those on one rank, as the name means elsewhere (Megatron-Core, and transformers' own
# `EPImplementation.num_local_experts`). Python 3.11 or later.
#
#   transformers 5.24.0: Qwen3MoeConfig is made with num_experts=8, and its JSON has
#       "num_local_experts": 8
#   and no num_experts. Of a raw configuration that has both, num_local_experts=8 and num_experts=4, it
#   keeps 8 without a word. DeepseekV3Config writes n_routed_experts, and answers to num_local_experts, but
#   not to num_experts; Qwen2MoeConfig answers to num_experts alone.
#
# So a number of experts is taken from the modules of experts, or from what a loaded configuration answers to
# either name, and never from one key of a JSON file. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" transformers==5.24.0
PYTHONPATH="$folder" "$python" - <<'PYTHON'
import json

import transformers
from transformers import AutoConfig

assert transformers.__version__ == "5.24.0", transformers.__version__


def raw(config):
    found = json.loads(config.to_json_string(use_diff=False))
    return {key: found[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in found}


qwen = AutoConfig.for_model("qwen3_moe", num_experts=8)
assert raw(qwen) == {"num_local_experts": 8}, raw(qwen)
assert qwen.num_experts == qwen.num_local_experts == 8
both = AutoConfig.for_model("qwen3_moe", num_local_experts=8, num_experts=4)
assert raw(both) == {"num_local_experts": 8} and both.num_experts == 8, raw(both)
both = AutoConfig.for_model("qwen3_moe", num_experts=4, num_local_experts=8)
assert raw(both) == {"num_local_experts": 8} and both.num_experts == 8, raw(both)
deepseek = AutoConfig.for_model("deepseek_v3", n_routed_experts=8)
assert raw(deepseek) == {"n_routed_experts": 8}, raw(deepseek)
qwen2 = AutoConfig.for_model("qwen2_moe", num_experts=8)
assert qwen2.num_experts == 8 and not hasattr(qwen2, "num_local_experts")
assert deepseek.num_local_experts == 8 and not hasattr(deepseek, "num_experts")
PYTHON
echo "as described"
