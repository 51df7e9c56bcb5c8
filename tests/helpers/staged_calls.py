"""Calls whose rows pass through the host, beside the same calls on tensors of the CPU; for every device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

import moe_comm
from moe_comm import FP8_BLOCK128, MXFP8, Communicator, EpBuffer, EpConfig, Layout, Placement
from moe_comm.ep.backends.base import Backend
from moe_comm.ep.backends.staged import StagedBackend
from moe_comm.testing.launch import RankContext
from tests.helpers import guarded_device
from tests.helpers.on_device import OnDevice


def connect(
    group: Any, device: str = guarded_device.DEVICE, num_local_ranks: int | None = None
) -> Communicator:
    if device == guarded_device.DEVICE:
        guarded_device.register()
    return Communicator(group, device, num_local_ranks=num_local_ranks, backend="host")


def make(communicator: Communicator, config: EpConfig) -> Backend:
    return OnDevice(communicator, config, StagedBackend)


NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_MAX = 6, 3, 256, 9
NUM_TOKENS = (5, 0, 9)


@dataclasses.dataclass(frozen=True)
class Given:
    """A buffer, and what this rank gives it: tensors of its device."""

    buffer: EpBuffer
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def rows(self, num_rows: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        """Made on the host, where numbers do not depend on the device."""
        numbers = torch.arange(num_rows * HIDDEN).view(num_rows, HIDDEN) % 251 - 125
        return numbers.to(dtype).to(self.x.device)


def routed(given: Given) -> Iterator[Any]:
    """Each layout, with a handle that is used again."""
    buffer, x, weights = given.buffer, given.x, given.topk_weights
    for layout in Layout:
        for copy_out in (True, False):
            there = buffer.dispatch(x, given.topk_idx, weights, layout=layout, copy_out=copy_out)
            yield from defined(there)
            rows = buffer.empty_expert_output(there.handle, dtype=x.dtype)
            rows.copy_(given.rows(len(rows)))
            factors = None if layout is Layout.RANK_MAJOR else weights
            yield buffer.combine(rows, there.handle, topk_weights=factors)
            out = torch.empty_like(x)
            assert buffer.combine(rows, there.handle, out=out) is out
            yield out
            pulled = buffer.combine(None, there.handle, row_weights=there.topk_weights)
            yield pulled.topk_weights
            again = buffer.dispatch(given.rows(len(x), torch.float32), None, handle=there.handle)
            yield from defined(again)
            yield there.handle.dropped_choices()
            yield buffer.combine(rows.double(), there.handle)


def defined(there: Any) -> Iterator[Any]:
    """All that a dispatch brought, without places that nothing was sent to."""
    counts = there.num_tokens_per_expert
    is_there = slice(None)
    if there.handle.layout is Layout.LOW_LATENCY:
        places = torch.arange(len(there.x) // max(1, len(counts)))
        is_there = (places < counts[:, None]).flatten()
    for each in (there.x, there.x_sf, there.topk_weights):
        if each is not None:
            rows = each if each.dim() < 3 else each.flatten(0, 1)
            yield rows.cpu().contiguous()[is_there]
    yield from (counts, there.topk_idx, there.expert_offsets, there.num_required_rows)


def quantized(given: Given) -> Iterator[Any]:
    """Rows that are quantized on their way, and those that come as a pair, of any strides."""
    for how in (FP8_BLOCK128, MXFP8, dataclasses.replace(MXFP8, is_column_major=True)):
        for layout in Layout:
            yield from defined(
                given.buffer.dispatch(given.x, given.topk_idx, layout=layout, quantization=how)
            )
    data = given.rows(len(given.x), torch.uint8)
    scales = given.rows(len(given.x), torch.float32)[:, :4].t().contiguous().t()
    yield from defined(given.buffer.dispatch((data, scales), given.topk_idx))


def asynchronous(given: Given) -> Iterator[Any]:
    """Two operations in flight at a time, waited for in the other order."""
    for layout in Layout:
        first, second = (
            given.buffer.dispatch(rows, given.topk_idx, layout=layout, async_op=True)
            for rows in (given.x, given.x + 1)
        )
        given.x.clone().zero_()
        x = second.x
        second.event.wait()
        assert second.x is x
        first.event.wait()
        assert first.event.is_complete()
        yield from (*defined(first), *defined(second))
        rows = given.rows(len(first.x))
        sums = [given.buffer.combine(rows, each.handle, async_op=True) for each in (first, second)]
        rows_before = rows.clone()
        for each in reversed(sums):
            each.event.wait()
            rows.zero_()
            yield each.x
        yield rows_before


def differentiated(given: Given) -> Iterator[Any]:
    """Gradients of rows and weights, both ways."""
    for layout in Layout:
        for how in (None, MXFP8):
            x, weights = (each.detach().requires_grad_() for each in (given.x, given.topk_weights))
            by_choice = layout is not Layout.RANK_MAJOR
            there = moe_comm.dispatch(
                x,
                given.topk_idx,
                None if by_choice else weights,
                buffer=given.buffer,
                layout=layout,
                quantization=how,
            )
            rows = there.x if how is None else there.x.dequantize()
            if not by_choice:
                rows = rows * there.topk_weights.sum(1, keepdim=True).to(rows.dtype)
            y = moe_comm.combine(
                rows * 2,
                there.handle,
                buffer=given.buffer,
                topk_weights=weights if by_choice else None,
            )
            (y.float() * given.rows(len(y), torch.float32)).sum().backward()
            yield from (y.detach(), x.grad, weights.grad)


def mapped(given: Given) -> Iterator[Any]:
    """Choices as a map, with probabilities where it is true."""
    routing_map = torch.zeros(len(given.x), NUM_EXPERTS, dtype=torch.bool)
    routing_map.scatter_(1, given.topk_idx.cpu().clamp_min(0), True)
    probs = routing_map * torch.arange(NUM_EXPERTS) / 8
    yield from defined(
        given.buffer.dispatch(
            given.x, routing_map.to(given.x.device), probs.to(given.x.device, torch.bfloat16)
        )
    )


def compiled(given: Given) -> Iterator[Any]:
    """Both operators in a graph, and their backward."""

    def layer(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        there = moe_comm.dispatch(x, given.topk_idx, weights, buffer=given.buffer)
        rows = there.x * there.topk_weights[:, None].to(there.x.dtype)
        return moe_comm.combine(rows, there.handle, buffer=given.buffer)

    x, weights = (each.detach().requires_grad_() for each in (given.x, given.topk_weights))
    y = torch.compile(layer, backend="aot_eager", fullgraph=True)(x, weights)
    y.sum().backward()
    yield from (y.detach(), x.grad, weights.grad)


CALLS: dict[str, Callable[[Given], Iterator[Any]]] = {
    each.__name__: each
    for each in (routed, quantized, asynchronous, differentiated, mapped, compiled)
}
KINDS = ("hash", "balanced", "a rank without experts")
CALLS_AND_KINDS = [*((name, "") for name in CALLS), *(("routed", how) for how in KINDS)]
"""Calls, and the kind of buffer that they are of, "" for the plainest."""
WITH_REPLICAS = Placement(((0, 1, 2), (3, 4, 5), (0, -1, 3)), NUM_EXPERTS)


def config_of(kind: str) -> EpConfig:
    placed: dict[str, Any] = {}
    if kind == "a rank without experts":
        placed = {"expert_rank": (0, 0, 0, 2, 2, 2)}
    elif kind:
        placed = {"placement": WITH_REPLICAS, "replica_rule": kind}
    return EpConfig(
        num_experts=NUM_EXPERTS,
        num_topk=NUM_TOPK,
        hidden=HIDDEN,
        dtype=None,
        num_max_tokens_per_rank=NUM_MAX,
        **placed,
    )


def given_to(communicator: Communicator, kind: str = "") -> Given:
    num_tokens = NUM_TOKENS[communicator.rank_idx]
    generator = torch.Generator().manual_seed(communicator.rank_idx)
    # Small enough that every sum is exact, in whatever order a device adds.
    x = torch.randint(-4, 5, (num_tokens, HIDDEN), generator=generator).bfloat16()
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :NUM_TOPK].clone()
    ids[::4, 1] = -1
    weights = torch.randint(1, 9, (num_tokens, NUM_TOPK), generator=generator) / 8
    buffer = EpBuffer(communicator, config_of(kind))
    return Given(buffer, *(each.to(communicator.device) for each in (x, ids, weights)))


def compare(
    context: RankContext, name: str, kind: str, device: str, num_local_ranks: int | None = None
) -> None:
    there = connect(context.group, device, num_local_ranks)
    here = Communicator(context.group, backend="host")
    assert there.device.type == device
    found, expected = (
        [*CALLS[name](given_to(communicator, kind))] for communicator in (there, here)
    )
    assert len(found) == len(expected) > 0
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        if other is None:
            assert one is None
            continue
        assert (one.shape, one.dtype) == (other.shape, other.dtype), place
        raw = [each.cpu().contiguous().flatten().view(torch.uint8) for each in (one, other)]
        assert torch.equal(*raw), f"{name}, value {place}"
    for communicator in (there, here):
        communicator.destroy()
