"""One rank of a sweep: it goes from one size to the next in the same process."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from moe_comm.cli.bench.case import BenchCase, make_topk_idx, make_x
from moe_comm.cli.bench.measured_calls import NativeExchange
from moe_comm.cli.bench.options import BenchOptions
from moe_comm.cli.bench.parts import Parts, take_apart, timed_native_calls
from moe_comm.cli.bench.roof import Roof
from moe_comm.cli.bench.side import Side
from moe_comm.cli.bench.statistics import Interval
from moe_comm.cli.bench.worker import Worker
from moe_comm.ep import autograd
from moe_comm.peers.bootstrap import Bootstrap
from moe_comm.peers.communicator import Communicator

CALLS = ("EpBuffer.dispatch", "EpBuffer.combine", "moe_comm.dispatch", "moe_comm.combine")


class SweepWorker(Worker):
    """One rank; every method is called on all ranks in the same order.

    Args:
        case: The first size.
        options: See `Worker`.
        folder: See `Worker`.
        rank_idx: This rank.
        group: See `Worker`.
    """

    def __init__(
        self,
        case: BenchCase,
        options: BenchOptions,
        folder: Path,
        rank_idx: int,
        group: Bootstrap | None = None,
    ) -> None:
        # Before it is bound to one of them.
        self._shares_cores = case.num_ranks > len(os.sched_getaffinity(0))
        super().__init__(case, options, folder, rank_idx, group)
        self._options = options
        self._of_threads: dict[int, Communicator] = {}
        self._by_threads: dict[int, Side] = {}
        self._traced: Side | None = None
        library: Any = torch.library.Library("moe_comm_bench", "DEF")  # type: ignore[no-untyped-call]
        library.define("no_op(Tensor a, Tensor b) -> ()")
        library.impl("no_op", lambda a, b: None, "CPU")
        self._library = library  # which takes its operators with it
        self._no_op = torch.ops.moe_comm_bench.no_op

    def begin(self, case: BenchCase, numbers_of_threads: tuple[int, ...]) -> str | None:
        """Make what is timed of one size, and compare it with the oracle.

        Args:
            case: Case like the first, with other tokens.
            numbers_of_threads: Numbers of threads to compare with the communicator's own choice.

        Returns:
            None, or what is wrong.
        """
        self._end()
        self.case = case
        self.x = make_x(case, self.rank_idx)
        self.sides = [self._make_side(case)]
        # A tracer stays on; calls that are only timed must not pay for it.
        self._traced = self._make_side(case)
        for number in numbers_of_threads:
            if number not in self._of_threads:
                self._of_threads[number] = Communicator(
                    backend=self._options.backend,
                    num_threads=number,
                    with_huge_pages=self._options.with_huge_pages,
                )
            exchange = NativeExchange(self._of_threads[number], case, self.rank_idx, self.x)
            self._by_threads[number] = Side(case, self.rank_idx, exchange, self.x)
        problem = self.sides[0].check(None, self.barrier)
        for side in (self._traced, *self._by_threads.values()):
            # All ranks check all of it: a check is collective.
            problem = side.check(None, self.barrier) or problem
            del side.expert_out, side.ordinary_out, side.sums
        return problem

    def run_eager(self, num_iterations: int) -> list[Interval]:
        """When every dispatch + combine began and ended, one after the other, in nanoseconds."""
        return self.sides[0].run_back_to_back(self.barrier, num_iterations)

    def run_threads(self, number: int, num_iterations: int) -> list[Interval]:
        """`run_eager` with so many threads."""
        return self._by_threads[number].run_back_to_back(self.barrier, num_iterations)

    def run_differentiable(self, num_iterations: int) -> list[Interval]:
        """`run_eager` of the differentiable calls on an x that needs a gradient; no backward."""
        dispatch, combine = self._differentiable_calls(is_needed=True)
        intervals = []
        self.barrier.wait()
        for _ in range(num_iterations):
            start = time.perf_counter_ns()
            result = dispatch()
            combine(result.x, result.handle)
            intervals.append((start, time.perf_counter_ns()))
        return intervals

    def run_roof(self, num_passes: int, is_streaming: bool) -> float | None:
        """Microseconds of a pass over the bytes of dispatch and combine; None without a roof."""
        side = self.sides[0]
        if side.roof is None:
            side.prepare_roof()
        roof = side.roof
        if not isinstance(roof, Roof):
            return None
        how = {"streaming": is_streaming, "num_passes": num_passes}
        self.barrier.wait()
        start = time.perf_counter_ns()
        if self._shares_cores:
            words = self.barrier.words_of_roofs
            roof.dispatch_and_combine(words=words, rank_idx=self.rank_idx, **how)
        else:
            roof.dispatch(**how)
            roof.combine(**how)
        return (time.perf_counter_ns() - start) / 1e3 / num_passes

    def run_taken_apart(self, num_iterations: int) -> dict[str, list[Parts]]:
        """`run_eager` with every call taken apart: parts of every dispatch and of every combine."""
        # Here, because the command works without the native module.
        from moe_comm.ep.backends.host import HostBackend

        assert self._traced is not None
        exchange = self._traced.exchange
        assert isinstance(exchange, NativeExchange)
        backend = exchange.buffer._backend
        assert isinstance(backend, HostBackend)
        backend.take_trace()  # switches recording on, and what is older is not of these calls
        calls = []
        self.barrier.wait()
        with timed_native_calls(backend) as native_ns:
            for _ in range(num_iterations):
                start = time.perf_counter_ns()
                result = exchange.dispatch()
                middle = time.perf_counter_ns()
                exchange.combine(result.x, result.handle)
                end = time.perf_counter_ns()
                calls += [(start, middle), (middle, end)]
        taken = take_apart(calls, native_ns, backend.take_trace())
        return {"dispatch": taken[::2], "combine": taken[1::2]}

    def run_call(self, name: str, num_iterations: int) -> list[Interval]:
        """One of `CALLS` alone; the other of its pair is made in between and is no part of the time."""
        if name.startswith("moe_comm."):
            dispatch, combine = self._differentiable_calls(is_needed=False)
        else:
            exchange = self.sides[0].exchange
            dispatch, combine = exchange.dispatch, exchange.combine
        times_dispatch = name.endswith("dispatch")
        intervals = []
        self.barrier.wait()
        for _ in range(num_iterations):
            start = time.perf_counter_ns()
            result = dispatch()
            middle = time.perf_counter_ns()
            rows, handle = result.x, result.handle
            second = time.perf_counter_ns()
            combine(rows, handle)
            end = time.perf_counter_ns()
            intervals.append((start, middle) if times_dispatch else (second, end))
        return intervals

    def run_no_op(self, num_iterations: int) -> list[Interval]:
        """An operator of torch.library with two tensor arguments that does nothing, called from Python."""
        no_op = self._no_op
        topk_idx = make_topk_idx(self.case, self.rank_idx)
        intervals = []
        self.barrier.wait()
        for _ in range(num_iterations):
            start = time.perf_counter_ns()
            no_op(self.x, topk_idx)
            intervals.append((start, time.perf_counter_ns()))
        return intervals

    def close(self) -> None:
        """Leave in good order, with the communicators of every number of threads."""
        self._end()
        for communicator in self._of_threads.values():
            communicator.destroy()
        super().close()

    def _end(self) -> None:
        """Give back what the former size holds."""
        former = [*self.sides, *self._by_threads.values()]
        if self._traced is not None:
            former.append(self._traced)
        self.sides, self._by_threads, self._traced = [], {}, None
        for side in former:
            assert isinstance(side.exchange, NativeExchange)
            side.exchange.buffer.destroy()

    def _differentiable_calls(
        self, *, is_needed: bool
    ) -> tuple[Callable[[], Any], Callable[[torch.Tensor, Any], Any]]:
        """`moe_comm.dispatch` and `moe_comm.combine` of this case; `is_needed`: of an x with a gradient."""
        exchange = self.sides[0].exchange
        assert isinstance(exchange, NativeExchange)
        buffer = exchange.buffer
        # The leaf shares x's memory, so all calls read the same rows.
        x = self.x.detach().requires_grad_(is_needed)
        dispatch = functools.partial(
            autograd.dispatch,
            x,
            make_topk_idx(self.case, self.rank_idx),
            buffer=buffer,
            layout=self.case.layout,
            expert_alignment=self.case.expert_alignment,
        )
        return dispatch, functools.partial(autograd.combine, buffer=buffer)
