"""Surfaces that know their group alone work on the device of their tensors, in the order of streams."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_comm import Communicator, fused_a2a
from moe_comm.compat.deep_ep import (
    BucketBuffer,
    Buffer,
    ElasticBuffer,
    EventOverlap,
    HybridEPBuffer,
    streams,
)
from moe_comm.compat.deep_ep.hybrid_ep_buffer import indices_to_map
from moe_comm.compat.deep_ep.streams import tensors_in
from moe_comm.compat.deep_ep.utils.event import EventHandle
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.ep import group_buffers
from moe_comm.testing import RankContext, run_ranks
from tests.helpers import deep_ep_oracle as oracle
from tests.helpers.dispatcher_cases import DISPATCHER_CASES, RankTokens, all_tokens
from tests.helpers.dispatcher_targets import DISPATCHERS
from tests.helpers.pretended_device import DEVICE, Stream, on_pretended_device, pretend

CASE = oracle.Case("devices", 6, 2, 128, (5, 4), share_unused=0.2)
NUM_MAX = 8
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pretend(monkeypatch)
    yield
    fused_a2a._buffers.clear()
    fused_a2a._hybrid_ep_buffers.clear()


def given(rank_idx: int, device: torch.device) -> oracle.Given:
    mine = oracle.given(CASE, rank_idx)
    return oracle.Given(mine.x.to(device), mine.topk_idx.to(device), mine.topk_weights.to(device))


def normal(context: RankContext, mine: oracle.Given) -> Iterator[Any]:
    buffer = Buffer(context.group, enable_shrink=True)
    yield buffer.get_dispatch_layout(mine.topk_idx, CASE.num_experts)
    routing = oracle.routing(buffer, mine.topk_idx, CASE.num_experts)
    arrived = buffer.dispatch(
        mine.x, topk_idx=mine.topk_idx, topk_weights=mine.topk_weights, **routing
    )
    yield arrived
    handle = arrived[4]
    yield buffer.dispatch(mine.x, handle=handle)
    yield buffer.dispatch((mine.x.view(torch.uint8), mine.topk_weights), **routing)
    bias = mine.x + 1
    for weights, added in ((None, None), (arrived[2], None), (arrived[2], (bias, mine.x))):
        yield buffer.combine(arrived[0], handle, weights, added)
    *sums, event = buffer.combine(arrived[0], handle, arrived[2], async_finish=True)
    event.current_stream_wait()
    yield sums
    mask = torch.ones(CASE.num_ranks, dtype=torch.int32, device=mine.x.device)
    buffer.low_latency_query_mask_buffer(mask)
    yield mask


def low_latency(context: RankContext, mine: oracle.Given) -> Iterator[Any]:
    buffer = Buffer(context.group)
    device = mine.x.device
    for is_hook in (False, True):
        stats = torch.zeros(CASE.num_experts // CASE.num_ranks, dtype=torch.int32, device=device)
        waits = torch.zeros(CASE.num_ranks, dtype=torch.int64, device=device)
        x, count, handle, _, hook = buffer.low_latency_dispatch(
            mine.x,
            mine.topk_idx,
            NUM_MAX,
            CASE.num_experts,
            stats,
            waits,
            return_recv_hook=is_hook,
        )
        if hook is not None:
            hook()
        assert isinstance(x, tuple)
        is_filled = torch.arange(x[0].shape[1], device=device) < count[:, None]
        places = [x[0].view(torch.uint8)[is_filled], x[1][is_filled], handle[0][is_filled]]
        yield [*places, count, handle[1], stats]
        rows = buffer.get_next_low_latency_combine_buffer(handle)
        rows.copy_(torch.ones_like(rows))
        y, event, _ = buffer.low_latency_combine(
            rows,
            mine.topk_idx,
            mine.topk_weights,
            handle,
            zero_copy=True,
            async_finish=is_hook,
            combine_wait_recv_cost_stats=waits,
        )
        if is_hook:
            event.current_stream_wait()
        yield y


def elastic(context: RankContext, mine: oracle.Given) -> Iterator[Any]:
    buffer = ElasticBuffer(context.group, num_max_tokens_per_rank=NUM_MAX)
    for is_expanded in (False, True):
        arrived = buffer.dispatch(
            mine.x,
            mine.topk_idx,
            mine.topk_weights,
            num_experts=CASE.num_experts,
            do_expand=is_expanded,
        )
        yield arrived[:4]
        handle = arrived[3]
        yield buffer.dispatch(mine.x, handle=handle, topk_weights=mine.topk_weights)[:3]
        weights = None if is_expanded else arrived[2]
        yield buffer.combine(arrived[0], handle, weights)[:2]
        yield buffer.combine(arrived[0], handle, weights, mine.x)[:2]


def hybrid(context: RankContext, mine: oracle.Given) -> Iterator[Any]:
    buffer = HybridEPBuffer(context.group, CASE.hidden, NUM_MAX, CASE.num_experts // CASE.num_ranks)
    chosen = {"topk_idx": mine.topk_idx, "topk_weights": mine.topk_weights}
    token, probs, _, handle = buffer.dispatch(mine.x, **chosen)
    yield token, probs, handle
    yield buffer.combine(token, probs, handle)
    permuted = buffer.dispatch_with_permute(hidden=mine.x, pad_multiple=4, **chosen)
    yield permuted
    yield indices_to_map(mine.topk_idx, mine.topk_weights, len(mine.x), CASE.num_experts)
    rows = {"hidden": permuted[0], "probs": permuted[1], "handle": permuted[4]}
    yield buffer.combine_with_unpermute(**rows)


def fused(context: RankContext, mine: oracle.Given) -> Iterator[Any]:
    rows, ids, probs, counts, handle = fused_a2a.fused_dispatch(
        mine.x, mine.topk_idx, mine.topk_weights, CASE.num_experts, context.group
    )
    yield rows, ids, probs, counts
    yield fused_a2a.fused_combine(rows, context.group, handle)[0]
    fused_a2a._buffers.pop(id(context.group))  # whose calls are on one device


def dispatcher(context: RankContext, mine: oracle.Given) -> Iterator[Any]:
    """Its constructor makes its buffer, before there are tensors."""
    buffers = group_buffers.group_buffers(context.group, device=mine.x.device)
    made = TokenDispatcher(CASE.num_experts, buffer=buffers.get(CASE.num_experts))
    x, weights = (each.detach().requires_grad_() for each in (mine.x, mine.topk_weights))
    routed = made.dispatch(x, weights, topk_idx=mine.topk_idx)
    y = made.combine(routed.tokens * routed.probs[:, None], routed)
    y.sum().backward()
    yield routed.tokens, routed.probs, y, x.grad, weights.grad


def bucket(context: RankContext, mine: oracle.Given) -> Iterator[Any]:
    """Its storage is there before its first call, on torch's default device."""
    with mine.x.device:
        buffer = BucketBuffer(context.group, 2 << 20)
    with buffer.session():
        # Numbers of bytes that are rows as they are, and others.
        for size in (CASE.num_ranks * 1024, CASE.num_ranks * 13):
            x = mine.topk_weights.flatten()[:1] * torch.ones(size, device=mine.x.device)
            yield buffer.all_gather(x).wait()
            yield buffer.reduce_scatter([x, x + 1], scale=0.5).wait()
            yield buffer.reduce_scatter(x, "bf16").wait()
            yield buffer.all_reduce(x, num_sms=2).wait()


