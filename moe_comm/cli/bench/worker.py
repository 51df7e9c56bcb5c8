"""One rank of the benchmark: a process that checks, times and measures when its parent asks."""

from __future__ import annotations

import dataclasses
import mmap
import time
from pathlib import Path
from typing import Any

import torch

from moe_comm.cli.bench.case import BenchCase, make_topk_idx, make_x
from moe_comm.cli.bench.measured_calls import Exchange, HybridEpExchange, NativeExchange
from moe_comm.cli.bench.memory import WindowMemory, window_memory
from moe_comm.cli.bench.options import BenchOptions
from moe_comm.cli.bench.peers.gloo import exchange_by_gloo
from moe_comm.cli.bench.peers.runner import PipelineRunner
from moe_comm.cli.bench.rank import RankWorker, Sample
from moe_comm.cli.bench.side import Side
from moe_comm.cli.bench.statistics import Interval
from moe_comm.ep.autograd import dispatch as differentiable_dispatch
from moe_comm.ep.group_buffers import group_buffers
from moe_comm.ep.tracing import PhaseRecord
from moe_comm.peers import cuda_devices
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator import Communicator


class Worker(RankWorker):
    """One rank that dispatches and combines.

    Args:
        case: The case.
        options: Options of the run.
        folder: As in `RankWorker`, like the next two.
        rank_idx: See there.
        group: See there.
    """

    def __init__(
        self,
        case: BenchCase,
        options: BenchOptions,
        folder: Path,
        rank_idx: int,
        group: Bootstrap | None = None,
    ) -> None:
        super().__init__(case.num_ranks, folder, rank_idx, is_pinned=options.is_pinned, group=group)
        self.case = case
        if options.backend == "cuda":
            take = cuda_devices.take_device if group is None else cuda_devices.take_stream
            take(rank_idx)
        self.communicator = Communicator(
            group,
            backend=options.backend,
            device="cuda" if options.backend == "cuda" else "cpu",
            num_threads=options.num_threads,
            num_sms=options.num_sms,
            with_huge_pages=options.with_huge_pages,
            num_local_ranks=options.num_local_ranks,
            rail=options.rail,
            check_messages=case.check_messages,
        )
        self._unchecked: Communicator | None = None
        if case.check_messages:
            self._unchecked = Communicator(
                group,
                parent=self.communicator,
                backend=options.backend,
                num_threads=options.num_threads,
                rail=options.rail,
            )
        # The buffers that these functions find for the group, so that both sides use one heap.
        groups = group_buffers(self.communicator) if case.api == "hybrid_ep" else None
        self.device = self.communicator.device
        x = make_x(case, rank_idx, _huge_page_rows(case) if case.with_huge_page_x else None)
        self.x = x.to(self.device)
        self.groups = groups
        self.sides = [self._make_side(case)]
        if case.baseline is not None:
            self.sides.append(self._make_side(case.baseline[1]))
        self.gloo: PipelineRunner | None = None
        self.collective: Side | None = None

    def check(self) -> str | None:
        """Compare every side with the oracle, then prepare the timed calls.

        Returns:
            None, or what is wrong.
        """
        first: Side | None = None
        for side in self.sides:
            problem = side.check(first, self.barrier)
            if problem is not None:
                return problem
            first = first or side
        case = self.case
        if case.placement is not None and not torch.equal(*(side.sums for side in self.sides)):
            assert case.baseline is not None
            return f"rank {self.rank_idx} has sums that differ from those of {case.baseline[0]}"
        return None

    def prepare_experts(self) -> str | None:
        """Make the experts of every side; returns None, or what is wrong with their sums."""
        problems = [side.prepare_experts(self.barrier) for side in self.sides]
        return next((problem for problem in problems if problem is not None), None)

    def count_rows(self) -> list[int]:
        """Rows that a dispatch of every side brings this rank."""
        return [side.count_rows() for side in self.sides]

    def measure_memory(self) -> dict[str, WindowMemory]:
        """Windows of this rank that are resident, with an expert output in the heap and one outside.

        Runs one dispatch and combine of each kind, as a model does, holding what a model holds.
        """
        # The scratch of the roofs must not count, nor what the other side holds.
        self.release_roof()
        del self.sides[1:]
        side, exchange = self.sides[0], self.sides[0].exchange
        side.result = None
        del side.expert_out, side.sums
        self._trim()
        stages: dict[str, WindowMemory] = {}
        result = exchange.dispatch()
        stages["dispatch"] = window_memory()
        expert_out = exchange.empty_expert_output(result.handle)
        expert_out.copy_(side.ordinary_out)
        sums = exchange.combine(expert_out, result.handle)
        stages["combine"] = window_memory()
        del expert_out, sums
        self._trim()
        sums = exchange.combine(side.ordinary_out, result.handle)
        stages["combine_copy_in"] = window_memory()
        side.expert_out = exchange.empty_expert_output(result.handle)
        side.expert_out.copy_(side.ordinary_out)
        side.sums = sums
        return stages

    def prepare_roof(self) -> bool:
        """Make the roof of every side; returns whether they have one."""
        have_roofs = [side.prepare_roof() for side in self.sides]
        return all(have_roofs)

    def release_roof(self) -> None:
        """Give the scratch of the roofs back."""
        for side in self.sides:
            side.roof = None

    def roof_bytes(self, side_idx: int) -> dict[str, int]:
        """Bytes the roofs of a side move on this rank, by operation; empty without a roof."""
        return self.sides[side_idx].roof_bytes()

    def sample(self, operation: str, side_idx: int) -> Sample:
        """Time `operation` of a side once between two roofs."""
        side = self.sides[side_idx]

        def run_roof() -> None:
            side.run_roof(operation)

        before = self._timed(run_roof) if side.roof is not None else None
        # The result of an earlier call goes back first: a model does not hold it either.
        for each in self.sides:
            each.result = None
        op = self._timed(side.call(operation))
        after = self._timed(run_roof) if side.roof is not None else None
        return Sample(op=op, roof_before=before, roof_after=after)

    def run_back_to_back(self, num_iterations: int, side_idx: int) -> list[Interval]:
        """When every dispatch + combine of a side began and ended, in nanoseconds."""
        for side in self.sides:
            side.result = None
        return self.sides[side_idx].run_back_to_back(self.barrier, num_iterations)

    def compare_differentiable(self, num_iterations: int) -> dict[str, list[Interval]]:
        """Time `moe_comm.dispatch` (with a gradient) and `EpBuffer.dispatch` in turns."""
        side, exchange = self.sides[0], self.sides[0].exchange
        assert isinstance(exchange, NativeExchange)
        buffer = exchange.buffer
        topk_idx = make_topk_idx(self.case, self.rank_idx).to(self.device)
        layout, alignment = self.case.layout, self.case.expert_alignment
        # The leaf shares x's memory, so both read the same rows.
        leaf = self.x.detach().requires_grad_(self.x.is_floating_point())
        intervals: dict[str, list[Interval]] = {"eager": [], "differentiable": []}
        side.result = None
        self.barrier.wait()
        for _ in range(num_iterations):
            start = time.perf_counter_ns()
            result = buffer.dispatch(self.x, topk_idx, layout=layout, expert_alignment=alignment)
            intervals["eager"].append((start, time.perf_counter_ns()))
            buffer.combine(result.x, result.handle)
            start = time.perf_counter_ns()
            recorded = differentiable_dispatch(
                leaf, topk_idx, buffer=buffer, layout=layout, expert_alignment=alignment
            )
            intervals["differentiable"].append((start, time.perf_counter_ns()))
            buffer.combine(recorded.x.detach(), result.handle)
            del result, recorded
        return intervals

    def prepare_gloo(self) -> None:
        """Make and check the Gloo pipeline; raises AssertionError if it is wrong."""
        self.gloo = PipelineRunner(self.case, self.rank_idx, exchange_by_gloo, self.barrier, self.x)
        self.gloo.check()

    def run_gloo(self, operation: str, num_iterations: int) -> list[Interval]:
        """Time the Gloo pipeline."""
        assert self.gloo is not None
        return self.gloo.run(operation, num_iterations)

    def prepare_collective(self) -> None:
        """Make and check the package's own collective backend; raises AssertionError if it is wrong."""
        communicator = Communicator(backend="collective")
        exchange = NativeExchange(communicator, self.case, self.rank_idx, self.x)
        self.collective = Side(self.case, self.rank_idx, exchange, self.x)
        problem = self.collective.check(self.sides[0], self.barrier)
        if problem is not None:
            raise AssertionError(problem)

    def run_collective(self, operation: str, num_iterations: int) -> list[Interval]:
        """Time the collective backend."""
        side = self.collective
        assert side is not None
        if operation == "dispatch+combine":
            return side.run_back_to_back(self.barrier, num_iterations)
        intervals = []
        for _ in range(num_iterations):
            side.result = None
            intervals.append(self._timed(side.call(operation)))
        side.result = None
        return intervals

    def internode_bytes(self) -> int:
        """Bytes this rank has sent to other nodes so far, as its rail counts them."""
        exchange = self.sides[0].exchange
        assert isinstance(exchange, NativeExchange)
        return exchange.buffer._backend.internode_bytes()[0]

    def record_trace(self, num_iterations: int) -> list[PhaseRecord]:
        """Run dispatch and combine and record every phase; host backend only."""
        # Here, because the other backends work without the native module.
        from moe_comm.ep.backends.host import HostBackend

        exchange = self.sides[0].exchange
        assert isinstance(exchange, NativeExchange)
        backend = exchange.buffer._backend
        assert isinstance(backend, HostBackend)
        # The first call switches recording on; what it returns is older.
        backend.take_trace()
        self.run_back_to_back(num_iterations, 0)
        return backend.take_trace()

    def describe(self) -> dict[str, Any]:
        """Describe the backend and device that this rank runs on, for the header."""
        stats = self.communicator.heap_stats() if self.communicator.native is not None else None
        return {
            "backend": self.communicator.backend,
            "device": (
                f"{self.device}: {torch.cuda.get_device_name(self.device)}"
                if self.device.type == "cuda"
                else "cpu"
            ),
            "num_sms": None if self.communicator.gpu is None else self.communicator.gpu.num_sms,
            "heap": dataclasses.asdict(stats) if stats is not None else None,
        }

    def close(self) -> None:
        """Leave in good order."""
        self.release_roof()
        for side in self.sides:
            if isinstance(side.exchange, NativeExchange):
                side.exchange.buffer.destroy()
        if self.collective is not None:
            assert isinstance(self.collective.exchange, NativeExchange)
            self.collective.exchange.buffer.destroy()
        if self.groups is not None:
            self.groups.destroy()
        self.communicator.destroy()
        super().close()

    def _make_side(self, case: BenchCase) -> Side:
        exchange: Exchange
        if case.api == "hybrid_ep":
            assert self.groups is not None
            exchange = HybridEpExchange(self.groups, case, self.rank_idx, self.x)
        else:
            communicator = self.communicator
            if case.check_messages != communicator.check_messages:
                assert self._unchecked is not None
                communicator = self._unchecked
            exchange = NativeExchange(communicator, case, self.rank_idx, self.x)
        return Side(case, self.rank_idx, exchange, self.x)

    def _trim(self) -> None:
        if self.communicator.native is not None:
            self.communicator.trim()


def _huge_page_rows(case: BenchCase) -> torch.Tensor:
    """`[num_tokens, hidden]` in private memory for which 2 MiB pages were asked."""
    num_bytes = max(1, case.num_tokens * case.row_bytes)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=case.torch_dtype, count=case.num_tokens * case.hidden)
    return flat.view(case.num_tokens, case.hidden)
