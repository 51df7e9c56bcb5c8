"""Costs of one dispatch and combine on GPUs: times of every kernel, eager and captured, and of the host's calls.

Ranks are threads of this process, on the GPUs of the machine in turn; tokens and choices are those of `moe-comm
bench`. Prints a table of kernels (of the profiler) and a JSON document as the last line, in which every time has that
of a copy of as many bytes beside it. For speed as users see it there is `moe-comm bench`; this says where it goes.

    python tests/gpu/kernel_times.py --ranks 1 --tokens 128 --layout low-latency
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from moe_comm import FP8_BLOCK128, Capacity, Communicator, EpBuffer, Layout  # noqa: E402
from moe_comm.cli.bench.case import (  # noqa: E402
    BenchCase,
    make_topk_idx,
    make_topk_weights,
    make_x,
)
from moe_comm.cli.bench.side import synchronize  # noqa: E402
from moe_comm.cli.bench.traffic import (  # noqa: E402
    combine_bytes,
    dispatch_bytes,
    num_rows_per_rank,
    rank_traffic,
)
from moe_comm.testing import RankContext, run_ranks  # noqa: E402

NUM_OPERATIONS = 20
NUM_ROUNDS = 9
NUM_HOST_CALLS = 50
NUM_EXPERTS = 64
NUM_TOPK = 8
ARRIVAL_TIMEOUT_S = 60.0
BARRIER_TIMEOUT_S = 2 * ARRIVAL_TIMEOUT_S
CAPTURE_LOCK = threading.Lock()
"""Torch has one capture at a time in a process."""
HOST_AIM_US = 15.0
"""Time that the host may take for an operation that it does not wait in."""


class Operations:
    """The calls of one rank on one case, and what they are called with.

    Args:
        buffer: Of the rank.
        case: What all ranks share.
        rank_idx: This rank.
        device: Of the rows.
        barrier: Of the ranks: a copy from the host's memory may wait for kernels of a rank that is ahead.
    """

    def __init__(
        self,
        buffer: EpBuffer,
        case: BenchCase,
        rank_idx: int,
        device: torch.device,
        barrier: threading.Barrier,
    ) -> None:
        self._buffer = buffer
        self._case = case
        self._x = make_x(case, rank_idx).to(device)
        self._topk_idx = make_topk_idx(case, rank_idx).to(device)
        self._weights = make_topk_weights(case, rank_idx).to(device)
        # Rows of a rank were weighted by their expert.
        is_by_rank = case.layout is Layout.RANK_MAJOR
        self._sum_weights = None if is_by_rank else self._weights
        # A captured dispatch has a fixed size, equal on all ranks: what the fullest of them receives.
        num_rows = max(rank_traffic(case, each).num_recv_rows for each in range(case.num_ranks))
        self._capacity = None
        if case.layout is not Layout.LOW_LATENCY:
            on_overflow = "raise" if is_by_rank else "drop"
            self._capacity = Capacity(num_rows=num_rows, on_overflow=on_overflow)
        barrier.wait()
        self._handle = self._dispatch(None).handle
        # Experts give rows of bfloat16, whatever crossed; as many as those of a fixed size.
        self._fixed_handle = self._dispatch(self._capacity).handle
        # The first launch of a kernel of torch's may wait for kernels of every rank, too.
        synchronize(device)
        barrier.wait()
        self._expert_out, self._fixed_out = (
            buffer.empty_expert_output(handle).normal_()
            for handle in (self._handle, self._fixed_handle)
        )

    def _dispatch(self, capacity: Capacity | None) -> Any:
        return self._buffer.dispatch(
            self._x,
            self._topk_idx,
            self._weights,
            layout=self._case.layout,
            capacity=capacity,
            quantization=self._case.quantization,
        )

    def dispatch(self) -> None:
        """Dispatch as users call it: of open size, but in LOW_LATENCY."""
        self._dispatch(None)

    def cached_dispatch(self) -> None:
        """With the handle of the first one."""
        self._buffer.dispatch(
            self._x, None, handle=self._handle, quantization=self._case.quantization
        )

    def combine(self) -> None:
        """Combine of the first dispatch, weighted, in place."""
        self._buffer.combine(self._expert_out, self._handle, topk_weights=self._sum_weights)

    def both(self) -> None:
        """A dispatch of open size and its combine."""
        result = self._dispatch(None)
        self._buffer.combine(self._expert_out, result.handle, topk_weights=self._sum_weights)

    def both_of_fixed_size(self) -> torch.Tensor:
        """Call all that can be captured. Returns the sums."""
        result = self._dispatch(self._capacity)
        return self._buffer.combine(self._fixed_out, result.handle, topk_weights=self._sum_weights)

    def named(self) -> dict[str, Callable[[], None]]:
        """Operations that are timed by themselves."""
        return {
            "dispatch": self.dispatch,
            "cached_dispatch": self.cached_dispatch,
            "combine": self.combine,
            "dispatch+combine": self.both,
        }


def bytes_of(case: BenchCase, rank_idx: int) -> dict[str, int]:
    """That a rank reads and writes, by operation."""
    traffic = rank_traffic(case, rank_idx)
    dispatch, combine = dispatch_bytes(traffic), combine_bytes(traffic)
    return {
        "dispatch": dispatch,
        "cached_dispatch": dispatch,
        "combine": combine,
        "dispatch+combine": dispatch + combine,
    }


def least_bytes_to_others(case: BenchCase, rank_idx: int) -> int:
    """That a dispatch cannot help sending to other ranks: a row for each token and rank."""
    by_rank = BenchCase(
        num_ranks=case.num_ranks,
        num_tokens=case.num_tokens,
        hidden=case.hidden,
        num_topk=case.num_topk,
        num_experts=case.num_experts,
        layout=Layout.RANK_MAJOR,
    )
    num_rows = num_rows_per_rank(by_rank, rank_idx)
    return int(num_rows.sum() - num_rows[rank_idx]) * case.dispatched_row_bytes


def host_times_us(
    calls: dict[str, Callable[[], None]],
    settle: Callable[[], None],
    barrier: threading.Barrier,
    num_calls: int,
) -> dict[str, float]:
    """Median microseconds that the host spends in a call, when nothing is before it on the device.

    Args:
        calls: By operation.
        settle: Waits for what was asked of the device.
        barrier: Of the ranks.
        num_calls: Of each.
    """
    found = {}
    for name, call in calls.items():
        times = []
        for _ in range(num_calls):
            settle()
            barrier.wait()
            start = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - start) / 1e3)
        settle()
        found[name] = round(statistics.median(times), 1)
    return found


def on_events(run: Callable[[], Any], barrier: threading.Barrier, num_calls: int) -> float:
    """Microseconds of one call of many, from event to event on this rank's stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.current_stream().synchronize()
    barrier.wait()
    begin.record()
    for _ in range(num_calls):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / num_calls


