#!/usr/bin/env bash
# Where transformers dequantizes FP8 weights it takes no notice of `weight_block_size`: it divides a weight into as
# many equal blocks as it has scale factors. Linux, Python 3.11, one process, no GPU.
#
# One would guess that a last block is a shorter one, as in DeepSeek's checkpoints, in the FP8 layers of
# transformers themselves and in every engine that reads them.
#
#   transformers 5.24.0, weight_block_size [128, 128], a matrix of ones with the factors 1 and 2 over 192 columns:
#       from_pretrained on a CPU, and everywhere with dequantize=True, gives 96 columns of 1 and 96 of 2.
#       It should be 128 and 64. Nothing is said.
#   320 columns with three factors:
#       RuntimeError, whose report names "Weight shape (320, 64) not divisible by scale grid (3, 1)".
#
# So a checkpoint that is to be read so has FP8 in weights of whole blocks alone. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" \
  torch==2.13.0 numpy==2.4.6 transformers==5.24.0 accelerate==1.15.0
cat >"$folder/unequal_blocks.py" <<'PYTHON'
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file, save_file


def read(folder, num_columns):
    """What from_pretrained gives for a down_proj of one layer, by value and number of columns."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, intermediate_size=num_columns, vocab_size=32)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        factors = torch.arange(1.0, 1 - (-columns // 128)).expand(-(-rows // 128), -1)
        tensors[name] = torch.ones(rows, columns).to(torch.float8_e4m3fn)
        tensors[name + "_scale_inv"] = factors.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "dequantize": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    values, counts = model.model.layers[0].mlp.down_proj.weight[0].unique_consecutive(return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


assert transformers.__version__ == "5.24.0", transformers.__version__
folder = pathlib.Path(sys.argv[1])
assert read(folder / "256", 256) == {1: 128, 2: 128}
assert (found := read(folder / "192", 192)) == {1: 96, 2: 96}, found
try:
    raise SystemExit(f"changed: expected an error, got {read(folder / '320', 320)}")
except RuntimeError as error:
    assert "automatic conversion of the weights" in str(error), error
PYTHON
PYTHONPATH="$folder" "$python" "$folder/unequal_blocks.py" "$folder/models" 2>"$folder/said" || { cat "$folder/said"; exit 1; }
grep -q "Weight shape (320, 64) not divisible by scale grid (3, 1)" "$folder/said"
echo "as described"
