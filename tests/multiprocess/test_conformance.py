from __future__ import annotations

import pytest

from moe_comm.testing.cases import CASES, Case
from moe_comm.testing.conformance import CHECKS, check_case
from moe_comm.testing.target import Target

TARGETS = {
    "reference": Target(name="reference", can_overlap=False),
    "collective": Target(name="collective"),
    "host": Target(name="host"),
}
# The collective backend needs a process group, of which a process has one.
MODES = [
    ("reference", "threads"),
    ("reference", "processes"),
    ("collective", "processes"),
    ("host", "processes"),
    ("host", "threads"),
]


@pytest.fixture(params=MODES, ids=lambda pair: "-".join(pair))
def target_and_mode(request: pytest.FixtureRequest) -> tuple[Target, str]:
    name, mode = request.param
    return TARGETS[name], mode


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_case(target_and_mode: tuple[Target, str], case: Case) -> None:
    target, mode = target_and_mode
    check_case(target, case, mode=mode)


@pytest.mark.parametrize("check", CHECKS)
def test_check(target_and_mode: tuple[Target, str], check: str) -> None:
    target, mode = target_and_mode
    CHECKS[check](target, mode=mode)
