"""Gradients across ranks: numerically right, the same bits on any number of ranks, no rank left waiting."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import moe_comm
from moe_comm import Capacity, Communicator, EpBuffer, EpConfig, Layout
from moe_comm.testing.launch import RankContext, RankError, run_ranks
from tests.helpers.configs import ep_config
from tests.helpers.moe_layer import (
    MoeLayer,
    assert_same_bits,
    expert_scale,
    forward_backward,
    recorded_operations,
)

BACKENDS = ["reference", "collective", "host"]
NUM_EXPERTS, NUM_TOPK, HIDDEN = 5, 2, 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Place where weights are applied, and inputs of every rank."""

    layout: Layout = Layout.EXPERT_MAJOR
    place: str = "dispatch"
    num_tokens: tuple[int, ...] = (3, 2)
    expert_rank: tuple[int, ...] | None = None
    capacity: Capacity | None = None


PLACES = [
    pytest.param(Case(), id="expert_major-dispatch"),
    pytest.param(Case(place="combine"), id="expert_major-combine"),
    pytest.param(Case(layout=Layout.RANK_MAJOR), id="rank_major-dispatch"),
    pytest.param(Case(place="combine", num_tokens=(4, 0)), id="no_tokens"),
    pytest.param(Case(place="combine", expert_rank=(1, 1, 1, 1, 1)), id="no_experts"),
    pytest.param(
        Case(layout=Layout.RANK_MAJOR, num_tokens=(2, 0, 3), expert_rank=(2, 0, 2, 0, 0)),
        id="three_ranks",
    ),
    pytest.param(Case(layout=Layout.LOW_LATENCY, place="combine"), id="low_latency-combine"),
    pytest.param(
        Case(layout=Layout.LOW_LATENCY, num_tokens=(4, 0)), id="low_latency-dispatch-no_tokens"
    ),
    pytest.param(
        Case(place="combine", capacity=Capacity(num_rows_per_expert=1, on_overflow="drop")),
        id="drops_per_expert",
    ),
    pytest.param(
        Case(capacity=Capacity(num_rows=2, on_overflow="drop"), num_tokens=(4, 2)),
        id="drops_per_rank",
    ),
]


def make_buffer(communicator: Communicator, case: Case) -> EpBuffer:
    config = ep_config(
        NUM_EXPERTS, NUM_TOPK, HIDDEN, 8, dtype=torch.float64, expert_rank=case.expert_rank
    )
    return EpBuffer(communicator, config)


def global_inputs(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_tokens, HIDDEN, dtype=torch.float64, generator=generator)
    topk_idx = torch.randint(-1, NUM_EXPERTS, (num_tokens, NUM_TOPK), generator=generator)
    topk_weights = torch.rand(num_tokens, NUM_TOPK, dtype=torch.float64, generator=generator)
    return x, topk_idx, topk_weights


def moe(
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    buffer: EpBuffer,
    case: Case,
) -> torch.Tensor:
    scale = torch.linspace(0.5, 1.5, NUM_EXPERTS, dtype=torch.float64)
    result = moe_comm.dispatch(
        x,
        topk_idx,
        topk_weights if case.place == "dispatch" else None,
        buffer=buffer,
        layout=case.layout,
        expert_alignment=1 if case.layout is Layout.LOW_LATENCY else 2,
        capacity=case.capacity,
    )
    out = expert_scale(result.x, result, buffer, case.layout, scale)
    return moe_comm.combine(
        out,
        result.handle,
        buffer=buffer,
        topk_weights=topk_weights if case.place == "combine" else None,
    )


def check_gradient(context: RankContext, backend: str, case: Case) -> None:
    """Compare with central differences of the loss over all ranks, which step in lockstep."""
    communicator = Communicator(context.group, backend=backend)
    buffer = make_buffer(communicator, case)
    first = sum(case.num_tokens[: context.rank_idx])
    mine = slice(first, first + case.num_tokens[context.rank_idx])
    x, topk_idx, topk_weights = global_inputs(sum(case.num_tokens))

    def loss(x: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        y = moe(x[mine], topk_idx[mine], topk_weights[mine], buffer, case)
        return (y * torch.arange(1.0, 1.0 + y.numel()).view_as(y)).sum()

    leaves = (x.clone().requires_grad_(), topk_weights.clone().requires_grad_())
    loss(*leaves).backward()
    step = 1e-6
    for values, leaf in zip((x, topk_weights), leaves, strict=True):
        numerical = torch.zeros_like(values)
        for position in range(values.numel()):
            entry = values.view(-1)[position].item()
            sides = []
            for shifted in (entry + step, entry - step):
                values.view(-1)[position] = shifted
                with torch.no_grad():
                    parts = communicator.bootstrap.all_gather(loss(x, topk_weights).item())
                sides.append(sum(parts))
            values.view(-1)[position] = entry
            numerical.view(-1)[position] = (sides[0] - sides[1]) / (2 * step)
        torch.testing.assert_close(leaf.grad[mine], numerical[mine], rtol=1e-6, atol=1e-7)
    communicator.destroy()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", PLACES)
@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("reference", "threads"),
        ("host", "threads"),
        ("host", "processes"),
        ("collective", "processes"),
    ],
)
def test_gradients_across_ranks(backend: str, case: Case, mode: str) -> None:
    run_ranks(check_gradient, len(case.num_tokens), backend, case, mode=mode)


