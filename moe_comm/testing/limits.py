"""Limits: capacities and the places of LOW_LATENCY.

What is beyond them every rank must raise alike, and survive, or drop; as many rows as there is room
for are no overflow.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal

import torch

from moe_comm.ep.config import Capacity, Layout
from moe_comm.errors import CapacityError
from moe_comm.tensors.quantization import MXFP8
from moe_comm.testing import calls
from moe_comm.testing.case_data import CaseData
from moe_comm.testing.cases import Case, RankInput, case_inputs
from moe_comm.testing.compare import Expectations
from moe_comm.testing.launch import RankContext
from moe_comm.testing.scripts import compare_dispatch
from moe_comm.testing.target import Target

_NUM_TOKENS = 5
_NUM_EXPERTS = 6
_ALIGNMENT = 4


@dataclasses.dataclass(frozen=True)
class _Refusal:
    """A dispatch that every rank refuses; all tokens of all ranks choose experts 0 and 1.

    Args:
        name: Name of the refusal.
        changes: Arguments of `Backend.dispatch`, of every rank.
        error: Raised on every rank.
        numbers: Found in its message on every rank, as whole numbers: an expert or a rank, the rows
            it needs and those that it has.
        row_bytes: Bytes of a row on arrival.
    """

    name: str
    changes: list[dict[str, Any]]
    error: type[Exception]
    numbers: tuple[int, ...]
    row_bytes: int = 128


def _refusals(num_ranks: int) -> list[_Refusal]:
    rows_of_expert = num_ranks * _NUM_TOKENS  # of experts 0 and 1 each
    rows_of_rank = 2 * _padded(rows_of_expert)

    def everywhere(**changes: Any) -> list[dict[str, Any]]:
        return [changes] * num_ranks

    def with_rows(*num_rows: int, **more: Any) -> list[dict[str, Any]]:
        limits = [Capacity(num_rows=count, on_overflow="raise") for count in num_rows]
        return [{"capacity": limit, **more} for limit in limits]

    most = Capacity(num_rows_per_expert=rows_of_expert - 1, on_overflow="raise")
    plenty = (1000,) * (num_ranks - 1)
    by_rank = {"layout": Layout.RANK_MAJOR}
    all_on_one = {
        "layout": Layout.LOW_LATENCY,
        "expert_alignment": 1,
        "topk_idx": torch.zeros(_NUM_TOKENS, 2, dtype=torch.int64),
        "topk_weights": None,
    }
    return [
        _Refusal("rows of an expert", everywhere(capacity=most), CapacityError,
                 (0, rows_of_expert, rows_of_expert - 1)),
        _Refusal("rows of a rank", with_rows(rows_of_rank - 4, *plenty), CapacityError,
                 (0, rows_of_rank, rows_of_rank - 4)),
        _Refusal("one row of a rank",
                 with_rows(2 * rows_of_expert - 1, *plenty, expert_alignment=1), CapacityError,
                 (0, 2 * rows_of_expert, 2 * rows_of_expert - 1)),
        _Refusal("no rows at all", with_rows(0, *plenty), CapacityError, (0, rows_of_rank, 0)),
        _Refusal("rows, quantized", with_rows(4, *plenty, quantization=MXFP8), CapacityError,
                 (0, rows_of_rank, 4), row_bytes=64),
        _Refusal("rows, asynchronous", with_rows(4, *plenty, async_op=True), CapacityError,
                 (0, rows_of_rank, 4)),
        _Refusal("rows of RANK_MAJOR", with_rows(rows_of_expert - 1, *plenty, **by_rank),
                 CapacityError, (0, rows_of_expert, rows_of_expert - 1)),
        _Refusal("places of an expert", everywhere(**all_on_one), ValueError,
                 (0, 2 * rows_of_expert, rows_of_expert)),
    ]  # fmt: skip


def _edges(case: Case) -> list[Case]:
    """Dispatches of the same input at limits for which `name` rows of experts 0 and 1 are too many."""
    rows_of_expert = case.num_ranks * _NUM_TOKENS
    start_of_second = _padded(rows_of_expert)
    both, both_padded = 2 * rows_of_expert, 2 * start_of_second

    def at(
        name: str,
        on_overflow: Literal["grow", "drop", "raise"],
        num_rows: int | None = None,
        *,
        alignment: int = _ALIGNMENT,
        num_rows_per_expert: int | None = None,
        layout: Layout = case.layout,
    ) -> Case:
        plenty = None if num_rows is None else 1000
        capacities = (
            Capacity(
                num_rows=count, num_rows_per_expert=num_rows_per_expert, on_overflow=on_overflow
            )
            for count in (num_rows, *(plenty,) * (case.num_ranks - 1))
        )
        return dataclasses.replace(
            case,
            name=f"{name}, {on_overflow}",
            capacities=tuple(capacities),
            expert_alignment=alignment,
            layout=layout,
        )

    return [
        at("no rows", "raise", num_rows_per_expert=rows_of_expert),
        at("no rows", "drop", num_rows_per_expert=rows_of_expert),
        at("no rows", "raise", both_padded),
        at("no rows", "drop", both_padded),
        at("no rows", "grow", both_padded),
        at("no unpadded rows", "raise", both, alignment=1),
        at("no unpadded rows", "drop", both, alignment=1),
        at("no unpadded rows", "grow", both, alignment=1),
        at("no rows by rank", "raise", rows_of_expert, layout=Layout.RANK_MAJOR),
        at("no rows by rank", "grow", rows_of_expert, layout=Layout.RANK_MAJOR),
        dataclasses.replace(
            case, name="no places", layout=Layout.LOW_LATENCY, expert_alignment=1, capacities=None
        ),
        at("one row of each", "drop", num_rows_per_expert=rows_of_expert - 1),
        at("one unpadded row", "drop", both - 1, alignment=1),
        at("one unpadded row", "grow", both - 1, alignment=1),
        # Padding takes room: without that of expert 0 more rows of expert 1 would fit.
        at("all but four rows of expert 1", "drop", start_of_second + 4),
        at("all rows of expert 1", "drop", start_of_second),
        at("all but three rows of expert 0", "drop", 4, num_rows_per_expert=3),
    ]


def _padded(num_rows: int) -> int:
    return num_rows + -num_rows % _ALIGNMENT


def run_limits(context: RankContext, target: Target) -> list[str]:
    """Every refusal, after each of which the buffer works; then what is exactly at a limit."""
    expected = Expectations()
    num_ranks, rank_idx = context.num_ranks, context.rank_idx
    case = Case(
        name="limits",
        num_ranks=num_ranks,
        num_tokens=(_NUM_TOKENS,) * num_ranks,
        num_experts=_NUM_EXPERTS,
        expert_alignment=_ALIGNMENT,
        # Experts 0 and 1 are on rank 0, whatever the number of ranks.
        expert_rank=(0, 0, *(idx % num_ranks for idx in range(_NUM_EXPERTS - 2))),
    )
    inputs = [
        RankInput(
            x=rank.x,
            topk_idx=torch.tensor([[0, 1]] * _NUM_TOKENS),
            topk_weights=torch.ones(_NUM_TOKENS, 2),
        )
        for rank in case_inputs(case)
    ]
    data = CaseData(case, inputs)
    rows, weights = [rank.x for rank in inputs], [rank.topk_weights for rank in inputs]
    want = data.received(rank_idx, rows, weights)
    with target.communicator(context) as communicator:
        backend = target.backend(communicator, case.config)
        for refusal in _refusals(num_ranks):
            try:
                calls.dispatch(
                    backend, case, rank_idx, inputs[rank_idx], **refusal.changes[rank_idx]
                ).wait()
            except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
                _compare_error(expected, refusal, error, num_ranks)
            else:
                expected.true(refusal.name, False, "raised nothing")
            output = calls.dispatch(backend, case, rank_idx, inputs[rank_idx]).wait()
            compare_dispatch(expected, f"after {refusal.name}", output, want)
        for edge in _edges(case):
            output = calls.dispatch(backend, edge, rank_idx, inputs[rank_idx]).wait()
            at_edge = CaseData(edge, inputs).received(rank_idx, rows, weights)
            compare_dispatch(expected, f"at a limit, {edge.name}", output, at_edge)
        backend.destroy()
    return [f"rank {rank_idx}: {text}" for text in expected.result()]


def _compare_error(
    expected: Expectations, refusal: _Refusal, error: Exception, num_ranks: int
) -> None:
    name = refusal.name
    expected.true(name, type(error) is refusal.error, f"got {error!r}, want {refusal.error}")
    found = {int(number) for number in re.findall(r"\d+", str(error))}
    missing = set(refusal.numbers) - found
    expected.true(name, not missing, f"{str(error)!r} does not have {sorted(missing)}")
    if isinstance(error, CapacityError):
        got = (error.ranks, error.needed_rows[:2], error.needed_bytes, error.available_bytes)
        rows_of_expert = num_ranks * _NUM_TOKENS
        _, needed, available = refusal.numbers
        want = (
            (0,),
            (rows_of_expert, rows_of_expert),
            needed * refusal.row_bytes,
            available * refusal.row_bytes,
        )
        expected.true(name, got == want, f"attributes {got}, want {want}")
