#!/usr/bin/env bash
# The gradient of gathered rows is added in the rows' own dtype by some spellings of the gather, and in float32 by
# others. Linux, Python 3.11, one process.
#
# One would guess that `x[rows]` and `x.index_select(0, rows)` are one operation, whose gradient index_add makes.
#
#   torch 2.13.0 on a CPU, bfloat16, a row that is taken 1000 times, gradients of one:
#       x[rows], F.embedding, index_put_(accumulate=True)                                      256
#       index_select, gather, repeat_interleave, expand, index_add_, scatter_add_              1000
#   float16 and 4000 times: 2048 and 4000.
#   Rows that 8 experts get each, normal gradients in bfloat16: every second element is another number than the sum
#   that is rounded once by the first three, and none by the others.
#
# So tokens are brought to experts by index_select, and a sum by index_put_ is made in float32. Ends with 1 where that
# has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
PYTHONPATH="$folder" "$python" - <<'PYTHON'
import torch
from torch.nn import functional

GATHERS = {
    "x[rows]": lambda x, rows: x[rows],
    "embedding": lambda x, rows: functional.embedding(rows, x),
    "index_select": lambda x, rows: x.index_select(0, rows),
    "gather": lambda x, rows: x.gather(0, rows[:, None].expand(-1, x.shape[1])),
    "repeat_interleave": lambda x, rows: x.repeat_interleave(torch.bincount(rows, minlength=len(x)), 0),
}
SUMS = {
    "index_put_": lambda x, rows, values: x.index_put_((rows,), values, accumulate=True),
    "index_add_": lambda x, rows, values: x.index_add_(0, rows, values),
    "scatter_add_": lambda x, rows, values: x.scatter_add_(0, rows[:, None].expand_as(values), values),
}
ROUNDING = {"x[rows]", "embedding", "index_put_"}


def sums(num_rows, rows, values):
    """Sum of the values of every row, by each of the ways."""
    found = {}
    for name, gather in GATHERS.items():
        x = torch.zeros(num_rows, values.shape[1], dtype=values.dtype, requires_grad=True)
        gather(x, rows).backward(values)
        found[name] = x.grad
    for name, add in SUMS.items():
        found[name] = add(torch.zeros(num_rows, values.shape[1], dtype=values.dtype), rows, values)
    return found


assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
for dtype, count, most in ((torch.bfloat16, 1000, 256), (torch.float16, 4000, 2048)):
    for name, found in sums(2, torch.zeros(count, dtype=torch.int64), torch.ones(count, 64, dtype=dtype)).items():
        print(dtype, name, found[0, 0].item())
        assert (found[0] == (most if name in ROUNDING else count)).all(), (name, found[0])

torch.manual_seed(0)
values = torch.randn(4096 * 8, 64).bfloat16()
exact = values.float().view(4096, 8, 64).sum(1).bfloat16()
for name, found in sums(4096, torch.arange(4096).repeat_interleave(8), values).items():
    others = (found != exact).float().mean().item()
    print(f"{name}: {others:.2f} of the elements are another number")
    assert (others > 0.4) if name in ROUNDING else (others < 0.01), (name, others)
PYTHON
echo "as described"
