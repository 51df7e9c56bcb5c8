"""Mistakes that every backend must refuse on every rank, and survive."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch

from moe_comm.ep.backends.base import Backend, Plan
from moe_comm.ep.config import Capacity, EpConfig, Layout
from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8, Quantization, ScaleFormat
from moe_comm.testing import calls
from moe_comm.testing.case_data import CaseData
from moe_comm.testing.cases import Case, case_inputs
from moe_comm.testing.compare import Expectations
from moe_comm.testing.launch import RankContext
from moe_comm.testing.scripts import compare_dispatch
from moe_comm.testing.target import Target


@dataclasses.dataclass(frozen=True)
class _Mistake:
    """One call that some rank gets wrong.

    Args:
        name: Name of the mistake.
        call: Call that a rank makes; `is_wrong` on the rank that errs.
        error: Type of the error that every rank must raise.
        pattern: Regular expression found in the message on every rank.
    """

    name: str
    call: Callable[[_Caller, bool], object]
    error: type[Exception]
    pattern: str


class _Caller:
    """The calls of one rank, with valid arguments unless said otherwise."""

    def __init__(self, backend: Backend, data: CaseData, rank_idx: int) -> None:
        self.backend = backend
        self.data = data
        self.rank_idx = rank_idx
        self.mine = data.inputs[rank_idx]
        self.plan: Plan = self.dispatch()

    def dispatch(self, **changes: Any) -> Plan:
        """A dispatch; returns its plan."""
        return (
            calls.dispatch(self.backend, self.data.case, self.rank_idx, self.mine, **changes)
            .wait()
            .plan
        )

    def pair(self, num_scales: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        """Rows that are quantized already."""
        return {
            "x": torch.zeros(len(self.mine.x), 64, dtype=torch.float8_e4m3fn),
            "x_sf": torch.zeros(len(self.mine.x), num_scales, dtype=dtype),
        }

    def with_expert(self, value: int) -> torch.Tensor:
        """Choices of which the very last is `value`."""
        topk_idx = self.mine.topk_idx.clone()
        topk_idx[-1, -1] = value
        return topk_idx

    def cached(
        self,
        dtype: torch.dtype = torch.bfloat16,
        hidden: int = 64,
        quantization: Quantization | None = None,
    ) -> object:
        """A cached dispatch of zeros."""
        x = torch.zeros(len(self.mine.x), hidden, dtype=dtype)
        return calls.dispatch_cached(self.backend, x, self.plan, quantization=quantization)

    def combine(self, plan: Plan | None = None, **changes: Any) -> object:
        """A combine of zeros."""
        plan = plan or self.plan
        rows = torch.zeros(plan.num_recv_tokens, 64, dtype=changes.get("dtype", torch.bfloat16))
        row_weights = torch.ones(len(rows)) if changes.get("has_row_weights") else None
        return calls.combine(self.backend, rows, plan, None, row_weights).wait()

    def reject(self, error: Exception) -> None:
        """Reject input as `EpBuffer` does when it finds it wrong."""
        self.backend.reject("dispatch", error)


_Call = Callable[[_Caller, bool], object]

_FP8, _MX = {"quantization": FP8_BLOCK128}, {"quantization": MXFP8}
_MET = r"dispatch\(.* on rank \d met .*dispatch\(.* on rank \d"


def _choose(value: int, **more: Any) -> _Call:
    """One rank has a choice of an expert that is none."""
    return lambda caller, is_wrong: caller.dispatch(
        **({"topk_idx": caller.with_expert(value)} if is_wrong else {}), **more
    )


def _reject(error: Exception) -> _Call:
    """One rank finds its input wrong."""
    return lambda caller, is_wrong: caller.reject(error) if is_wrong else caller.dispatch()


def _differ(**changes: Any) -> _Call:
    """One rank has changed arguments."""
    return _differ_from({}, changes)


def _differ_from(right: dict[str, Any], wrong: dict[str, Any]) -> _Call:
    """One rank has other arguments than the others."""
    return lambda caller, is_wrong: caller.dispatch(**(wrong if is_wrong else right))


def _differ_in_pairs(right: tuple[Any, ...], wrong: tuple[Any, ...]) -> _Call:
    """One rank has other quantized rows than the others."""
    return lambda caller, is_wrong: caller.dispatch(**caller.pair(*(wrong if is_wrong else right)))


def _drop(most: int) -> dict[str, Any]:
    return {"capacity": Capacity(num_rows_per_expert=most, on_overflow="drop")}


def _own_mistakes(bad_rank: int) -> list[_Mistake]:
    """Wrong whatever the other ranks do."""
    bad_id = rf"^rank {bad_rank}: topk_idx\[\d+, \d+\] = {{}} is not an expert id in \[-1, 8\)"
    return [
        _Mistake("id = num_experts", _choose(8), ValueError, bad_id.format("8")),
        _Mistake("id = -2", _choose(-2), ValueError, bad_id.format("-2")),
        _Mistake("huge id", _choose(1 << 40), ValueError, bad_id.format(1 << 40)),
        _Mistake(
            "id, RANK_MAJOR", _choose(9, layout=Layout.RANK_MAJOR), ValueError, bad_id.format("9")
        ),
        _Mistake("id, asynchronous", _choose(8, async_op=True), ValueError, bad_id.format("8")),
        _Mistake("id, LOW_LATENCY", _choose(9, layout=Layout.LOW_LATENCY), ValueError, bad_id.format("9")),
        _Mistake("id, quantized", _choose(9, **_MX), ValueError, bad_id.format("9")),
        _Mistake("id, limited", _choose(9, **_drop(1)), ValueError, bad_id.format("9")),
        _Mistake("ValueError", _reject(ValueError("x has 3 rows, not 4")), ValueError, "x has 3 rows, not 4"),
        _Mistake("TypeError", _reject(TypeError("x is a list")), TypeError, "x is a list"),
    ]  # fmt: skip


def _other_calls() -> list[_Mistake]:
    """Operations, places, rows, weights or limits that differ between ranks."""
    return [
        _Mistake(
            "another operation",
            lambda caller, is_wrong: caller.combine() if is_wrong else caller.dispatch(),
            ValueError,
            r"(dispatch.* on rank \d met combine|combine.* on rank \d met dispatch).* on rank \d",
        ),
        _Mistake(
            "cached against uncached",
            lambda caller, is_wrong: caller.cached() if is_wrong else caller.dispatch(),
            ValueError,
            _MET,
        ),
        _Mistake(
            "layouts",
            _differ(layout=Layout.RANK_MAJOR),
            ValueError,
            r"(EXPERT_MAJOR.* on rank \d met .*RANK_MAJOR|RANK_MAJOR.* on rank \d met .*EXPERT_MAJOR)",
        ),
        _Mistake(
            "alignments", _differ(expert_alignment=16), ValueError, r"(\b1\b.* met .*\b16\b|\b16\b.* met .*\b1\b)"
        ),
        _Mistake("weights", _differ(topk_weights=None), ValueError, r"no weights.* met .*float32 weights|float32 weights.* met .*no weights"),
        _Mistake(
            "dtypes",
            lambda caller, is_wrong: caller.cached(torch.float32 if is_wrong else torch.bfloat16),
            ValueError,
            r"(bfloat16.* met .*float32|float32.* met .*bfloat16)",
        ),
        _Mistake(
            "hidden sizes",
            lambda caller, is_wrong: caller.cached(hidden=128 if is_wrong else 64),
            ValueError,
            r"(\b128 bytes.* met .*\b256 bytes|\b256 bytes.* met .*\b128 bytes)",
        ),
        _Mistake("low-latency against expert-major", _differ(layout=Layout.LOW_LATENCY), ValueError, _MET),
        _Mistake("a limit or none", _differ(**_drop(2)), ValueError, _MET),
        _Mistake("rows of an expert", _differ_from(_drop(2), _drop(3)), ValueError, _MET),
        _Mistake(
            "what happens beyond a limit",
            _differ_from(
                {"capacity": Capacity(num_rows=8, on_overflow="drop")},
                {"capacity": Capacity(num_rows=8, on_overflow="grow")},
            ),
            ValueError,
            _MET,
        ),
        _Mistake(
            "row weights in combine",
            lambda caller, is_wrong: caller.combine(has_row_weights=is_wrong),
            ValueError,
            "no weights.* met .*float32 weights|float32 weights.* met .*no weights",
        ),
    ]  # fmt: skip


def _other_scales() -> list[_Mistake]:
    """Quantizations and scale factors that differ between ranks."""
    in_columns = {"quantization": dataclasses.replace(MXFP8, is_column_major=True)}
    powers = {
        "quantization": dataclasses.replace(
            FP8_BLOCK128, scale_format=ScaleFormat.FLOAT32_POWER_OF_2
        )
    }
    return [
        _Mistake("quantized or not", _differ(**_MX), ValueError, _MET),
        _Mistake("quantized formats", _differ_from(_FP8, _MX), ValueError, _MET),
        _Mistake("scale formats", _differ_from(_FP8, powers), ValueError, _MET),
        _Mistake("order of scale factors", _differ_from(_MX, in_columns), ValueError, _MET),
        _Mistake("numbers of scale factors", _differ_in_pairs((1,), (2,)), ValueError, _MET),
        _Mistake(
            "sizes of scale factors", _differ_in_pairs((2,), (2, torch.bfloat16)), ValueError, _MET
        ),
        _Mistake(
            "pairs against rows",
            lambda caller, is_wrong: caller.dispatch(**(caller.pair(2) if is_wrong else _FP8)),
            ValueError,
            _MET,
        ),
        _Mistake(
            "quantized or not, cached",
            lambda caller, is_wrong: caller.cached(quantization=MXFP8 if is_wrong else None),
            ValueError,
            r"cached dispatch\(.* on rank \d met .*cached dispatch\(.* on rank \d",
        ),
    ]  # fmt: skip


def run_bad_input(context: RankContext, target: Target) -> list[str]:
    """Every mistake, made by the first and by the last rank; after each of them the buffer works."""
    expected = Expectations()
    case = Case(name="bad input", num_ranks=context.num_ranks, num_tokens=(4,) * context.num_ranks)
    data = CaseData(case, case_inputs(case))
    rank_idx = context.rank_idx
    with target.communicator(context) as communicator:
        backend = target.backend(communicator, case.config)
        caller = _Caller(backend, data, rank_idx)
        for bad_rank in {0, context.num_ranks - 1}:
            for mistake in (*_own_mistakes(bad_rank), *_other_calls(), *_other_scales()):
                if context.num_ranks == 1 and not mistake.pattern.startswith(("^rank", "x ")):
                    continue  # one rank cannot disagree with itself
                what = f"{mistake.name} on rank {bad_rank}"
                _expect_error(expected, what, mistake, caller, is_wrong=rank_idx == bad_rank)
                _expect_work(expected, f"after {what}", caller)
        backend.destroy()
    return [f"rank {rank_idx}: {text}" for text in expected.result()]


def _expect_error(
    expected: Expectations, what: str, mistake: _Mistake, caller: _Caller, *, is_wrong: bool
) -> None:
    try:
        mistake.call(caller, is_wrong)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        expected.true(what, type(error) is mistake.error, f"got {error!r}, want {mistake.error}")
        found = re.search(mistake.pattern, str(error))
        expected.true(what, found is not None, f"got {str(error)!r}, want {mistake.pattern!r}")
        bad_rank = re.search(r"on rank (\d)$", what)
        assert bad_rank is not None
        if not is_wrong:
            named = f"rank {bad_rank.group(1)}"
            expected.true(what, named in str(error), f"{str(error)!r} does not name {named}")
    else:
        expected.true(what, False, "raised nothing")


def _expect_work(expected: Expectations, what: str, caller: _Caller) -> None:
    data, rank_idx = caller.data, caller.rank_idx
    output = calls.dispatch(caller.backend, data.case, rank_idx, caller.mine).wait()
    rows = [rank.x for rank in data.inputs]
    weights = [rank.topk_weights for rank in data.inputs]
    want = data.received(rank_idx, rows, weights)
    compare_dispatch(expected, what, output, want)


def run_bad_config(context: RankContext, target: Target) -> list[str]:
    """Configurations that differ on the last rank are refused on every rank, with both values."""
    expected = Expectations()
    changes: list[tuple[str, dict[str, Any]]] = [
        ("num_topk", {"num_topk": 3}),
        ("num_experts", {"num_experts": 9}),
        ("hidden", {"hidden": 128}),
        ("num_max_tokens_per_rank", {"num_max_tokens_per_rank": 5}),
        ("dtype", {"dtype": torch.float16}),
        ("dtype", {"dtype": None}),
        ("num_topk", {"num_topk": None}),
        ("expert_rank", {"expert_rank": [context.num_ranks - 1] * 8}),
        ("is not a rank of a", {"expert_rank": [context.num_ranks] * 8}),
    ]
    valid: dict[str, Any] = {"num_experts": 8, "num_topk": 2, "hidden": 64}
    valid["num_max_tokens_per_rank"] = 4
    is_wrong = context.rank_idx == context.num_ranks - 1
    with target.communicator(context) as communicator:
        for name, change in changes:
            config = EpConfig(**{**valid, **(change if is_wrong else {})})
            try:
                target.backend(communicator, config)
            except ValueError as error:
                text = str(error)
                is_named = f"rank {context.num_ranks - 1}" in text or (name in text and is_wrong)
                expected.true(f"config {name}", name in text and is_named, text)
            else:
                expected.true(f"config {name}", False, "raised nothing")
        backend = target.backend(communicator, EpConfig(**valid))
        backend.destroy()
    return [f"rank {context.rank_idx}: {text}" for text in expected.result()]