def median_us(run: Callable[[], Any], barrier: threading.Barrier, num_calls: int) -> float:
    """Median of several rounds."""
    return round(
        statistics.median(on_events(run, barrier, num_calls) for _ in range(NUM_ROUNDS)), 1
    )


def capture(
    call: Callable[[], object], settle: Callable[[], None], barrier: threading.Barrier
) -> torch.cuda.CUDAGraph:
    """A graph of this rank's operations, captured in turn with the other ranks and replayed once.

    Torch waits for the device and gives memory back as it begins, which may wait for kernels of every rank: none
    runs before the last rank has captured.

    Args:
        call: What to capture.
        settle: Waits for what was asked of the device.
        barrier: Of the ranks.
    """
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    settle()
    barrier.wait()
    with (
        CAPTURE_LOCK,
        torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
    ):
        call()
    barrier.wait()
    graph.replay()
    return graph


def copy_us(num_bytes: int, target_device: int, barrier: threading.Barrier) -> float:
    """Time of a copy of so many bytes from this rank's GPU to one, while other ranks copy too."""
    source = torch.empty(max(1, num_bytes), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source, device=torch.device("cuda", target_device))
    return median_us(lambda: target.copy_(source, non_blocking=True), barrier, 10)


def measure(context: RankContext, case: BenchCase, barrier: threading.Barrier) -> dict[str, Any]:
    """One rank's part of the document."""
    with (
        Communicator(
            context.group, device="cuda", arrival_timeout_s=ARRIVAL_TIMEOUT_S
        ) as communicator,
        EpBuffer(communicator, case.config) as buffer,
    ):
        operations = Operations(buffer, case, context.rank_idx, communicator.device, barrier)
        calls = operations.named()
        own_device = torch.cuda.current_device()
        found: dict[str, Any] = {"device": own_device, "bytes": bytes_of(case, context.rank_idx)}
        found["eager_us"] = {
            name: median_us(call, barrier, NUM_OPERATIONS) for name, call in calls.items()
        }
        # Half of the bytes are read, half written.
        found["copy_roof_us"] = {
            name: copy_us(num_bytes // 2, own_device, barrier)
            for name, num_bytes in found["bytes"].items()
        }
        settle = torch.cuda.current_stream().synchronize
        found["host_us"] = host_times_us(calls, settle, barrier, NUM_HOST_CALLS)
        if torch.cuda.device_count() > 1 and context.num_ranks > 1:
            crossing = least_bytes_to_others(case, context.rank_idx)
            next_device = (own_device + 1) % min(context.num_ranks, torch.cuda.device_count())
            found["crossing_bytes"] = crossing
            found["peer_copy_us"] = copy_us(crossing, next_device, barrier)

        # The profiler is of the process: one rank runs it, around what all of them do.
        barrier.wait()
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        if context.rank_idx == 0:
            profiler.__enter__()
        barrier.wait()
        for _ in range(NUM_OPERATIONS):
            operations.both()
        torch.cuda.current_stream().synchronize()
        barrier.wait()
        if context.rank_idx == 0:
            profiler.__exit__(None, None, None)
            found["kernels"] = kernels_of(profiler, context.num_ranks)
            # First replays may wait for kernels of every rank, and the rest may not come.
            print(json.dumps(found), flush=True)  # noqa: T201
        barrier.wait()

        sums = operations.both_of_fixed_size()
        settle()
        barrier.wait()  # as more memory may wait for kernels of every rank
        communicator.reserve(2 * (found["bytes"]["dispatch"] + sums.nbytes))
        graph = capture(operations.both_of_fixed_size, settle, barrier)
        found["captured_us"] = {
            "dispatch+combine": median_us(graph.replay, barrier, NUM_OPERATIONS)
        }
    return found


def short_name(name: str) -> str:
    """Function and template arguments of a kernel: its name without type, namespaces and parameters.

    Args:
        name: As the profiler gives it, such as "void a::(anonymous namespace)::b<c::D, true>(e::F)".
    """
    depth = 0
    begin = 0
    end = len(name)
    text = name.removeprefix("void ").replace("(anonymous namespace)", "_anonymous_namespace_")
    for place, sign in enumerate(text):
        if sign in "<>":
            depth += 1 if sign == "<" else -1
        elif depth:
            continue
        elif sign == ":":
            begin = place + 1
        elif sign == "(":
            end = place
            break
    return text[begin:end].strip()


def kernels_of(profiler: Any, num_ranks: int) -> dict[str, dict[str, float]]:
    """By name: launches of a dispatch and combine of one rank, and the microseconds of one."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[short_name(event.name)].append(event.device_time)
    return {
        name: {
            "launches": round(len(us) / num_ranks / NUM_OPERATIONS, 2),
            "median_us": round(statistics.median(us), 2),
        }
        for name, us in sorted(times.items(), key=lambda item: -sum(item[1]))
    }


def of_all_ranks(per_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The document: of every time and number of bytes the greatest, kernels of the rank that has them."""
    found: dict[str, Any] = {"devices": [of_rank["device"] for of_rank in per_rank]}
    for name, first in per_rank[0].items():
        if name in ("device", "kernels"):
            continue
        if isinstance(first, dict):
            found[name] = {key: max(of_rank[name][key] for of_rank in per_rank) for key in first}
        else:
            found[name] = max(of_rank[name] for of_rank in per_rank)
    found["host_aim_us"] = HOST_AIM_US
    found["kernels"] = per_rank[0]["kernels"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument(
        "--layout", default="expert-major", choices=["expert-major", "rank-major", "low-latency"]
    )
    parser.add_argument("--fp8", action="store_true", help="FP8_BLOCK128 on the wire")
    options = parser.parse_args()
    case = BenchCase(
        num_ranks=options.ranks,
        num_tokens=options.tokens,
        hidden=options.hidden,
        num_topk=NUM_TOPK,
        num_experts=NUM_EXPERTS,
        layout=Layout[options.layout.replace("-", "_").upper()],
        quantization=FP8_BLOCK128 if options.fp8 else None,
        with_weights=True,
    )
    barrier = threading.Barrier(options.ranks, timeout=BARRIER_TIMEOUT_S)
    found = of_all_ranks(run_ranks(measure, options.ranks, case, barrier, mode="threads"))
    for name, kernel in found["kernels"].items():
        print(f"{kernel['median_us']:9.2f} us x {kernel['launches']:5.2f}  {name}")  # noqa: T201
    for name, eager_us in found["eager_us"].items():
        captured_us = found["captured_us"].get(name)
        captured = "" if captured_us is None else f", captured {captured_us:.1f}"
        print(  # noqa: T201
            f"{name:17} {eager_us:9.1f} us{captured}; a copy of its bytes {found['copy_roof_us'][name]:.1f} us; "
            f"the host's call {found['host_us'][name]:.1f} us"
        )
    print(json.dumps({**vars(options), "gpu": torch.cuda.get_device_name(), **found}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