Calls = Callable[[RankContext, oracle.Given], Iterator[Any]]
SURFACES: dict[str, Calls] = {
    "normal": normal,
    "low_latency": low_latency,
    "elastic": elastic,
    "hybrid": hybrid,
    "bucket": bucket,
    "fused": fused,
    "dispatcher": dispatcher,
}
LONG = {"normal", "low_latency"}
SHORT = {"megatron", "sglang normal", "vllm standard"}


def compare(context: RankContext, surface: str) -> None:
    with on_pretended_device():
        # Those of threads live as long as somebody holds them.
        held = [group_buffers.group_buffers(context.group, device=each) for each in (CPU, DEVICE)]
        there, here = (
            [
                list(tensors_in(each))
                for each in SURFACES[surface](context, given(context.rank_idx, device))
            ]
            for device in (DEVICE, CPU)
        )
        assert [len(each) for each in there] == [len(each) for each in here]
        for call, (found, expected) in enumerate(zip(there, here, strict=True)):
            for place, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert other.device == CPU
                assert one.device == DEVICE or one.numel() == 0 or (surface, place) == ("fused", 3)
                assert one.dtype == other.dtype
                raw = one.cpu().contiguous().view(torch.uint8)
                assert torch.equal(raw, other.contiguous().view(torch.uint8)), (call, place)
        del held


@pytest.mark.parametrize(
    "surface",
    [pytest.param(each, marks=pytest.mark.full if each in LONG else ()) for each in SURFACES],
)
def test_calls_give_on_a_device_what_they_give_on_the_cpu(surface: str) -> None:
    run_ranks(compare, CASE.num_ranks, surface, mode="threads", timeout_s=120.0)


