"""Script that every rank runs in a case of the conformance suite; returns what went wrong on its rank."""

from __future__ import annotations

import dataclasses

import torch

from moe_comm.ep.backends.base import Backend, DispatchOutput, Plan
from moe_comm.ep.call_options import CopyOut
from moe_comm.ep.config import Layout
from moe_comm.ep.spec import Received
from moe_comm.tensors.arithmetic import dot_rows, scale_rows
from moe_comm.tensors.quantization import FP8_BLOCK128, MXFP8, QUANTIZABLE_DTYPES
from moe_comm.testing import calls
from moe_comm.testing.case_data import CaseData, as_sent
from moe_comm.testing.cases import Case, RankInput, case_inputs, scales_of_case
from moe_comm.testing.compare import Expectations
from moe_comm.testing.launch import RankContext
from moe_comm.testing.target import Target

# Rules for leaving outputs in the backend's own memory; each must give the same bits.
_COPY_OUT: tuple[CopyOut, ...] = ("auto", False, True)


def run_case(context: RankContext, target: Target, case: Case, num_rounds: int = 3) -> list[str]:
    """Everything a buffer can do, several times on one buffer, with two buffers alive."""
    expected = Expectations()
    with target.communicator(context, case.num_local_ranks) as communicator:
        backend = target.backend(communicator, case.config)
        other = target.backend(communicator, case.config)
        rounds = []
        for round_idx in range(num_rounds):
            exercise = _Round(context.rank_idx, case, round_idx, expected)
            exercise.dispatch(other if round_idx == 1 else backend)
            exercise.combine()
            exercise.dispatch_cached()
            exercise.differentiate()
            rounds.append(exercise)
        for exercise in reversed(rounds):
            exercise.combine()
        for used in (backend, other):
            used.destroy()
            used.destroy()
        return [f"rank {context.rank_idx}: {text}" for text in expected.result()]


class _Round:
    """One dispatch and what follows from it."""

    def __init__(self, rank_idx: int, case: Case, round_idx: int, expected: Expectations) -> None:
        self.rank_idx = rank_idx
        self.case = case
        self.round_idx = round_idx
        self.expected = expected
        self.data = CaseData(case, case_inputs(case, round_idx))
        self.mine: RankInput = self.data.inputs[rank_idx]
        self.copy_out: CopyOut = _COPY_OUT[round_idx % len(_COPY_OUT)]
        self.num_combines = 0

    def dispatch(self, backend: Backend) -> None:
        """Dispatch with and without weights."""
        self.backend = backend
        inputs = self.data.inputs
        given = [rank.x_sf for rank in inputs if rank.x_sf is not None]
        rows, scales = as_sent([rank.x for rank in inputs], given or None, self.case.quantization)
        for has_weights in (False, True):
            output = calls.dispatch(
                backend,
                self.case,
                self.rank_idx,
                self.mine,
                has_weights=has_weights,
                copy_out=self.copy_out,
            ).wait()
            want = self.data.received(
                self.rank_idx,
                rows,
                [rank.topk_weights for rank in inputs] if has_weights else None,
                scales=scales,
                quantization=self.case.quantization,
            )
            self._compare("dispatch", output, want)
            self.plan: Plan = output.plan
        for name, want_number in (
            ("num_tokens", len(self.mine.x)),
            ("num_topk", self.mine.topk_idx.shape[1]),
            ("num_recv_tokens", len(want.x)),
            ("num_recv_topk", self.case.num_recv_topk),
        ):
            got = getattr(self.plan, name)
            self.expected.true(f"plan.{name}", got == want_number, f"got {got}, want {want_number}")
        tensors = self.plan.to_tensors()
        self.expected.equal("plan counts", tensors.counts, self.data.dispatch.counts)
        self.expected.equal("plan slots", tensors.slots, self.data.dispatch.slots(self.rank_idx))
        self.expected.equal("plan topk_idx", tensors.topk_idx, self.mine.topk_idx)
        asked = self.data.dispatch.asked_rows(self.rank_idx)
        self.expected.equal("plan asked", tensors.asked, asked)
        if self.round_idx % 2:
            self.plan = backend.import_plan(tensors)

    def combine(self) -> None:
        """Combine in place and from an ordinary tensor, weighted and not, with row weights and without rows."""
        by_choice = self.case.layout is not Layout.RANK_MAJOR
        for hidden, dtype, has_weights, has_row_weights in (
            (self.case.combine_hidden, self.case.combine_dtype, False, False),
            (self.case.combine_hidden, self.case.combine_dtype, by_choice, True),
            (16, torch.float32, by_choice, False),
        ):
            self._combine(hidden, dtype, has_weights=has_weights, has_row_weights=has_row_weights)
        weights_dtype = self.case.weights_dtype
        row_weights = self.data.row_weights(("pulled", self.round_idx), weights_dtype)
        pulled = calls.combine(
            self.backend,
            None,
            self.plan,
            None,
            row_weights[self.rank_idx],
            copy_out=self.copy_out,
        ).wait()
        want = self.data.dispatch.pulled(self.rank_idx, row_weights)
        self.expected.equal(self._text("combine of no rows: x"), pulled.x, None)
        self.expected.equal(self._text("combine of no rows: weights"), pulled.topk_weights, want)

    def _combine(
        self, hidden: int, dtype: torch.dtype, *, has_weights: bool, has_row_weights: bool
    ) -> None:
        key = (self.round_idx, self.num_combines)
        self.num_combines += 1
        is_wide = dtype == torch.float64
        weights_dtype = torch.float64 if is_wide else torch.float32
        expert_outputs = self.data.expert_outputs(("out", key), hidden, dtype)
        row_weights = (
            self.data.row_weights(("weights", key), weights_dtype) if has_row_weights else None
        )
        weights = self.mine.topk_weights.to(weights_dtype) if has_weights else None
        rows = expert_outputs[self.rank_idx]
        if self.num_combines % 2:
            rows = self.backend.empty_expert_output(self.plan, hidden, dtype)
            self.expected.true(
                "empty_expert_output",
                rows.shape == expert_outputs[self.rank_idx].shape and rows.dtype == dtype,
                (rows.shape, rows.dtype),
            )
            rows.copy_(expert_outputs[self.rank_idx])
        out = None
        if self.num_combines % 3 == 0:
            out = torch.full((len(self.mine.x), hidden), float("nan"), dtype=dtype)
        output = calls.combine(
            self.backend,
            rows,
            self.plan,
            weights,
            None if row_weights is None else row_weights[self.rank_idx],
            out=out,
            copy_out=self.copy_out,
        ).wait()
        want = self.data.sums(self.rank_idx, expert_outputs, weights)
        pulled = None
        if row_weights is not None:
            pulled = self.data.dispatch.pulled(self.rank_idx, row_weights)
        what = self._text(f"combine {dtype} weights={has_weights}")
        self.expected.equal(what, output.x, want)
        self.expected.equal(f"{what} row_weights", output.topk_weights, pulled)
        if out is not None:
            self.expected.equal(f"{what} out=", out, want)
        # From here on the rows are the caller's again; a peer that still reads them adds NaN.
        rows.fill_(float("nan"))

    def dispatch_cached(self) -> None:
        """Dispatch to the same places: rows like the first ones, then of another dtype, size and format."""
        quantization = self.case.quantization
        in_columns = dataclasses.replace(MXFP8, is_column_major=True)
        for hidden, dtype, has_weights, other in (
            (self.case.hidden, self.case.dtype, True, quantization),
            (24, torch.float64, False, None),
            (32, torch.uint8, False, None),
            (72, torch.float16, True, in_columns if quantization is None else FP8_BLOCK128),
        ):
            key = (self.round_idx, hidden, dtype)
            rows = self.data.rows(key, hidden, dtype)
            weights = None
            if has_weights and dtype is self.case.dtype:
                weights = [rank.topk_weights for rank in self.data.inputs]
            scales = scales_of_case(self.case, key) if dtype is self.case.dtype else None
            if scales is None and dtype not in QUANTIZABLE_DTYPES:
                other = None
            output = calls.dispatch_cached(
                self.backend,
                rows[self.rank_idx],
                self.plan,
                None if weights is None else weights[self.rank_idx],
                x_sf=None if scales is None else scales[self.rank_idx],
                quantization=other,
                copy_out=self.copy_out,
            )
            want = self.data.received(
                self.rank_idx, rows, weights, scales=scales, quantization=other, is_cached=True
            )
            self._compare(f"cached dispatch {dtype}", output, want)

    def differentiate(self) -> None:
        """The local backward of weights applied in combine."""
        dtype = self.case.combine_dtype
        gradient, value = (
            self.data.expert_outputs((name, self.round_idx), self.case.combine_hidden, dtype)[
                self.rank_idx
            ]
            for name in ("gradient", "value")
        )
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        weights = torch.linspace(-1.5, 1.5, len(gradient), dtype=wide)
        want_dots = dot_rows(gradient, value, wide)
        want_gradient = scale_rows(gradient, weights)
        dots = self.backend.weighted_gradient(gradient, value, weights)
        self.expected.equal(self._text("weighted_gradient dots"), dots, want_dots)
        self.expected.equal(self._text("weighted_gradient gradient"), gradient, want_gradient)

    def _compare(self, what: str, got: DispatchOutput, want: Received) -> None:
        compare_dispatch(self.expected, self._text(what), got, want)

    def _text(self, what: str) -> str:
        return f"round {self.round_idx}, copy_out={self.copy_out}: {what}"


