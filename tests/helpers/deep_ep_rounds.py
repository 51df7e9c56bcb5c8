"""An installed DeepEP and this package in turns: the same tokens, choices and ranks, in the same processes.

What is compared does the same work: every token crosses once to each rank that has one of its experts, and
comes back as a sum over these ranks (`RANK_MAJOR`); or, in low latency, once for each choice, and comes
back as a weighted sum. Both sides are checked before they are timed.
"""

from __future__ import annotations

import dataclasses
import importlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from moe_comm import Communicator, EpBuffer, Layout
from moe_comm.cli.bench.case import BenchCase, make_topk_idx, make_topk_weights, make_x
from moe_comm.cli.bench.traffic import combine_bytes, dispatch_bytes, rank_traffic
from moe_comm.peers import cuda_devices
from moe_comm.testing import RankContext

SIDES = {
    "v1": "Buffer",
    "v2": "ElasticBuffer",
    "low_latency": "Buffer",
}
"""Interfaces of DeepEP, and the class that each needs."""

ARRIVAL_TIMEOUT_S = 60.0
OPERATIONS = ("dispatch", "cached_dispatch", "combine", "dispatch+combine")


def missing_deep_ep() -> str | None:
    """Why there is nothing to compare with, or None."""
    try:
        module = importlib.import_module("deep_ep")
    except ImportError as error:
        return f"deep_ep is not installed: {error}"
    if not any(hasattr(module, name) for name in SIDES.values()):
        return f"the installed deep_ep has none of the classes {', '.join(set(SIDES.values()))}"
    return None


