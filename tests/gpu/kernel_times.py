"""What one dispatch and combine cost on a GPU: times of every kernel, eager and captured, beside a copy.

Ranks are threads of this process, on the GPUs of the machine in turn. Prints a table of kernels (of the profiler) and a
JSON document as the last line. For speed as users see it there is `moe-comm bench`; this says where it goes.

    python tests/gpu/kernel_times.py --ranks 1 --tokens 128 --layout low-latency
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from moe_comm import FP8_BLOCK128, Capacity, Communicator, EpBuffer, EpConfig, Layout  # noqa: E402
from moe_comm.testing import RankContext, run_ranks  # noqa: E402

NUM_OPERATIONS = 20
NUM_ROUNDS = 9
NUM_EXPERTS = 64
NUM_TOPK = 8
ARRIVAL_TIMEOUT_S = 60.0


def on_events(run: Any, barrier: threading.Barrier, num_calls: int) -> float:
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


def copy_roof_us(num_bytes: int, barrier: threading.Barrier) -> float:
    """Of a copy on the GPU that reads and writes `num_bytes` together, while other ranks copy too."""
    half = max(1, num_bytes // 2)
    source = torch.empty(half, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return statistics.median(
        on_events(lambda: target.copy_(source), barrier, 10) for _ in range(NUM_ROUNDS)
    )


def measure(
    context: RankContext, options: argparse.Namespace, barrier: threading.Barrier
) -> dict[str, Any]:
    layout = Layout[options.layout.replace("-", "_").upper()]
    quantization = FP8_BLOCK128 if options.fp8 else None
    config = EpConfig(
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=options.hidden,
        num_max_tokens_per_rank=options.tokens,
    )
    generator = torch.Generator().manual_seed(context.rank_idx)
    x = torch.randn(options.tokens, options.hidden, generator=generator).bfloat16().cuda()
    scores = torch.rand(options.tokens, NUM_EXPERTS, generator=generator)
    topk_idx = scores.topk(NUM_TOPK).indices.cuda()
    weights = torch.rand(options.tokens, NUM_TOPK, generator=generator).cuda()
    num_rows = context.num_ranks * options.tokens * NUM_TOPK
    with (
        Communicator(
            context.group, device="cuda", arrival_timeout_s=ARRIVAL_TIMEOUT_S
        ) as communicator,
        EpBuffer(communicator, config) as buffer,
    ):
        capacity = (
            None
            if layout is Layout.LOW_LATENCY
            else Capacity(num_rows=num_rows, on_overflow="drop")
        )

        def dispatch() -> Any:
            return buffer.dispatch(
                x, topk_idx, weights, layout=layout, capacity=capacity, quantization=quantization
            )

        # An expert output of bfloat16, whatever crossed.
        first = dispatch()
        expert_out = buffer.empty_expert_output(first.handle)
        expert_out.normal_()
        sums = buffer.combine(expert_out, first.handle, topk_weights=weights)

        def both() -> None:
            result = dispatch()
            buffer.combine(expert_out, result.handle, topk_weights=weights)

        both()
        found: dict[str, Any] = {}
        eager = [on_events(both, barrier, NUM_OPERATIONS) for _ in range(NUM_ROUNDS)]
        found["eager_us"] = round(statistics.median(eager), 1)

        communicator.reserve(2 * (num_rows * options.hidden * 2 + sums.numel() * 2))
        graph = torch.cuda.CUDAGraph()
        barrier.wait()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            both()
        graph.replay()
        captured = [on_events(graph.replay, barrier, NUM_OPERATIONS) for _ in range(NUM_ROUNDS)]
        found["captured_us"] = round(statistics.median(captured), 1)

        row_bytes = options.hidden * 2
        sent_bytes = options.hidden * (1 + 4 / 128) if options.fp8 else row_bytes
        num_bytes = options.tokens * (row_bytes + NUM_TOPK * sent_bytes)  # dispatch
        num_bytes += options.tokens * (1 + NUM_TOPK) * row_bytes  # combine
        found["bytes"] = int(num_bytes)
        found["copy_roof_us"] = round(copy_roof_us(int(num_bytes), barrier), 1)

        # The profiler is of the process: one rank runs it, around what all of them do.
        barrier.wait()
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        if context.rank_idx == 0:
            profiler.__enter__()
        barrier.wait()
        for _ in range(NUM_OPERATIONS):
            both()
        torch.cuda.current_stream().synchronize()
        barrier.wait()
        if context.rank_idx == 0:
            profiler.__exit__(None, None, None)
            found["kernels"] = kernels_of(profiler, context.num_ranks)
        barrier.wait()
    return found


def kernels_of(profiler: Any, num_ranks: int) -> dict[str, dict[str, float]]:
    """By name: launches of a dispatch and combine of one rank, and the microseconds of one."""
    times: dict[str, list[float]] = collections.defaultdict(list)
    for event in profiler.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name.split("(")[0].removeprefix("void ")].append(event.device_time)
    return {
        name: {
            "launches": round(len(us) / num_ranks / NUM_OPERATIONS, 2),
            "median_us": round(statistics.median(us), 2),
        }
        for name, us in sorted(times.items(), key=lambda item: -sum(item[1]))
    }


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
    barrier = threading.Barrier(options.ranks)
    per_rank = run_ranks(measure, options.ranks, options, barrier, mode="threads")
    found = per_rank[0]
    for name in ("eager_us", "captured_us", "copy_roof_us"):
        found[name] = max(of_rank[name] for of_rank in per_rank)
    for name, kernel in found["kernels"].items():
        print(f"{kernel['median_us']:9.2f} us x {kernel['launches']:5.2f}  {name}")  # noqa: T201
    print(json.dumps({**vars(options), "gpu": torch.cuda.get_device_name(), **found}))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
