#!/usr/bin/env bash
# Rows behind the last offset of a grouped matrix product are memory that nobody has written, in the result and in the
# gradient of the rows, whatever the gradient of the result is. Linux, Python 3.11, one process.
#
# One would guess zeros, as the rows are of no group; or that it is enough to leave such rows of the result out.
#
#   torch 2.13.0 on a CPU, torch.nn.functional.grouped_mm and torch._grouped_mm, float32 and bfloat16, 6 rows and
#   offsets [2, 4]; memory that nobody writes is NaN (torch.use_deterministic_algorithms):
#       result                 16 in rows 0 to 3, NaN in rows 4 and 5
#       gradient of the rows   the same, also where the loss takes rows 0 to 3 alone, by a slice or by torch.where
#       gradient of a weight that made the rows (a projection before the experts): NaN throughout
#       gradient of the experts' weights: right. An expert without rows gets zeros.
#
# So where a buffer is longer than its groups (a fixed capacity), rows and their gradient are cut or set to zero on both
# sides of the experts. Ends with 1 where that has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m pip install --quiet --disable-pip-version-check --target "$folder" torch==2.13.0 numpy==2.4.6
cat >"$folder/rows.py" <<'PYTHON'
import torch

NUM_ROWS, NUM_GROUPED, SIZE = 6, 4, 16
LOSSES = {
    "slice": lambda y: y[:NUM_GROUPED].sum(),
    "where": lambda y: torch.where(torch.arange(NUM_ROWS)[:, None] < NUM_GROUPED, y, 0).sum(),
}


def is_behind(tensor):
    """Whether the rows of groups are 16, and those behind them are NaN."""
    return bool(tensor[:NUM_GROUPED].eq(SIZE).all() and tensor[NUM_GROUPED:].isnan().all())


assert torch.__version__.split("+")[0] == "2.13.0", torch.__version__
torch.use_deterministic_algorithms(True)
for multiply in (torch.nn.functional.grouped_mm, torch._grouped_mm):
    for dtype in (torch.float32, torch.bfloat16):
        for name, loss in LOSSES.items():
            before, rows = torch.eye(SIZE, dtype=dtype, requires_grad=True), torch.ones(NUM_ROWS, SIZE, dtype=dtype)
            made = rows @ before
            made.retain_grad()
            experts = torch.ones(2, SIZE, SIZE, dtype=dtype, requires_grad=True)
            y = multiply(made, experts, offs=torch.tensor([2, NUM_GROUPED], dtype=torch.int32))
            loss(y).backward()
            print(dtype, name, y[:, 0].tolist(), made.grad[:, 0].tolist(), before.grad.isnan().all().item())
            assert is_behind(y) and is_behind(made.grad), (y, made.grad)
            assert before.grad.isnan().all(), before.grad
            assert experts.grad.eq(2).all(), experts.grad
        experts = torch.ones(2, SIZE, SIZE, dtype=dtype, requires_grad=True)
        y = multiply(rows, experts, offs=torch.tensor([0, NUM_ROWS], dtype=torch.int32))
        y.backward(torch.ones_like(y))
        assert experts.grad[0].eq(0).all() and experts.grad[1].eq(NUM_ROWS).all(), experts.grad
PYTHON
PYTHONPATH="$folder" "$python" "$folder/rows.py"
echo "as described"
