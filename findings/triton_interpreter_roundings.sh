#!/usr/bin/env bash
# Triton's interpreter rounds to bfloat16 and FP8 otherwise than the kernels that Triton compiles, and makes numbers of
# NaN and infinity. Linux on x86-64, Python 3.11, one process, no GPU.
#
# One would guess that TRITON_INTERPRET=1 computes what the same kernel does on a GPU, to nearest even, as torch does.
#
#   triton 3.7.1, `.to()` in a kernel, in the interpreter, and what torch 2.13.0 gives:
#       float32 -> bfloat16     cut off: 1 + 3/256 is 1.0078125 and not 1.015625; half of all normal numbers differ
#       float32 -> float8e4nv   17 is 18 and not 16: ties go up.   1000 and infinity are 256, not 448.   NaN is 384
#       float8e4nv -> float32   NaN is 480
#       float8e5 -> float32     infinity is 65536, NaN 81920 and more
#   Compiled for compute capability 9.0 the casts are cvt.rn.bf16.f32 and cvt.rn.satfinite.e4m3x2.f32: to nearest even,
#   beyond the largest number that one.
#
# So a kernel that is tested in the interpreter rounds by integer arithmetic of its own, or is compared with a tolerance
# that sees nothing of it. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" \
  torch==2.13.0 numpy==2.4.6 triton==3.7.1
cat >"$folder/casts.py" <<'PYTHON'
import math
import os

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def cast(x, y, SIZE: tl.constexpr):
    places = tl.arange(0, SIZE)
    tl.store(y + places, tl.load(x + places).to(y.dtype.element_ty))


def interpreted(x, dtype):
    y = torch.zeros(len(x), dtype=dtype)
    cast[(1,)](x, y, len(x))
    return y


def expect(x, dtype, expected, by_torch):
    found = interpreted(x, dtype).float().tolist()
    assert str(found) == str(expected), (dtype, found)
    assert str(x.to(dtype).float().tolist()) == str(by_torch), (dtype, x.to(dtype))


assert triton.__version__ == "3.7.1" and torch.__version__.split("+")[0] == "2.13.0"
if os.environ.get("TRITON_INTERPRET") == "1":
    nan, infinity = math.nan, math.inf
    expect(torch.tensor([1 + 3 / 256, -1 - 1.5 / 256]), torch.bfloat16, [1.0078125, -1.0], [1.015625, -1.0078125])
    numbers = torch.tensor([17.0, 1.0625, 1000.0, -infinity, nan, 448.0, 19.0, 0.1])
    by_torch = [16.0, 1.0, 448.0, -448.0, nan, 448.0, 20.0, 0.1015625]
    expect(numbers, torch.float8_e4m3fn, [18.0, 1.125, 256.0, -256.0, 384.0, 448.0, 20.0, 0.1015625], by_torch)
    e4m3 = torch.tensor([0x7E, 0x7F], dtype=torch.uint8).view(torch.float8_e4m3fn)
    expect(e4m3, torch.float32, [448.0, 480.0], [448.0, nan])
    e5m2 = torch.tensor([0x7B, 0x7C, 0xFC, 0x7D], dtype=torch.uint8).view(torch.float8_e5m2)
    expect(e5m2, torch.float32, [57344.0, 65536.0, -65536.0, 81920.0], [57344.0, infinity, -infinity, nan])
    torch.manual_seed(0)
    x = torch.randn(1 << 16)
    others = (interpreted(x, torch.bfloat16) != x.bfloat16()).float().mean().item()
    print(f"normal numbers that are another bfloat16: {others:.0%}")
    assert 0.45 < others < 0.55, others
else:
    for name, expected in (("bf16", "cvt.rn.bf16.f32"), ("fp8e4nv", "cvt.rn.satfinite.e4m3x2.f32")):
        source = ASTSource(cast, {"x": "*fp32", "y": f"*{name}", "SIZE": "constexpr"}, {"SIZE": 1024})
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
        assert expected in compiled.asm["ptx"], [line for line in compiled.asm["ptx"].splitlines() if "cvt" in line]
PYTHON
export PYTHONPATH=$folder TRITON_CACHE_DIR=$folder/cache
TRITON_INTERPRET=1 "$python" -W ignore "$folder/casts.py"
"$python" "$folder/casts.py"
echo "as described"
