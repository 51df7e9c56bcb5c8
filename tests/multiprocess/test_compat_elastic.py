"""`deep_ep.ElasticBuffer`, against an oracle made from the contract's text."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from moe_comm import RankThreads
from moe_comm.compat import deep_ep
from moe_comm.compat.deep_ep import ElasticBuffer, EventHandle, EventOverlap
from moe_comm.compat.deep_ep.utils import per_token_cast_to_fp8
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import deep_ep_oracle as oracle
from tests.helpers.deep_ep_oracle import CASES, Case, Given

BACKENDS = ["reference", "collective", "host"]
NUM_MAX = 16
UNIT = 4


def expanded_rows(
    case: Case, inputs: list[Given], rank_idx: int
) -> list[tuple[int, int, int] | None]:
    """(source, token, k) of every row, None for padding."""
    rows: list[tuple[int, int, int] | None] = []
    for expert_idx in oracle.experts_of(case, rank_idx):
        arrived = oracle.expert_arrivals(case, inputs, expert_idx)
        rows += [*arrived, *[None] * (-len(arrived) % UNIT)]
    return rows


def check_handle(
    case: Case, inputs: list[Given], rank_idx: int, handle: deep_ep.EPHandle, has_counts: bool
) -> None:
    experts = oracle.experts_of(case, rank_idx)
    tokens = oracle.arrivals(case, inputs, rank_idx)
    raw = [len(oracle.expert_arrivals(case, inputs, e)) for e in experts]
    rounded = [-(-count // UNIT) * UNIT for count in raw]
    assert (handle.num_experts, handle.expert_alignment) == (case.num_experts, UNIT)
    assert (handle.num_max_tokens_per_rank, handle.num_sms) == (NUM_MAX, 6)
    assert torch.equal(handle.topk_idx, inputs[rank_idx].topk_idx)
    assert handle.num_recv_tokens == len(tokens)
    assert handle.num_recv_tokens_per_expert_list == (rounded if has_counts else [])
    assert handle.num_unaligned_recv_tokens_per_expert.tolist() == raw
    until = [sum(source <= r for source, _ in tokens) for r in range(case.num_ranks)]
    assert handle.psum_num_recv_tokens_per_scaleup_rank.tolist() == until
    starts = [sum(rounded[:i]) for i in range(len(raw))]
    ends = [
        s + (c if handle.do_expand else p) for s, c, p in zip(starts, raw, rounded, strict=True)
    ]
    assert handle.psum_num_recv_tokens_per_expert.tolist() == ends

    slots = [[-1] * case.num_topk for _ in inputs[rank_idx].x]
    for peer in range(case.num_ranks):
        sent = [t for t, r in enumerate(oracle.layout(case, inputs[rank_idx])[2]) if r[peer]]
        for place, token_idx in enumerate(sent):
            choices = inputs[rank_idx].topk_idx[token_idx].tolist()
            (*_, last) = [k for k, e in enumerate(choices) if e in oracle.experts_of(case, peer)]
            slots[token_idx][last] = rank_idx * NUM_MAX + place
    assert handle.dst_buffer_slot_idx.dtype is torch.int32
    assert handle.dst_buffer_slot_idx.tolist() == slots

    rows = expanded_rows(case, inputs, rank_idx)
    assert handle.recv_src_metadata.dtype is torch.int32
    assert handle.recv_src_metadata.shape == (len(tokens), 2 + case.num_topk)
    for values, (source, token_idx) in zip(handle.recv_src_metadata.tolist(), tokens, strict=True):
        choices = inputs[source].topk_idx[token_idx].tolist()
        here = [k for k, expert_idx in enumerate(choices) if expert_idx in experts]
        assert values[0] == source * NUM_MAX + token_idx
        assert values[1] == rank_idx * case.num_topk + here[0]
        for k in range(case.num_topk):
            is_row = handle.do_expand and k in here
            assert values[2 + k] == (rows.index((source, token_idx, k)) if is_row else -1)


def check_rows(
    x: torch.Tensor, places: list[tuple[int, ...] | None], sent: list[torch.Tensor]
) -> None:
    for row, place in enumerate(places):
        right = torch.zeros_like(x[row]) if place is None else sent[place[0]][place[1]]
        assert torch.equal(x[row].clone().view(torch.uint8), right.clone().view(torch.uint8))


def sums_of(
    case: Case, mine: Given, bias: tuple[torch.Tensor, ...], expanded: bool, reduces: bool
) -> torch.Tensor:
    """Rank r (or expert e) multiplied its rows by a power of two."""
    in_rank = oracle.layout(case, mine)[2]
    rows = []
    for t, x in enumerate(mine.x):
        terms = [each[t] for each in bias]
        if expanded:
            by_place: dict[int, list[torch.Tensor]] = {}
            for k, e in enumerate(mine.topk_idx[t].tolist()):
                if e >= 0:
                    # Rows of one rank are summed there, and these sums by their last choice.
                    place = oracle.rank_of(case, e) if reduces else k
                    by_place[place] = [*by_place.pop(place, []), x * 2.0 ** (e % 3)]
            terms += [oracle.summed(rows_there, x) for rows_there in by_place.values()]
        else:
            terms += [x * 2.0**r for r in range(case.num_ranks) if in_rank[t, r]]
        rows.append(oracle.summed(terms, x))
    return torch.stack(rows) if rows else mine.x.clone()


def padding_of(
    case: Case, experts: range, num_rows: int, expanded: bool, do_cpu_sync: bool | None
) -> list[None]:
    """Rows behind those that arrive, where the host does not wait to know how many do."""
    if do_cpu_sync is not False:
        return []
    worst = case.num_ranks * NUM_MAX
    if expanded:
        worst *= min(case.num_topk, len(experts))
        worst += (UNIT - 1) * len(experts)
        worst = -(-worst // UNIT) * UNIT
    return [None] * (worst - num_rows)


def check_choices(
    case: Case,
    inputs: list[Given],
    places: list,
    experts: range,
    recv_idx: Any,
    recv_weights: Any,
    expanded: bool,
) -> None:
    if expanded:
        assert recv_idx is None
        for row, place in enumerate(places):
            right = 0.0 if place is None else inputs[place[0]].topk_weights[place[1], place[2]]
            assert recv_weights[row] == right
    else:
        for row, place in enumerate(places):
            if place is None:
                assert recv_idx[row].tolist() == [-1] * case.num_topk
                continue
            given = inputs[place[0]]
            local = [
                e - experts.start if e in experts else -1 for e in given.topk_idx[place[1]].tolist()
            ]
            assert recv_idx[row].tolist() == local
            # Weights of choices that are elsewhere come too.
            assert torch.equal(recv_weights[row], given.topk_weights[place[1]])


def factors_of(inputs: list[Given], places: list, rank_idx: int, expanded: bool) -> list[float]:
    """Factors by which experts multiply rows."""
    if expanded:
        return [
            1.0 if p is None else 2.0 ** (int(inputs[p[0]].topk_idx[p[1], p[2]]) % 3)
            for p in places
        ]
    return [2.0**rank_idx] * len(places)


def check_sums(
    buffer: ElasticBuffer,
    case: Case,
    mine: Given,
    out: torch.Tensor,
    handle: deep_ep.EPHandle,
    recv_weights: Any,
    expanded: bool,
    reduces: bool,
) -> None:
    weights_back = mine.topk_weights.masked_fill(mine.topk_idx < 0, 0.0)
    bias = (torch.randn(mine.x.shape).to(case.dtype), mine.x)
    for biases in ((), bias[:1], bias):
        for is_async in (False, True):
            sums, weights, event = buffer.combine(
                out,
                handle,
                recv_weights,
                None if not biases else biases if len(biases) == 2 else biases[0],
                previous_event_before_epilogue=EventOverlap(EventHandle()),
                async_with_compute_stream=is_async,
            )
            if is_async:
                event.current_stream_wait()
            assert torch.equal(sums, sums_of(case, mine, biases, expanded, reduces))
            assert torch.equal(weights, weights_back)


def check_cached(
    buffer: ElasticBuffer,
    mine: Given,
    x: list,
    places: list,
    handle: deep_ep.EPHandle,
    recv_idx: Any,
    recv_weights: Any,
    expanded: bool,
) -> None:
    """Another dtype, with and without weights."""
    again, idx, no_weights, same, _ = buffer.dispatch(mine.x.float() * 2, handle=handle)
    assert idx is None if expanded else torch.equal(idx, recv_idx)
    assert no_weights is None
    assert same is handle
    check_rows(again, places, [each.float() * 2 for each in x])
    again, _, new_weights, *_ = buffer.dispatch(
        mine.x, topk_weights=mine.topk_weights * 2, handle=handle
    )
    check_rows(again, places, x)
    assert torch.equal(new_weights, recv_weights * 2)


def check_dispatch_and_combine(
    context: RankContext, case: Case, backend: str, expanded: bool, reduces: bool
) -> None:
    rank_idx = context.rank_idx
    inputs = oracle.all_given(case)
    mine = inputs[rank_idx]
    x = [each.x for each in inputs]
    experts = oracle.experts_of(case, rank_idx)
    exact = (
        expanded_rows(case, inputs, rank_idx)
        if expanded
        else oracle.arrivals(case, inputs, rank_idx)
    )
    with oracle.backend_of_group(context, backend):
        buffer = ElasticBuffer(
            context.group,
            num_max_tokens_per_rank=NUM_MAX,
            hidden=case.hidden,
            num_topk=case.num_topk,
            allow_multiple_reduction=reduces,
        )
        stats = torch.zeros(len(experts), dtype=torch.int32)
        for do_cpu_sync in (None, False):
            recv_x, recv_idx, recv_weights, handle, event = buffer.dispatch(
                mine.x,
                mine.topk_idx,
                mine.topk_weights,
                stats,
                num_experts=case.num_experts,
                expert_alignment=UNIT,
                num_sms=6,
                previous_event=ElasticBuffer.capture(),
                async_with_compute_stream=True,
                do_expand=expanded,
                do_cpu_sync=do_cpu_sync,
            )
            event.current_stream_wait()
            places = [*exact, *padding_of(case, experts, len(exact), expanded, do_cpu_sync)]
            assert recv_x.shape == (len(places), case.hidden)
            check_rows(recv_x, places, x)
            check_handle(case, inputs, rank_idx, handle, do_cpu_sync is not False)
            assert handle.num_expanded_tokens == (len(places) if expanded else 0)
            check_choices(case, inputs, places, experts, recv_idx, recv_weights, expanded)
            factors = factors_of(inputs, places, rank_idx, expanded)
            out = recv_x * torch.tensor(factors, dtype=case.dtype).reshape(-1, 1)
            out[[place is None for place in places]] = float("nan")
            check_sums(buffer, case, mine, out, handle, recv_weights, expanded, reduces)
            check_cached(buffer, mine, x, places, handle, recv_idx, recv_weights, expanded)
        raw = [len(oracle.expert_arrivals(case, inputs, e)) for e in experts]
        assert stats.tolist() == [2 * count for count in raw]
        assert torch.equal(handle.topk_idx, mine.topk_idx)
        assert handle.topk_idx.data_ptr() != mine.topk_idx.data_ptr() or not mine.num_tokens


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("order", ["by_rank", "by_expert", "by_expert_rounded_once"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_dispatch_and_combine(case: Case, order: str, backend: str) -> None:
    expanded, reduces = order != "by_rank", order != "by_expert_rounded_once"
    run_ranks(check_dispatch_and_combine, case.num_ranks, case, backend, expanded, reduces)


def check_fp8(context: RankContext, case: Case) -> None:
    rank_idx = context.rank_idx
    inputs = oracle.all_given(case)
    mine = inputs[rank_idx]
    casts = [per_token_cast_to_fp8(each.x) for each in inputs]
    with oracle.backend_of_group(context, "host"):
        buffer = ElasticBuffer(context.group, num_max_tokens_per_rank=NUM_MAX)
        for expanded in (False, True):
            places = (
                expanded_rows(case, inputs, rank_idx)
                if expanded
                else oracle.arrivals(case, inputs, rank_idx)
            )
            for column_major in (False, True):
                options = {"use_tma_aligned_col_major_sf": column_major}
                for weights in (None, mine.topk_weights):
                    (data, scales), _, _, handle, _ = buffer.dispatch(
                        casts[rank_idx],
                        mine.topk_idx,
                        weights,
                        num_experts=case.num_experts,
                        expert_alignment=UNIT,
                        do_expand=expanded,
                        **options,
                    )
                    (data2, scales2), *_ = buffer.dispatch(
                        casts[rank_idx], topk_weights=weights, handle=handle, **options
                    )
                    for each_data, each_scales in ((data, scales), (data2, scales2)):
                        check_rows(each_data, places, [cast[0] for cast in casts])
                        check_rows(each_scales, places, [cast[1] for cast in casts])
                        if column_major:
                            stride = max(-(-len(places) // 4) * 4, 1)
                            assert each_scales.stride() == (1, stride)
                        else:
                            assert each_scales.is_contiguous()


def test_fp8_pairs() -> None:
    run_ranks(check_fp8, 3, CASES[5])


def check_mistakes(context: RankContext) -> None:
    case = CASES[1]
    mine = oracle.given(case, context.rank_idx)
    with oracle.backend_of_group(context, "host"):
        buffer = ElasticBuffer(context.group, num_max_tokens_per_rank=NUM_MAX)
        right = {"x": mine.x, "topk_idx": mine.topk_idx, "num_experts": case.num_experts}
        with pytest.raises(ValueError, match="rank 1: num_experts must be an int, got None"):
            buffer.dispatch(**{**right, "num_experts": None if context.rank_idx else 8})
        recv_x, _, _, handle, _ = buffer.dispatch(**right)
        mistakes = [
            ({"num_experts": None}, TypeError, "num_experts"),
            ({"num_experts": 0}, ValueError, "num_experts must be >= 1, got 0"),
            ({"num_max_tokens_per_rank": 3}, ValueError, "more than num_max_tokens_per_rank = 3"),
            ({"topk_idx": mine.topk_idx.to(torch.int32)}, TypeError, "int64, got torch.int32"),
            ({"handle": handle}, ValueError, "topk_idx must be None"),
            ({"handle": (1, 2)}, TypeError, "an EPHandle, got tuple"),
            ({"previous_event": 3}, TypeError, "EventHandle or None, got int"),
            ({"expert_alignment": 0}, ValueError, "expert_alignment must be >= 1, got 0"),
            ({"do_cpu_sync": 2}, TypeError, "do_cpu_sync must be a bool, got 2"),
        ]
        for changes, kind, text in mistakes:
            with pytest.raises(kind, match=f"rank 1: .*{re.escape(text)}"):
                buffer.dispatch(**{**right, **(changes if context.rank_idx else {})})
        with pytest.raises(TypeError, match="rank 1: handle must be an EPHandle, got NoneType"):
            buffer.combine(recv_x, None if context.rank_idx else handle)
        with pytest.raises(ValueError, match="rank 1: x must have shape"):
            buffer.combine(recv_x[: -1 if context.rank_idx else None], handle)
        with pytest.raises(ValueError):  # noqa: PT011 - one rank gives a bias, the other does not
            buffer.combine(recv_x, handle, None, mine.x if context.rank_idx else None)
        buffer.barrier()
        buffer.combine(recv_x, handle)


def test_a_mistake_of_one_rank_is_raised_on_all() -> None:
    run_ranks(check_mistakes, 2)


def test_sizes_and_what_is_not_offered() -> None:
    group = RankThreads(1)[0]
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=8, hidden=64, explicitly_destroy=True)
    assert buffer.num_bytes == ElasticBuffer.get_buffer_size_hint(group, 8, 64)
    assert ElasticBuffer.get_buffer_size_hint(group, 4096, 7168) % (2 << 20) == 0
    assert ElasticBuffer.get_pp_buffer_size_hint(33, 3) == 64 * 3 * 4
    assert (buffer.num_scaleout_ranks, buffer.num_scaleup_ranks, buffer.scaleup_rank_idx) == (
        1,
        1,
        0,
    )
    assert buffer.get_physical_domain_size() == buffer.get_logical_domain_size() == (1, 1)
    assert deep_ep.get_physical_domain_size(group) == (1, 1)
    assert deep_ep.get_logical_domain_size(group) == (1, 1)
    num_sms = buffer.get_theoretical_num_sms(8, 2)
    assert num_sms >= 4
    assert num_sms % 2 == 0
    assert buffer.get_theoretical_num_qps(num_sms) == buffer.num_allocated_qps
    for name in ("engram_write", "engram_fetch", "pp_send", "pp_recv", "create_agrs_session"):
        with pytest.raises(NotImplementedError, match=f"{name} belongs to the experimental parts"):
            getattr(buffer, name)(torch.zeros(1))
    with pytest.raises(NotImplementedError, match="num_cpu_bytes"):
        ElasticBuffer(group, num_cpu_bytes=1)
    buffer.destroy()
    with pytest.raises(ValueError, match="destroyed"):
        buffer.get_comm_stream()
