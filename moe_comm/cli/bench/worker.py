"""One rank of the benchmark: a process that checks, times and measures when its parent asks."""

from __future__ import annotations

import dataclasses
import mmap
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moe_comm.autograd import dispatch as differentiable_dispatch
from moe_comm.buffer import EpBuffer
from moe_comm.cli.bench.barrier import SpinBarrier, bind_to_core
from moe_comm.cli.bench.case import BenchCase, make_topk_idx, make_x
from moe_comm.cli.bench.memory import WindowMemory, window_memory
from moe_comm.cli.bench.oracle import check_combine, check_dispatch, run_experts
from moe_comm.cli.bench.peers.gloo import GlooTransport
from moe_comm.cli.bench.peers.runner import PipelineRunner
from moe_comm.cli.bench.roof import Roof, make_roof
from moe_comm.cli.bench.statistics import Interval
from moe_comm.cli.bench.traffic import rank_traffic
from moe_comm.communicator import Communicator
from moe_comm.handles import DispatchResult
from moe_comm.tracing import PhaseRecord

__all__ = ["Launch", "Sample", "Worker", "worker_main"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """What the ranks of one run share.

    Args:
        case: The case.
        backend: Of the communicator.
        folder: Files for rendezvous and barrier.
        num_threads: Of the communicator; None for its own choice.
        with_huge_pages: Of the communicator.
        is_pinned: Every rank is bound to one core.
    """

    case: BenchCase
    backend: str
    folder: Path
    num_threads: int | None = None
    with_huge_pages: bool = True
    is_pinned: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One operation on one rank, between two roofs (None where there is no roof)."""

    op: Interval
    roof_before: Interval | None
    roof_after: Interval | None


class Worker:
    """One rank; every method is called on all ranks in the same order.

    Args:
        launch: The run.
        rank_idx: This rank.
    """

    def __init__(self, launch: Launch, rank_idx: int) -> None:
        # Rows are moved by the communicator's threads; torch's own would compete for the cores.
        torch.set_num_threads(1)
        if launch.is_pinned:
            bind_to_core(rank_idx)
        case = launch.case
        self.case = case
        self.rank_idx = rank_idx
        dist.init_process_group(
            "gloo",
            init_method=f"file://{launch.folder / 'rendezvous'}",
            rank=rank_idx,
            world_size=case.num_ranks,
        )
        self.barrier = SpinBarrier(launch.folder / "barrier", rank_idx, case.num_ranks)
        self.communicator = Communicator(
            backend=launch.backend,
            num_threads=launch.num_threads,
            with_huge_pages=launch.with_huge_pages,
        )
        self.memory_before = window_memory()
        self.buffer = EpBuffer(self.communicator, case.config)
        self.x = make_x(case, rank_idx, _huge_page_rows(case) if case.with_huge_page_x else None)
        self.topk_idx = make_topk_idx(case, rank_idx)
        self.traffic = rank_traffic(case, rank_idx)
        self.result: DispatchResult | None = None
        self.gloo: PipelineRunner | None = None
        self.roof: Roof | None = None

    def check(self) -> str | None:
        """Compare a dispatch and both combines with the oracle, then prepare the timed calls.

        Returns:
            None, or what is wrong.
        """
        case = self.case
        result = self._dispatch()
        problem = check_dispatch(case, self.rank_idx, result.x)
        self.handle = result.handle
        self.expert_out = self.buffer.empty_expert_output(self.handle)
        run_experts(case, self.rank_idx, result.x, self.expert_out)
        self.ordinary_out = self.expert_out.clone()
        # The window goes back, as in a model whose experts have read it.
        del result
        self.result = None
        for expert_out in (self.expert_out, self.ordinary_out):
            self.sums = self.buffer.combine(expert_out, self.handle)
            problem = problem or check_combine(case, self.rank_idx, self.sums)
        return problem

    def measure_memory(self) -> dict[str, WindowMemory]:
        """Windows of this rank that are resident, with an expert output in the heap and one outside.

        Runs one dispatch and combine of each kind, as a model does, holding what a model holds.
        """
        self.result = None
        # The scratch of the roofs must not count.
        self.release_roof()
        del self.expert_out, self.sums
        self._trim()
        stages: dict[str, WindowMemory] = {}
        result = self._dispatch()
        stages["dispatch"] = window_memory()
        expert_out = self.buffer.empty_expert_output(result.handle)
        expert_out.copy_(self.ordinary_out)
        sums = self.buffer.combine(expert_out, result.handle)
        stages["combine"] = window_memory()
        del expert_out, sums
        self._trim()
        sums = self.buffer.combine(self.ordinary_out, result.handle)
        stages["combine_copy_in"] = window_memory()
        self.expert_out = self.buffer.empty_expert_output(result.handle)
        self.expert_out.copy_(self.ordinary_out)
        self.sums = sums
        return stages

    def prepare_roof(self) -> bool:
        """Make the roof; returns whether there is one."""
        # The expert output is its scratch: checked by now, and what it holds stays as random.
        self.roof = make_roof(self.traffic, self.x, self.expert_out, self.sums, self.ordinary_out)
        return self.roof is not None

    def release_roof(self) -> None:
        """Give the scratch of the roof back."""
        self.roof = None

    def roof_bytes(self) -> dict[str, int]:
        """Bytes the roofs move on this rank, by operation; empty without a roof."""
        if self.roof is None:
            return {}
        return {
            "dispatch": self.roof.dispatch_bytes,
            "combine": self.roof.combine_bytes,
            "combine_copy_in": self.roof.combine_bytes + self.roof.copy_in_bytes,
        }

    def sample(self, operation: str) -> Sample:
        """Time `operation` once between two roofs."""
        before = self._timed(lambda: self._run_roof(operation)) if self.roof is not None else None
        # What an earlier call returned goes back first: a model does not hold it either.
        self.result = None
        op = self._timed(self._call(operation))
        after = self._timed(lambda: self._run_roof(operation)) if self.roof is not None else None
        return Sample(op=op, roof_before=before, roof_after=after)

    def run_back_to_back(self, num_iterations: int) -> list[Interval]:
        """Time dispatch + combine in place, one after the other, without a barrier in between."""
        buffer, x, topk_idx, layout = self.buffer, self.x, self.topk_idx, self.case.layout
        alignment = self.case.expert_alignment
        intervals = []
        self.result = None
        self.barrier.wait()
        for _ in range(num_iterations):
            start = time.perf_counter_ns()
            result = buffer.dispatch(x, topk_idx, layout=layout, expert_alignment=alignment)
            buffer.combine(result.x, result.handle)
            intervals.append((start, time.perf_counter_ns()))
        return intervals

    def compare_differentiable(self, num_iterations: int) -> dict[str, list[Interval]]:
        """Time `moe_comm.dispatch` (with a gradient) and `EpBuffer.dispatch` in turns."""
        layout, alignment = self.case.layout, self.case.expert_alignment
        # The leaf shares x's memory, so both read the same rows.
        leaf = self.x.detach().requires_grad_(self.x.is_floating_point())
        intervals: dict[str, list[Interval]] = {"eager": [], "differentiable": []}
        self.result = None
        self.barrier.wait()
        for _ in range(num_iterations):
            start = time.perf_counter_ns()
            result = self.buffer.dispatch(
                self.x, self.topk_idx, layout=layout, expert_alignment=alignment
            )
            intervals["eager"].append((start, time.perf_counter_ns()))
            self.buffer.combine(result.x, result.handle)
            start = time.perf_counter_ns()
            recorded = differentiable_dispatch(
                leaf, self.topk_idx, buffer=self.buffer, layout=layout, expert_alignment=alignment
            )
            intervals["differentiable"].append((start, time.perf_counter_ns()))
            self.buffer.combine(recorded.x.detach(), result.handle)
            del result, recorded
        return intervals

    def prepare_gloo(self) -> None:
        """Make and check the Gloo pipeline; raises AssertionError if it is wrong."""
        self.gloo = PipelineRunner(self.case, self.rank_idx, GlooTransport(), self.barrier, self.x)
        self.gloo.check()

    def run_gloo(self, operation: str, num_iterations: int) -> list[Interval]:
        """Time the Gloo pipeline."""
        assert self.gloo is not None
        return self.gloo.run(operation, num_iterations)

    def record_trace(self, num_iterations: int) -> list[PhaseRecord]:
        """Run dispatch and combine and record every phase; host backend only."""
        # Here, because the other backends work without the native module.
        from moe_comm.backends.host import HostBackend

        backend = self.buffer._backend
        assert isinstance(backend, HostBackend)
        # The first call switches recording on; what it returns is older.
        backend.take_trace()
        self.run_back_to_back(num_iterations)
        return backend.take_trace()

    def describe(self) -> dict[str, Any]:
        """What this rank runs on, for the header."""
        stats = self.communicator.heap_stats() if self.communicator.native is not None else None
        return {
            "backend": self.buffer.backend,
            "heap": dataclasses.asdict(stats) if stats is not None else None,
        }

    def close(self) -> None:
        """Leave in good order."""
        self.buffer.destroy()
        self.communicator.destroy()
        dist.destroy_process_group()

    def _dispatch(self) -> DispatchResult:
        return self.buffer.dispatch(
            self.x,
            self.topk_idx,
            layout=self.case.layout,
            expert_alignment=self.case.expert_alignment,
        )

    def _call(self, operation: str) -> Callable[[], None]:
        def dispatch() -> None:
            self.result = self._dispatch()

        def combine() -> None:
            self.sums = self.buffer.combine(self.expert_out, self.handle)

        def combine_copy_in() -> None:
            self.sums = self.buffer.combine(self.ordinary_out, self.handle)

        return {
            "dispatch": dispatch,
            "combine": combine,
            "combine_copy_in": combine_copy_in,
        }[operation]

    def _run_roof(self, operation: str) -> None:
        assert self.roof is not None
        if operation == "dispatch":
            self.roof.dispatch()
            return
        if operation == "combine_copy_in":
            self.roof.copy_in()
        self.roof.combine()

    def _timed(self, call: Callable[[], None]) -> Interval:
        self.barrier.wait()
        start = time.perf_counter_ns()
        call()
        return start, time.perf_counter_ns()

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


def worker_main(launch: Launch, rank_idx: int, pipe: Connection) -> None:
    """Serve (method, arguments) from `pipe` until "close"; answers are ("ok", value) or ("error", text)."""
    try:
        worker = Worker(launch, rank_idx)
        pipe.send(("ok", None))
        method = ""
        while method != "close":
            method, arguments = pipe.recv()
            pipe.send(("ok", getattr(worker, method)(*arguments)))
    except EOFError:
        # The parent is gone, nobody waits for an answer.
        return
    except BaseException:
        pipe.send(("error", traceback.format_exc()))
        raise