def sides_of(layout: Layout) -> list[str]:
    """Interfaces of the installed DeepEP that do what a layout does."""
    module = importlib.import_module("deep_ep")
    wanted = ("low_latency",) if layout is Layout.LOW_LATENCY else ("v1", "v2")
    return [name for name in wanted if hasattr(module, SIDES[name])]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Inputs of one rank.

    Args:
        case: Case that all ranks share.
        x: bfloat16 `[num_tokens, hidden]`.
        topk_idx: int64 `[num_tokens, num_topk]`.
        topk_weights: float32 `[num_tokens, num_topk]`.
    """

    case: BenchCase
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    @staticmethod
    def make(case: BenchCase, rank_idx: int, device: torch.device) -> Inputs:
        """Make the inputs of `moe-comm bench`."""
        return Inputs(
            case=case,
            x=make_x(case, rank_idx).to(device),
            topk_idx=make_topk_idx(case, rank_idx).to(device),
            topk_weights=make_topk_weights(case, rank_idx).to(device),
        )

    def expected_sums(self) -> torch.Tensor:
        """Sums of rows that come back as they were sent: float32 `[num_tokens, hidden]`."""
        x = self.x.float()
        if self.case.layout is Layout.LOW_LATENCY:
            return x * self.topk_weights.sum(dim=1, keepdim=True)
        per_rank = self.case.num_experts // self.case.num_ranks
        owners = self.topk_idx // per_rank
        is_bound = torch.zeros(x.shape[0], self.case.num_ranks, device=x.device)
        is_bound.scatter_(1, owners, 1.0)
        return x * is_bound.sum(dim=1, keepdim=True)


class Ours:
    """This package."""

    is_paired = False

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        on_gpu = inputs.x.device.type == "cuda"
        self._communicator = Communicator(
            device="cuda" if on_gpu else "cpu", arrival_timeout_s=ARRIVAL_TIMEOUT_S
        )
        self._buffer = EpBuffer(self._communicator, inputs.case.config)

    def dispatch(self) -> tuple[torch.Tensor, Any]:
        """The rows, and what knows where they belong."""
        inputs = self._inputs
        result = self._buffer.dispatch(
            inputs.x, inputs.topk_idx, inputs.topk_weights, layout=inputs.case.layout
        )
        return result.x, result.handle

    def cached_dispatch(self, handle: Any) -> None:
        """The same again, without counting."""
        self._buffer.dispatch(self._inputs.x, None, handle=handle)

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        """The sums."""
        is_weighted = self._inputs.case.layout is Layout.LOW_LATENCY
        weights = self._inputs.topk_weights if is_weighted else None
        return self._buffer.combine(rows, handle, topk_weights=weights)

    def destroy(self) -> None:
        """Collective."""
        self._buffer.destroy()
        self._communicator.destroy()


class DeepEpV1:
    """`deep_ep.Buffer`, as its own test of one node makes and calls it."""

    is_paired = False

    def __init__(self, inputs: Inputs, group: dist.ProcessGroup) -> None:
        self._inputs = inputs
        case = inputs.case
        module = importlib.import_module("deep_ep")
        kind = module.Buffer
        configs = (
            kind.get_dispatch_config(case.num_ranks),
            kind.get_combine_config(case.num_ranks),
        )
        hint = max(
            config.get_nvl_buffer_size_hint(case.row_bytes, case.num_ranks) for config in configs
        )
        self._buffer = kind(group, hint, 0, explicitly_destroy=True)

    def dispatch(self) -> tuple[torch.Tensor, Any]:
        inputs, buffer = self._inputs, self._buffer
        per_rank, _, per_expert, is_bound, _ = buffer.get_dispatch_layout(
            inputs.topk_idx, inputs.case.num_experts
        )
        rows, _, _, _, handle, _ = buffer.dispatch(
            inputs.x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_bound,
            num_tokens_per_expert=per_expert,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
        )
        return rows, handle

    def cached_dispatch(self, handle: Any) -> None:
        self._buffer.dispatch(self._inputs.x, handle=handle)

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        return self._buffer.combine(rows, handle)[0]

    def destroy(self) -> None:
        self._buffer.destroy()


class DeepEpV2:
    """`deep_ep.ElasticBuffer`."""

    is_paired = False

    def __init__(self, inputs: Inputs, group: dist.ProcessGroup) -> None:
        self._inputs = inputs
        case = inputs.case
        module = importlib.import_module("deep_ep")
        self._buffer = module.ElasticBuffer(
            group,
            num_max_tokens_per_rank=case.num_tokens,
            hidden=case.hidden,
            num_topk=case.num_topk,
            explicitly_destroy=True,
        )

    def dispatch(self) -> tuple[torch.Tensor, Any]:
        inputs = self._inputs
        rows, _, _, handle, _ = self._buffer.dispatch(
            inputs.x,
            topk_idx=inputs.topk_idx,
            topk_weights=inputs.topk_weights,
            num_experts=inputs.case.num_experts,
        )
        return rows, handle

    def cached_dispatch(self, handle: Any) -> None:
        # With a handle alone it estimates its SMs before it knows the experts.
        self._buffer.dispatch(
            self._inputs.x, handle=handle, num_experts=self._inputs.case.num_experts
        )

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        return self._buffer.combine(rows, handle)[0]

    def destroy(self) -> None:
        self._buffer.destroy()


class DeepEpLowLatency:
    """`deep_ep.Buffer` in low-latency mode, rows of bfloat16.

    Its two buffers take turns, so that a dispatch is to be combined before the next but one.
    """

    is_paired = True

    def __init__(self, inputs: Inputs, group: dist.ProcessGroup) -> None:
        self._inputs = inputs
        case = inputs.case
        kind = importlib.import_module("deep_ep").Buffer
        hint = kind.get_low_latency_rdma_size_hint(
            case.num_tokens, case.hidden, case.num_ranks, case.num_experts
        )
        self._buffer = kind(
            group,
            0,
            hint,
            low_latency_mode=True,
            num_qps_per_rank=case.num_experts // case.num_ranks,
            explicitly_destroy=True,
        )

    def dispatch(self) -> tuple[torch.Tensor, Any]:
        inputs, case = self._inputs, self._inputs.case
        rows, _, handle, _, _ = self._buffer.low_latency_dispatch(
            inputs.x, inputs.topk_idx, case.num_tokens, case.num_experts, use_fp8=False
        )
        return rows, handle

    def combine(self, rows: torch.Tensor, handle: Any) -> torch.Tensor:
        inputs = self._inputs
        given = (rows, inputs.topk_idx, inputs.topk_weights, handle)
        return self._buffer.low_latency_combine(*given)[0]

    def destroy(self) -> None:
        self._buffer.destroy()


_DEEP_EP = {"v1": DeepEpV1, "v2": DeepEpV2, "low_latency": DeepEpLowLatency}


def _calls(side: Any) -> dict[str, Callable[[], Any]]:
    """Timed calls of a side, by name of `OPERATIONS`."""

    def both() -> None:
        side.combine(*side.dispatch())

    if side.is_paired:
        return {"dispatch+combine": both}
    rows, handle = side.dispatch()
    return {
        "dispatch": side.dispatch,
        "cached_dispatch": lambda: side.cached_dispatch(handle),
        "combine": lambda: side.combine(rows, handle),
        "dispatch+combine": both,
    }


def _check(name: str, inputs: Inputs, side: Any) -> None:
    sums = side.combine(*side.dispatch()).float()
    expected = inputs.expected_sums()
    # One rounding of a sum of equal rows, or of weighted ones.
    tolerance = 0.0 if inputs.case.layout is not Layout.LOW_LATENCY else 2**-6
    difference = (sums - expected.bfloat16().float()).abs().max().item()
    if difference > tolerance * max(1.0, expected.abs().max().item()):
        raise AssertionError(f"sums of {name} differ from the expected ones by {difference}")


def _timed_us(device: torch.device, call: Callable[[], Any], num_calls: int) -> float:
    """Microseconds of a call among several: of the GPU's events, or of the clock where there is none."""
    dist.barrier()
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(num_calls):
            call()
        return (time.perf_counter() - start) * 1e6 / num_calls
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(num_calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / num_calls


def compare(
    context: RankContext, case: BenchCase, device_type: str, num_rounds: int, num_calls: int
) -> dict[str, Any]:
    """Time every operation of both sides in turns; on every rank.

    Args:
        context: Context of the rank, a process.
        case: Case of `RANK_MAJOR` or `LOW_LATENCY` rows of bfloat16.
        device_type: "cuda": each rank on a GPU, in turn; or "cpu".
        num_rounds: Medians are over these.
        num_calls: Calls of an operation in a round.

    Returns:
        Microseconds of ours, of each interface of DeepEP, and of a copy of as many bytes on this rank's
        device, by operation; the slowest rank's where the caller takes the greatest. And `bytes`.
    """
    is_on_gpu = device_type == "cuda"
    if is_on_gpu:
        cuda_devices.take_device(context.rank_idx)
    device = torch.device("cuda", torch.cuda.current_device()) if is_on_gpu else torch.device("cpu")
    # A second interface reuses NCCL's communicator, which takes one rank on a GPU.
    has_nccl = is_on_gpu and context.num_ranks <= torch.cuda.device_count()
    inputs = Inputs.make(case, context.rank_idx, device)
    sides: dict[str, Any] = {"ours": Ours(inputs)}
    for name in sides_of(case.layout):
        if name == "v2" and is_on_gpu and not has_nccl:
            continue
        group = dist.new_group(backend="nccl" if has_nccl else "gloo")
        # NCCL's communicator, which DeepEP asks for, is made by the first collective call.
        dist.all_reduce(torch.zeros(1, device=device if has_nccl else "cpu"), group=group)
        sides[name] = _DEEP_EP[name](inputs, group)
    for name, side in sides.items():
        _check(name, inputs, side)
    calls = {name: _calls(side) for name, side in sides.items()}
    traffic = rank_traffic(case, context.rank_idx)
    num_bytes = {"dispatch": dispatch_bytes(traffic), "combine": combine_bytes(traffic)}
    num_bytes["cached_dispatch"] = num_bytes["dispatch"]
    num_bytes["dispatch+combine"] = num_bytes["dispatch"] + num_bytes["combine"]
    found: dict[str, Any] = {"bytes": num_bytes, "times_us": {}}
    for operation in OPERATIONS:
        half = torch.empty(max(1, num_bytes[operation] // 2), dtype=torch.uint8, device=device)
        target = torch.empty_like(half)
        timed = {
            name: of_side[operation] for name, of_side in calls.items() if operation in of_side
        }
        timed["copy_roof"] = lambda half=half, target=target: target.copy_(half)
        times: dict[str, list[float]] = {name: [] for name in timed}
        for _ in range(num_rounds):
            for name, call in timed.items():
                times[name].append(_timed_us(device, call, num_calls))
        found["times_us"][operation] = {
            name: round(statistics.median(each), 1) for name, each in times.items()
        }
    del calls
    for side in reversed(list(sides.values())):
        side.destroy()
    return found
