#!/usr/bin/env bash
# A cast of torch to float8_e4m3fn makes 448 of infinity, so that an overflow before it cannot be seen behind it; the
# other FP8 dtypes keep a sign of it, and so does ml_dtypes. Linux, Python 3.11, one process.
#
# One would guess NaN, as the format has no infinity: so in ml_dtypes (JAX, NumPy), and in torch's own e4m3fnuz.
#
#   torch 2.13.0, ml_dtypes 0.6.0, float32 and bfloat16 on a CPU, eager and any number of elements:
#                        infinity       1000 (1e6 in e5m2)    465
#   torch e4m3fn         448            448                   448
#   ml_dtypes e4m3fn     NaN            NaN                   NaN
#   torch e5m2           infinity       infinity
#   torch e4m3fnuz       NaN            NaN                   NaN
#   NaN stays NaN in all of them. A load_state_dict of float32 weights into a parameter of FP8 gives 448 as well.
#
# So whoever quantizes looks for infinities before the cast. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" \
  torch==2.13.0 numpy==2.4.6 ml_dtypes==0.6.0
PYTHONPATH="$folder" "$python" - <<'PYTHON'
import math

import ml_dtypes
import numpy as np
import torch

assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
assert ml_dtypes.__version__ == "0.6.0", ml_dtypes.__version__
nan, infinity = math.nan, math.inf
expected = {
    torch.float8_e4m3fn: {infinity: 448.0, -infinity: -448.0, 1000.0: 448.0, 465.0: 448.0, 464.0: 448.0, nan: nan},
    torch.float8_e5m2: {infinity: infinity, -infinity: -infinity, 1e6: infinity, 57344.0: 57344.0, nan: nan},
    torch.float8_e4m3fnuz: {infinity: nan, -infinity: nan, 1000.0: nan, 465.0: nan, 240.0: 240.0, nan: nan},
}
for dtype, numbers in expected.items():
    for source in (torch.float32, torch.bfloat16):
        for number, result in numbers.items():
            if torch.tensor(number, dtype=source).item() != number and not math.isnan(number):
                continue  # 465 is no bfloat16
            for count in (1, 33, 1000):
                found = torch.full((count,), number, dtype=source).to(dtype).float()
                assert all(str(each) == str(result) for each in found.tolist()), (dtype, number, found[0])
for number, result in {infinity: nan, 1000.0: nan, 465.0: nan, 464.0: 448.0, nan: nan}.items():
    found = float(np.float32(number).astype(ml_dtypes.float8_e4m3fn))
    assert str(found) == str(result), (number, found)
module = torch.nn.Module()
module.weight = torch.nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn), requires_grad=False)
module.load_state_dict({"weight": torch.tensor([infinity, 1e6])})
assert module.weight.float().tolist() == [448.0, 448.0], module.weight
PYTHON
echo "as described"
