"""Calls that are let through at a glance must be those that the checks one by one let through."""

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from moe_comm import (
    FP8_BLOCK128,
    MXFP8,
    Capacity,
    CombineResult,
    Communicator,
    EpBuffer,
    EpConfig,
    Layout,
    Quantization,
    QuantizationFormat,
    ScaleFormat,
)
from moe_comm.dispatcher.routing_map import topk_of_routing_map
from moe_comm.ep import validation
from moe_comm.ep.call_options import DispatchOptions, check_options
from tests.helpers.described_tensors import needs_described_tensors

CONFIG = EpConfig(num_experts=8, num_topk=2, hidden=16, num_max_tokens_per_rank=4)


pytestmark = needs_described_tensors  # without, every call is checked rule by rule


@pytest.fixture
def buffer(communicator: Communicator) -> Iterator[EpBuffer]:
    with EpBuffer(communicator, CONFIG) as made:
        yield made


@pytest.fixture
def seen(buffer: EpBuffer, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every call on `buffer`, whether a glance sufficed; nothing where none was thrown."""
    seen: list[bool] = []
    for name in ("dispatch_unchecked", "combine_unchecked"):
        look = getattr(buffer._backend, name)

        def called(*args: object, look: object = look) -> object:
            operation: object = look(*args)
            seen.append(operation is not None)
            return operation

        monkeypatch.setattr(buffer._backend, name, called)
    return seen


def _rows(num_rows: int = 3) -> list[object]:
    good = torch.zeros(num_rows, 16, dtype=torch.bfloat16)
    return [
        good,
        good[:0],
        good.float(),
        torch.zeros(num_rows, 32, dtype=torch.bfloat16),
        torch.zeros(num_rows, 32, dtype=torch.bfloat16)[:, ::2],
        torch.zeros(5, 16, dtype=torch.bfloat16),
        torch.zeros(16, dtype=torch.bfloat16),
        torch.zeros(num_rows, 16, dtype=torch.bfloat16, device="meta"),
        torch.nn.Parameter(good),
        torch._neg_view(good),
        (good, good),
        None,
    ]


def _choices() -> list[object]:
    good = torch.tensor([[0, 1]] * 3)
    return [
        good,
        good[:0],
        torch.zeros(5, 2, dtype=torch.int64),
        good.int(),
        torch.zeros(3, 4, dtype=torch.int64)[:, ::2],
        torch.zeros(3, 3, dtype=torch.int64),
        torch.zeros(6, dtype=torch.int64),
        torch.zeros(3, 2, dtype=torch.int64, device="meta"),
        torch._neg_view(-good),
        None,
    ]


def _weights() -> list[object]:
    return [
        None,
        torch.zeros(3, 2),
        torch.zeros(3, 2, dtype=torch.float64),
        torch.zeros(2, 3),
        torch.zeros(3, 4)[:, ::2],
        torch.zeros(3, 2, device="meta"),
        torch._neg_view(torch.zeros(3, 2)),
        1.0,
    ]


def _outs(expert_out: object, weights: object) -> list[object]:
    """None, two to write to, and others."""
    good = torch.zeros(3, 16, dtype=torch.bfloat16)
    freed = torch.zeros(3, 16, dtype=torch.bfloat16)
    freed.untyped_storage().resize_(0)
    outs = [
        None,
        good,
        torch.nn.Parameter(good, requires_grad=False),
        good[:2],
        good.float(),
        torch.zeros(3, 32, dtype=torch.bfloat16)[:, ::2],
        torch.zeros(3, 16, dtype=torch.bfloat16, device="meta"),
        torch._neg_view(good),
        freed,
        1.0,
    ]
    for read in (expert_out, weights):
        # Torch's numbers of other types in the same bytes.
        if isinstance(read, torch.Tensor) and read.device.type == "cpu" and read.numel() > 0:
            shared = torch.empty(0, dtype=torch.bfloat16)
            shared.set_(read.untyped_storage(), 0, (1, 1)).resize_(3, 16)
            outs.append(shared)
    return outs


def _pass(buffer: EpBuffer, **options: Any) -> None:
    """Options are looked at once: later calls with them are seen at a glance."""
    x, topk_idx = _rows()[0], _choices()[0]
    assert isinstance(x, torch.Tensor)
    assert isinstance(topk_idx, torch.Tensor)
    with contextlib.suppress(ValueError, TypeError):
        buffer.dispatch(x, topk_idx, **options)


def test_a_dispatch_seen_at_a_glance_passes_every_check(buffer: EpBuffer, seen: list[bool]) -> None:
    num_seen = 0
    for layout, alignment, x, topk_idx, weights in itertools.product(
        [*Layout, 2, None], [1, 4, True, 1.0, "1"], _rows(), _choices(), _weights()
    ):
        _pass(buffer, layout=layout, expert_alignment=alignment)
        seen.clear()
        try:
            buffer.dispatch(x, topk_idx, weights, layout=layout, expert_alignment=alignment)
        except (ValueError, TypeError):
            assert not any(seen)
            continue
        if not any(seen):
            continue
        num_seen += 1
        validation.check_rows(x, None)
        validation.check_devices(torch.device("cpu"), x=x, topk_idx=topk_idx, topk_weights=weights)
        options = check_options(DispatchOptions(layout, alignment))
        validation.check_dispatch(CONFIG, x, topk_idx, weights, options, is_quantized=False)
    # Rows of every layout, with and without weights, also as a parameter, and none; two of the layouts
    # aligned, too.
    assert num_seen == (3 + 2) * 2 * 2 + (3 + 2) * 1


QUANTIZATIONS = [
    FP8_BLOCK128,
    MXFP8,
    Quantization(format=QuantizationFormat.FP8_BLOCK128, scale_format=ScaleFormat.UE8M0),
    Quantization(format=QuantizationFormat.MXFP8, is_column_major=True),
]


def test_a_dispatch_seen_to_quantize_passes_every_check(buffer: EpBuffer, seen: list[bool]) -> None:
    num_seen = 0
    for x, topk_idx, layout, quantization in itertools.product(
        _rows(), _choices(), Layout, [*QUANTIZATIONS, "MXFP8", 1]
    ):
        _pass(buffer, layout=layout, quantization=quantization)
        seen.clear()
        try:
            buffer.dispatch(x, topk_idx, layout=layout, quantization=quantization)
        except (ValueError, TypeError):
            assert not any(seen)
            continue
        if not any(seen):
            continue
        num_seen += 1
        validation.check_rows(x, quantization)
        validation.check_devices(torch.device("cpu"), x=x, topk_idx=topk_idx)
        options = check_options(DispatchOptions(layout, 1, quantization))
        validation.check_dispatch(CONFIG, x, topk_idx, None, options, is_quantized=False)
    # Rows of every layout, and none.
    assert num_seen == 2 * len(Layout) * len(QUANTIZATIONS)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize("hidden", [16, 192, 640])
def test_a_dispatch_seen_at_a_glance_quantizes_like_one_that_is_checked(
    communicator: Communicator, layout: Layout, hidden: int
) -> None:
    config = dataclasses.replace(CONFIG, hidden=None, dtype=None)
    topk_idx = torch.tensor([[0, 1], [5, 7], [1, -1]])
    with EpBuffer(communicator, config) as buffer:
        look = buffer._backend.dispatch_unchecked
        # Each shape, dtype and quantization behind another.
        for dtype, quantization in itertools.product(
            (torch.bfloat16, torch.float16, torch.float32), QUANTIZATIONS
        ):
            x = torch.randn(3, hidden).to(dtype)
            options = {"layout": layout, "quantization": quantization}
            checked = buffer.dispatch(x, topk_idx, copy_out=False, **options)
            _pass(buffer, **options)
            assert look(x, topk_idx, None, None, DispatchOptions(**options)) is not None
            result = buffer.dispatch(x, topk_idx, **options)
            assert result.x.dtype is checked.x.dtype is torch.float8_e4m3fn
            sf, checked_sf = result.x_sf, checked.x_sf
            assert (sf.shape, sf.stride(), sf.dtype) == (
                checked_sf.shape,
                checked_sf.stride(),
                quantization.sf_dtype,
            )
            filled = result.num_tokens_per_expert.tolist()
            rows = [result.x, checked.x, sf, checked_sf]
            if layout is Layout.LOW_LATENCY:
                rows = [
                    torch.cat(
                        [
                            each[:count]
                            for each, count in zip(
                                t.unflatten(0, (8, -1)) if t.dim() == 2 else t, filled, strict=True
                            )
                        ]
                    )
                    for t in rows
                ]
            x_bytes, checked_bytes, sf, checked_sf = (
                t.contiguous().view(torch.uint8) for t in rows
            )
            assert torch.equal(x_bytes, checked_bytes)
            assert torch.equal(sf, checked_sf)


@pytest.mark.parametrize("most_tokens", [None, 0, 2, 3])
@pytest.mark.parametrize("layout", list(Layout))
def test_any_number_of_tokens_is_seen_where_none_is_configured(
    communicator: Communicator, most_tokens: int | None, layout: Layout
) -> None:
    x, topk_idx = torch.zeros(3, 16, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3)
    config = EpConfig(num_experts=8, num_topk=2, hidden=16, num_max_tokens_per_rank=most_tokens)
    with EpBuffer(communicator, config) as buffer:
        with contextlib.suppress(ValueError):
            buffer.dispatch(x, topk_idx, layout=layout)
        look = buffer._backend.dispatch_unchecked
        is_seen = look(x, topk_idx, None, None, DispatchOptions(layout)) is not None
        assert is_seen == (
            most_tokens == 3 or (most_tokens is None and layout is not Layout.LOW_LATENCY)
        )
        if not is_seen:
            with pytest.raises(ValueError, match="num_max_tokens_per_rank"):
                buffer.dispatch(x, topk_idx, layout=layout)


@pytest.mark.parametrize("opened", ["num_topk", "hidden", "dtype"])
def test_an_open_configuration_takes_at_a_glance_what_can_be_added(
    communicator: Communicator, opened: str
) -> None:
    fields = {"num_topk": 2, "hidden": 16, "dtype": torch.bfloat16, opened: None}
    x, topk_idx = torch.ones(3, 16, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3)
    with EpBuffer(communicator, EpConfig(num_experts=8, **fields)) as buffer:
        look = buffer._backend.dispatch_unchecked

        def is_seen(x: torch.Tensor, topk_idx: torch.Tensor) -> bool:
            return look(x, topk_idx, None, None, DispatchOptions()) is not None

        buffer.dispatch(x, topk_idx)  # its options pass
        assert is_seen(x, topk_idx)
        assert is_seen(x, topk_idx[:, :1].contiguous()) == (opened == "num_topk")
        assert not is_seen(x, topk_idx[:, :0])
        assert is_seen(torch.ones(3, 32, dtype=torch.bfloat16), topk_idx) == (opened == "hidden")
        # Rows of 24 bytes.
        assert not is_seen(torch.ones(3, 12, dtype=torch.bfloat16), topk_idx)
        assert is_seen(x.float(), topk_idx) == (opened == "dtype")
        assert not is_seen(x.int(), topk_idx)
        result = buffer.dispatch(x, topk_idx)
        assert torch.equal(result.x, torch.ones(6, 16, dtype=torch.bfloat16))
        assert result.x.dtype is torch.bfloat16


def test_whatever_is_asked_for_is_seen_once_it_has_passed(
    buffer: EpBuffer, seen: list[bool]
) -> None:
    x, topk_idx = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    handle = buffer.dispatch(x, topk_idx, expert_alignment=4).handle
    calls: list[dict[str, Any]] = [
        {"copy_out": True},
        {"copy_out": False},
        {"async_op": True},
        {"capacity": Capacity(num_rows=8)},
        {"capacity": Capacity(num_rows=8, on_overflow="drop"), "expert_alignment": 8},
        {"topk_idx": None, "handle": handle},
        {"topk_idx": None, "handle": handle, "expert_alignment": 4, "async_op": True},
        {"gradients": 1},
    ]
    for call in calls:
        seen.clear()
        for _ in range(2):
            # Equal values: another object each time.
            asked = {"topk_idx": topk_idx, **copy.deepcopy(call | {"handle": None})}
            if "handle" in call:
                asked["handle"] = handle
            result = buffer.dispatch(x, **asked)
            result.event.wait()
            assert result.x.shape[1] == 16
        assert seen[-1], call
    summed = buffer.dispatch(x, topk_idx)
    combines: list[dict[str, Any]] = [{"copy_out": True}, {"async_op": True}, {"gradients": 1}]
    for call in combines:
        seen.clear()
        for _ in range(2):
            combined = buffer.combine(summed.x, summed.handle, **call)
            if isinstance(combined, CombineResult):
                combined.event.wait()
        assert seen[-1], call
    buffer.mask_ranks([0])
    for _ in range(2):
        assert (
            int(buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY).num_tokens_per_expert.sum())
            == 0
        )
    assert seen[-1]


def test_a_value_that_only_equals_one_that_passed_is_refused(buffer: EpBuffer) -> None:
    x, topk_idx = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    alike: list[tuple[str, object, object]] = [
        ("layout", Layout.RANK_MAJOR, 1),
        ("expert_alignment", 1, True),
        ("expert_alignment", 4, 4.0),
        ("async_op", True, 1),
        ("copy_out", False, 0),
        ("gradients", 1, True),
    ]
    for name, good, bad in alike:
        options: dict[str, Any] = {name: good}
        buffer.dispatch(x, topk_idx, **options).event.wait()
        options[name] = bad
        with pytest.raises((ValueError, TypeError), match=name):
            buffer.dispatch(x, topk_idx, **options)


def test_options_are_known_without_running_python(
    buffer: EpBuffer, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A signal may raise where Python runs, and other threads go on.
    x, topk_idx = torch.zeros(3, 16, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3)
    called: list[object] = []

    def compare(one: object, other: object) -> bool:
        called.append(other)
        return NotImplemented

    monkeypatch.setattr(Capacity, "__eq__", compare)
    for num_rows in (51, 52, 51, 52):
        assert buffer.dispatch(x, topk_idx, capacity=Capacity(num_rows=num_rows)).x.shape[0] == (
            num_rows
        )
    assert seen == [False, False, True, True]
    assert called == []


class _Comparing(Capacity):
    """Limits whose comparison runs Python."""

    compare: Callable[[], bool]

    def __eq__(self, other: object) -> bool:
        return self.compare()

    __hash__ = Capacity.__hash__


def test_options_may_be_remembered_while_others_are_compared(
    buffer: EpBuffer, seen: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, topk_idx = torch.zeros(3, 16, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3)
    num_rows = itertools.count(100)
    with EpBuffer(buffer.communicator, CONFIG) as other:

        def remember() -> bool:
            for _ in range(20):  # as many take every place
                other.dispatch(x, topk_idx, capacity=Capacity(num_rows=next(num_rows)))
            return True

        def fail() -> bool:
            raise ValueError("cannot be compared")

        def interrupt() -> bool:
            raise KeyboardInterrupt("first")

        monkeypatch.setattr(_Comparing, "compare", staticmethod(remember), raising=False)
        for size in range(8, 12):
            result = buffer.dispatch(x, topk_idx, capacity=_Comparing(num_rows=size))
            assert result.x.shape[0] == size
        monkeypatch.setattr(_Comparing, "compare", staticmethod(fail))
        assert buffer.dispatch(x, topk_idx, capacity=_Comparing(num_rows=12)).x.shape[0] == 12
        monkeypatch.setattr(_Comparing, "compare", staticmethod(interrupt))
        with pytest.raises(KeyboardInterrupt, match="first"):
            buffer.dispatch(x, topk_idx, capacity=_Comparing(num_rows=13))
        assert buffer.dispatch(x, topk_idx).x.shape[0] == 6
    assert not any(seen[:-1])


def test_what_passed_with_one_buffer_is_seen_by_the_limits_of_another(
    buffer: EpBuffer, communicator: Communicator
) -> None:
    x, topk_idx = torch.zeros(3, 16, dtype=torch.bfloat16), torch.tensor([[0, 1]] * 3)
    handle = buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY).handle
    with EpBuffer(
        communicator, dataclasses.replace(CONFIG, num_max_tokens_per_rank=None)
    ) as open_one:
        with pytest.raises(ValueError, match="num_max_tokens_per_rank"):
            open_one.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY)
        with pytest.raises(ValueError, match="handle belongs to buffer"):
            open_one.dispatch(x, None, handle=handle)
        aligned = open_one.dispatch(x, topk_idx, expert_alignment=4).handle
        open_one.dispatch(x, topk_idx, layout=Layout.RANK_MAJOR)
        open_one.dispatch(x, topk_idx, expert_alignment=8, capacity=Capacity(num_rows=8))
        bad: list[tuple[str, dict[str, Any]]] = [
            ("layout", {"layout": Layout.RANK_MAJOR}),
            ("expert_alignment", {"expert_alignment": 8}),
            ("capacity", {"capacity": Capacity(num_rows=8)}),
        ]
        for name, options in bad:
            with pytest.raises(ValueError, match=f"{name} (is|of the handle)"):
                open_one.dispatch(x, None, handle=aligned, **options)


@pytest.mark.parametrize("layout", list(Layout))
def test_a_combine_seen_at_a_glance_passes_every_check(
    buffer: EpBuffer, seen: list[bool], layout: Layout
) -> None:
    x, topk_idx = torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(3, 2, dtype=torch.int64)
    topk_idx[:, 1] = -1
    handle = buffer.dispatch(x, topk_idx, layout=layout).handle
    buffer.combine(torch.zeros(handle.num_recv_tokens, 16), handle)  # its options pass
    num_seen = 0
    for expert_out, weights in itertools.product(_rows(handle.num_recv_tokens), _weights()):
        for out in _outs(expert_out, weights):
            seen.clear()
            try:
                buffer.combine(expert_out, handle, topk_weights=weights, out=out)
            except (ValueError, TypeError):
                assert seen == [False]
                continue
            if seen == [False]:
                continue
            num_seen += 1
            validation.check_devices(
                torch.device("cpu"), expert_out=expert_out, topk_weights=weights, out=out
            )
            validation.check_combine(handle, expert_out, weights, None, out)
    # Rows, also as a parameter, into new memory and into both that can be written; of float32, into new
    # memory and one; and wider ones, into new memory.
    assert num_seen == (1 if layout is Layout.RANK_MAJOR else 2) * (2 * 3 + 2 + 1)


OPEN = EpConfig(num_experts=8, num_topk=None, hidden=None, num_max_tokens_per_rank=None)


def _map() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of three experts, of none and of one; and numbers for all places."""
    routing_map = torch.zeros(3, 8, dtype=torch.bool)
    routing_map[0, [1, 4, 7]] = routing_map[2, 4] = True
    return routing_map, torch.arange(1.0, 25.0).view(3, 8)


@pytest.mark.parametrize("has_probs", [True, False])
def test_a_map_seen_at_a_glance_is_its_list(communicator: Communicator, has_probs: bool) -> None:
    x = torch.arange(48, dtype=torch.bfloat16).view(3, 16)
    routing_map, dense = _map()
    probs = dense if has_probs else None
    with EpBuffer(communicator, OPEN) as buffer:
        topk_idx, weights = topk_of_routing_map(routing_map, probs)
        listed = buffer.dispatch(x, topk_idx, weights)
        result = buffer.dispatch(x, routing_map, probs)
        assert torch.equal(result.x, x[[0, 0, 2, 0]])
        assert torch.equal(result.num_tokens_per_expert, listed.num_tokens_per_expert)
        assert torch.equal(result.plan.to_tensors().topk_idx, topk_idx)
        if has_probs:
            assert result.topk_weights.tolist() == [2.0, 5.0, 21.0, 8.0]
        else:
            assert result.topk_weights is None
        # Without a row there is nothing to list.
        empty = buffer.dispatch(x[:0], routing_map[:0])
        assert empty.x.shape == (0, 16)


def test_a_map_that_cannot_be_is_refused_in_its_own_words(communicator: Communicator) -> None:
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    routing_map, _ = _map()
    with EpBuffer(communicator, OPEN) as buffer:
        handle = buffer.dispatch(x, routing_map).handle
        with pytest.raises(ValueError, match="topk_idx must be None with a handle"):
            buffer.dispatch(x, routing_map, handle=handle)
        with pytest.raises(TypeError, match="routing_map must be a dense tensor"):
            buffer.dispatch(x, routing_map.to_sparse())
        with pytest.raises(ValueError, match=r"routing_map must have shape .* = \(3, 8\)"):
            buffer.dispatch(x, routing_map[:, :4])


def test_a_map_is_seen_where_it_is_one(communicator: Communicator) -> None:
    x = torch.zeros(3, 16, dtype=torch.bfloat16)
    good, probs = _map()
    maps = [
        good.to(torch.uint8),
        good[:2],
        good[:, :4].contiguous(),
        good.t().contiguous().t(),
        good.to("meta"),
        None,
    ]
    numbers = [
        probs.double(),
        probs[:2],
        probs[:, :4].contiguous(),
        probs.t().contiguous().t(),
        1.0,
    ]
    tried = [(good, probs), *((each, probs) for each in maps), *((good, each) for each in numbers)]
    with EpBuffer(communicator, OPEN) as buffer:

        def is_seen(routing_map: object, probs: object) -> bool:
            look = buffer._backend.dispatch_unchecked
            return look(x, routing_map, probs, None, DispatchOptions()) is not None

        buffer.dispatch(x, good)  # its options pass
        assert [is_seen(*each) for each in tried] == [True] + [False] * (len(tried) - 1)
    # Three choices of a token.
    with EpBuffer(communicator, dataclasses.replace(OPEN, num_topk=2)) as buffer:
        assert not is_seen(good, None)
        with pytest.raises(
            ValueError, match="a token of 3 experts, more than the configured num_topk"
        ):
            buffer.dispatch(x, good)
        assert is_seen(good & (torch.arange(8) > 1), None)
        one = torch.eye(3, 8, dtype=torch.bool)
        assert is_seen(one, None)
        for each in (one, one.t().contiguous().t()):  # at a glance, and by the rules
            topk_idx = buffer.dispatch(x, each).plan.to_tensors().topk_idx
            assert topk_idx.tolist() == [[0, -1], [1, -1], [2, -1]]
