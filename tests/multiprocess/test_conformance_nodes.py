"""The conformance suite where ranks lie on several nodes, over every rail this machine has."""

from __future__ import annotations

import pytest

from moe_comm.testing.case_list import CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import CHECKS, check_case
from tests.helpers.node_ranks import target

# Rail, how ranks run, most ranks a node, and every how many cases `make test` runs.
RUNS = [
    ("sockets", "threads", 2, 10),
    ("sockets", "threads", 1, 16),
    ("sockets", "threads", 3, 16),
    ("sockets", "processes", 2, 40),
    ("gloo", "processes", 2, 16),
    ("gloo", "processes", 1, 20),
    ("gloo", "processes", 3, 20),
]


def runs(case: Case, most_local_ranks: int) -> bool:
    """Whether the case has several nodes, and nodes of that size where it has them."""
    return case.num_ranks > most_local_ranks and (
        most_local_ranks < 3 or case.num_ranks % most_local_ranks == 0
    )


def runs_of_cases() -> list[object]:
    parameters = []
    for rail, mode, most_local_ranks, share in RUNS:
        fitting = [case for case in CASES if runs(case, most_local_ranks)]
        for idx, case in enumerate(fitting):
            parameters.append(
                pytest.param(
                    rail,
                    mode,
                    most_local_ranks,
                    case,
                    id=f"{rail}-{mode}-{most_local_ranks}-{case.name}",
                    marks=() if idx % min(share, len(fitting)) == 0 else pytest.mark.slow,
                )
            )
    return parameters


@pytest.mark.parametrize(("rail", "mode", "most_local_ranks", "case"), runs_of_cases())
def test_case(rail: str, mode: str, most_local_ranks: int, case: Case) -> None:
    check_case(target(most_local_ranks, rail), case, mode=mode)


FAST_CHECKS = ("bad-input", "in-flight", "overwrite")


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if check in FAST_CHECKS else pytest.mark.slow)
        for check in CHECKS
    ],
)
@pytest.mark.parametrize(
    ("rail", "mode", "most_local_ranks"),
    [
        ("sockets", "threads", 2),
        pytest.param("gloo", "processes", 1, marks=pytest.mark.slow),
        pytest.param("gloo", "processes", 2, marks=pytest.mark.slow),
    ],
)
def test_check(rail: str, mode: str, most_local_ranks: int, check: str) -> None:
    CHECKS[check](target(most_local_ranks, rail), mode=mode)