def run_dispatcher(context: RankContext, name: str) -> None:
    """A layer around a dispatcher that is constructed, as serving frameworks do, with a default device."""
    target = next(each for each in DISPATCHERS if each.name == name)
    case = next(each for each in DISPATCHER_CASES if each.name == "backward")
    found = []
    with on_pretended_device():
        held = [group_buffers.group_buffers(context.group, device=each) for each in (CPU, DEVICE)]
        mine = all_tokens(case)[context.rank_idx]
        for buffers in held:
            fused_a2a._buffers.pop(id(context.group), None)
            fused_a2a._hybrid_ep_buffers.pop(id(context.group), None)
            tensors = [mine.x, mine.topk_idx, mine.topk_weights, mine.grad]
            x, topk_idx, weights, grad = (each.clone().to(buffers.device) for each in tensors)
            if "backward" in target.features:
                x.requires_grad_()
                weights.requires_grad_()
            with buffers.device:
                y = target.run(buffers, case, RankTokens(x, topk_idx, weights, grad))
                if "backward" in target.features:
                    y.backward(grad)
            assert y.device == buffers.device
            found.append(
                [y.detach().cpu(), *(g.cpu() for g in (x.grad, weights.grad) if g is not None)]
            )
        here, there = found
        assert len(here) == len(there) == (3 if "backward" in target.features else 1)
        for one, other in zip(here, there, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        del held


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each.name, marks=() if each.name in SHORT else pytest.mark.full)
        for each in DISPATCHERS
    ],
)
def test_dispatchers_give_on_a_device_what_they_give_on_the_cpu(name: str) -> None:
    run_ranks(run_dispatcher, 2, name, mode="threads", timeout_s=120.0)


