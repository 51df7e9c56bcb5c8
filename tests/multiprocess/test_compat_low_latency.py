"""`deep_ep.Buffer` in its low-latency mode, against an oracle made from the contract's text."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from moe_comm.compat.deep_ep import Buffer
from moe_comm.compat.deep_ep.utils import per_token_cast_to_fp8
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import deep_ep_oracle as oracle
from tests.helpers.deep_ep_oracle import CASES, Case, Given
from tests.helpers.failing_ranks import wait_for

BACKENDS = ["reference", "collective", "host"]
NUM_MAX = 16

# use_fp8, round_scale, use_ue8m0
FORMATS = [(False, False, False), (True, False, False), (True, True, False), (True, True, True)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    # A clone: one column counts as contiguous whatever its stride.
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def check_dispatched(
    case: Case,
    inputs: list[Given],
    rank_idx: int,
    recv_x: object,
    count: torch.Tensor,
    handle: tuple,
    form: tuple[bool, bool, bool],
) -> None:
    """Every row, scale, count and place of the handle; rows beyond the counts are undefined."""
    use_fp8, round_scale, use_ue8m0 = form
    experts = oracle.experts_of(case, rank_idx)
    num_places = case.num_ranks * NUM_MAX
    src_info, layout_range, num_max, hidden, num_experts = handle
    assert (num_max, hidden, num_experts) == (NUM_MAX, case.hidden, case.num_experts)
    assert src_info.shape == (len(experts), num_places)
    assert (src_info.dtype, layout_range.dtype) == (torch.int32, torch.int64)
    data, scales = recv_x if use_fp8 else (recv_x, None)
    assert data.shape == (len(experts), num_places, case.hidden)
    if use_fp8:
        casts = [per_token_cast_to_fp8(each.x, round_scale, use_ue8m0) for each in inputs]
        num_scales = casts[0][1].shape[1]
        assert scales.shape == (len(experts), num_places, num_scales)
        assert scales.dtype is (torch.int32 if use_ue8m0 else torch.float32)
        if len(experts):  # column-major in the last two dimensions
            assert scales.transpose(1, 2).is_contiguous()
    else:
        casts = [(each.x, None) for each in inputs]
    for local_idx, expert_idx in enumerate(experts):
        arrived = oracle.expert_arrivals(case, inputs, expert_idx)
        assert int(count[local_idx]) == len(arrived)
        for source in range(case.num_ranks):
            packed = int(layout_range[local_idx, source])
            begin, number = packed >> 32, packed & 0xFFFFFFFF
            places = [i for i, (s, _, _) in enumerate(arrived) if s == source]
            assert number == len(places)
            assert begin == (places[0] if places else sum(s < source for s, _, _ in arrived))
        for place, (source, token_idx, _) in enumerate(arrived):
            assert src_info[local_idx, place] == token_idx
            assert torch.equal(bits(data[local_idx, place]), bits(casts[source][0][token_idx]))
            if use_fp8:
                right = casts[source][1][token_idx]
                assert torch.equal(bits(scales[local_idx, place]), bits(right))


def expert_output(case: Case, inputs: list[Given], rank_idx: int, num_places: int) -> torch.Tensor:
    """Expert e gives 2**(e % 3) times x; NaN where there is no row."""
    experts = oracle.experts_of(case, rank_idx)
    out = torch.full((len(experts), num_places, case.hidden), float("nan"), dtype=case.dtype)
    for local_idx, expert_idx in enumerate(experts):
        for place, (source, token_idx, _) in enumerate(
            oracle.expert_arrivals(case, inputs, expert_idx)
        ):
            out[local_idx, place] = inputs[source].x[token_idx] * 2.0 ** (expert_idx % 3)
    return out


def weighted(case: Case, mine: Given) -> torch.Tensor:
    rows = []
    for t, x in enumerate(mine.x):
        terms = [
            (x * 2.0 ** (e % 3)).float() * mine.topk_weights[t, k]
            for k, e in enumerate(mine.topk_idx[t].tolist())
            if e >= 0
        ]
        rows.append(oracle.summed(terms, x))
    return torch.stack(rows) if rows else mine.x.clone()


def check_options(context: RankContext, case: Case, backend: str) -> None:
    """All forms and endings of dispatch, each with another combine; all results stay alive."""
    rank_idx = context.rank_idx
    inputs = oracle.all_given(case)
    mine = inputs[rank_idx]
    num_local = len(oracle.experts_of(case, rank_idx))
    expert_out = expert_output(case, inputs, rank_idx, case.num_ranks * NUM_MAX)
    right = weighted(case, mine)
    endings = [{}, {"async_finish": True}, {"return_recv_hook": True}]
    combines = itertools.cycle(
        [{}, {"use_logfmt": True}, {"zero_copy": True}, {"out": True}, {"stats": True}]
    )
    with oracle.backend_of_group(context, backend):
        buffer = Buffer(context.group, 0, 1 << 20, low_latency_mode=True)
        totals = torch.zeros(num_local, dtype=torch.int32)
        waits = torch.zeros(case.num_ranks, dtype=torch.int64)
        alive = []
        for form, ending in itertools.product(FORMATS, endings):
            use_fp8, round_scale, use_ue8m0 = form
            recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
                mine.x,
                mine.topk_idx,
                NUM_MAX,
                case.num_experts,
                cumulative_local_expert_recv_stats=totals,
                dispatch_wait_recv_cost_stats=waits,
                use_fp8=use_fp8,
                round_scale=round_scale,
                use_ue8m0=use_ue8m0,
                **ending,
            )
            assert (hook is not None) == ("return_recv_hook" in ending)
            assert (event.event is not None) == ("async_finish" in ending)
            if hook is not None:
                hook()
                hook()  # again changes nothing
            if event.event is not None:
                event.current_stream_wait()
            alive.append((recv_x, count, handle, form))

        for (recv_x, count, handle, form), ending in zip(
            alive, itertools.cycle(endings), strict=False
        ):
            check_dispatched(case, inputs, rank_idx, recv_x, count, handle, form)
            options = dict(next(combines))
            x, out, stats = expert_out, None, None
            if options.get("zero_copy"):
                room = buffer.get_next_low_latency_combine_buffer(handle)
                assert room.shape == expert_out.shape
                room.copy_(expert_out)
                x = torch.zeros_like(expert_out)  # not read
            if options.pop("out", False):
                options["out"] = out = torch.empty_like(mine.x)
            if options.pop("stats", False):
                stats = torch.zeros(case.num_ranks, dtype=torch.int64)
                options["combine_wait_recv_cost_stats"] = stats
            sums, event, hook = buffer.low_latency_combine(
                x, mine.topk_idx, mine.topk_weights, handle, **options, **ending
            )
            if hook is not None:
                hook()
            if event.event is not None:
                event.current_stream_wait()
            assert torch.equal(sums, right)
            assert out is None or sums.data_ptr() == out.data_ptr()
            assert stats is None or bool((stats >= 0).all())
        expected = [
            len(oracle.expert_arrivals(case, inputs, e)) * len(alive)
            for e in oracle.experts_of(case, rank_idx)
        ]
        assert totals.tolist() == expected
        assert bool((waits >= 0).all())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_all_options(case: Case, backend: str) -> None:
    run_ranks(check_options, case.num_ranks, case, backend)


def check_overlap(context: RankContext) -> None:
    """Two batches: a second dispatch is on its way before the first is waited for."""
    case = CASES[1]
    rank_idx = context.rank_idx
    batches = [oracle.all_given(case, salt) for salt in (0, 1)]
    with oracle.backend_of_group(context, "host"):
        buffer = Buffer(context.group, low_latency_mode=True)
        pending = [
            buffer.low_latency_dispatch(
                inputs[rank_idx].x,
                inputs[rank_idx].topk_idx,
                NUM_MAX,
                case.num_experts,
                use_fp8=False,
                return_recv_hook=True,
            )
            for inputs in batches
        ]
        combined = []
        for inputs, (recv_x, count, handle, _, hook) in zip(batches, pending, strict=True):
            hook()
            check_dispatched(case, inputs, rank_idx, recv_x, count, handle, FORMATS[0])
            out = expert_output(case, inputs, rank_idx, case.num_ranks * NUM_MAX)
            mine = inputs[rank_idx]
            combined.append(
                buffer.low_latency_combine(
                    out, mine.topk_idx, mine.topk_weights, handle, return_recv_hook=True
                )
            )
        for inputs, (sums, _, hook) in zip(batches, combined, strict=True):
            hook()
            assert torch.equal(sums, weighted(case, inputs[rank_idx]))


def test_two_batches_overlap() -> None:
    run_ranks(check_overlap, 2)


def check_newer_keywords(context: RankContext, is_one_rank: bool) -> None:
    case = CASES[1]
    mine = oracle.given(case, context.rank_idx)
    asks = context.rank_idx == 0 or not is_one_rank
    wanted: dict[str, type[Exception]] = {
        "expected_exception": NotImplementedError if asks else ValueError
    }
    with oracle.backend_of_group(context, "host"):
        buffer = Buffer(context.group, low_latency_mode=True)
        arguments = (mine.x, mine.topk_idx, NUM_MAX, case.num_experts)
        for name, value in {
            "topk_weights": mine.topk_weights,
            "use_nvfp4": True,
            "use_ue8m0_for_sf": True,
        }.items():
            with pytest.raises(**wanted, match=f"{name}=.*does not offer"):
                buffer.low_latency_dispatch(*arguments, **({name: value} if asks else {}))
        *_, handle, _, _ = buffer.low_latency_dispatch(
            *arguments, use_fp8=False, use_nvfp4=False, x_global_scale=torch.ones(())
        )
        out = expert_output(
            case, oracle.all_given(case), context.rank_idx, case.num_ranks * NUM_MAX
        )
        combine = functools.partial(
            buffer.low_latency_combine, out, mine.topk_idx, mine.topk_weights, handle
        )
        for name, value in {"overlap": True, "src_signals": torch.zeros(4)}.items():
            with pytest.raises(**wanted, match=f"{name}=.*does not offer"):
                combine(**({name: value} if asks else {}))
        sums, *_ = combine(
            overlap=False, packed_recv_count=None, block_m=64, threshold=0, num_sms=3
        )
        assert torch.equal(sums, weighted(case, mine))


@pytest.mark.parametrize("is_one_rank", [False, True])
def test_keywords_of_newer_releases_are_taken_and_refused_by_value(is_one_rank: bool) -> None:
    run_ranks(check_newer_keywords, 2, is_one_rank)


def check_rows_are_let_go(context: RankContext) -> None:
    """Handles, hooks and events that have come do not keep the received rows."""
    case = CASES[1]
    mine = oracle.given(case, context.rank_idx)
    with oracle.backend_of_group(context, "host"):
        communicator = group_buffers(context.group).communicator
        buffer = Buffer(context.group, low_latency_mode=True)
        made = buffer.low_latency_dispatch(mine.x, mine.topk_idx, NUM_MAX, case.num_experts)
        with_rows = communicator.heap_stats().live_bytes
        del made

        def live_bytes() -> int:
            return communicator.heap_stats().live_bytes

        # The thread that ran the operation lets go a moment after it was waited for.
        wait_for(lambda: live_bytes() < with_rows)
        kept = []
        for ending in ({}, {"async_finish": True}, {"return_recv_hook": True}):
            before = live_bytes()
            recv_x, count, handle, event, hook = buffer.low_latency_dispatch(
                mine.x, mine.topk_idx, NUM_MAX, case.num_experts, **ending
            )
            if hook is not None:
                hook()
            if event.event is not None:
                event.current_stream_wait()
            assert communicator.heap_stats().live_bytes > before
            kept.append((count, handle, event, hook))
            del recv_x
            wait_for(lambda before=before: live_bytes() <= before)  # type: ignore[misc]
            assert live_bytes() == before


def test_rows_are_let_go() -> None:
    run_ranks(check_rows_are_let_go, 2)


def check_masks(context: RankContext, backend: str) -> None:
    """A rank that rank 0 masks is left out everywhere, until it is unmasked."""
    case = Case("masked", 9, 3, 64, (5, 4, 6), share_unused=0.0)
    rank_idx, masked = context.rank_idx, 2
    inputs = oracle.all_given(case)
    mine = inputs[rank_idx]
    living = []
    for source, each in enumerate(inputs):
        lost = torch.tensor(
            [[oracle.rank_of(case, e) == masked for e in row] for row in each.topk_idx.tolist()]
        )
        gone = torch.ones_like(lost) if source == masked else lost
        living.append(Given(each.x, each.topk_idx.masked_fill(gone, -1), each.topk_weights))
    with oracle.backend_of_group(context, backend):
        buffer = Buffer(context.group, low_latency_mode=True, enable_shrink=True)
        status = torch.full((3,), 7, dtype=torch.int32)
        if rank_idx == 0:
            buffer.low_latency_update_mask_buffer(masked, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 0, int(rank_idx == 0)]
        for is_masked in (True, False):
            current = living if is_masked else inputs
            recv_x, count, handle, _, _ = buffer.low_latency_dispatch(
                mine.x, mine.topk_idx, NUM_MAX, case.num_experts, use_fp8=False
            )
            if is_masked and rank_idx == masked:
                assert not count.any()
            else:
                check_dispatched(case, current, rank_idx, recv_x, count, handle, FORMATS[0])
            out = expert_output(case, current, rank_idx, 3 * NUM_MAX)
            sums, _, _ = buffer.low_latency_combine(out, mine.topk_idx, mine.topk_weights, handle)
            assert torch.equal(sums, weighted(case, current[rank_idx]))
            if rank_idx == 0:
                buffer.low_latency_clean_mask_buffer()
        plain = Buffer(context.group)
        with pytest.raises(ValueError, match="enable_shrink"):
            plain.low_latency_clean_mask_buffer()
        with pytest.raises(ValueError, match="3 is not a rank of 3"):
            buffer.low_latency_update_mask_buffer(3, True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_masks(backend: str) -> None:
    run_ranks(check_masks, 3, backend)
