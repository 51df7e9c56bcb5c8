"""Calls of operations by kernels to the device besides kernels, counted on the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm import Communicator, EpBuffer, EpConfig, Layout
from moe_comm.ep.backends.simt import current_stream, use_device
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.configs import ep_config
from tests.helpers.on_stream import in_stream

NUM_EXPERTS = 6
NUM_TOKENS = 5
NUM_TOPK = 2
HIDDEN = 16
NUM_STEPS = 4
Calls = dict[str, float]

NOTHING = {
    "zeroed_allocations": 0,
    "unset_allocations": 0,
    "host_allocations": 0,
    "launches": 0,
    "copies": 0,
}
# The exchange of rows, which counts, sending, receiving; plan and tables.
DISPATCH = {**NOTHING, "unset_allocations": 2, "launches": 3}
# The choices are in the plan, which is there.
CACHED_DISPATCH = {**NOTHING, "unset_allocations": 1, "launches": 3}
# The exchange of rows and the sums, which lie in a window.
COMBINE = {**NOTHING, "launches": 2}
# Requests of ranks to each other, and their sums, in a further window.
REDUCED_COMBINE = {**NOTHING, "launches": 4}


def _calls_per_step(buffer: EpBuffer, step: Any) -> Calls:
    """Calls of steps behind one that makes what is made once, each when the one before has ended."""
    backend: Any = buffer._backend

    def step_to_its_end() -> None:
        step()
        stream = current_stream()
        if stream is not None:
            stream.synchronize()

    step_to_its_end()
    before = backend._endpoint.device_calls()
    for _ in range(NUM_STEPS):
        step_to_its_end()
    after = backend._endpoint.device_calls()
    return {name: (after[name] - before[name]) / NUM_STEPS for name in before}


def _count_calls(
    context: RankContext, layout: Layout, num_devices: int, rank_reduction: bool = False
) -> dict[str, Calls]:
    comm = Communicator(context.group, backend="simt", arrival_timeout_s=60.0)
    config = ep_config(NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS, rank_reduction=rank_reduction)
    generator = torch.Generator().manual_seed(context.rank_idx)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    topk_idx = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(NUM_TOPK, dim=1)[1]
    with use_device(context.rank_idx % num_devices):
        buffer = EpBuffer(comm, config)
    with buffer:
        result = buffer.dispatch(x, topk_idx, layout=layout)
        calls = {
            "dispatch": _calls_per_step(
                buffer, lambda: buffer.dispatch(x, topk_idx, layout=layout)
            ),
            "cached": _calls_per_step(
                buffer, lambda: buffer.dispatch(x, None, handle=result.handle)
            ),
            "combine": _calls_per_step(
                buffer, lambda: buffer.combine(result.x, handle=result.handle)
            ),
        }
        assert torch.equal(buffer.combine(result.x, handle=result.handle), x * NUM_TOPK)
    comm.destroy()
    return calls


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("caller", ["host", "stream"])
@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.LOW_LATENCY])
def test_operations_make_few_calls_of_the_device(
    layout: Layout, caller: str, num_devices: int
) -> None:
    """Nothing is zeroed, which has the host wait, and nothing made anew but what results keep."""
    if caller == "host":
        found = run_ranks(_count_calls, 2, layout, num_devices)
    else:
        found = run_ranks(in_stream, 2, _count_calls, layout, num_devices)
    for calls in found:
        for operation, wanted in (
            ("dispatch", DISPATCH),
            ("cached", CACHED_DISPATCH),
            ("combine", COMBINE),
        ):
            events = calls[operation].pop("events")
            host_waits = calls[operation].pop("host_waits")
            assert calls[operation] == wanted, operation
            # The end, and where rows are late one more, for a kernel that fails.
            assert 1 <= events <= 2, (operation, events)
            # A host that calls waits for rows and for the end; a stream for rows that decide sizes.
            if caller == "host":
                assert host_waits <= 2, operation
            else:
                assert host_waits <= (operation == "dispatch"), operation


def _count_waits(context: RankContext, num_pairs: int) -> float:
    """Waits beside low-latency pairs, for none of which the caller waits."""
    comm = Communicator(context.group, backend="simt", arrival_timeout_s=60.0)
    config = EpConfig(
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        num_max_tokens_per_rank=NUM_TOKENS,
        dtype=torch.bfloat16,
        # The emulator holds what a combine reads until it has.
        num_low_latency_windows=num_pairs + 1,
    )
    generator = torch.Generator().manual_seed(context.rank_idx)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).to(torch.bfloat16)
    topk_idx = torch.rand(NUM_TOKENS, NUM_EXPERTS, generator=generator).topk(NUM_TOPK, dim=1)[1]
    with EpBuffer(comm, config) as buffer:
        backend: Any = buffer._backend
        num_waits = []
        sums = []
        for _ in range(num_pairs):
            result = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
            sums.append(buffer.combine(result.x, handle=result.handle))
            num_waits.append(backend._endpoint.device_calls()["host_waits"])
        stream = current_stream()
        stream.synchronize()
        for found in sums:
            assert torch.equal(found, x * NUM_TOPK)
    comm.destroy()
    return num_waits[-1]


def test_the_host_runs_ahead_of_low_latency_pairs() -> None:
    assert run_ranks(in_stream, 2, _count_waits, 10) == [0, 0]


@pytest.mark.parametrize("caller", ["host", "stream"])
def test_ranks_that_add_first_launch_two_kernels_more(caller: str) -> None:
    """And the host waits no more often for them."""
    call = (Layout.EXPERT_MAJOR, 2, True)
    if caller == "host":
        found = run_ranks(_count_calls, 2, *call)
    else:
        found = run_ranks(in_stream, 2, _count_calls, *call)
    for calls in found:
        combine = calls["combine"]
        host_waits, events = combine.pop("host_waits"), combine.pop("events")
        assert combine == REDUCED_COMBINE
        assert 1 <= events <= 2
        assert host_waits <= (2 if caller == "host" else 0)
