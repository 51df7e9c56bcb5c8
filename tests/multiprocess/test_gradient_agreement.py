"""Ranks that need different gradients: what every rank owes to others is in the gradients of all."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import moe_comm
from moe_comm import FP8_BLOCK128, Capacity, Communicator, EpBuffer, EpConfig, Layout
from moe_comm.dispatcher import TokenDispatcher
from moe_comm.tensors.quantized import dequantize
from moe_comm.testing.launch import RankContext, run_ranks
from tests.helpers.configs import ep_config
from tests.helpers.moe_layer import expert_scale, recorded_operations

NUM_EXPERTS, NUM_TOPK = 5, 2
NEEDS = ("none", "x", "weights", "both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Inputs and needs of every rank.

    Args:
        needs: Of every rank, one of `NEEDS`.
        num_tokens: Of every rank; one without tokens gives `torch.empty(0, hidden)`.
        is_trained: Of every rank: whether its experts need a gradient.
        layout: Of the rows.
        place: Where weights are applied: "dispatch", "combine", or "nowhere".
        face: "functions" or "dispatcher".
        is_quantized: Whether rows are quantized on their way.
        capacity: Limits.
        num_combines: Of one handle.
        compiled: Ranks whose layer is compiled.
    """

    needs: tuple[str, ...]
    num_tokens: tuple[int, ...]
    is_trained: tuple[bool, ...]
    layout: Layout = Layout.EXPERT_MAJOR
    place: str = "dispatch"
    face: str = "functions"
    is_quantized: bool = False
    capacity: Capacity | None = None
    num_combines: int = 1
    compiled: tuple[int, ...] = ()

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows."""
        return torch.float32 if self.is_quantized else torch.float64

    @property
    def hidden(self) -> int:
        """Elements of a row."""
        return 128 if self.is_quantized else 4

    def needs_of(self, name: str) -> tuple[bool, ...]:
        """Ranks that need the gradient of "x" or "weights"."""
        has_weights = self.place != "nowhere"
        return tuple(need in (name, "both") and (name == "x" or has_weights) for need in self.needs)


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """Of all ranks."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    scale: torch.Tensor

    @classmethod
    def of(cls, case: Case) -> Tokens:
        """The same on every rank."""
        draw = torch.Generator().manual_seed(5)
        num_tokens = sum(case.num_tokens)
        wide = case.dtype
        return cls(
            torch.randn(num_tokens, case.hidden, dtype=wide, generator=draw),
            torch.randint(-1, NUM_EXPERTS, (num_tokens, NUM_TOPK), generator=draw),
            torch.rand(num_tokens, NUM_TOPK, dtype=wide, generator=draw),
            torch.linspace(0.5, 1.5, NUM_EXPERTS, dtype=wide),
        )


def coefficients(num_rows: int, hidden: int, first: int) -> torch.Tensor:
    """Factors of sums in the loss: nothing about it is the same for two ranks."""
    return (torch.arange(num_rows * hidden) + first * hidden).view(num_rows, hidden) % 7 - 2.5


