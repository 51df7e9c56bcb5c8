"""`deep_ep.HybridEPBuffer`, against an oracle made from the contract's text."""

from __future__ import annotations

import pytest
import torch

from moe_comm.compat.deep_ep import HybridEPBuffer
from moe_comm.compat.deep_ep.hybrid_ep_buffer import indices_to_map
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import deep_ep_oracle as oracle
from tests.helpers.deep_ep_oracle import Case, Given

BACKENDS = ["reference", "collective", "host"]
PAD = 4

# Experts divide by ranks, as the constructor's num_local_experts says.
CASES = [case for case in oracle.CASES if case.num_experts % case.num_ranks == 0]


def routing_of(case: Case, mine: Given) -> tuple[torch.Tensor, torch.Tensor]:
    routing_map = torch.zeros(mine.num_tokens, case.num_experts, dtype=torch.bool)
    probs = torch.zeros(mine.num_tokens, case.num_experts)
    for token_idx, choices in enumerate(mine.topk_idx.tolist()):
        for k, expert_idx in enumerate(choices):
            if expert_idx >= 0:
                routing_map[token_idx, expert_idx] = True
                probs[token_idx, expert_idx] = mine.topk_weights[token_idx, k]
    return routing_map, probs


def permuted(
    case: Case, inputs: list[Given], rank_idx: int
) -> tuple[list[tuple[int, int, int] | None], list[int], list[int]]:
    """Rows as (source, token, expert) or None for padding; counts without and with padding."""
    rows: list[tuple[int, int, int] | None] = []
    raw, padded = [], []
    for expert_idx in oracle.experts_of(case, rank_idx):
        arrived = [
            (s, t, expert_idx) for s, t, _ in oracle.expert_arrivals(case, inputs, expert_idx)
        ]
        missing = -len(arrived) % PAD
        rows += arrived + [None] * missing
        raw.append(len(arrived))
        padded.append(len(arrived) + missing)
    return rows, raw, padded


def check_permuted_rows(
    case: Case,
    inputs: list[Given],
    rows: list[tuple[int, int, int] | None],
    token: torch.Tensor,
    probs: torch.Tensor | None,
    x: list[torch.Tensor],
) -> None:
    assert token.shape[0] == len(rows)
    for row, place in enumerate(rows):
        if place is None:
            assert not token[row].view(torch.uint8).any()
            assert probs is None or probs[row] == 0
            continue
        source, token_idx, expert_idx = place
        assert torch.equal(token[row], x[source][token_idx])
        if probs is not None:
            assert probs[row] == routing_of(case, inputs[source])[1][token_idx, expert_idx]


def combined(
    case: Case, mine: Given, factor_of_expert: torch.Tensor, *, by_map: bool
) -> torch.Tensor:
    """Each expert gives a power of two times x: ascending for a map, else in the order of choices."""
    rows = []
    for x, choices in zip(mine.x, mine.topk_idx.tolist(), strict=True):
        experts = [expert_idx for expert_idx in choices if expert_idx >= 0]
        ordered = sorted(experts) if by_map else experts
        rows.append(oracle.summed([x * factor_of_expert[e].item() for e in ordered], x))
    return torch.stack(rows) if rows else mine.x.clone()


def factors_of_rows(
    rows: list[tuple[int, int, int] | None], factor_of_expert: torch.Tensor
) -> torch.Tensor:
    factors = [float("nan") if place is None else factor_of_expert[place[2]] for place in rows]
    return torch.tensor(factors).reshape(-1, 1)