def layer_gradients(context: RankContext, backend: str, num_tokens: int) -> dict[str, torch.Tensor]:
    config = EpConfig(num_experts=8, num_topk=2, hidden=32, num_max_tokens_per_rank=num_tokens)
    x = torch.randn(
        num_tokens, config.hidden, generator=torch.Generator().manual_seed(1)
    ).bfloat16()
    mine = x.chunk(context.num_ranks)[context.rank_idx]
    with Communicator(context.group, backend=backend) as communicator:
        layer = MoeLayer(EpBuffer(communicator, config))
        results = forward_backward(layer, layer, mine)
        # The gate is replicated: its gradient is a sum over ranks, which has another order.
        del results["gate"]
        return {name: tensor.clone() for name, tensor in results.items()}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_have_the_same_bits_on_any_number_of_ranks(backend: str, num_ranks: int) -> None:
    num_tokens = 24
    (alone,) = run_ranks(layer_gradients, 1, "reference", num_tokens, mode="threads")
    together = run_ranks(layer_gradients, num_ranks, backend, num_tokens)
    assert_same_bits({name: torch.cat([rank[name] for rank in together]) for name in alone}, alone)


def compiled_and_eager(context: RankContext, backend: str, compiler: str, num_steps: int) -> None:
    config = EpConfig(num_experts=8, num_topk=2, hidden=32, num_max_tokens_per_rank=64)
    router = "softmax" if compiler == "aot_eager" else "detached"
    with Communicator(context.group, backend=backend) as communicator:
        layer = MoeLayer(EpBuffer(communicator, config), router=router)
        compiled = torch.compile(layer, fullgraph=True, backend=compiler)
        for step in range(num_steps):
            # Ranks recompile at different steps: only rank 1 sees a second size.
            num_tokens = 16 + step * context.rank_idx
            x = torch.randn(num_tokens, config.hidden).bfloat16()
            assert_same_bits(
                forward_backward(compiled, layer, x), forward_backward(layer, layer, x)
            )
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.full)]
)
@pytest.mark.parametrize("backend", [pytest.param("reference", marks=pytest.mark.full), "host"])
def test_compiled_ranks_have_the_bits_of_eager_ones(backend: str, compiler: str) -> None:
    run_ranks(compiled_and_eager, 2, backend, compiler, 3, timeout_s=280)


def one_rank_differs(context: RankContext, backend: str, how: str) -> list[str]:
    """Forward and backward in which rank 1 treats its rows in its own way; its operations."""
    case = Case(place="dispatch", num_tokens=(4, 4))
    x, topk_idx, topk_weights = global_inputs(8)
    mine = slice(4 * context.rank_idx, 4 * context.rank_idx + 4)
    is_odd = context.rank_idx == 1
    rows = x[mine].clone().requires_grad_(not (is_odd and how == "needs no gradient"))
    weights = topk_weights[mine].clone().requires_grad_(not (is_odd and how == "needs no gradient"))
    choices = topk_idx[mine]
    if how == "receives nothing":
        choices = torch.zeros_like(choices)  # expert 0 lives on rank 0
    with Communicator(context.group, backend=backend) as communicator:
        buffer = make_buffer(communicator, case)
        with recorded_operations(buffer) as operations:
            result = moe_comm.dispatch(rows, choices, weights, buffer=buffer)
            out = result.x * result.topk_weights[:, None]
            if is_odd and how in ("skips its experts", "receives nothing"):
                out = torch.zeros_like(result.x.detach())
            if is_odd and how == "detaches":
                out = out.detach()
            y = moe_comm.combine(out, result.handle, buffer=buffer)
            # Two losses: a rank whose own sums do not matter has a zero gradient, not none.
            (y.sum() * (0.0 if is_odd else 1.0)).backward()
        buffer.destroy()
    if how == "receives nothing" and not is_odd:
        assert torch.equal(rows.grad, weights.detach().sum(1, keepdim=True).expand_as(rows))
    return operations


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "how", ["skips its experts", "receives nothing", "detaches", "needs no gradient"]
)
@pytest.mark.parametrize(("backend", "mode"), [("reference", "threads"), ("host", "processes")])
def test_no_rank_waits_for_one_that_differs(backend: str, mode: str, how: str) -> None:
    used, skipped = run_ranks(one_rank_differs, 2, backend, how, mode=mode)
    assert used == skipped == ["dispatch", "combine", "cached dispatch", "combine"]


def test_a_lockstep_check_can_fail() -> None:
    """A gradient that forgets the weights is found."""
    case = Case(place="combine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            EpBuffer,
            "weighted_gradient",
            lambda self, gradient, expert_out, weights: torch.zeros_like(weights),
        )
        with pytest.raises(RankError, match="not close"):
            run_ranks(check_gradient, 2, "reference", case, mode="threads")