def dense_gradients(
    case: Case, tokens: Tokens, is_dropped: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Gradients of x, weights and experts, by the loss of all ranks together, in one process."""
    x, weights, scale = (
        tensor.clone().requires_grad_() for tensor in (tokens.x, tokens.topk_weights, tokens.scale)
    )
    rows = x
    if case.is_quantized:
        data, sf = moe_comm.quantize(tokens.x, FP8_BLOCK128)
        rows = x + (dequantize(data, sf, FP8_BLOCK128, case.dtype) - x).detach()
    out = torch.sin(rows[:, None, :] * scale[tokens.topk_idx.clamp(min=0)][:, :, None])
    if case.place != "nowhere":
        out = out * weights[:, :, None]
    is_used = (tokens.topk_idx >= 0) & ~is_dropped
    y = (out * is_used[:, :, None]).sum(1)
    loss = (y * coefficients(*y.shape, 0)).sum() * sum(range(1, case.num_combines + 1))
    loss.backward()
    gradients = {"x": x.grad, "weights": weights.grad, "experts": scale.grad}
    return {
        name: torch.zeros(()) if gradient is None else gradient
        for name, gradient in gradients.items()
    }


def moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    scale: torch.Tensor,
    buffer: EpBuffer,
    case: Case,
) -> tuple[torch.Tensor, Any]:
    """The sums, and what was dispatched."""
    in_dispatch = topk_weights if case.place == "dispatch" else None
    in_combine = topk_weights if case.place == "combine" else None
    quantization = FP8_BLOCK128 if case.is_quantized else None
    if case.face == "dispatcher":
        dispatcher = TokenDispatcher(
            NUM_EXPERTS,
            buffer=buffer,
            quantization=quantization,
            capacity=case.capacity,
            weighted_by="combine" if case.place == "combine" else "experts",
        )
        given = None if case.place == "nowhere" else topk_weights
        routed = dispatcher.dispatch(x, given, topk_idx=topk_idx)
        sizes = routed.expert_offsets.diff()
        local = scale[buffer.expert_rank == buffer.communicator.rank_idx]
        factor = torch.repeat_interleave(local, sizes)
        tail = routed.tokens.shape[0] - factor.shape[0]
        factor = torch.cat([factor, factor.new_zeros(tail)])
        out = torch.sin(routed.tokens * factor[:, None])
        if routed.probs is not None:
            out = out * routed.probs[:, None]
        sums = [dispatcher.combine(out * (i + 1), routed) for i in range(case.num_combines)]
        return torch.stack(sums).sum(0), routed
    result = moe_comm.dispatch(
        x,
        topk_idx,
        in_dispatch,
        buffer=buffer,
        layout=case.layout,
        quantization=quantization,
        capacity=case.capacity,
    )
    rows = result.x
    if case.compiled:
        # Without reading a size.
        row_idx = torch.arange(rows.shape[0])
        expert_idx = torch.searchsorted(result.expert_offsets[1:], row_idx, right=True)
        local = scale[buffer.expert_rank == buffer.communicator.rank_idx]
        out = torch.sin(rows * local[expert_idx][:, None])
        if in_dispatch is not None:
            out = out * result.topk_weights[:, None]
    elif case.capacity is not None and case.layout is not Layout.LOW_LATENCY:
        # Rows beyond the last expert are of no expert.
        num_rows = int(result.expert_offsets[-1])
        head = types.SimpleNamespace(
            expert_offsets=result.expert_offsets,
            topk_idx=result.topk_idx,
            topk_weights=None if in_dispatch is None else result.topk_weights[:num_rows],
        )
        out = expert_scale(rows[:num_rows], head, buffer, case.layout, scale)
        out = torch.cat([out, out.new_zeros(rows.shape[0] - num_rows, rows.shape[1])])
    else:
        out = expert_scale(rows, result, buffer, case.layout, scale)
    sums = [
        moe_comm.combine(out * (i + 1), result.handle, buffer=buffer, topk_weights=in_combine)
        for i in range(case.num_combines)
    ]
    return torch.stack(sums).sum(0), result


def check_gradients(context: RankContext, backend: str, cases: list[Case]) -> None:
    """Every gradient that this rank needs is that of the loss of all ranks."""
    with Communicator(context.group, backend=backend) as communicator:
        for case in cases:
            check_case(context, communicator, case)


def check_case(context: RankContext, communicator: Communicator, case: Case) -> None:
    config = ep_config(NUM_EXPERTS, NUM_TOPK, case.hidden, 8, dtype=case.dtype)
    rank_idx = context.rank_idx
    tokens = Tokens.of(case)
    first = sum(case.num_tokens[:rank_idx])
    mine = slice(first, first + case.num_tokens[rank_idx])
    x, weights = (
        torch.empty(0, tensor.shape[1], dtype=case.dtype)
        if case.num_tokens[rank_idx] == 0
        else tensor[mine].clone()
        for tensor in (tokens.x, tokens.topk_weights)
    )
    x.requires_grad_(case.needs_of("x")[rank_idx])
    weights.requires_grad_(case.needs_of("weights")[rank_idx])
    scale = tokens.scale.clone().requires_grad_(case.is_trained[rank_idx])
    with EpBuffer(communicator, config) as buffer:
        layer = moe
        if rank_idx in case.compiled:
            layer = torch.compile(moe, fullgraph=True, backend="aot_eager")
        with recorded_operations(buffer) as operations:
            y, result = layer(x, tokens.topk_idx[mine], weights, scale, buffer, case)
            if y.requires_grad:
                (y * coefficients(*y.shape, first)).sum().backward()
        dropped = communicator.bootstrap.all_gather(result.handle.dropped_choices().tolist())
    is_static = bool(case.compiled)
    needs_x = any(case.needs_of("x")) or is_static
    needs_weights = any(case.needs_of("weights")) or is_static
    rows, row_weights = (
        (result.tokens, result.probs)
        if case.face == "dispatcher"
        else (result.x, result.topk_weights)
    )
    assert rows.requires_grad is needs_x, case
    if row_weights is not None:
        assert row_weights.requires_grad is needs_weights, case
    assert y.requires_grad is (needs_x or needs_weights or any(case.is_trained)), case
    # The backward of a rank follows from nothing of its own.
    assert all(other == operations for other in communicator.bootstrap.all_gather(operations))
    is_dropped = torch.tensor([row for rank in dropped for row in rank], dtype=torch.bool)
    expected = dense_gradients(case, tokens, is_dropped.view(-1, NUM_TOPK))
    tolerance = {"rtol": 2e-4, "atol": 2e-4} if case.is_quantized else {}
    is_local = config.resolve_expert_rank(context.num_ranks) == rank_idx
    for name, leaf, want in (
        ("x", x, expected["x"][mine]),
        ("weights", weights, expected["weights"][mine] if expected["weights"].dim() else None),
        ("experts", scale, torch.where(is_local, expected["experts"], 0.0)),
    ):
        if leaf.requires_grad:
            got = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(
                got, want, **tolerance, msg=lambda text, name=name: f"{name}: {text}\n{case}"
            )


def case_of(*needs: str, num_tokens: tuple[int, ...] | None = None, **options: Any) -> Case:
    return Case(
        needs=needs,
        num_tokens=num_tokens or (4, 3, 5)[: len(needs)],
        is_trained=options.pop("is_trained", (True,) * len(needs)),
        **options,
    )


CASES = {
    "no_tokens": case_of("both", "none", num_tokens=(5, 0)),
    "frozen_first_block": case_of("both", "none", place="combine"),
    "only_the_router": case_of("weights", "none", "none"),
    "x_there_weights_here": case_of("x", "weights", place="combine"),
    "weights_and_x_of_two_ranks": case_of("x", "none", "weights"),
    "by_rank": case_of("none", "both", layout=Layout.RANK_MAJOR),
    "low_latency": case_of("none", "x", layout=Layout.LOW_LATENCY),
    "low_latency_no_tokens": case_of(
        "both", "none", num_tokens=(5, 0), layout=Layout.LOW_LATENCY, place="combine"
    ),
    "quantized": case_of("x", "none", is_quantized=True),
    "drops": case_of("none", "x", capacity=Capacity(num_rows=3, on_overflow="drop")),
    "handle_twice": case_of("x", "none", num_combines=2),
    "handle_twice_weighted": case_of("none", "weights", num_combines=2, place="combine"),
    "only_one_trains_its_experts": case_of("none", "none", is_trained=(True, False)),
    "nobody": case_of("none", "none", is_trained=(False, False)),
    "dispatcher_no_tokens": case_of("both", "none", num_tokens=(5, 0), face="dispatcher"),
    "dispatcher_combine": case_of("none", "x", "none", face="dispatcher", place="combine"),
    "dispatcher_quantized": case_of("none", "both", face="dispatcher", is_quantized=True),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("backend", "mode"), [("reference", "threads"), ("host", "threads")])
def test_gradients_are_whole(backend: str, mode: str, name: str) -> None:
    case = CASES[name]
    run_ranks(check_gradients, len(case.needs), backend, [case], mode=mode)


@pytest.mark.parametrize("backend", ["host", "collective", "simt"])
def test_gradients_are_whole_in_processes(backend: str) -> None:
    for num_ranks in (2, 3):
        cases = [case for case in CASES.values() if len(case.needs) == num_ranks]
        if backend == "simt":
            cases = [case for case in cases if case.face == "functions"][::3]
        run_ranks(check_gradients, num_ranks, backend, cases)


def drawn_case(draw: random.Random) -> Case:
    num_ranks = draw.choice((2, 2, 3))
    layout = draw.choice(list(Layout))
    face = draw.choice(("functions", "dispatcher"))
    if face == "dispatcher":
        layout = Layout.EXPERT_MAJOR
    places = (
        ("dispatch", "nowhere")
        if layout is Layout.RANK_MAJOR
        else (
            "dispatch",
            "combine",
            "nowhere",
        )
    )
    capacity = None
    if layout is Layout.EXPERT_MAJOR:
        capacity = draw.choice(
            (
                None,
                Capacity(num_rows=draw.randint(1, 6), on_overflow="drop"),
                Capacity(num_rows_per_expert=1, on_overflow="drop"),
                Capacity(num_rows=2, on_overflow="grow"),
            )
        )
    return Case(
        needs=tuple(draw.choice(NEEDS) for _ in range(num_ranks)),
        num_tokens=tuple(draw.choice((0, 0, 1, 4, 7)) for _ in range(num_ranks)),
        is_trained=tuple(draw.random() < 0.5 for _ in range(num_ranks)),
        layout=layout,
        place=draw.choice(places),
        face=face,
        is_quantized=draw.random() < 0.25,
        capacity=capacity,
        num_combines=draw.choice((1, 1, 2)),
    )


@pytest.mark.parametrize(
    ("backend", "mode", "seed"),
    [
        ("host", "threads", 1),
        ("reference", "threads", 2),
        ("collective", "processes", 3),
    ],
)
def test_gradients_are_whole_whoever_needs_them(backend: str, mode: str, seed: int) -> None:
    draw = random.Random(seed)
    cases = [drawn_case(draw) for _ in range(40)]
    for num_ranks in (2, 3):
        run_ranks(
            check_gradients,
            num_ranks,
            backend,
            [case for case in cases if len(case.needs) == num_ranks],
            mode=mode,
        )


COMPILED = [
    case_of("none", "x", compiled=(0,)),
    case_of("none", "none", compiled=(1,), is_trained=(True, False), place="combine"),
]


def check_compiled(context: RankContext, backend: str) -> None:
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        check_gradients(context, backend, COMPILED)
    torch._dynamo.reset()


@pytest.mark.full
def test_gradients_are_whole_beside_compiled_ranks() -> None:
    run_ranks(check_compiled, 2, "host", timeout_s=280)


# --- Ranks that cannot run a backward ------------------------------------------------------------


@contextlib.contextmanager
def disabled(how: str) -> Iterator[None]:
    with torch.no_grad() if how == "no_grad" else torch.inference_mode():
        yield


def clash(context: RankContext, backend: str, how: str, layout: Layout) -> list[str]:
    """Rank 0 needs gradients, rank 1 has none, the last rank needs none; what each raises."""
    said = []
    rank_idx = context.rank_idx
    config = ep_config(6, 2, 8, 4, dtype=torch.float32)
    topk_idx = torch.tensor([[0, 5], [3, 2]])
    x = torch.ones(2, 8)
    with Communicator(context.group, backend=backend) as communicator:
        with EpBuffer(communicator, config) as buffer:
            is_off = rank_idx == 1
            needed = torch.ones(2, 8, requires_grad=rank_idx == 0)

            def dispatch(rows: torch.Tensor) -> Any:
                if is_off and how == "buffer":
                    return buffer.dispatch(rows, topk_idx, layout=layout)
                with disabled(how) if is_off else contextlib.nullcontext():
                    return moe_comm.dispatch(rows, topk_idx, buffer=buffer, layout=layout)

            def combine(rows: torch.Tensor, handle: Any, **options: Any) -> torch.Tensor:
                if is_off and how == "buffer":
                    return buffer.combine(rows, handle, **options)
                with disabled(how) if is_off else contextlib.nullcontext():
                    return moe_comm.combine(rows, handle, buffer=buffer, **options)

            # Nobody needs a gradient: nothing is in the way.
            result = dispatch(x)
            assert not result.x.requires_grad
            rows = result.x.clone()
            with pytest.raises(ValueError, match="ranks disagree") as caught:
                dispatch(needed)
            said.append(str(caught.value))
            rows.requires_grad_(rank_idx == 0)
            with pytest.raises(ValueError, match="ranks disagree") as caught:
                combine(rows, result.handle)
            said.append(str(caught.value))
            y = combine(rows.detach(), result.handle)
            assert not y.requires_grad
            copies = 2 if layout is not Layout.RANK_MAJOR or context.num_ranks > 1 else 1
            if layout is Layout.RANK_MAJOR:
                owners = config.resolve_expert_rank(context.num_ranks)[topk_idx]
                per_token = torch.tensor([len(set(row)) for row in owners.tolist()])
            else:
                per_token = torch.full((2,), copies)
            assert torch.equal(y, x * per_token[:, None])
            # And all can go on to differentiate, with the same handle too.
            weights = None if layout is Layout.RANK_MAJOR else torch.full((2, 2), 0.5)
            y = moe_comm.combine(rows, result.handle, buffer=buffer, topk_weights=weights)
            assert y.requires_grad
            y.sum().backward()
            if rank_idx == 0:
                num_rows = result.handle.num_recv_tokens
                expected = torch.zeros(num_rows, 8)
                if layout is Layout.LOW_LATENCY:
                    filled = result.num_tokens_per_expert[:, None]
                    is_filled = (torch.arange(num_rows // len(filled)) < filled).flatten()
                    expected[is_filled] = 0.5
                else:
                    expected += 1 if weights is None else 0.5
                assert torch.equal(rows.grad, expected)
            leaf = torch.ones(2, 8, requires_grad=rank_idx == 0)
            result = moe_comm.dispatch(leaf, topk_idx, buffer=buffer, layout=layout)
            assert result.x.requires_grad
            y = moe_comm.combine(result.x * 2, result.handle, buffer=buffer)
            y.sum().backward()
            if rank_idx == 0:
                assert torch.equal(leaf.grad, 2 * x * per_token[:, None])
    return said


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["no_grad", "inference_mode", "buffer"])
@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("reference", "threads"),
        ("host", "threads"),
        ("collective", "processes"),
        ("simt", "processes"),
    ],
)
def test_a_rank_that_cannot_differentiate_is_named_on_every_rank(
    backend: str, mode: str, how: str
) -> None:
    for layout in Layout:
        told = run_ranks(clash, 3, backend, how, layout, mode=mode)
        assert (
            told
            == [
                [
                    f"ranks disagree: a gradient of this {operation} is needed on rank 0, and gradients "
                    f"are disabled on rank 1 (torch.no_grad, inference mode, or an EpBuffer's own "
                    f"{operation}): every rank runs its backward or none does"
                    for operation in ("dispatch", "combine")
                ]
            ]
            * 3
        )


def weights_on_one_rank(context: RankContext, backend: str) -> str:
    config = EpConfig(num_experts=2, num_topk=1, hidden=8, num_max_tokens_per_rank=4)
    topk_idx = torch.tensor([[0], [1]])
    x = torch.ones(2, 8).bfloat16()
    weights = torch.ones(2, 1) if context.rank_idx == 1 else None
    with Communicator(context.group, backend=backend) as communicator:
        with EpBuffer(communicator, config) as buffer:
            leaf = x.clone().requires_grad_(context.rank_idx == 0)
            result = moe_comm.dispatch(leaf, topk_idx, buffer=buffer)
            with pytest.raises(ValueError, match="ranks disagree") as caught:
                moe_comm.combine(result.x, result.handle, buffer=buffer, topk_weights=weights)
            with torch.no_grad():  # the sums alone are each rank's own
                rows = result.x.detach()
                y = moe_comm.combine(rows, result.handle, buffer=buffer, topk_weights=weights)
            assert torch.equal(y, x)
            moe_comm.combine(result.x, result.handle, buffer=buffer).sum().backward()
            assert context.rank_idx or torch.equal(leaf.grad, x)
    return str(caught.value)


@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("reference", "threads"),
        ("host", "threads"),
        ("collective", "processes"),
        ("simt", "processes"),
    ],
)
def test_weights_of_a_differentiated_combine_are_on_every_rank_or_none(
    backend: str, mode: str
) -> None:
    told = run_ranks(weights_on_one_rank, 3, backend, mode=mode)
    assert (
        told
        == [
            "ranks disagree: a combine whose backward is needed on ranks 0, 1, 2 applies no weights on "
            "rank 0 and float32 weights on rank 1"
        ]
        * 3
    )