def check_permute(context: RankContext, case: Case, backend: str) -> None:
    rank_idx = context.rank_idx
    inputs = oracle.all_given(case)
    mine = inputs[rank_idx]
    routing_map, probs = routing_of(case, mine)
    rows, raw, padded = permuted(case, inputs, rank_idx)
    x = [each.x for each in inputs]
    factor_of_expert = torch.exp2(torch.arange(case.num_experts) % 5)
    num_local = case.num_experts // case.num_ranks
    with oracle.backend_of_group(context, backend):
        buffer = HybridEPBuffer(context.group, case.hidden, 16, num_local)
        by_map = {"routing_map": routing_map, "probs": probs}
        by_index = {
            "topk_idx": mine.topk_idx,
            "topk_weights": mine.topk_weights,
            "num_of_experts": case.num_experts,
        }
        narrow = {"topk_idx": mine.topk_idx.to(torch.int32), "probs": probs}
        for routing in (by_map, by_index, narrow, {"routing_map": routing_map}):
            with_probs = len(routing) > 1
            token, token_probs, scales, counts, handle = buffer.dispatch_with_permute(
                hidden=mine.x,
                num_of_experts_per_rank=num_local,
                pad_multiple=PAD,
                fuse_permute_dispatch=True,
                **routing,
            )
            assert scales is None
            assert (token_probs is not None) == with_probs
            check_permuted_rows(case, inputs, rows, token, token_probs, x)
            assert counts.dtype is torch.int64
            assert counts.tolist() == padded
            assert len(handle) == 11
            assert handle[3].tolist() == [len(oracle.arrivals(case, inputs, rank_idx))]
            assert [len(handle[place]) for place in (0, 4, 5, 6)] == [0, 0, 0, 0]
            assert handle[7].tolist() == raw
            assert handle[8] == mine.num_tokens
            assert handle[9].pad_multiple == PAD
            assert handle[-1].tolist() == [0]
            assert handle[-1].dtype is torch.int32

            scaled = (token.float() * factors_of_rows(rows, factor_of_expert)).to(case.dtype)
            sums, dense = buffer.combine_with_unpermute(
                hidden=scaled, probs=token_probs, handle=handle, pad_multiple=PAD
            )
            right = combined(case, mine, factor_of_expert, by_map="routing_map" in routing)
            assert torch.equal(sums, right)
            if with_probs:
                assert dense.dtype is torch.float32
                assert torch.equal(dense, probs)
            else:
                assert dense is None

            # Cached: a gradient in float32 goes where the rows went; probs may be new.
            again, new_probs, _, no_counts, same = buffer.dispatch_with_permute(
                hidden=mine.x.float() * 2,
                probs=probs * 2,
                handle=handle,
                num_permuted_tokens=len(rows),
                pad_multiple=PAD,
            )
            assert no_counts is None
            assert same is handle
            check_permuted_rows(case, inputs, rows, again, None, [each.float() * 2 for each in x])
            check_permuted_rows(case, inputs, rows, token, new_probs / 2, x)
            bare, no_probs, *_ = buffer.dispatch_with_permute(hidden=mine.x, handle=handle)
            assert no_probs is None
            assert torch.equal(bare, token)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_permute(case: Case, backend: str) -> None:
    run_ranks(check_permute, case.num_ranks, case, backend)


LIMITS = {
    "spare": lambda num_rows: num_rows + 2 * PAD,
    "exact": lambda num_rows: num_rows,
    "one unit": lambda num_rows: max(num_rows - PAD, 0),
    "half": lambda num_rows: num_rows // PAD // 2 * PAD,
    "nothing": lambda num_rows: 0,
}


