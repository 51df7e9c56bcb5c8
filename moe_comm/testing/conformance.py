"""One suite that holds every backend to the specification, bit for bit.

`check_backend` runs it all; the single checks are for parametrized tests. `docs/testing.md` shows
how a backend made elsewhere is held to it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_comm.ep.config import Capacity, Layout
from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8
from moe_comm.testing import bad_input, gradients, in_flight, limits, scripts
from moe_comm.testing.case_list import CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.launch import run_ranks
from moe_comm.testing.target import Target

TIMEOUT_S = 300.0


class ConformanceError(AssertionError):
    """A backend did something else than the specification; the message has every rank's findings."""


def check_case(target: Target, case: Case, *, mode: str = "processes") -> None:
    """Dispatch, cached dispatch, combine and weighted gradient of one case, three rounds.

    Raises:
        ConformanceError: A bit differs.
        RankError: A rank raised.
        RankTimeoutError: Ranks hang.
    """
    _run(target, scripts.run_case, case.num_ranks, case, mode=mode)


def check_asynchronous(target: Target, *, mode: str = "processes") -> None:
    """Check as many operations in flight on one buffer as its configuration allows."""
    for layout, quantization in itertools.product(Layout, (None, MXFP8)):
        case = dataclasses.replace(_ragged(3, layout), quantization=quantization)
        _run(target, in_flight.run_asynchronous, 3, case, mode=mode)


def check_in_flight(target: Target, *, mode: str = "processes") -> None:
    """Operations in flight on several buffers, in another order on every rank."""
    for num_ranks in (2, 3):
        _run(target, in_flight.run_in_flight, num_ranks, _ragged(num_ranks), mode=mode)


def check_overwrite(target: Target, *, mode: str = "processes") -> None:
    """A combine that returned no longer needs this rank's expert outputs, nor do its peers."""
    _run(target, in_flight.run_overwrite, 3, mode=mode)


def check_bad_input(target: Target, *, mode: str = "processes") -> None:
    """Mistakes of one rank are raised on every rank, and the buffer works afterwards."""
    for num_ranks in (1, 3):
        _run(target, bad_input.run_bad_input, num_ranks, mode=mode)


def check_limits(target: Target, *, mode: str = "processes") -> None:
    """Check that what is beyond a raising limit is raised on every rank, and the buffer works afterwards."""
    for num_ranks in (1, 3):
        _run(target, limits.run_limits, num_ranks, mode=mode)


def check_gradients(target: Target, *, mode: str = "processes") -> None:
    """Check that a rank's word on gradients is heard by all, or refused by all."""
    _run(target, gradients.run_gradients, 3, mode=mode)


def check_bad_config(target: Target, *, mode: str = "processes") -> None:
    """Configurations that differ are refused on every rank."""
    _run(target, bad_input.run_bad_config, 3, mode=mode)


def check_same_bits(
    target: Target, *, mode: str = "processes", num_ranks: Sequence[int] = (1, 2, 3, 4, 8)
) -> None:
    """EXPERT_MAJOR: one global input gives the same rows, sums and gradients on any number of ranks.

    So does what a limit per expert keeps.
    """
    few = Capacity(num_rows_per_expert=9, on_overflow="drop")
    for changes in (
        {"dtype": torch.bfloat16},
        {"dtype": torch.float32},
        {"quantization": FP8_BLOCK128, "hidden": 200},
        {"capacities": few},
        {"capacities": few, "quantization": MXFP8, "dtype": torch.float32},
    ):
        results = {}
        for count in num_ranks:
            fields: dict[str, Any] = dict(changes)
            if "capacities" in fields:
                fields["capacities"] = (few,) * count
            case = Case(
                name="same bits",
                num_ranks=count,
                num_tokens=_shares(37, count),
                num_experts=11,
                num_topk=5,
                expert_alignment=4,
                routing="masked",
                **fields,
            )
            per_rank = run_ranks(
                in_flight.run_same_bits, count, target, case, mode=mode, timeout_s=TIMEOUT_S
            )
            results[count] = {
                name: b"".join(rank[name] for rank in per_rank) for name in per_rank[0]
            }
        first = num_ranks[0]
        for count, name in itertools.product(num_ranks[1:], results[first]):
            if results[count][name] != results[first][name]:
                raise ConformanceError(
                    f"{target.name}: {name} ({changes}) on {count} ranks is not what it is on {first}"
                )


CHECKS: dict[str, Callable[..., None]] = {
    "asynchronous": check_asynchronous,
    "in-flight": check_in_flight,
    "overwrite": check_overwrite,
    "bad-input": check_bad_input,
    "bad-config": check_bad_config,
    "gradients": check_gradients,
    "limits": check_limits,
    "same-bits": check_same_bits,
}
"""Checks beside the cases, by name; each takes a target and `mode`."""


def check_backend(
    target: Target, *, cases: Sequence[Case] = CASES, mode: str = "processes"
) -> list[str]:
    """Run the whole suite.

    Args:
        target: The backend.
        cases: Cases to run.
        mode: Ranks as "processes" or "threads".

    Returns:
        Names of the checks that passed.

    Raises:
        ConformanceError: A check fails; it is the last to run. A RankError or RankTimeoutError ends
            the suite likewise.
    """
    passed = []
    for case in cases:
        check_case(target, case, mode=mode)
        passed.append(case.name)
    for name, check in CHECKS.items():
        check(target, mode=mode)
        passed.append(name)
    return passed


def _run(
    target: Target, script: Callable[..., list[str]], num_ranks: int, *args: Any, mode: str
) -> None:
    found = run_ranks(script, num_ranks, target, *args, mode=mode, timeout_s=TIMEOUT_S)
    faults = [text for rank_faults in found for text in rank_faults]
    if faults:
        what = f"{target.name}, {num_ranks} ranks as {mode}"
        raise ConformanceError(f"{what}: {len(faults)} faults\n" + "\n".join(faults[:20]))


def _ragged(num_ranks: int, layout: Layout = Layout.EXPERT_MAJOR) -> Case:
    return Case(
        name=f"ragged on {num_ranks}",
        num_ranks=num_ranks,
        num_tokens=(7, 0, 12, 3)[:num_ranks],
        num_topk=3,
        layout=layout,
        expert_alignment=1 if layout is Layout.LOW_LATENCY else 4,
    )


def _shares(total: int, num_ranks: int) -> tuple[int, ...]:
    """Uneven shares, the last rank's the largest."""
    small = total // (num_ranks + 1)
    return (*(small,) * (num_ranks - 1), total - small * (num_ranks - 1))
