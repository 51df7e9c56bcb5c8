"""What every rank does in a conformance check. Each script returns what went wrong on its rank."""

from __future__ import annotations

import torch

from moe_comm.backends.arithmetic import dot_rows, scale_rows
from moe_comm.backends.base import Backend, DispatchOutput, Plan
from moe_comm.config import Layout
from moe_comm.testing.cases import Case, RankInput, case_inputs
from moe_comm.testing.compare import Expectations
from moe_comm.testing.launch import RankContext
from moe_comm.testing.oracle import Oracle
from moe_comm.testing.target import Target

__all__ = ["run_asynchronous", "run_case", "run_in_flight", "run_overwrite", "run_same_bits"]

# Whether outputs may stay in the backend's own memory; every choice must give the same bits.
_COPY_OUT = (None, False, True)


def run_case(context: RankContext, target: Target, case: Case, num_rounds: int = 3) -> list[str]:
    """Everything a buffer can do, several times on one buffer, with two buffers alive."""
    expected = Expectations()
    with target.communicator(context) as communicator:
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
        self.oracle = Oracle(case, case_inputs(case, round_idx))
        self.mine: RankInput = self.oracle.inputs[rank_idx]
        self.copy_out = _COPY_OUT[round_idx % len(_COPY_OUT)]
        self.num_combines = 0

    def dispatch(self, backend: Backend) -> None:
        """With and without weights."""
        self.backend = backend
        for has_weights in (False, True):
            output = backend.dispatch(
                self.mine.x,
                self.mine.topk_idx,
                self.mine.topk_weights if has_weights else None,
                layout=self.case.layout,
                expert_alignment=self.case.expert_alignment,
                copy_out=self.copy_out,
                async_op=False,
            ).wait()
            want = self.oracle.dispatched(
                self.rank_idx,
                [rank.x for rank in self.oracle.inputs],
                [rank.topk_weights for rank in self.oracle.inputs] if has_weights else None,
            )
            self._compare("dispatch", output, want)
            self.plan: Plan = output.plan
        self.expected.true(
            "plan.num_tokens", self.plan.num_tokens == len(self.mine.x), self.plan.num_tokens
        )
        self.expected.true(
            "plan.num_recv_tokens",
            self.plan.num_recv_tokens == want.plan.num_recv_tokens,
            self.plan.num_recv_tokens,
        )
        tensors = self.plan.to_tensors()
        for name in ("counts", "slots", "topk_idx"):
            self.expected.equal(
                f"plan {name}",
                getattr(tensors, name),
                getattr(self.oracle.plans[self.rank_idx], name),
            )
        if self.round_idx % 2:
            self.plan = backend.import_plan(tensors)

    def combine(self) -> None:
        """In place and of an ordinary tensor, weighted and not, with row weights and without rows."""
        is_expert_major = self.case.layout is Layout.EXPERT_MAJOR
        for hidden, dtype, has_weights, has_row_weights in (
            (self.case.hidden, self.case.combine_dtype, False, False),
            (self.case.hidden, self.case.combine_dtype, is_expert_major, True),
            (16, torch.float32, is_expert_major, False),
        ):
            self._combine(hidden, dtype, has_weights=has_weights, has_row_weights=has_row_weights)
        weights_dtype = self.case.weights_dtype
        row_weights = self.oracle.row_weights(("pulled", self.round_idx), weights_dtype)
        pulled = self.backend.combine(
            None,
            self.plan,
            None,
            row_weights[self.rank_idx],
            out=None,
            copy_out=self.copy_out,
            async_op=False,
        ).wait()
        want = self.oracle.combined(self.rank_idx, None, None, row_weights)
        self.expected.equal(self._text("combine of no rows: x"), pulled.x, None)
        self.expected.equal(
            self._text("combine of no rows: weights"), pulled.topk_weights, want.topk_weights
        )

    def _combine(
        self, hidden: int, dtype: torch.dtype, *, has_weights: bool, has_row_weights: bool
    ) -> None:
        key = (self.round_idx, self.num_combines)
        self.num_combines += 1
        is_wide = dtype == torch.float64
        weights_dtype = torch.float64 if is_wide else torch.float32
        expert_outputs = self.oracle.expert_outputs(("out", key), hidden, dtype)
        row_weights = (
            self.oracle.row_weights(("weights", key), weights_dtype) if has_row_weights else None
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
        output = self.backend.combine(
            rows,
            self.plan,
            weights,
            None if row_weights is None else row_weights[self.rank_idx],
            out=out,
            copy_out=self.copy_out,
            async_op=False,
        ).wait()
        want = self.oracle.combined(self.rank_idx, expert_outputs, weights, row_weights)
        what = self._text(f"combine {dtype} weights={has_weights}")
        self.expected.equal(what, output.x, want.x)
        self.expected.equal(f"{what} row_weights", output.topk_weights, want.topk_weights)
        if out is not None:
            self.expected.equal(f"{what} out=", out, want.x)
        # From here on the rows are the caller's again; a peer that still reads them adds NaN.
        rows.fill_(float("nan"))

    def dispatch_cached(self) -> None:
        """To the same places: the same rows, then another dtype and hidden size."""
        for hidden, dtype, has_weights in (
            (self.case.hidden, self.case.dtype, True),
            (24, torch.float64, False),
            (32, torch.uint8, False),
        ):
            rows = self.oracle.rows((self.round_idx, hidden), hidden, dtype)
            weights = [rank.topk_weights for rank in self.oracle.inputs] if has_weights else None
            output = self.backend.dispatch_cached(
                rows[self.rank_idx],
                self.plan,
                None if weights is None else weights[self.rank_idx],
                copy_out=self.copy_out,
                async_op=False,
            ).wait()
            want = self.oracle.dispatched(self.rank_idx, rows, weights, is_cached=True)
            self._compare(f"cached dispatch {dtype}", output, want)

    def differentiate(self) -> None:
        """The local backward of weights applied in combine."""
        dtype = self.case.combine_dtype
        gradient, value = (
            self.oracle.expert_outputs((name, self.round_idx), self.case.hidden, dtype)[
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

    def _compare(self, what: str, got: DispatchOutput, want: DispatchOutput) -> None:
        compare_dispatch(self.expected, self._text(what), got, want)

    def _text(self, what: str) -> str:
        return f"round {self.round_idx}, copy_out={self.copy_out}: {what}"


def compare_dispatch(
    expected: Expectations, what: str, got: DispatchOutput, want: DispatchOutput
) -> None:
    """Every tensor of a dispatch."""
    for name in ("x", "topk_idx", "topk_weights", "num_tokens_per_expert", "expert_offsets"):
        expected.equal(f"{what}: {name}", getattr(got, name), getattr(want, name))


def run_asynchronous(context: RankContext, target: Target, case: Case) -> list[str]:
    """As many operations in flight on one buffer as its configuration allows, waited for backwards."""
    expected = Expectations()
    with target.communicator(context) as communicator:
        backend = target.backend(communicator, case.config)
        depth = case.config.num_max_in_flight
        oracles = [Oracle(case, case_inputs(case, idx)) for idx in range(depth)]
        rank_idx = context.rank_idx
        pending = [
            backend.dispatch(
                oracle.inputs[rank_idx].x,
                oracle.inputs[rank_idx].topk_idx,
                oracle.inputs[rank_idx].topk_weights,
                layout=case.layout,
                expert_alignment=case.expert_alignment,
                copy_out=None,
                async_op=True,
            )
            for oracle in oracles
        ]
        outputs = [operation.wait() for operation in reversed(pending)][::-1]
        for idx, (oracle, output) in enumerate(zip(oracles, outputs, strict=True)):
            rows = [rank.x for rank in oracle.inputs]
            weights = [rank.topk_weights for rank in oracle.inputs]
            want = oracle.dispatched(rank_idx, rows, weights)
            compare_dispatch(expected, f"asynchronous dispatch {idx}", output, want)
            expected.true("is_complete after wait", pending[idx].is_complete())
            expected.true("wait gives the same again", pending[idx].wait() is output)
        outs = [
            oracle.expert_outputs(idx, case.hidden, case.combine_dtype)
            for idx, oracle in enumerate(oracles)
        ]
        combines = [
            backend.combine(
                outs[idx][rank_idx],
                outputs[idx].plan,
                None,
                None,
                out=None,
                copy_out=None,
                async_op=True,
            )
            for idx in range(depth - 1)
        ]
        # A blocking call comes after what is in flight.
        rows = [rank.x for rank in oracles[0].inputs]
        output = backend.dispatch_cached(
            rows[rank_idx], outputs[0].plan, None, copy_out=None, async_op=False
        ).wait()
        want = oracles[0].dispatched(rank_idx, rows, None, is_cached=True)
        compare_dispatch(expected, "dispatch behind combines in flight", output, want)
        for idx, combine in enumerate(combines):
            want_sums = oracles[idx].combined(rank_idx, outs[idx], None, None)
            expected.equal(f"asynchronous combine {idx}", combine.wait().x, want_sums.x)
        backend.destroy()
        return [f"rank {rank_idx}: {text}" for text in expected.result()]


def run_in_flight(
    context: RankContext, target: Target, case: Case, num_buffers: int = 3
) -> list[str]:
    """Operations in flight on several buffers, issued and awaited in another order on every rank."""
    expected = Expectations()
    rank_idx = context.rank_idx
    with target.communicator(context) as communicator:
        backends = [target.backend(communicator, case.config) for _ in range(num_buffers)]
        oracles = [Oracle(case, case_inputs(case, idx)) for idx in range(num_buffers)]
        outs = [
            oracle.expert_outputs(idx, case.hidden, case.combine_dtype)
            for idx, oracle in enumerate(oracles)
        ]
        shift = rank_idx if target.can_overlap else 0
        order = [(shift + idx) % num_buffers for idx in range(num_buffers)]
        dispatches = {
            idx: backends[idx].dispatch(
                oracles[idx].inputs[rank_idx].x,
                oracles[idx].inputs[rank_idx].topk_idx,
                None,
                layout=case.layout,
                expert_alignment=case.expert_alignment,
                copy_out=None,
                async_op=True,
            )
            for idx in order
        }
        combines = {}
        for idx in reversed(order) if target.can_overlap else order:
            output = dispatches[idx].wait()
            want = oracles[idx].dispatched(rank_idx, [rank.x for rank in oracles[idx].inputs], None)
            compare_dispatch(expected, f"dispatch on buffer {idx}", output, want)
            combines[idx] = backends[idx].combine(
                outs[idx][rank_idx],
                output.plan,
                None,
                None,
                out=None,
                copy_out=None,
                async_op=True,
            )
        for idx in order:
            want_sums = oracles[idx].combined(rank_idx, outs[idx], None, None)
            expected.equal(f"combine on buffer {idx}", combines[idx].wait().x, want_sums.x)
        for backend in backends:
            backend.destroy()
        return [f"rank {rank_idx}: {text}" for text in expected.result()]


def run_overwrite(context: RankContext, target: Target, num_rounds: int = 3) -> list[str]:
    """Rank 0 pulls many rows; the others get theirs at once and then destroy what it pulls from."""
    case = Case(
        name="overwrite",
        num_ranks=context.num_ranks,
        num_tokens=(1500, *(1,) * (context.num_ranks - 1)),
        hidden=512,
        num_experts=16,
        num_topk=8,
    )
    expected = Expectations()
    rank_idx = context.rank_idx
    oracle = Oracle(case, case_inputs(case))
    outs = oracle.expert_outputs("overwrite", case.hidden, case.dtype)
    want = oracle.combined(rank_idx, outs, None, None).x
    with target.communicator(context) as communicator:
        backend = target.backend(communicator, case.config)
        plan = (
            backend.dispatch(
                oracle.inputs[rank_idx].x,
                oracle.inputs[rank_idx].topk_idx,
                None,
                layout=case.layout,
                expert_alignment=1,
                copy_out=None,
                async_op=False,
            )
            .wait()
            .plan
        )
        rows = backend.empty_expert_output(plan, case.hidden, case.dtype)
        for round_idx in range(num_rounds):
            rows.copy_(outs[rank_idx])
            sums = backend.combine(
                rows, plan, None, None, out=None, copy_out=None, async_op=False
            ).wait()
            rows.fill_(float("nan"))
            expected.equal(f"sums of round {round_idx}", sums.x, want)
        backend.destroy()
    return [f"rank {rank_idx}: {text}" for text in expected.result()]


def run_same_bits(context: RankContext, target: Target, case: Case) -> list[torch.Tensor]:
    """What this rank gets, to be laid end to end and compared between rank counts."""
    oracle = Oracle(case, case_inputs(case))
    rank_idx = context.rank_idx
    mine = oracle.inputs[rank_idx]
    with target.communicator(context) as communicator:
        backend = target.backend(communicator, case.config)
        output = backend.dispatch(
            mine.x,
            mine.topk_idx,
            mine.topk_weights,
            layout=case.layout,
            expert_alignment=case.expert_alignment,
            copy_out=None,
            async_op=False,
        ).wait()
        assert output.topk_weights is not None
        expert_out = oracle.expert_outputs("same bits", case.hidden, case.combine_dtype)[rank_idx]
        row_weights = oracle.row_weights("same bits", case.weights_dtype)[rank_idx]
        plain = backend.combine(
            expert_out, output.plan, None, row_weights, out=None, copy_out=None, async_op=False
        ).wait()
        weighted = backend.combine(
            expert_out,
            output.plan,
            mine.topk_weights,
            None,
            out=None,
            copy_out=None,
            async_op=False,
        ).wait()
        gradient = output.x.clone()
        dots = backend.weighted_gradient(gradient, expert_out, output.topk_weights)
        assert plain.x is not None
        assert plain.topk_weights is not None
        assert weighted.x is not None
        results = [
            output.x, output.topk_weights, output.num_tokens_per_expert, plain.x, plain.topk_weights,
            weighted.x, gradient, dots,
        ]  # fmt: skip
        results = [tensor.clone() for tensor in results]
        backend.destroy()
    return results
