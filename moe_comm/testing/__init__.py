"""For tests of this package and of backends made elsewhere: ranks, cases, conformance.

`launch` and `pool` make ranks, as threads or as processes. `conformance` holds a backend to the definition, in
the cases of `case_list` (`cases`, `case_data`, `scripts`, `compare`), and `bad_input` to its errors.
Installed with the package, in which nothing uses it.
"""

from __future__ import annotations

from moe_comm import gone
from moe_comm.testing.case_list import CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import CHECKS, ConformanceError, check_backend, check_case
from moe_comm.testing.launch import (
    RankContext,
    RankError,
    RankTimeoutError,
    close_workers,
    run_ranks,
)
from moe_comm.testing.target import Target

__all__ = [
    "CASES",
    "CHECKS",
    "Case",
    "ConformanceError",
    "RankContext",
    "RankError",
    "RankTimeoutError",
    "Target",
    "check_backend",
    "check_case",
    "close_workers",
    "run_ranks",
]

gone.answer_imports()