def raised_by(call: Callable[[], object]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is the caller's to look at
        call()
    return str(caught.value)


def differ(context: RankContext) -> None:
    """Rank 0 has tensors of the CPU, rank 1 those of a device: at first, and where buffers exist."""
    with on_pretended_device():
        held = [group_buffers.group_buffers(context.group, device=each) for each in (CPU, DEVICE)]
        mine = given(context.rank_idx, (CPU, DEVICE)[context.rank_idx])
        buffer = Buffer(context.group)
        arguments = oracle.routing(buffer, mine.topk_idx, CASE.num_experts)
        texts = [
            raised_by(lambda: buffer.dispatch(mine.x, **arguments)),
            raised_by(
                lambda: fused_a2a.fused_dispatch(
                    mine.x, mine.topk_idx, None, CASE.num_experts, context.group
                )
            ),
            raised_by(
                lambda: group_buffers.group_buffers(
                    context.group, device=mine.x.device
                ).get_together("layers", CASE.num_experts)
            ),
        ]
        for text in texts:
            assert all(said in text for said in ("rank 0", "on cpu", "rank 1", "on meta"))
        # Nothing is lost: they go on where they agree, and then hold to it.
        both = given(context.rank_idx, DEVICE)
        fused_a2a.fused_dispatch(both.x, both.topk_idx, None, CASE.num_experts, context.group)
        text = raised_by(
            lambda: fused_a2a.fused_dispatch(
                mine.x, mine.topk_idx, None, CASE.num_experts, context.group
            )
        )
        assert all(said in text for said in ("rank 0", "on meta", "cpu"))
        del held


def test_ranks_with_tensors_on_different_devices_all_raise() -> None:
    run_ranks(differ, CASE.num_ranks, mode="threads", timeout_s=60.0)


def hold_back(stream: Any, tensor: torch.Tensor, value: torch.Tensor) -> threading.Event:
    """The stream gives `tensor` its value when the event is set, which nobody on the host waits for."""
    gate = threading.Event()
    stream.call(gate.wait)
    stream.call(lambda: tensor.inner.copy_(value))
    return gate


def follow_events(context: RankContext) -> None:
    """Calls come behind the caller's stream, or with `previous_event` behind that and nothing later."""
    with on_pretended_device() as stream:
        mine = given(context.rank_idx, DEVICE)
        buffer = Buffer(context.group)
        arguments = {
            **oracle.routing(buffer, mine.topk_idx, CASE.num_experts),
            "topk_idx": mine.topk_idx,
            "topk_weights": mine.topk_weights,
        }
        expected = buffer.dispatch(mine.x, **arguments)[0].cpu()

        # Behind an event that is here already, while the caller's stream stands still.
        before = Buffer.capture()
        later = torch.zeros(4, device=DEVICE)
        gate = hold_back(stream, later, torch.ones(4))
        *arrived, event = buffer.dispatch(
            mine.x, **arguments, previous_event=before, async_finish=True
        )
        assert not stream.is_idle()
        y, _, combined = buffer.combine(
            arrived[0], arrived[4], previous_event=event, async_finish=True
        )
        assert isinstance(combined, EventOverlap)
        assert not stream.is_idle()
        gate.set()
        event.current_stream_wait()
        assert torch.equal(arrived[0].cpu(), expected)
        combined.current_stream_wait()
        assert bool((y != 0).any())

        # Without one, behind what the caller's stream holds when the call is made.
        late = torch.zeros_like(mine.x)
        gate = hold_back(stream, late, mine.x.cpu())
        opened = threading.Timer(0.2, gate.set)
        opened.start()
        assert torch.equal(buffer.dispatch(late, **arguments)[0].cpu(), expected)

        # Windows stay as long as the caller's stream may read them, and its events are in order.
        communicator = buffer.runtime.shared().communicator
        assert stream in communicator.streams_of_results
        comm_stream = buffer.get_comm_stream()
        assert isinstance(comm_stream, Stream)
        assert comm_stream.beneath is not stream
        gate = hold_back(stream, later, torch.full((4,), 2.0))
        mark = EventHandle()
        with streams.cuda.stream(comm_stream):
            mark.current_stream_wait()
            assert not comm_stream.beneath.is_idle()
            gate.set()
            comm_stream.beneath.synchronize()
            assert later.inner.tolist() == [2.0] * 4


def test_calls_are_in_the_order_of_streams_and_events() -> None:
    run_ranks(follow_events, CASE.num_ranks, mode="threads", timeout_s=60.0)


def ask_for_another_gpu(context: RankContext) -> None:
    """Every rank has one GPU of a kind, and rank 1 asks for another."""
    first = torch.device(DEVICE.type, 0)
    with on_pretended_device():
        held = group_buffers.group_buffers(context.group, device=first)
        wanted = torch.device(DEVICE.type, context.rank_idx)
        text = raised_by(
            lambda: group_buffers.group_buffers(context.group, device=wanted).get_together(
                "layers", 4
            )
        )
        assert all(said in text for said in ("rank 1", "on meta:0", "on meta:1"))
        del held


def test_a_second_gpu_on_a_rank_is_refused_on_every_rank() -> None:
    run_ranks(ask_for_another_gpu, 2, mode="threads", timeout_s=60.0)


def name_kinds(context: RankContext) -> str:
    """Ranks that make a communicator for different kinds of device hear of both."""
    device = ("cpu", "cuda")[context.rank_idx]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moe_comm.peers.communicator.RankGpu", lambda device, *_: _Gpu(device))
        return raised_by(lambda: Communicator(context.group, device=device))


class _Gpu:
    def __init__(self, device: torch.device) -> None:
        self.device = device


def test_a_communicator_is_for_one_kind_of_device() -> None:
    for text in run_ranks(name_kinds, 2):
        assert "different communicators: device is cpu on rank 0 and cuda on rank 1" in text


@pytest.mark.parametrize(
    ("config", "device", "expected"),
    [
        ("cpu:gloo,cuda:gloo", None, "cpu"),
        ("cuda:nccl", None, "cuda"),
        ("cpu:gloo,cuda:nccl", None, "cuda"),
        ("cuda:nccl", "cpu", "cpu"),
        ("cpu:gloo,cuda:gloo", torch.device("cuda:3"), "cuda:3"),
    ],
)
def test_constructors_take_the_device_of_their_group(
    config: str, device: Any, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Group(dist.ProcessGroup):
        pass

    asked = []

    class Asked(Communicator):
        def __init__(self, group: object, device: Any) -> None:
            asked.append(torch.device(device))
            raise LookupError

    monkeypatch.setattr("moe_comm.ep.group_buffers.Communicator", Asked)
    monkeypatch.setattr("moe_comm.ep.group_buffers.is_alive", lambda group: True)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    # Such a group has no backend over which its one rank could speak to itself.
    monkeypatch.setattr(
        "moe_comm.peers.bootstrap.gather_objects_of_group", lambda group, item: [item]
    )
    with pytest.raises(LookupError):
        group_buffers.group_buffers(Group(0, 1), device=device)
    assert asked == [torch.device(expected)]


def give_a_communicator(context: RankContext) -> None:
    """A group whose own device would be the CPU."""
    with on_pretended_device():
        held = group_buffers.group_buffers(
            group_buffers.Communicator(context.group, device=DEVICE)  # type: ignore[attr-defined]
        )
        made = TokenDispatcher(CASE.num_experts, group=context.group)
        assert made.buffer is held.get(CASE.num_experts)
        assert group_buffers.group_buffers(context.group, device=CPU) is not held


def test_constructors_take_the_device_of_a_communicator_that_was_given() -> None:
    run_ranks(give_a_communicator, 2, mode="threads", timeout_s=60.0)