def compare_dispatch(
    expected: Expectations, what: str, got: DispatchOutput, want: Received
) -> None:
    """Everything that a dispatch gives."""
    defined = want.is_defined
    expected.equal(f"{what}: x", got.x, want.x, rows=defined)
    expected.equal(f"{what}: topk_weights", got.topk_weights, want.topk_weights, rows=defined)
    for name in ("topk_idx", "num_tokens_per_expert", "num_dropped_per_expert", "expert_offsets"):
        expected.equal(f"{what}: {name}", getattr(got, name), getattr(want, name))
    expected.true(
        f"{what}: num_required_rows",
        int(got.num_required_rows) == want.num_required_rows,
        f"got {got.num_required_rows}, want {want.num_required_rows}",
    )
    waited = got.wait_ns
    expected.true(
        f"{what}: wait_ns",
        waited.dtype is torch.int64 and waited.dim() == 1 and bool((waited >= 0).all()),
        waited,
    )
    if want.x_sf is None or got.x_sf is None:
        expected.equal(f"{what}: x_sf", got.x_sf, want.x_sf)
        return
    form, want_form = (
        (shape, [stride for size, stride in zip(shape, strides, strict=True) if size > 1])
        for shape, strides in (
            (tuple(got.x_sf.shape), got.x_sf.stride()),
            (tuple(want.x_sf.shape), want.x_sf.stride()),
        )
    )
    # Strides of empty tensors and of dimensions of one element mean nothing.
    is_same = form == want_form if got.x_sf.numel() else form[0] == want_form[0]
    expected.true(f"{what}: shape and strides of x_sf", is_same, f"got {form}, want {want_form}")
    if is_same:
        got_rows, want_rows = (
            sf.reshape(len(got.x), sf.shape[-1]) if sf.dim() == 3 else sf
            for sf in (got.x_sf, want.x_sf)
        )
        expected.equal(f"{what}: x_sf", got_rows, want_rows, rows=defined)
