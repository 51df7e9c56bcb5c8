"""`deep_ep.Buffer` in its normal mode, against an oracle made from the contract's text."""

from __future__ import annotations

import pytest
import torch

from moe_comm import CapacityError
from moe_comm.compat.deep_ep import Buffer, Config, EventHandle, EventOverlap
from moe_comm.compat.deep_ep.utils import per_token_cast_back, per_token_cast_to_fp8
from moe_comm.tensors.quantization import FP8_BLOCK128
from moe_comm.tensors.quantized import dequantize, quantize
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import deep_ep_oracle as oracle
from tests.helpers.deep_ep_oracle import CASES, Case, Given

BACKENDS = ["reference", "collective", "host"]
NUM_SMS = 6


def send(buffer: Buffer, case: Case, mine: Given, **changes: object) -> tuple:
    arguments = {
        "x": mine.x,
        **oracle.routing(buffer, mine.topk_idx, case.num_experts),
        "topk_idx": mine.topk_idx,
        "topk_weights": mine.topk_weights,
        "config": Config(NUM_SMS),
        **changes,
    }
    return buffer.dispatch(**arguments)


def check_received(case: Case, inputs: list[Given], rank_idx: int, received: tuple) -> None:
    recv_x, recv_idx, recv_weights, counts, _, _ = received
    rows = oracle.arrivals(case, inputs, rank_idx)
    experts = oracle.experts_of(case, rank_idx)
    assert recv_x.shape == (len(rows), case.hidden)
    for row, (source, token_idx) in enumerate(rows):
        assert torch.equal(recv_x[row], inputs[source].x[token_idx])
        for k, expert_idx in enumerate(inputs[source].topk_idx[token_idx].tolist()):
            is_local = expert_idx in experts
            assert recv_idx[row, k] == (expert_idx - experts.start if is_local else -1)
            weight = inputs[source].topk_weights[token_idx, k] if is_local else 0.0
            assert recv_weights[row, k] == weight
    assert counts == [len(oracle.expert_arrivals(case, inputs, e)) for e in experts]


def check_handle(case: Case, inputs: list[Given], rank_idx: int, handle: tuple) -> None:
    """Every place, as DeepEP's own tests and callers read it."""
    assert isinstance(handle, tuple)
    rank_prefix, channel_prefix, recv_channel_prefix, src_idx, in_rank, send_head = handle
    num_ranks, num_channels = case.num_ranks, NUM_SMS // 2
    layouts = [oracle.layout(case, each) for each in inputs]
    for i in range(num_ranks):
        for j in range(num_ranks):
            assert rank_prefix[i, j] == sum(int(layouts[s][0][j]) for s in range(i + 1))
    rows = oracle.arrivals(case, inputs, rank_idx)
    assert src_idx.tolist() == [token_idx for _, token_idx in rows]
    assert src_idx.dtype is send_head.dtype is rank_prefix.dtype is torch.int32
    assert torch.equal(in_rank, layouts[rank_idx][2])

    def channel_of(source: int, token_idx: int) -> int:
        return token_idx // max(-(-inputs[source].num_tokens // num_channels), 1)

    for peer in range(num_ranks):
        sent = [t for t in range(inputs[rank_idx].num_tokens) if in_rank[t, peer]]
        for channel in range(num_channels):
            until = [t for t in sent if channel_of(rank_idx, t) <= channel]
            assert channel_prefix[peer, channel] == len(until)
            earlier = [t for s, t in rows if s == peer and channel_of(s, t) < channel]
            assert recv_channel_prefix[peer, channel] == len(earlier)
        places = dict.fromkeys(range(num_channels), 0)
        for token_idx in range(inputs[rank_idx].num_tokens):
            channel = channel_of(rank_idx, token_idx)
            expected = places[channel] if token_idx in sent else -1
            assert send_head[token_idx, peer] == expected
            places[channel] += token_idx in sent


def sums_of(
    case: Case, mine: Given, factor_of_rank: list[float], biases: tuple[torch.Tensor, ...] = ()
) -> torch.Tensor:
    """Sums of combine when rank r multiplied its rows by a power of two."""
    in_rank = oracle.layout(case, mine)[2]
    rows = []
    for token_idx in range(mine.num_tokens):
        x = mine.x[token_idx]
        terms = [bias[token_idx] for bias in biases]
        terms += [x * factor_of_rank[r] for r in range(case.num_ranks) if in_rank[token_idx, r]]
        rows.append(oracle.summed(terms, x))
    return torch.stack(rows) if rows else mine.x.clone()


