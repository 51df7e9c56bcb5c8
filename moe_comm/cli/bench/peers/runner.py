"""Times one pipeline on one rank; the same code for every transport."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from moe_comm.cli.bench.barrier import SpinBarrier
from moe_comm.cli.bench.case import BenchCase, make_x
from moe_comm.cli.bench.oracle import check_combine, check_dispatch, run_experts
from moe_comm.cli.bench.peers.pipeline import AllToAllPipeline, Transport
from moe_comm.cli.bench.statistics import Interval

# The library's gather-and-add rounds its bfloat16 sums in its own way.
PEER_MAX_ULPS = 2


class PipelineRunner:
    """A pipeline with its data.

    Args:
        case: The case.
        rank_idx: This rank.
        transport: The all-to-all.
        barrier: Barrier of the ranks of this pipeline.
        x: `[num_tokens, hidden]`, or None to make it.
    """

    def __init__(
        self,
        case: BenchCase,
        rank_idx: int,
        transport: Transport,
        barrier: SpinBarrier,
        x: torch.Tensor | None = None,
    ) -> None:
        self.case = case
        self.rank_idx = rank_idx
        self.barrier = barrier
        self.pipeline = AllToAllPipeline(
            case, rank_idx, make_x(case, rank_idx) if x is None else x, transport
        )

    def check(self) -> None:
        """Compare one dispatch and combine with the oracle.

        The experts work in place: a pipeline holds three large buffers already.

        Raises:
            AssertionError: The pipeline is wrong, so its time means nothing.
        """
        expert_x = self.pipeline.dispatch()
        problem = check_dispatch(self.case, self.rank_idx, expert_x)
        run_experts(self.case, self.rank_idx, expert_x, expert_x)
        sums = self.pipeline.combine(expert_x)
        problem = problem or check_combine(self.case, self.rank_idx, sums, max_ulps=PEER_MAX_ULPS)
        if problem is not None:
            raise AssertionError(problem)

    def run(self, operation: str, num_iterations: int) -> list[Interval]:
        """Time `"dispatch"` or `"combine"` one by one, or `"dispatch+combine"` back to back."""
        calls: dict[str, Callable[[], torch.Tensor]] = {
            "dispatch": self.pipeline.dispatch,
            "combine": lambda: self.pipeline.combine(self.pipeline.expert_x),
            "dispatch+combine": lambda: self.pipeline.combine(self.pipeline.dispatch()),
        }
        call = calls[operation]
        is_back_to_back = operation == "dispatch+combine"
        intervals = []
        self.barrier.wait()
        for _ in range(num_iterations):
            if not is_back_to_back:
                self.barrier.wait()
            start = time.perf_counter_ns()
            call()
            intervals.append((start, time.perf_counter_ns()))
        return intervals