def check_limit(context: RankContext, case: Case, backend: str, limit: str) -> None:
    rank_idx = context.rank_idx
    inputs = oracle.all_given(case)
    mine = inputs[rank_idx]
    routing_map, probs = routing_of(case, mine)
    x = [each.x for each in inputs]
    kept = []
    for rank in range(case.num_ranks):
        rows = permuted(case, inputs, rank)[0]
        num_rows = LIMITS[limit](len(rows))
        kept.append([*rows, *[None] * num_rows][:num_rows])
    survivors = {place for rank_rows in kept for place in rank_rows if place is not None}
    everything, raw, padded = permuted(case, inputs, rank_idx)
    with oracle.backend_of_group(context, backend):
        buffer = HybridEPBuffer(context.group, case.hidden, 16, case.num_experts // case.num_ranks)
        for options in ({"non_blocking": True}, {}, {"use_host_meta": False}):
            token, token_probs, _, counts, handle = buffer.dispatch_with_permute(
                hidden=mine.x,
                routing_map=routing_map,
                probs=probs,
                pad_multiple=PAD,
                num_permuted_tokens=len(kept[rank_idx]),
                **options,
            )
            check_permuted_rows(case, inputs, kept[rank_idx], token, token_probs, x)
            num_kept = sum(place is not None for place in kept[rank_idx])
            assert handle[-1].tolist() == [int(num_kept < sum(raw))]
            assert int(handle[7].sum()) == num_kept
            assert int(counts.sum()) <= len(kept[rank_idx])
            if limit in ("spare", "exact"):
                assert counts.tolist() == padded

            # Dropped rows add nothing, and neither does what nobody wrote.
            token[[place is None for place in kept[rank_idx]]] = float("nan")
            sums, dense = buffer.combine_with_unpermute(
                hidden=token, probs=token_probs, handle=handle, pad_multiple=PAD
            )
            for t in range(mine.num_tokens):
                is_kept = torch.tensor(
                    [(rank_idx, t, e) in survivors for e in range(case.num_experts)]
                )
                terms = [mine.x[t]] * int(is_kept.sum())
                assert torch.equal(sums[t], oracle.summed(terms, mine.x[t]))
                assert torch.equal(dense[t], probs[t] * is_kept)
            assert len(everything) >= num_kept


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("case", [CASES[1], CASES[-1]], ids=str)
def test_limit_of_rows(case: Case, limit: str, backend: str) -> None:
    run_ranks(check_limit, case.num_ranks, case, backend, limit)


def check_plain(context: RankContext, case: Case, backend: str) -> None:
    rank_idx = context.rank_idx
    inputs = oracle.all_given(case)
    mine = inputs[rank_idx]
    routing_map, probs = routing_of(case, mine)
    rows = oracle.arrivals(case, inputs, rank_idx)
    experts = oracle.experts_of(case, rank_idx)
    all_probs = [routing_of(case, each)[1] for each in inputs]
    with oracle.backend_of_group(context, backend):
        buffer = HybridEPBuffer(context.group, case.hidden, 16, len(experts))
        for routing in (
            {"routing_map": routing_map, "probs": probs},
            {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights},
            {"topk_idx": mine.topk_idx, "num_of_experts": case.num_experts},
        ):
            with_probs = "probs" in routing or "topk_weights" in routing
            token, token_probs, scales, handle = buffer.dispatch(mine.x, **routing)
            assert scales is None
            assert token.shape == (len(rows), case.hidden)
            for row, (source, token_idx) in enumerate(rows):
                assert torch.equal(token[row], inputs[source].x[token_idx])
                if with_probs:
                    assert torch.equal(token_probs[row], all_probs[source][token_idx])

            dense_rows, _, _, num_dispatched, local_map, num_tokens, _ = handle
            assert (num_dispatched.tolist(), num_tokens) == ([len(rows)], mine.num_tokens)
            assert local_map.shape[0] >= len(rows)
            assert not local_map[len(rows) :].any()
            for row, (source, token_idx) in enumerate(rows):
                right = routing_of(case, inputs[source])[0][token_idx, list(experts)]
                assert torch.equal(local_map[row], right)
            for peer in range(case.num_ranks):
                there = oracle.arrivals(case, inputs, peer)
                for token_idx in range(mine.num_tokens):
                    place = (rank_idx, token_idx)
                    right = there.index(place) if place in there else -1
                    assert dense_rows[token_idx, peer] == right

            # The same as in DeepEP's test: every expert is the identity, probs are masked to the own slice.
            scaled = token * local_map[: len(rows)].sum(1, keepdim=True)
            masked = None
            if with_probs:
                masked = torch.zeros_like(token_probs)
                masked[:, list(experts)] = token_probs[:, list(experts)]
            sums, dense = buffer.combine(scaled, masked, handle)
            in_rank = oracle.layout(case, mine)[2]
            for t, x in enumerate(mine.x):
                peers = [r for r in range(case.num_ranks) if in_rank[t, r]]
                terms = [
                    x * int(routing_map[t, list(oracle.experts_of(case, r))].sum()) for r in peers
                ]
                assert torch.equal(sums[t], oracle.summed(terms, x))
            assert dense is None if not with_probs else torch.equal(dense, probs)

            again, again_probs, _, same = buffer.dispatch(
                mine.x.float(), probs=probs, handle=handle
            )
            assert same is handle
            assert torch.equal(again, token.float())
            assert token_probs is None or torch.equal(again_probs, token_probs)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain(case: Case, backend: str) -> None:
    run_ranks(check_plain, case.num_ranks, case, backend)


def check_fp8(context: RankContext, case: Case, backend: str) -> None:
    """Bytes and scaling factors travel as they are, whatever they mean."""
    rank_idx = context.rank_idx
    inputs = oracle.all_given(case)
    random = torch.Generator().manual_seed(3)
    hidden = [
        torch.randint(0, 256, (each.num_tokens, case.hidden), generator=random).to(torch.uint8)
        for each in inputs
    ]
    scales = [torch.randn(each.num_tokens, 3, generator=random) for each in inputs]
    routing_map, probs = routing_of(case, inputs[rank_idx])
    places = permuted(case, inputs, rank_idx)[0]
    rows = oracle.arrivals(case, inputs, rank_idx)
    with oracle.backend_of_group(context, backend):
        buffer = HybridEPBuffer(
            context.group, case.hidden, 16, case.num_experts // case.num_ranks, use_fp8=True
        )
        for dtype in (torch.uint8, torch.float8_e4m3fn):
            sent = {"hidden": hidden[rank_idx].view(dtype), "scaling_factor": scales[rank_idx]}
            routing = {"routing_map": routing_map, "probs": probs}
            token, token_probs, factor, handle = buffer.dispatch(**sent, **routing)
            assert token.dtype is dtype
            assert token_probs.shape == (len(rows), case.num_experts)
            for row, (source, token_idx) in enumerate(rows):
                assert torch.equal(token[row].view(torch.uint8), hidden[source][token_idx])
                assert torch.equal(factor[row], scales[source][token_idx])
            sums, _ = buffer.combine(token.view(torch.uint8).bfloat16(), None, handle)
            assert sums.shape == inputs[rank_idx].x.shape

            token, token_probs, factor, _, handle = buffer.dispatch_with_permute(
                **sent, **routing, pad_multiple=PAD, use_fp8=True
            )
            check_permuted_rows(case, inputs, places, token.view(torch.uint8), token_probs, hidden)
            for row, place in enumerate(places):
                right = torch.zeros(3) if place is None else scales[place[0]][place[1]]
                assert torch.equal(factor[row], right)
            # A handle of bytes takes a gradient of another dtype.
            gradient, *_ = buffer.dispatch_with_permute(
                hidden=inputs[rank_idx].x, handle=handle, use_fp8=False
            )
            x = [each.x for each in inputs]
            check_permuted_rows(case, inputs, places, gradient, None, x)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bytes_with_scaling_factors(backend: str) -> None:
    run_ranks(check_fp8, CASES[1].num_ranks, CASES[1], backend)


def check_configuration(context: RankContext) -> None:
    with oracle.backend_of_group(context, "host"):
        buffer = HybridEPBuffer(context.group, 64, 100, 3, num_sms_dispatch_api=8)
        config = buffer.configurer.buffer_config
        assert (config.hidden_dim, config.num_of_experts_per_rank) == (64, 3)
        assert config.max_num_of_tokens_per_rank == 512
        assert config.num_of_blocks_dispatch_api == 8
        assert (buffer.num_of_nodes, buffer.local_rank) == (1, context.rank_idx)
        made = buffer.update_template_config(
            hidden_dim=128, num_of_tokens_per_rank=600, use_fp8=True, num_of_stages_dispatch_api=4
        )
        assert (made.hidden_dim, made.max_num_of_tokens_per_rank) == (128, 640)
        assert (made.token_data_type, made.num_of_stages_dispatch_api) == ("UINT8", 4)
        assert buffer.configurer.buffer_config.max_num_of_tokens_per_rank == 640
        with pytest.raises(TypeError, match="no field 'num_of_wheels'"):
            buffer.update_template_config(num_of_wheels=4)
        buffer.empty_jit_cache()

        # More experts than the buffer was made for.
        case = Case("more", 8, 2, 64, (3, 4))
        inputs = oracle.all_given(case)
        mine = inputs[context.rank_idx]
        routing_map, probs = routing_of(case, mine)
        token, token_probs, _, counts, _ = buffer.dispatch_with_permute(
            hidden=mine.x,
            routing_map=routing_map,
            probs=probs,
            num_of_experts_per_rank=4,
            pad_multiple=PAD,
        )
        rows, _, padded = permuted(case, inputs, context.rank_idx)
        assert counts.tolist() == padded
        check_permuted_rows(case, inputs, rows, token, token_probs, [each.x for each in inputs])


def test_configuration() -> None:
    run_ranks(check_configuration, 2)


def test_indices_to_map() -> None:
    topk_idx = torch.tensor([[2, -1], [0, 3], [-1, -1]])
    weights = torch.tensor([[0.5, 9.0], [0.25, 0.75], [9.0, 9.0]])
    routing_map, probs = indices_to_map(topk_idx, weights, 3, 4)
    assert routing_map.tolist() == [
        [False, False, True, False],
        [True, False, False, True],
        [False, False, False, False],
    ]
    assert probs.tolist() == [[0, 0, 0.5, 0], [0.25, 0, 0, 0.75], [0, 0, 0, 0]]
    assert indices_to_map(topk_idx.to(torch.int16), None, 3, 4)[1] is None