def check_normal_mode(context: RankContext, case: Case, backend: str) -> None:
    rank_idx = context.rank_idx
    inputs = oracle.all_given(case)
    mine = inputs[rank_idx]
    with oracle.backend_of_group(context, backend):
        buffer = Buffer(context.group, 1 << 20, 0)
        assert (buffer.rank, buffer.group_size) == (rank_idx, case.num_ranks)
        per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
            mine.topk_idx, case.num_experts
        )
        assert per_node is None
        assert event.event is None
        for made, right in zip(
            (per_rank, per_expert, in_rank), oracle.layout(case, mine), strict=True
        ):
            assert made.dtype is right.dtype
            assert torch.equal(made, right)

        received = send(buffer, case, mine)
        recv_x, _, recv_weights, counts, handle, event = received
        check_received(case, inputs, rank_idx, received)
        check_handle(case, inputs, rank_idx, handle)
        rounded = send(buffer, case, mine, expert_alignment=8)
        assert rounded[3] == [-(-count // 8) * 8 for count in counts]
        assert torch.equal(rounded[0], recv_x)

        # By rank alone: no choices come back, counts do.
        bare = send(buffer, case, mine, topk_idx=None, topk_weights=None)
        assert torch.equal(bare[0], recv_x)
        assert bare[1:4] == (None, None, counts)
        check_handle(case, inputs, rank_idx, bare[4])

        # Cached, with another payload and another dtype.
        cached = buffer.dispatch(mine.x.float() * 3, handle=handle)
        assert cached[1:5] == (None, None, None, None)
        assert torch.equal(cached[0], recv_x.float() * 3)

        factors = [2.0**r for r in range(case.num_ranks)]
        scaled = recv_x * factors[rank_idx]
        sums, weights, event = buffer.combine(scaled, handle, topk_weights=recv_weights)
        assert torch.equal(sums, sums_of(case, mine, factors))
        unused = mine.topk_idx < 0
        assert torch.equal(weights, mine.topk_weights.masked_fill(unused, 0.0))
        assert event.event is None
        sums, weights, _ = buffer.combine(scaled, bare[4])
        assert torch.equal(sums, sums_of(case, mine, factors))
        assert weights is None

        bias = [torch.randn(mine.x.shape).to(case.dtype) for _ in range(2)]
        for biases in ((bias[0],), tuple(bias)):
            sums, weights, _ = buffer.combine(
                scaled, handle, recv_weights, biases if len(biases) == 2 else biases[0]
            )
            assert torch.equal(sums, sums_of(case, mine, factors, biases))
            assert torch.equal(weights, mine.topk_weights.masked_fill(unused, 0.0))

        before = Buffer.capture()
        layouts = buffer.get_dispatch_layout(mine.topk_idx, case.num_experts, before, True, True)
        deferred = send(
            buffer,
            case,
            mine,
            previous_event=layouts[-1],
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        deferred[-1].current_stream_wait()
        check_received(case, inputs, rank_idx, deferred)
        sums, weights, event = buffer.combine(
            scaled,
            deferred[4],
            deferred[2],
            previous_event=EventOverlap(EventHandle()),
            async_finish=True,
        )
        with event:
            pass
        assert torch.equal(sums, sums_of(case, mine, factors))
        assert torch.equal(weights, mine.topk_weights.masked_fill(unused, 0.0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_normal_mode(case: Case, backend: str) -> None:
    run_ranks(check_normal_mode, case.num_ranks, case, backend)


def check_worst_tokens(context: RankContext, case: Case, backend: str) -> None:
    inputs = oracle.all_given(case)
    mine = inputs[context.rank_idx]
    num_worst = sum(case.num_tokens) + 3
    with oracle.backend_of_group(context, backend):
        buffer = Buffer(context.group)
        exact = send(buffer, case, mine)
        num_rows = exact[0].shape[0]
        worst = send(buffer, case, mine, num_worst_tokens=num_worst)
        recv_x, recv_idx, recv_weights, counts, handle, _ = worst
        assert recv_x.shape == (num_worst, case.hidden)
        assert counts == []
        assert torch.equal(recv_x[:num_rows], exact[0])
        assert torch.equal(recv_idx[:num_rows], exact[1])
        assert bool((recv_idx[num_rows:] == -1).all())
        assert handle[0][-1, context.rank_idx] == num_rows
        recv_x[num_rows:] = float("nan")  # what nobody sent is not read
        factors = [1.0] * case.num_ranks
        for bias in (None, mine.x):
            sums, weights, _ = buffer.combine(recv_x, handle, recv_weights, bias)
            assert torch.equal(sums, sums_of(case, mine, factors, () if bias is None else (bias,)))
            assert torch.equal(weights, mine.topk_weights.masked_fill(mine.topk_idx < 0, 0.0))
        full = send(buffer, case, mine, num_worst_tokens=num_rows)  # no more than there is room for
        assert torch.equal(full[0], exact[0])
        assert torch.equal(full[1], exact[1])
        with pytest.raises(CapacityError):
            send(buffer, case, mine, num_worst_tokens=max(num_rows - 1, 0))
        check_received(case, inputs, context.rank_idx, send(buffer, case, mine))


@pytest.mark.parametrize("backend", BACKENDS)
def test_worst_tokens(backend: str) -> None:
    case = CASES[1]
    run_ranks(check_worst_tokens, case.num_ranks, case, backend)


def check_fp8(context: RankContext, case: Case, backend: str) -> None:
    inputs = oracle.all_given(case)
    mine = inputs[context.rank_idx]
    rows = oracle.arrivals(case, inputs, context.rank_idx)
    with oracle.backend_of_group(context, backend):
        buffer = Buffer(context.group)
        for use_ue8m0 in (False, True):
            pairs = [per_token_cast_to_fp8(each.x, use_ue8m0, use_ue8m0) for each in inputs]
            data, scales = pairs[context.rank_idx]
            assert scales.dtype is (torch.int32 if use_ue8m0 else torch.float32)
            for strided in (scales, scales.T.contiguous().T, scales[:, :1].expand_as(scales)):
                sent = [pair[1] for pair in pairs]
                if strided.shape[1] > 1 and strided.stride(1) == 0:
                    sent = [each[:, :1].expand_as(each) for each in sent]
                (recv_data, recv_scales), *_, handle, _ = send(
                    buffer, case, mine, x=(data, strided)
                )
                assert recv_data.dtype is torch.float8_e4m3fn
                assert recv_scales.is_contiguous()
                assert recv_scales.dtype is scales.dtype
                for row, (source, token_idx) in enumerate(rows):
                    as_sent = pairs[source][0][token_idx].view(torch.uint8)
                    assert torch.equal(recv_data[row].view(torch.uint8), as_sent)
                    assert torch.equal(recv_scales[row], sent[source][token_idx])
            check_handle(case, inputs, context.rank_idx, handle)
            again, *_ = buffer.dispatch((data, scales), handle=handle)
            assert torch.equal(again[0].view(torch.uint8), recv_data.view(torch.uint8))
            back = per_token_cast_back(*again)
            for row, (source, token_idx) in enumerate(rows):
                x = inputs[source].x[token_idx].float()
                # Three bits of mantissa, and scales up to twice too large.
                bound = x.abs().max() * (0.08 if use_ue8m0 else 0.04)
                assert float((back[row].float() - x).abs().max()) <= bound
            sums, _, _ = buffer.combine(back, handle)
            assert sums.shape == mine.x.shape


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[5]], ids=str)
def test_fp8_pairs(case: Case, backend: str) -> None:
    run_ranks(check_fp8, case.num_ranks, case, backend)


def test_casts_are_those_of_a_quantized_dispatch() -> None:
    x = torch.randn(5, 200).bfloat16()
    data, scales = per_token_cast_to_fp8(x)
    right, right_scales = quantize(x, FP8_BLOCK128)
    assert torch.equal(data.view(torch.uint8), right.view(torch.uint8))
    assert torch.equal(scales, right_scales)
    assert torch.equal(per_token_cast_back(data, scales), dequantize(data, scales, FP8_BLOCK128))


def check_two_groups_of_layers(context: RankContext) -> None:
    """Several buffers and expert counts over one group, interleaved; one is destroyed."""
    first, second = CASES[1], Case("other", 10, 2, 64, (4, 3))
    with oracle.backend_of_group(context, "host"):
        one = Buffer(context.group, explicitly_destroy=True)
        two = Buffer(context.group)
        results = [
            send(b, c, oracle.given(c, context.rank_idx))
            for b, c in ((one, first), (two, second), (one, second), (two, first))
        ]
        check_received(first, oracle.all_given(first), context.rank_idx, results[0])
        check_received(second, oracle.all_given(second), context.rank_idx, results[2])
        # A handle of one buffer serves the other: both belong to the group.
        sums, _, _ = two.combine(results[0][0], results[0][4])
        assert torch.equal(sums, sums_of(first, oracle.given(first, context.rank_idx), [1.0, 1.0]))
        one.destroy()
        one.destroy()
        with pytest.raises(ValueError, match="destroyed"):
            one.combine(results[0][0], results[0][4])
        check_received(
            first,
            oracle.all_given(first),
            context.rank_idx,
            send(two, first, oracle.given(first, context.rank_idx)),
        )


def test_buffers_of_one_group() -> None:
    run_ranks(check_two_groups_of_layers, 2)
