#!/usr/bin/env bash
# A cast to float8_e8m0fnu is none of the roundings that scale factors have elsewhere, and takes numbers that the
# format lacks. Linux, Python 3.11, one process.
#
# One would guess round to nearest, ties to even, as in every other cast of torch, and NaN for what is no power of
# two above zero; or the exponent rounded up, as in quantizers of DeepSeek's formats.
#
#   torch 2.13.0, exponent byte of float32 and bfloat16 numbers:
#       1.49 -> 127, 1.5 -> 128, 3 -> 129, 6 -> 130: to nearest, and every tie goes up
#       -4 -> 129: the sign is dropped.     0 -> 0, which is 2**-127, not zero
#       1.01 * 2**-127 -> 1, which is 2**-126: so does all that lies between the two, and all below them goes to 0
#       1.5 * 2**127 and infinity -> 255 (NaN)
#   A factor of 1.4 becomes 1, so that 448 * 1.4 leaves e4m3 as 627, which is beyond its largest number.
#
# So factors are rounded to powers of two before the cast. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
PYTHONPATH="$folder" "$python" - <<'PYTHON'
import torch

assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
expected = {
    1.0: 127,
    1.49: 127,
    1.5: 128,
    3.0: 129,
    6.0: 130,
    -4.0: 129,
    0.0: 0,
    2.0**-128: 0,
    2.0**-127: 0,
    0.9 * 2.0**-127: 0,
    1.01 * 2.0**-127: 1,
    1.25 * 2.0**-126: 1,
    1.5 * 2.0**127: 255,
    float("inf"): 255,
    float("nan"): 255,
}
for dtype in (torch.float32, torch.bfloat16):
    found = torch.tensor(list(expected), dtype=dtype).to(torch.float8_e8m0fnu).view(torch.uint8).tolist()
    assert found == list(expected.values()), (dtype, found)
assert torch.tensor([0.0]).to(torch.float8_e8m0fnu).float().item() == 2.0**-127
factor = torch.tensor([1.4]).to(torch.float8_e8m0fnu).float()
assert (448 * 1.4 / factor).item() > 448
PYTHON
echo "as described"
