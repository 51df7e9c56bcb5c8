"""The conformance suite on a GPU that all ranks share."""

from __future__ import annotations

import pytest

from moe_comm.testing.case_list import CASES, RANK_REDUCTION_CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import CHECKS, check_case
from moe_comm.testing.target import Target
from tests.helpers.on_device import connect_to_gpu, make_on_gpu

TARGET = Target(name="cuda", make=make_on_gpu, connect=connect_to_gpu)

pytestmark = pytest.mark.gpu(1)


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"ranks{case.num_ranks}-{case.name}")
        for case in (*CASES, *RANK_REDUCTION_CASES)
    ],
)
def test_case(case: Case, mode: str) -> None:
    check_case(TARGET, case, mode=mode)


@pytest.mark.parametrize("mode", ["threads", "processes"])
@pytest.mark.parametrize("check", CHECKS)
def test_check(check: str, mode: str) -> None:
    CHECKS[check](TARGET, mode=mode)
