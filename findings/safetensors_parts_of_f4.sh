#!/usr/bin/env bash
# The Python reader of safetensors gives an F4 tensor whole, and no part of it. Linux, Python 3.11, one process.
#
# One would guess that get_slice, the call for a rank's part, takes the elements that get_shape counts, or bytes.
#
#   safetensors 0.8.0, torch 2.13.0, float4_e2m1fn_x2 [4, 16], which has two elements a byte:
#       get_slice(name).get_shape() is [4, 32]; get_tensor(name) is [4, 16]
#       get_slice(name)[0:2], [:, 0:8], [:, 16:32], also [:]:
#       RuntimeError: shape '[4, 32]' is invalid for input of size 64
#
# So whoever reads parts of four-bit weights finds their bytes by the header, or stores them as U8. Ends with 1
# where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" \
  torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
PYTHONPATH="$folder" "$python" - "$folder/model.safetensors" <<'PYTHON'
import sys

import safetensors
import torch
from safetensors.torch import save_file

assert safetensors.__version__ == "0.8.0", safetensors.__version__
codes = torch.arange(64, dtype=torch.uint8).view(4, 16)
save_file({"F4": codes.clone().view(torch.float4_e2m1fn_x2), "U8": codes}, sys.argv[1])
parts = [slice(0, 2), slice(None), (slice(None), slice(0, 8)), (slice(None), slice(16, 32))]
with safetensors.safe_open(sys.argv[1], "pt") as file:
    assert torch.equal(file.get_slice("U8")[0:2], codes[0:2])
    assert torch.equal(file.get_tensor("F4").view(torch.uint8), codes)
    assert file.get_slice("F4").get_shape() == [4, 32]
    for part in parts:
        try:
            raise SystemExit(f"changed: expected an error of {part}, got {file.get_slice('F4')[part].shape}")
        except RuntimeError as error:
            assert "shape '[4, 32]' is invalid for input of size 64" in str(error), error
PYTHON
echo "as described"
