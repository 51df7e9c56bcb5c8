"""The conformance suite where ranks lie on several nodes, over every rail this machine has."""

from __future__ import annotations

import pytest

from moe_comm.testing.case_list import CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import CHECKS, check_case
from tests.helpers.node_ranks import target

# Rail, how ranks run, most ranks a node.
RUNS = [
    ("sockets", "threads", 2),
    ("sockets", "threads", 1),
    ("sockets", "threads", 3),
    ("sockets", "processes", 2),
    ("gloo", "processes", 2),
    ("gloo", "processes", 1),
    ("gloo", "processes", 3),
]


def runs(case: Case, most_local_ranks: int) -> bool:
    """Return whether the case has several nodes, and nodes of that size where it has them."""
    return case.num_ranks > most_local_ranks and (
        most_local_ranks < 3 or case.num_ranks % most_local_ranks == 0
    )


RUNS_OF_CASES = [
    pytest.param(*run, case, id=f"{'-'.join(map(str, run))}-{case.name}")
    for run in RUNS
    for case in CASES
    if runs(case, run[2])
]


@pytest.mark.sampled(
    1, 2, of=("rail", "mode", "most_local_ranks", "layout", "rows", "capacity", "masks ranks")
)
@pytest.mark.parametrize(("rail", "mode", "most_local_ranks", "case"), RUNS_OF_CASES)
def test_case(rail: str, mode: str, most_local_ranks: int, case: Case) -> None:
    check_case(target(most_local_ranks, rail), case, mode=mode)


FAST_CHECKS = ("bad-input", "in-flight", "overwrite")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check in FAST_CHECKS else pytest.mark.full)
        for check in CHECKS
    ],
)
@pytest.mark.parametrize(
    ("rail", "mode", "most_local_ranks"),
    [
        ("sockets", "threads", 2),
        pytest.param("gloo", "processes", 1, marks=pytest.mark.full),
        pytest.param("gloo", "processes", 2, marks=pytest.mark.full),
    ],
)
def test_check(rail: str, mode: str, most_local_ranks: int, check: str) -> None:
    CHECKS[check](target(most_local_ranks, rail), mode=mode)
