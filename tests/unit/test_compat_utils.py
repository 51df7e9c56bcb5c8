"""`deep_ep.utils`, and what test programs of DeepEP import of it besides."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moe_comm.compat.deep_ep import EventHandle, EventOverlap
from moe_comm.compat.deep_ep.utils import per_token_cast_back, per_token_cast_to_fp8
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.deep_ep_utils import envs, gate, math, refs, testing


def test_an_event_has_one_hook() -> None:
    event = EventOverlap(EventHandle())
    seen = []
    assert event.hook_after_wait is None

    def hook() -> None:
        seen.append(event.hook_after_wait)

    event.register_hook_after_wait(hook)
    assert event.hook_after_wait is hook
    with pytest.raises(ValueError, match="one hook at a time"):
        event.register_hook_after_wait(print)
    event.current_stream_wait()
    event.current_stream_wait()
    assert seen == [None]
    event.register_hook_after_wait(hook)  # and another one after it


def test_arithmetic() -> None:
    assert (math.safe_div(0, 0), math.safe_div(1, 4)) == (0, 0.25)
    with pytest.raises(ZeroDivisionError):
        math.safe_div(1, 0)
    x = torch.tensor([[3, 1, 3, -1], [0, 0, 0, 0], [-1, -1, -1, -1], [0, 1, 2, 3]])
    math.inplace_unique(x, 4)
    assert x.tolist() == [[3, 1, -1, -1], [0, -1, -1, -1], [-1] * 4, [3, 2, 1, 0]]
    narrow = torch.tensor([[1, 0, 1]])
    math.inplace_unique(narrow, 2)
    assert narrow.tolist() == [[1, 0, -1]]
    scores = torch.arange(1.0, 9.0).view(1, 8)
    chosen = math.create_grouped_scores(scores, torch.tensor([[0, 3]]), 4)
    assert chosen.tolist() == [[1, 2, 0, 0, 0, 0, 7, 8]]
    a, b = torch.tensor([5, 7], dtype=torch.int32), torch.tensor([1.0])
    assert math.hash_tensor(a) == 12
    assert math.hash_tensors(a, (b, None), [a]) == math.hash_tensor(b) == 0x3F800000
    assert math.count_bytes(a, (b, None), [a.to(torch.int64)]) == 8 + 4 + 16


def test_scales_may_have_another_shape() -> None:
    x = torch.randn(8, 512)
    for is_packed in (False, True):
        data, scales = per_token_cast_to_fp8(x, round_scale=is_packed, use_ue8m0=is_packed)
        right = per_token_cast_back(data, scales)
        flat = scales.contiguous().reshape(2, -1)
        assert torch.equal(per_token_cast_back(data, flat), right)
        assert math.calc_diff(right, x) < 2e-3


@pytest.mark.parametrize("precise", [True, False])
@pytest.mark.parametrize(("num_ranks", "num_local_experts"), [(2, 8), (8, 8), (16, 1)])
@pytest.mark.parametrize("ratio", [1.0, 2.0, 4.0])
def test_rank_0_gets_more_tokens(
    precise: bool, num_ranks: int, num_local_experts: int, ratio: float
) -> None:
    num_topk = 4 if num_ranks > 2 else 2
    num_experts, num_tokens = num_ranks * num_local_experts, 4096
    scores = gate.get_unbalanced_scores(
        num_tokens, num_experts, num_ranks, num_topk, ratio, precise
    )
    assert (scores.shape, scores.dtype) == ((num_tokens, num_experts), torch.float32)
    ranks = scores.topk(num_topk).indices // num_local_experts
    in_rank = torch.zeros(num_tokens, num_ranks).scatter_(1, ranks, 1.0)
    first, *others = in_rank.sum(0).tolist()
    mean = sum(others) / len(others)
    # Tokens that like it better by chance are not more than all: a bound of the second kind.
    reachable = min(ratio, num_tokens / mean)
    assert first / mean == pytest.approx(reachable, rel=0.02 if precise else 0.1)
    if precise:
        assert max(others) - min(others) <= 1


def test_a_ratio_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"at least 1, got 0\.5"):
        gate.get_unbalanced_scores(8, 8, 4, 2, 0.5, True)
    with pytest.raises(ValueError, match="1 ranks of 2 experts are too few"):
        gate.get_unbalanced_scores(8, 8, 4, 3, 4.0, True)


def test_benches_count_their_calls(tmp_path: Path) -> None:
    calls: list[str] = []
    times = testing.bench(lambda: calls.append("fn"), 3, 4, lambda: calls.append("post"))
    assert (calls.count("fn"), calls.count("post")) == (7, 4)
    mean, least, most = times
    assert 0 < least <= mean <= most
    assert len(testing.bench(lambda: None, 0, 1)) == 3
    calls.clear()
    names = ("dispatch", "combine")
    times = testing.bench_kineto(
        lambda: calls.append("fn"),
        names,
        5,
        num_kernels_per_period=2,
        barrier_comm_profiling=True,
        barrier=lambda: calls.append("barrier"),
    )
    assert calls == ["fn", "barrier"] * 5
    assert times == (times[0], times[0])
    assert len(times[0]) == 2
    assert isinstance(testing.bench_kineto(lambda: None, "dispatch"), float)
    with pytest.raises(NotImplementedError, match="trace_path must be None"):
        testing.bench_kineto(lambda: None, "dispatch", trace_path=str(tmp_path))


def test_numbers_of_bytes() -> None:
    given = ("7", "512K", "64m", "1G")
    assert [testing.parse_num_bytes(each) for each in given] == [7, 512 << 10, 64 << 20, 1 << 30]
    for wrong in ("", "K", "-1K", "1.5M", "1T"):
        with pytest.raises(ValueError, match=f"got {wrong!r}"):
            testing.parse_num_bytes(wrong)


def test_sums_of_the_reference() -> None:
    # Numbers of bfloat16 from 1 on are 8 / 1024 apart. Two experts on either of two ranks.
    y = torch.tensor([1.0, 3 / 1024, 2 / 1024]).to(torch.bfloat16).view(1, 3, 1)
    for choices, reduces, right in (
        ([0, 1, 2], False, 1 + 8 / 1024),  # 5 / 1024, rounded once
        ([0, 1, 2], True, 1.0),  # 3 / 1024 are lost on rank 0
        ([0, 2, 3], True, 1 + 8 / 1024),  # they are added to the others on rank 1
        ([0, -1, 2], True, 1.0),
    ):
        topk_idx = torch.tensor([choices])
        given = y.masked_fill((topk_idx < 0)[:, :, None], 0)
        assert refs.combine(given, topk_idx, 1, 2, 4, None, reduces, False).item() == right
    biases = (torch.full((1, 1), 0.25), torch.full((1, 1), 0.5))
    assert refs.combine(y, topk_idx, 1, 2, 4, biases, True, True).item() == 1.75
    started = refs.ordered_accumulate(torch.ones(2, 3, 4), torch.full((2, 4), 0.5))
    assert started.tolist() == [[3.5] * 4] * 2


def check_envs(context: RankContext) -> tuple[int, int, list[float]]:
    envs.init_seed(5)
    drawn = [float(torch.rand(())), random.random()]
    assert (envs.get_global_seed(), envs.get_local_seed()) == (5, 5 + context.rank_idx)
    assert envs.get_physical_domain_size(context.group) == (1, context.num_ranks)
    envs.check_nvlink_connections(context.group)
    envs.dist_print("line", once_in_node=True)
    x, idx, weights, source, counts = refs.dispatch(
        torch.full((2, 4), float(context.rank_idx)),
        torch.tensor([[0, -1], [3, 1]]),
        torch.tensor([[0.5, 0.0], [1.0, 2.0]]),
        2,
        4,
    )
    first = context.rank_idx * 2
    right = [[0, -1], [-1, 1]] if first == 0 else [[1, -1]]
    assert idx.tolist() == right * 2
    assert weights is not None
    assert source.tolist() == ([0, 1, 2, 3] if first == 0 else [1, 3])
    assert counts.tolist() == [len(right)] * 2
    assert isinstance(x, torch.Tensor)
    assert x[:, 0].tolist() == [0.0] * len(right) + [1.0] * len(right)
    waves = refs.generate_pre_combine_data(source, 2, 2, 8)
    assert (waves.shape, waves.dtype) == ((len(source), 2, 8), torch.bfloat16)
    assert len(torch.unique(waves.flatten(0, 1), dim=0)) == 2 * len(source)
    return envs.get_local_seed(), len(source), drawn


def test_ranks_of_a_program() -> None:
    (seed, _, drawn), (other_seed, _, other_drawn) = run_ranks(check_envs, 2)
    assert (seed, other_seed) == (5, 6)
    assert not set(drawn) & set(other_drawn)
