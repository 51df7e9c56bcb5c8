"""The collective backend with the Triton kernels that it uses on CUDA, interpreted on CPU ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.ep.backends import local_ops
from moe_comm.testing import RankContext, run_ranks
from moe_comm.testing.case_list import CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.scripts import run_case
from moe_comm.testing.target import Target

triton_rows = pytest.importorskip("moe_comm.triton", exc_type=ImportError)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not interpreting")

NAMES = (
    "special-bfloat16",
    "masked",
    "empty-first",
    "fp8-block128-ue8m0-columns-bfloat16-200",
    "mxfp8-ue8m0-rows-float32-36",
)
SOME = [case for case in CASES if case.name.partition("major-")[2] in NAMES]


def run_interpreted(context: RankContext, case: Case) -> tuple[list[str], list[str]]:
    """Faults, and which functions of `moe_comm.triton` ran."""
    used = set()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_rows", "unpermute", "quantize"):
            real = getattr(triton_rows, name)

            def call(*args: Any, _name: str = name, _real: Any = real, **options: Any) -> Any:
                used.add(_name)
                return _real(*args, **options)

            patch.setattr(triton_rows, name, call)
        patch.setattr(local_ops, "has_triton", lambda device: True)
        faults = run_case(context, Target(name="collective"), case, num_rounds=1)
    return faults, sorted(used)


@pytest.mark.full
@pytest.mark.parametrize("case", SOME, ids=lambda case: case.name)
def test_collective_backend_with_triton(case: Case) -> None:
    assert len(SOME) == 2 * len(NAMES)
    for faults, used in run_ranks(run_interpreted, case.num_ranks, case):
        assert faults == []
        assert used == ["gather_rows", "quantize", "unpermute"]


def test_place_rows_on_the_cpu() -> None:
    rows = torch.arange(12, dtype=torch.uint8).view(3, 4)
    out = torch.full((4, 4), 99, dtype=torch.uint8)
    local_ops.place_rows(rows, torch.tensor([2, -1, 0, -1]), out)
    assert out.tolist() == [[8, 9, 10, 11], [0] * 4, [0, 1, 2, 3], [0] * 4]
    local_ops.place_rows(rows[:0], torch.tensor([-1, -1, -1, -1]), out)
    assert out.tolist() == [[0] * 4] * 4
