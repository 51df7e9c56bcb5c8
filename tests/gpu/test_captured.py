"""Operations captured with torch.cuda.graph, replayed while one rank is late at random."""

from __future__ import annotations

import random
import time

import pytest
import torch

from moe_comm import Capacity, Communicator, EpBuffer, EpConfig
from moe_comm.testing import RankContext, run_ranks

NUM_REPLAYS = 1000
CONFIG = EpConfig(num_experts=8, num_topk=2, hidden=256, num_max_tokens_per_rank=64)
NUM_TOKENS = 33

pytestmark = pytest.mark.gpu(1)


def _replay_and_compare(context: RankContext) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    late = random.Random(context.rank_idx)
    num_rows = context.num_ranks * NUM_TOKENS * 2
    capacity = Capacity(num_rows=num_rows, on_overflow="drop")
    with (
        Communicator(context.group, device=device) as communicator,
        EpBuffer(communicator, CONFIG) as buffer,
    ):
        x = torch.zeros(NUM_TOKENS, 256, dtype=torch.bfloat16, device=device)
        topk_idx = torch.zeros(NUM_TOKENS, 2, dtype=torch.int64, device=device)
        weights = torch.zeros(NUM_TOKENS, 2, device=device)

        def exchange() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
            result = buffer.dispatch(x, topk_idx, weights, capacity=capacity)
            y = buffer.combine(result.x * 2, result.handle, topk_weights=weights)
            return result.x, y, result.status

        communicator.reserve(1 << 24)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            rows, sums, status = exchange()
        generator = torch.Generator().manual_seed(context.rank_idx)
        for turn in range(NUM_REPLAYS):
            x.copy_(torch.randn(x.shape, generator=generator))
            topk_idx.copy_(torch.randint(-1, 8, topk_idx.shape, generator=generator))
            weights.copy_(torch.rand(weights.shape, generator=generator))
            if late.random() < 0.05:
                time.sleep(late.random() / 50)
            graph.replay()
            if turn % 50:
                continue
            assert status[0].item() == 0
            captured_rows, captured_sums = rows.clone(), sums.clone()
            eager_rows, eager_sums, _ = exchange()
            assert torch.equal(captured_rows.view(torch.uint8), eager_rows.view(torch.uint8))
            assert torch.equal(captured_sums.view(torch.uint8), eager_sums.view(torch.uint8))
        torch.cuda.synchronize()


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_replays_give_what_eager_calls_give(num_ranks: int) -> None:
    # Processes: what one rank captures must not forbid calls of another.
    run_ranks(_replay_and_compare, num_ranks, mode="processes", timeout_s=250.0)
