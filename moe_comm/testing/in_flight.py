"""Scripts that every rank runs in the checks of asynchrony, reuse of memory and equal bits."""

from __future__ import annotations

import torch

from moe_comm.testing import calls
from moe_comm.testing.case_data import CaseData
from moe_comm.testing.cases import Case, case_inputs
from moe_comm.testing.compare import Expectations
from moe_comm.testing.launch import RankContext
from moe_comm.testing.scripts import compare_dispatch
from moe_comm.testing.target import Target


def run_asynchronous(context: RankContext, target: Target, case: Case) -> list[str]:
    """Run as many operations in flight on one buffer as its configuration allows, waited for backwards."""
    expected = Expectations()
    with target.communicator(context) as communicator:
        backend = target.backend(communicator, case.config)
        depth = case.config.num_max_in_flight
        rounds = [CaseData(case, case_inputs(case, idx)) for idx in range(depth)]
        rank_idx = context.rank_idx
        pending = [
            calls.dispatch(backend, case, rank_idx, data.inputs[rank_idx], async_op=True)
            for data in rounds
        ]
        outputs = [operation.wait() for operation in reversed(pending)][::-1]
        for idx, (data, output) in enumerate(zip(rounds, outputs, strict=True)):
            rows = [rank.x for rank in data.inputs]
            weights = [rank.topk_weights for rank in data.inputs]
            want = data.received(rank_idx, rows, weights, quantization=case.quantization)
            compare_dispatch(expected, f"asynchronous dispatch {idx}", output, want)
            expected.true("is_complete after wait", pending[idx].is_complete())
            expected.true("wait gives the same again", pending[idx].wait() is output)
        outs = [
            data.expert_outputs(idx, case.combine_hidden, case.combine_dtype)
            for idx, data in enumerate(rounds)
        ]
        combines = [
            calls.combine(backend, outs[idx][rank_idx], outputs[idx].plan, async_op=True)
            for idx in range(depth - 1)
        ]
        # A blocking call comes after what is in flight.
        rows = [rank.x for rank in rounds[0].inputs]
        output = calls.dispatch_cached(backend, rows[rank_idx], outputs[0].plan)
        want = rounds[0].received(rank_idx, rows, None, is_cached=True)
        compare_dispatch(expected, "dispatch behind combines in flight", output, want)
        for idx, combine in enumerate(combines):
            want_sums = rounds[idx].sums(rank_idx, outs[idx])
            expected.equal(f"asynchronous combine {idx}", combine.wait().x, want_sums)
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
        rounds = [CaseData(case, case_inputs(case, idx)) for idx in range(num_buffers)]
        outs = [
            data.expert_outputs(idx, case.combine_hidden, case.combine_dtype)
            for idx, data in enumerate(rounds)
        ]
        shift = rank_idx if target.can_overlap else 0
        order = [(shift + idx) % num_buffers for idx in range(num_buffers)]
        dispatches = {
            idx: calls.dispatch(
                backends[idx],
                case,
                rank_idx,
                rounds[idx].inputs[rank_idx],
                has_weights=False,
                async_op=True,
            )
            for idx in order
        }
        combines = {}
        for idx in reversed(order) if target.can_overlap else order:
            output = dispatches[idx].wait()
            rows = [rank.x for rank in rounds[idx].inputs]
            want = rounds[idx].received(rank_idx, rows, None, quantization=case.quantization)
            compare_dispatch(expected, f"dispatch on buffer {idx}", output, want)
            combines[idx] = calls.combine(
                backends[idx], outs[idx][rank_idx], output.plan, async_op=True
            )
        for idx in order:
            want_sums = rounds[idx].sums(rank_idx, outs[idx])
            expected.equal(f"combine on buffer {idx}", combines[idx].wait().x, want_sums)
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
    data = CaseData(case, case_inputs(case))
    outs = data.expert_outputs("overwrite", case.hidden, case.dtype)
    want = data.sums(rank_idx, outs)
    with target.communicator(context) as communicator:
        backend = target.backend(communicator, case.config)
        plan = calls.dispatch(backend, case, rank_idx, data.inputs[rank_idx]).wait().plan
        rows = backend.empty_expert_output(plan, case.hidden, case.dtype)
        for round_idx in range(num_rounds):
            rows.copy_(outs[rank_idx])
            sums = calls.combine(backend, rows, plan).wait()
            rows.fill_(float("nan"))
            expected.equal(f"sums of round {round_idx}", sums.x, want)
        backend.destroy()
    return [f"rank {rank_idx}: {text}" for text in expected.result()]


def run_same_bits(context: RankContext, target: Target, case: Case) -> dict[str, bytes]:
    """Return this rank's results as bytes, to be laid end to end and compared between rank counts."""
    data = CaseData(case, case_inputs(case))
    rank_idx = context.rank_idx
    mine = data.inputs[rank_idx]
    with target.communicator(context) as communicator:
        backend = target.backend(communicator, case.config)
        output = calls.dispatch(backend, case, rank_idx, mine).wait()
        assert output.topk_weights is not None
        expert_out = data.expert_outputs("same bits", case.combine_hidden, case.combine_dtype)[
            rank_idx
        ]
        gradient = data.expert_outputs("gradient", case.combine_hidden, case.combine_dtype)[
            rank_idx
        ]
        row_weights = data.row_weights("same bits", case.weights_dtype)[rank_idx]
        plain = calls.combine(backend, expert_out, output.plan, None, row_weights).wait()
        weighted = calls.combine(backend, expert_out, output.plan, mine.topk_weights).wait()
        dots = backend.weighted_gradient(gradient, expert_out, output.topk_weights)
        assert plain.x is not None
        assert plain.topk_weights is not None
        assert weighted.x is not None
        results = {
            "x": output.x,
            "x_sf": torch.zeros(0) if output.x_sf is None else output.x_sf,
            "topk_weights": output.topk_weights,
            "num_tokens_per_expert": output.num_tokens_per_expert,
            "num_dropped_per_expert": output.num_dropped_per_expert,
            "combine": plain.x,
            "row_weights": plain.topk_weights,
            "weighted combine": weighted.x,
            "weighted gradient": gradient,
            "dots": dots,
        }
        raw = {
            name: tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            for name, tensor in results.items()
        }
        backend.destroy()
    return raw
