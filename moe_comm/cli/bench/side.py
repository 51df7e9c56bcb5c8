"""Side of a comparison, measured or compared with, on one rank: a case, its calls and their data."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import torch

from moe_comm.cli.bench.barrier import SpinBarrier
from moe_comm.cli.bench.case import BenchCase, make_topk_idx
from moe_comm.cli.bench.measured_calls import Exchange, Received
from moe_comm.cli.bench.oracle import check_combine, check_dispatch, run_experts
from moe_comm.cli.bench.rank import synchronize
from moe_comm.cli.bench.replicas import slots_of_rank
from moe_comm.cli.bench.roof import DeviceRoof, Roof, make_roof
from moe_comm.cli.bench.statistics import Interval
from moe_comm.cli.bench.traffic import rank_traffic
from moe_comm.ep.handles import DispatchResult
from moe_comm.nn import GroupedExperts

NUM_CHECKED_TOKENS = 4


def _on_cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu()


class Side:
    """One case on one rank.

    Args:
        case: The case.
        rank_idx: This rank.
        exchange: Exchange that is called.
        x: `[num_tokens, hidden]`.
    """

    def __init__(self, case: BenchCase, rank_idx: int, exchange: Exchange, x: torch.Tensor) -> None:
        self.case = case
        self.rank_idx = rank_idx
        self.exchange = exchange
        self.x = x
        self.traffic = rank_traffic(case, rank_idx)
        self.result: Received | None = None
        # Made by `check`.
        self.expert_out: torch.Tensor
        self.ordinary_out: torch.Tensor
        self.sums: torch.Tensor
        self.roof: Roof | DeviceRoof | None = None
        # Made by `prepare_experts`.
        self.experts: GroupedExperts

    def check(self, scratch: Side | None, barrier: SpinBarrier) -> str | None:
        """Compare a dispatch and both combines with the oracle, then prepare the timed calls.

        Args:
            scratch: Side whose expert outputs are shared if they have the same shape, as they are
                large; or None.
            barrier: Barrier of the ranks.

        Returns:
            None, or what is wrong.
        """
        case = self.case
        result = self.exchange.dispatch()
        with self._without_kernels(barrier):
            x, x_sf = result.x.cpu(), _on_cpu(result.x_sf)  # the oracle's; themselves on the CPU
            problem = check_dispatch(case, self.rank_idx, x, x_sf, _on_cpu(result.topk_weights))
            if problem is not None and result.x.shape[0] != self.traffic.num_window_rows:
                return problem
            self.handle = result.handle
            if scratch is not None and scratch.expert_out.shape == result.x.shape:
                self.expert_out, self.ordinary_out = scratch.expert_out, scratch.ordinary_out
            else:
                self.expert_out = self.exchange.empty_expert_output(self.handle)
                self.ordinary_out = torch.empty_like(self.expert_out)
            expert_out = self.expert_out.cpu()
            run_experts(case, self.rank_idx, x, expert_out, x_sf)
            if expert_out is not self.expert_out:
                self.expert_out.copy_(expert_out)
            self.ordinary_out.copy_(self.expert_out)
        # The window goes back, as in a model whose experts have read it.
        del result, x, x_sf
        for expert_out in (self.expert_out, self.ordinary_out):
            self.sums = self.exchange.combine(expert_out, self.handle)
            with self._without_kernels(barrier):
                problem = problem or check_combine(case, self.rank_idx, self.sums.cpu())
        return problem

    def prepare_experts(self, barrier: SpinBarrier) -> str | None:
        """Make the experts in the slots of this rank, and compare a few sums with experts run here.

        Returns:
            None, or what is wrong.
        """
        case = self.case
        self.experts = self._make_experts(slots_of_rank(case, self.rank_idx))
        self.run_layer()
        with self._without_kernels(barrier):
            x = self.x[:NUM_CHECKED_TOKENS]
            chosen = make_topk_idx(case, self.rank_idx)[: len(x)].to(x.device)
            expected = torch.zeros_like(x)
            with torch.no_grad():
                for expert_idx in {*chosen.flatten().tolist()}:
                    if expert_idx >= 0:
                        ends = torch.tensor([0, len(x)], dtype=torch.int32, device=x.device)
                        rows = self._make_experts([expert_idx])(x, ends)
                        expected += rows * (chosen == expert_idx).sum(1, keepdim=True)
            difference = (self.sums[: len(x)] - expected).abs()
            # Sums are rounded in different orders; those of another expert differ by the whole.
            limit = torch.finfo(x.dtype).eps ** 0.5 * float(expected.abs().max()) if len(x) else 0.0
            if bool((difference > limit).any()):
                return (
                    f"rank {self.rank_idx} got sums of experts that differ by {float(difference.max())} "
                    f"from those of experts run here, expected at most {limit}"
                )
        return None

    def _make_experts(self, expert_ids: list[int]) -> GroupedExperts:
        case = self.case
        sizes = (case.hidden, case.ffn_hidden)
        experts = GroupedExperts(expert_ids, *sizes, dtype=case.torch_dtype, seed=case.seed)
        return experts.to(self.x.device)

    def run_layer(self) -> None:
        """Dispatch, two matrix products for the rows of every slot, combine."""
        result = self.exchange.dispatch()
        assert isinstance(result, DispatchResult)
        with torch.no_grad():
            out = self.experts(result.x, result.expert_offsets)
        self.sums = self.exchange.combine(out, result.handle)

    def count_rows(self) -> int:
        """Rows that a dispatch brings this rank, without padding."""
        result = self.exchange.dispatch()
        assert isinstance(result, DispatchResult)
        return int(result.num_tokens_per_expert.sum())

    @contextlib.contextmanager
    def _without_kernels(self, barrier: SpinBarrier) -> Iterator[None]:
        """All ranks are within at once, and none of them has a kernel that waits for another rank.

        On a GPU that ranks share as threads, copies of pageable memory and allocations may wait for
        the kernels of every rank.
        """
        if self.x.device.type == "cpu":
            yield
            return
        synchronize(self.x.device)
        barrier.wait()
        yield
        barrier.wait()

    def call(self, operation: str) -> Callable[[], None]:
        """Return the function that is timed as `operation`."""

        def dispatch() -> None:
            self.result = self.exchange.dispatch()

        def combine() -> None:
            self.sums = self.exchange.combine(self.expert_out, self.handle)

        def combine_copy_in() -> None:
            self.sums = self.exchange.combine(self.ordinary_out, self.handle)

        return {
            "dispatch": dispatch,
            "combine": combine,
            "combine_copy_in": combine_copy_in,
            "dispatch+experts+combine": self.run_layer,
        }[operation]

    def run_back_to_back(self, barrier: SpinBarrier, num_iterations: int) -> list[Interval]:
        """Time dispatch + combine in place, one after the other, without a barrier in between.

        What was dispatched is what is combined; where it is quantized, an expert output is.
        """
        dispatch, combine = self.exchange.dispatch, self.exchange.combine
        expert_out = None if self.case.quantization is None else self.expert_out
        intervals = []
        barrier.wait()
        for _ in range(num_iterations):
            start = time.perf_counter_ns()
            result = dispatch()
            combine(result.x if expert_out is None else expert_out, result.handle)
            synchronize(self.x.device)
            intervals.append((start, time.perf_counter_ns()))
        return intervals

    def prepare_roof(self) -> bool:
        """Make the roof; returns whether there is one."""
        # The expert output is its scratch: checked by now, and what it holds stays as random.
        self.roof = make_roof(self.traffic, self.x, self.expert_out, self.sums, self.ordinary_out)
        return self.roof is not None

    def run_roof(self, operation: str) -> None:
        """The bytes of `operation` by plain loops."""
        assert self.roof is not None
        if operation == "dispatch":
            self.roof.dispatch()
            return
        if operation == "combine_copy_in":
            self.roof.copy_in()
        self.roof.combine()

    def roof_bytes(self) -> dict[str, int]:
        """Bytes the roofs move on this rank, by operation; empty without a roof."""
        if self.roof is None:
            return {}
        return {
            "dispatch": self.roof.dispatch_bytes,
            "combine": self.roof.combine_bytes,
            "combine_copy_in": self.roof.combine_bytes + self.roof.copy_in_bytes,
        }
