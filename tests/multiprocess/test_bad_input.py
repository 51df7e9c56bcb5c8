"""Mistakes of a caller in `EpBuffer`, on any rank, with any backend."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_comm import (
    FP8_BLOCK128,
    MXFP8,
    Capacity,
    Communicator,
    DispatchHandle,
    EpBuffer,
    EpConfig,
    Layout,
    ScaleFormat,
)
from moe_comm.testing import RankContext, run_ranks
from tests.helpers.configs import ep_config
from tests.helpers.wrong_arguments import missing_of, told_by

CONFIG = EpConfig(num_experts=6, num_topk=2, hidden=16, num_max_tokens_per_rank=4)
ELASTIC = ep_config(6, None, None, None, dtype=None)
COMPLEX = torch.zeros(4, 16, dtype=torch.complex64)
BACKENDS = ["reference", "collective", "host"]


@dataclasses.dataclass
class Calls:
    """A buffer with what a rank may pass to it."""

    buffer: EpBuffer
    other: EpBuffer
    x: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor
    handle: DispatchHandle
    foreign: DispatchHandle
    by_rank: DispatchHandle
    low_latency: DispatchHandle
    elastic: EpBuffer
    received: torch.Tensor

    @property
    def rows(self) -> torch.Tensor:
        return torch.zeros(self.handle.num_recv_tokens, 16, dtype=torch.bfloat16)

    def pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(4, 16, dtype=torch.float8_e4m3fn), torch.ones(4, 1)

    def dispatch(self, **changes: Any) -> object:
        arguments = {"x": self.x, "topk_idx": self.topk_idx, **changes}
        return self.buffer.dispatch(**arguments).x

    def cached(self, **changes: Any) -> object:
        arguments = {"x": self.x, "topk_idx": None, "handle": self.handle, **changes}
        return self.buffer.dispatch(**arguments).x

    def combine(self, **changes: Any) -> object:
        arguments = {"expert_out": self.rows, "handle": self.handle, **changes}
        return self.buffer.combine(**arguments)

    def by_rank_combine(self, **changes: Any) -> object:
        rows = torch.zeros(self.by_rank.num_recv_tokens, 16, dtype=torch.bfloat16)
        return self.combine(**{"expert_out": rows, "handle": self.by_rank, **changes})

    def low_latency_combine(self, **changes: Any) -> object:
        rows = torch.zeros(self.low_latency.num_recv_tokens, 16, dtype=torch.bfloat16)
        return self.combine(**{"expert_out": rows, "handle": self.low_latency, **changes})

    def elastic_dispatch(self, **changes: Any) -> object:
        return self.elastic.dispatch(**{"x": self.x, "topk_idx": self.topk_idx, **changes})


# Changes of the arguments, unless the call itself raises.
Change = Callable[[Calls], Any]


def freed(tensor: torch.Tensor, num_left: int = 0) -> torch.Tensor:
    """A tensor like it, at an offset of 16 elements, of whose storage `num_left` elements are left."""
    memory = torch.zeros(16 + tensor.numel(), dtype=tensor.dtype)
    view = memory[16:].view(tensor.shape)
    memory.untyped_storage().resize_(num_left * tensor.itemsize)
    return view


def fake(tensor: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(tensor.shape, dtype=tensor.dtype)


class Strange(torch.Tensor):
    """A tensor whose questions raise what they like."""

    def is_contiguous(self, *_: Any, **__: Any) -> bool:
        raise ValueError("no idea")


FREED = "bytes [ .. a storage of 0 bytes, which was freed or cut"


def shared(calls: Calls) -> dict[str, torch.Tensor]:
    """Rows, and sums that begin in the middle of the last of them."""
    num_rows = calls.handle.num_recv_tokens
    memory = torch.zeros((num_rows + 4) * 16, dtype=torch.bfloat16)
    rows, sums = memory[: num_rows * 16], memory[num_rows * 16 - 8 :][: 4 * 16]
    return {"expert_out": rows.view(-1, 16), "out": sums.view(4, 16)}


def shared_weights(calls: Calls) -> dict[str, torch.Tensor]:
    """Weights that lie where the sums are to be written."""
    sums = torch.zeros(4, 16, dtype=torch.bfloat16)
    return {"topk_weights": sums.view(torch.float32).flatten()[:8].view(4, 2), "out": sums}


# By what all ranks call and what all are told, the type and pieces: what one rank does otherwise.
BY_CALL: dict[str, dict[str, Change]] = {
    "dispatch": {
        "TypeError: bfloat16 .. float32": lambda c: {"x": c.x.float()},
        "ValueError: 16 .. 24": lambda c: {"x": torch.zeros(4, 24, dtype=torch.bfloat16)},
        "ValueError: 2 dimensions .. (16,)": lambda c: {"x": c.x[0]},
        "ValueError: contiguous .. (1, 4)": lambda c: {"x": torch.zeros(16, 4).bfloat16().T},
        "ValueError: cpu .. meta": lambda c: {"x": c.x.to("meta")},
        "TypeError: tensor .. list": lambda c: {"x": [1.0]},
        "ValueError: 5 .. 4": lambda c: {
            "x": torch.zeros(5, 16).bfloat16(),
            "topk_idx": torch.zeros(5, 2, dtype=torch.int64),
        },
        "TypeError: int64 .. int32": lambda c: {"topk_idx": c.topk_idx.int()},
        "ValueError: (4, 2) .. (4, 3)": lambda c: {
            "topk_idx": torch.zeros(4, 3, dtype=torch.int64)
        },
        "ValueError: None .. handle": lambda c: {"topk_idx": None},
        "ValueError: topk_idx[0, 0] .. [-1, 6)": lambda c: {"topk_idx": c.topk_idx + 6},
        "TypeError: float32 .. float64": lambda c: {"topk_weights": c.weights.double()},
        "ValueError: (4, 2) .. (3, 2)": lambda c: {"topk_weights": c.weights[:3]},
        "ValueError: expert_alignment .. 0": lambda c: {"expert_alignment": 0},
        "TypeError: expert_alignment .. 2.0": lambda c: {"expert_alignment": 2.0},
        "TypeError: Layout .. 1": lambda c: {"layout": 1},
        # Rows have room for so much of a text, which may end within one of two neighboring characters.
        f"TypeError: Layout .. {'é' * 120}": lambda c: {"layout": "é" * 400},
        f"TypeError: Layout .. x{'é' * 120}": lambda c: {"layout": "x" + "é" * 400},
        "ValueError: copy_out .. 'yes'": lambda c: {"copy_out": "yes"},
        "TypeError: Quantization .. 'fp8'": lambda c: {"quantization": "fp8"},
        "TypeError: bfloat16 .. int32": lambda c: {"x": c.x.to(torch.int32), "quantization": MXFP8},
        "TypeError: bfloat16, got torch.float32": lambda c: {
            "x": c.x.float(),
            "quantization": MXFP8,
        },
        "ValueError: (data, sf) .. 3 values": lambda c: {"x": (*c.pair(), c.x)},
        "TypeError: one-byte .. bfloat16": lambda c: {"x": (c.x, c.pair()[1])},
        "ValueError: hidden 16 .. 24": lambda c: {
            "x": (torch.zeros(4, 24, dtype=torch.uint8), c.pair()[1])
        },
        "TypeError: sf .. tensor .. list": lambda c: {"x": (c.pair()[0], [1.0])},
        "ValueError: sf .. 2 dimensions .. (4,)": lambda c: {"x": (c.pair()[0], torch.ones(4))},
        "ValueError: sf .. (4, num_scales .. (3, 1)": lambda c: {
            "x": (c.pair()[0], torch.ones(3, 1))
        },
        "ValueError: num_scales >= 1 .. (4, 0)": lambda c: {"x": (c.pair()[0], torch.ones(4, 0))},
        "TypeError: 8 bytes .. complex128": lambda c: {
            "x": (c.pair()[0], torch.ones(4, 1, dtype=torch.complex128))
        },
        "ValueError: 1 scale factors for 16 channels .. (4, 3)": lambda c: {
            "x": (c.pair()[0], torch.ones(4, 3)),
            "quantization": FP8_BLOCK128,
        },
        "TypeError: float8_e8m0fnu .. float32": lambda c: {"x": c.pair(), "quantization": MXFP8},
        "TypeError: Capacity .. got 8": lambda c: {"capacity": 8},
        "ValueError: expert_alignment = 4 .. got 6": lambda c: {
            "capacity": Capacity(num_rows=6),
            "expert_alignment": 4,
        },
        'ValueError: RANK_MAJOR .. "grow" or "raise" .. drop': lambda c: {
            "capacity": Capacity(num_rows=8, on_overflow="drop"),
            "layout": Layout.RANK_MAJOR,
        },
        "ValueError: RANK_MAJOR .. num_rows_per_expert=8": lambda c: {
            "capacity": Capacity(num_rows_per_expert=8, on_overflow="raise"),
            "layout": Layout.RANK_MAJOR,
        },
        "ValueError: LOW_LATENCY .. capacity must be None": lambda c: {
            "capacity": Capacity(num_rows=8),
            "layout": Layout.LOW_LATENCY,
        },
        "ValueError: must be 1 .. got 2": lambda c: {
            "layout": Layout.LOW_LATENCY,
            "expert_alignment": 2,
        },
        "TypeError: bool .. 'yes'": lambda c: {"async_op": "yes"},
        "TypeError: bfloat16 .. complex64": lambda c: {"x": COMPLEX},
        "TypeError: dispatch .. expert_aligment": lambda c: {"expert_aligment": 4},
        "TypeError: dispatch .. positional": lambda c: c.buffer.dispatch(
            c.x, c.topk_idx, c.weights, Layout.RANK_MAJOR
        ),
        f"ValueError: x has .. {FREED}": lambda c: {"x": freed(c.x)},
        "ValueError: x has elements in bytes [32, 160) of a storage of 158 bytes": lambda c: {
            "x": freed(c.x, 79)
        },
        f"ValueError: topk_idx has .. {FREED}": lambda c: {"topk_idx": freed(c.topk_idx)},
        f"ValueError: topk_weights has .. {FREED}": lambda c: {"topk_weights": freed(c.weights)},
        "ValueError: no idea": lambda c: {"x": c.x.as_subclass(Strange)},
        "TypeError: dense tensor .. sparse": lambda c: {"x": c.x.to_sparse()},
        "ValueError: x has no memory": lambda c: {"x": fake(c.x)},
        "ValueError: x has no memory of its own": lambda c: torch.func.vmap(
            lambda x: c.dispatch(x=x)
        )(c.x[None]),
    },
    "cached": {
        "ValueError: handle .. num_rows=8": lambda c: {"capacity": Capacity(num_rows=8)},
        "ValueError: EXPERT_MAJOR .. RANK_MAJOR": lambda c: {"layout": Layout.RANK_MAJOR},
        "ValueError: 8 .. handle's is 1": lambda c: {"expert_alignment": 8},
        "TypeError: float32 .. float64": lambda c: {"x": c.x.double(), "quantization": MXFP8},
        "ValueError: (4, num_scales .. (2, 1)": lambda c: {"x": (c.pair()[0], torch.ones(2, 1))},
        "ValueError: topk_idx .. handle": lambda c: {"topk_idx": c.topk_idx},
        "ValueError: 2 .. 4": lambda c: {"x": c.x[:2]},
        "ValueError: 16 bytes .. 12 bytes": lambda c: {"x": torch.zeros(4, 3)},
        "ValueError: buffer": lambda c: {"handle": c.foreign},
        "ValueError: generation .. -1": lambda c: {
            "handle": dataclasses.replace(c.handle, generation=-1)
        },
        "TypeError: bool .. 1": lambda c: {"async_op": 1},
        "TypeError: DispatchHandle .. int": lambda c: {"handle": 7},
        f"ValueError: x has .. {FREED}": lambda c: {"x": freed(c.x)},
    },
    "elastic_dispatch": {
        "ValueError: num_max_tokens_per_rank .. None": lambda c: {
            "x": c.x,
            "layout": Layout.LOW_LATENCY,
        },
        "ValueError: 16 bytes .. 12 bytes": lambda c: {"x": torch.zeros(4, 3)},
        "TypeError: bfloat16 .. int8": lambda c: {"x": c.x.to(torch.int8), "quantization": MXFP8},
        "ValueError: at least one column .. (4, 0)": lambda c: {
            "x": c.x,
            "topk_idx": torch.zeros(4, 0, dtype=torch.int64),
        },
        "ValueError: (4, 5) .. (3, 5)": lambda c: {
            "x": c.x,
            "topk_idx": torch.zeros(3, 5, dtype=torch.int64),
        },
        "TypeError: real .. complex64": lambda c: {"x": COMPLEX.clone().requires_grad_()},
        "ValueError: conjugate": lambda c: {"x": COMPLEX.conj()},
        f"ValueError: sf has .. {FREED}": lambda c: {"x": (c.pair()[0], freed(c.pair()[1]))},
    },
    "combine": {
        "TypeError: DispatchHandle .. str": lambda c: {"handle": "h"},
        "ValueError: 99 rows .. brought": lambda c: {"expert_out": torch.zeros(99, 16).bfloat16()},
        "TypeError: bfloat16 .. int32": lambda c: {"expert_out": c.rows.to(torch.int32)},
        "ValueError: None and None": lambda c: {"expert_out": None},
        "ValueError: (4, 2) .. (1, 2)": lambda c: {"topk_weights": c.weights[:1]},
        "ValueError: (99,)": lambda c: {"row_weights": torch.zeros(99)},
        "ValueError: (4, 16) .. (3, 16)": lambda c: {"out": torch.zeros(3, 16).bfloat16()},
        "TypeError: bfloat16 .. float32": lambda c: {"out": torch.zeros(4, 16)},
        "ValueError: out .. expert_out .. share bytes": shared,
        "ValueError: out .. topk_weights .. share bytes": shared_weights,
        "ValueError: expert_out .. share bytes": lambda c: {
            "expert_out": c.received,
            "out": c.received[:4],
        },
        "TypeError: bool .. None": lambda c: {"async_op": None},
        "ValueError: copy_out .. tensor": lambda c: {"copy_out": c.weights},
        "TypeError: combine .. topk_weight": lambda c: {"topk_weight": c.weights},
        "TypeError: combine .. handle": lambda c: c.buffer.combine(c.rows),
        f"ValueError: expert_out has .. {FREED}": lambda c: {"expert_out": freed(c.rows)},
        f"ValueError: out has .. {FREED}": lambda c: {"out": freed(c.x)},
        f"ValueError: topk_weights has .. {FREED}": lambda c: {"topk_weights": freed(c.weights)},
        f"ValueError: row_weights has .. {FREED}": lambda c: {
            "row_weights": freed(torch.ones(c.handle.num_recv_tokens))
        },
    },
    "by_rank_combine": {
        "ValueError: RANK_MAJOR .. before combine": lambda c: {"topk_weights": c.weights},
        "ValueError: row_weights .. 2 dimensions": lambda c: {
            "row_weights": torch.zeros(c.by_rank.num_recv_tokens)
        },
    },
    "low_latency_combine": {
        "ValueError: 1 rows .. brought": lambda c: {"expert_out": torch.zeros(1, 16).bfloat16()},
    },
}
Drawn = tuple[tuple[str, str], int]
MISTAKES = [(call, told) for call, its in BY_CALL.items() for told in its]


def err(context: RankContext, backend: str, drawn: list[Drawn]) -> list[tuple[str, bool]]:
    """Make the drawn mistakes one after the other: (type and message, whether the buffer works after)."""
    with Communicator(context.group, backend=backend) as communicator:
        buffer, other = EpBuffer(communicator, CONFIG), EpBuffer(communicator, CONFIG)
        elastic = EpBuffer(communicator, ELASTIC)
        generator = torch.Generator().manual_seed(context.rank_idx)
        x = torch.randn(4, 16, generator=generator).bfloat16()
        topk_idx = torch.randint(0, 6, (4, 2), generator=generator)
        weights = torch.ones(4, 2)
        arrived = buffer.dispatch(x, topk_idx)
        calls = Calls(
            buffer, other, x, topk_idx, weights,
            handle=arrived.handle,
            foreign=other.dispatch(x, topk_idx).handle,
            by_rank=buffer.dispatch(x, topk_idx, layout=Layout.RANK_MAJOR).handle,
            low_latency=buffer.dispatch(x, topk_idx, layout=Layout.LOW_LATENCY).handle,
            elastic=elastic,
            received=arrived.x,
        )  # fmt: skip
        found = []
        for (call, wanted), bad_rank in drawn:
            is_wrong = bad_rank % context.num_ranks == context.rank_idx
            told = told_by(calls, call, BY_CALL[call][wanted] if is_wrong else None)
            result = buffer.dispatch(x, topk_idx, weights)
            works = torch.equal(buffer.combine(result.x, result.handle), x + x)
            found.append((told, works))
        for used in (buffer, other, elastic):
            used.destroy()
    return found


def check(backend: str, mode: str, num_ranks: int, drawn: list[Drawn]) -> None:
    by_rank = run_ranks(err, num_ranks, backend, drawn, mode=mode)
    for found in by_rank:
        for ((call, wanted), bad_rank), (told, works) in zip(drawn, found, strict=True):
            assert missing_of(told, bad_rank % num_ranks, wanted) == [], (call, told)
            assert works, (call, wanted)


@pytest.mark.parametrize(
    ("num_ranks", "backend"),
    [
        (3, "host"),
        (1, "collective"),
        (1, "reference"),
        pytest.param(1, "host", marks=pytest.mark.full),
        pytest.param(3, "collective", marks=pytest.mark.full),
        pytest.param(3, "reference", marks=pytest.mark.full),
        pytest.param(2, "simt", marks=pytest.mark.full),
    ],
)
def test_every_mistake_on_every_rank(backend: str, num_ranks: int) -> None:
    check(backend, "processes", num_ranks, list(itertools.product(MISTAKES, range(num_ranks))))


@pytest.mark.parametrize("backend", ["reference", "host"])
@settings(max_examples=15)
@given(
    drawn=st.lists(st.tuples(st.sampled_from(MISTAKES), st.integers(0, 2)), min_size=1, max_size=8)
)
def test_any_sequence_of_mistakes(backend: str, drawn: list[Drawn]) -> None:
    check(backend, "threads", 3, drawn)


def disagree(context: RankContext, backend: str) -> list[str]:
    """Error of this rank where rank 1 calls otherwise, but for the number of a handle."""
    packed = dataclasses.replace(FP8_BLOCK128, scale_format=ScaleFormat.UE8M0, is_column_major=True)
    x, topk_idx = torch.zeros(4, 16).bfloat16(), torch.zeros(4, 2, dtype=torch.int64)
    data, weights = torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 2)
    limit = Capacity(num_rows_per_expert=3, on_overflow="drop")
    with Communicator(context.group, backend=backend) as communicator:
        buffer = EpBuffer(communicator, CONFIG)
        handle, other = (buffer.dispatch(x, topk_idx + expert).handle for expert in (0, 1))
        rows = torch.zeros(handle.num_recv_tokens, 16).bfloat16()
        calls = [
            ({"quantization": FP8_BLOCK128}, {"quantization": packed}),
            ({"x": (data, torch.ones(4, 1))}, {"x": (data, torch.ones(4, 3).half())}),
            ({"topk_weights": weights, "layout": Layout.LOW_LATENCY}, {"capacity": limit}),
            ({"topk_idx": None, "handle": handle}, {"quantization": MXFP8, "expert_alignment": 8}),
        ]
        said = []
        for pair in calls:
            with pytest.raises(ValueError, match="ranks disagree") as info:
                buffer.dispatch(**{"x": x, "topk_idx": topk_idx, **pair[context.rank_idx]})
            said.append(str(info.value))
        for wrong in ({"handle": other}, {"handle": handle, "row_weights": torch.ones(len(rows))}):
            with pytest.raises(ValueError, match="ranks disagree") as info:
                buffer.combine(rows, **(wrong if context.rank_idx else {"handle": handle}))
            said.append(str(info.value))
        buffer.destroy()
    return [re.sub(r"handle \w+", "handle", text) for text in said]


@pytest.mark.parametrize("backend", [*BACKENDS, "simt"])
def test_calls_that_differ_are_told_in_the_same_words(backend: str) -> None:
    plain = "EXPERT_MAJOR, expert_alignment=1, bfloat16 rows of 32 bytes"
    told = [
        f"dispatch({plain} to be quantized to FP8_BLOCK128 with FLOAT32 scale factors in rows, "
        f"no weights) on rank 0 met dispatch({plain} to be quantized to FP8_BLOCK128 with UE8M0 "
        "scale factors in columns, no weights)",
        "dispatch(EXPERT_MAJOR, expert_alignment=1, uint8 rows of 16 bytes, 1 scale factors of 4 "
        "bytes in rows, no weights) on rank 0 met dispatch(EXPERT_MAJOR, expert_alignment=1, uint8 "
        "rows of 16 bytes, 3 scale factors of 2 bytes in rows, no weights)",
        "dispatch(LOW_LATENCY, expert_alignment=1, bfloat16 rows of 32 bytes, float32 weights) on "
        f"rank 0 met dispatch({plain}, no weights, on_overflow=drop, num_rows_per_expert=3)",
        f"cached dispatch({plain}, no weights, handle) on rank 0 met dispatch(EXPERT_MAJOR, "
        "expert_alignment=8, bfloat16 rows of 32 bytes to be quantized to MXFP8 with UE8M0 scale "
        "factors in rows, no weights)",
        *(
            f"combine({plain}, no weights, handle) on rank 0 met combine({plain}, {weights}, handle)"
            for weights in ("no weights", "float32 weights")
        ),
    ]
    for said in run_ranks(disagree, 2, backend):
        assert said == [f"ranks disagree: {text} on rank 1" for text in told]


def use_after_destroy(context: RankContext, backend: str) -> list[str]:
    with Communicator(context.group, backend=backend) as communicator:
        buffer = EpBuffer(communicator, CONFIG)
        x, topk_idx = torch.zeros(1, 16).bfloat16(), torch.zeros(1, 2, dtype=torch.int64)
        handle = buffer.dispatch(x, topk_idx).handle
        rows = torch.zeros(handle.num_recv_tokens, 16).bfloat16()
        buffer.destroy()
        messages = []
        for call in (
            lambda: buffer.dispatch(x, topk_idx),
            lambda: buffer.combine(rows, handle),
            lambda: buffer.empty_expert_output(handle),
        ):
            with pytest.raises(ValueError, match="destroyed") as info:
                call()
            messages.append(str(info.value))
    return messages


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_destroyed_buffer_says_so(backend: str) -> None:
    for messages in run_ranks(use_after_destroy, 2, backend):
        assert len(messages) == 3


def use_from_two_threads(context: RankContext) -> tuple[str, bool]:
    """Rank 0 is in a dispatch that waits for rank 1 while its second thread calls, too."""
    with Communicator(context.group, backend="host") as communicator:
        buffer = EpBuffer(communicator, CONFIG)
        x, topk_idx = torch.ones(1, 16).bfloat16(), torch.zeros(1, 2, dtype=torch.int64)
        message = ""
        if context.rank_idx == 0:
            result = []
            first = threading.Thread(target=lambda: result.append(buffer.dispatch(x, topk_idx)))
            first.start()
            while not buffer._busy.locked() and first.is_alive():
                pass
            with pytest.raises(RuntimeError, match="another thread") as info:
                buffer.combine(x, None)  # type: ignore[arg-type]
            message = str(info.value)
            communicator.all_gather(b"refused")
            first.join()
            handle = result[0].handle
            rows = result[0].x
        else:
            communicator.all_gather(b"refused")
            result_of_peer = buffer.dispatch(x, topk_idx)
            handle, rows = result_of_peer.handle, result_of_peer.x
        works = torch.equal(buffer.combine(rows, handle), x + x)
        buffer.destroy()
    return message, works


def test_two_threads_are_refused_on_that_rank_alone() -> None:
    (message, works), (peer_message, peer_works) = run_ranks(use_from_two_threads, 2)
    assert "combine" in message
    assert peer_message == ""
    assert works
    assert peer_works


def mask_wrongly(context: RankContext, backend: str) -> tuple[list[str], tuple[int, ...]]:
    with Communicator(context.group, backend=backend) as communicator:
        buffer = EpBuffer(communicator, CONFIG)
        buffer.mask_ranks([1, 0, 1])
        messages = []
        for ranks in ([2], [-1, 0], [0, 5]):
            with pytest.raises(ValueError, match="not a rank of a communicator of 2") as info:
                buffer.mask_ranks(ranks)
            messages.append(str(info.value).split()[0])
        with pytest.raises(TypeError, match="float"):
            buffer.mask_ranks([0.5])  # type: ignore[list-item]
        kept = buffer.masked_ranks
        buffer.destroy()
    return messages, kept


@pytest.mark.parametrize("backend", BACKENDS)
def test_masking_what_is_no_rank_changes_nothing(backend: str) -> None:
    for messages, kept in run_ranks(mask_wrongly, 2, backend):
        assert messages == ["2", "-1", "5"]
        assert kept == (0, 1)


@pytest.mark.parametrize(
    ("fields", "error", "pieces"),
    [
        ({}, ValueError, ("neither",)),
        ({"num_rows": -1}, ValueError, ("num_rows", ">= 0", "-1")),
        ({"num_rows": 1 << 31}, ValueError, ("2**31", str(1 << 31))),
        ({"num_rows": 2.0}, TypeError, ("num_rows", "2.0")),
        ({"num_rows": True}, TypeError, ("num_rows", "True")),
        ({"num_rows_per_expert": 3}, ValueError, ("num_rows_per_expert = 3", '"grow"')),
        ({"num_rows": 3, "on_overflow": "wrap"}, ValueError, ("on_overflow", "'wrap'")),
    ],
)
def test_a_capacity_that_cannot_be(
    fields: dict[str, Any], error: type[Exception], pieces: tuple[str, ...]
) -> None:
    with pytest.raises(error) as info:
        Capacity(**fields)
    assert all(piece in str(info.value) for piece in pieces)
