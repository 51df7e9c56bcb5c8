"""One sum a token and rank instead of its rows: bits on every backend, gradients, and who refuses it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch

import moe_comm
from moe_comm import EpBuffer, EpConfig, Layout
from moe_comm.ep.autograd import combine, dispatch
from moe_comm.ep.backends.simt import use_device
from moe_comm.testing import RankContext, run_ranks
from moe_comm.testing.case_list import RANK_REDUCTION_CASES
from moe_comm.testing.cases import Case
from moe_comm.testing.conformance import check_case
from tests.helpers.configs import ep_config
from tests.multiprocess.test_conformance import TARGETS

RUNS = [
    ("host", "threads"),
    ("host", "processes"),
    ("simt", "threads"),
    ("simt", "processes"),
    ("simt-devices-streams", "threads"),
    ("collective", "processes"),
    ("reference", "threads"),
]
RUNS_OF_CASES = [
    pytest.param(*run, case, id=f"{'-'.join(run)}-{case.name}")
    for run in RUNS
    for case in sorted(RANK_REDUCTION_CASES, key=lambda case: case.num_ranks)
]


@pytest.mark.sampled(1, of=("name", "mode", "num_ranks", "layout", "rows", "dtype", "routing"))
@pytest.mark.parametrize(("name", "mode", "case"), RUNS_OF_CASES)
def test_case(name: str, mode: str, case: Case) -> None:
    check_case(TARGETS[name], case, mode=mode)


NUM_EXPERTS, NUM_TOKENS, NUM_TOPK, HIDDEN = 9, 12, 6, 64


def _config(rank_reduction: bool) -> EpConfig:
    return ep_config(NUM_EXPERTS, NUM_TOPK, HIDDEN, NUM_TOKENS, rank_reduction=rank_reduction)


def _batch(rank_idx: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, topk_idx (with -1, and repeated ids) and weights of one rank."""
    draw = torch.Generator().manual_seed(rank_idx)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=draw).to(torch.bfloat16)
    topk_idx = torch.randint(-1, NUM_EXPERTS, (NUM_TOKENS, NUM_TOPK), generator=draw)
    return x, topk_idx, torch.rand(NUM_TOKENS, NUM_TOPK, generator=draw)


def _on_backend(
    context: RankContext,
    backend: str,
    layout: Layout,
    step: Callable[[EpBuffer, Layout], list[torch.Tensor]],
    rank_reduction: bool,
) -> list[torch.Tensor]:
    with contextlib.ExitStack() as until_the_end:
        if backend == "simt":
            until_the_end.enter_context(use_device(context.rank_idx % 2))
        comm = moe_comm.Communicator(context.group, backend=backend, arrival_timeout_s=60.0)
        until_the_end.callback(comm.destroy)
        return step(until_the_end.enter_context(EpBuffer(comm, _config(rank_reduction))), layout)


def _train(buffer: EpBuffer, layout: Layout) -> list[torch.Tensor]:
    """Sums and gradients of a step whose combine applies weights."""
    x, topk_idx, weights = _batch(buffer.communicator.rank_idx)
    x.requires_grad_()
    weights.requires_grad_()
    received = dispatch(x, topk_idx, weights, buffer=buffer, layout=layout)
    out = received.x * (1.0 + 0.125 * buffer.communicator.rank_idx) + 0.25
    if layout is Layout.RANK_MAJOR:
        out = out * received.topk_weights.sum(dim=1, keepdim=True).to(out.dtype)
    applied = None if layout is Layout.RANK_MAJOR else weights
    y = combine(out, received.handle, buffer=buffer, topk_weights=applied)
    (y.float() * torch.linspace(-2, 3, HIDDEN)).sum().backward()
    return [y.detach().clone(), x.grad.clone(), weights.grad.clone()]


@pytest.mark.parametrize("layout", list(Layout))
def test_gradients_have_the_bits_of_the_reference(layout: Layout) -> None:
    """Backward of dispatch adds rows of gradients, and pulls those of weights one by one."""
    found = {
        (backend, rank_reduction): run_ranks(
            _on_backend, 3, backend, layout, _train, rank_reduction, mode="threads"
        )
        for backend, rank_reduction in (
            ("reference", True),
            ("host", True),
            ("simt", True),
            ("host", False),
        )
    }
    expected = found["reference", True]
    for backend in ("host", "simt"):
        for of_rank, wanted in zip(found[backend, True], expected, strict=True):
            for got, right in zip(of_rank, wanted, strict=True):
                assert torch.equal(got.view(torch.uint8), right.view(torch.uint8))
    # Else this test, and the option, would be of no use.
    has_other_sums = any(
        not torch.equal(a[0], b[0]) for a, b in zip(expected, found["host", False], strict=True)
    )
    assert has_other_sums == (layout is not Layout.RANK_MAJOR)


def _combine_often(buffer: EpBuffer, layout: Layout) -> list[torch.Tensor]:
    """Sums of outputs in the heap and outside, which stay as they are, through one handle."""
    x, topk_idx, weights = _batch(buffer.communicator.rank_idx)
    result = buffer.dispatch(x, topk_idx, layout=layout)
    found = []
    for turn in range(6):
        out = result.x * (turn + 1)
        if turn % 2:
            out = buffer.empty_expert_output(result.handle).copy_(out)
        before = out.clone()
        y = buffer.combine(out, result.handle, topk_weights=weights if turn % 3 else None)
        found.append(y.clone())
        assert torch.equal(out.view(torch.int16), before.view(torch.int16))
    return found


@pytest.mark.parametrize("layout", [Layout.EXPERT_MAJOR, Layout.LOW_LATENCY])
def test_expert_outputs_are_left_as_they_are(layout: Layout) -> None:
    expected, *others = (
        run_ranks(_on_backend, 3, backend, layout, _combine_often, True, mode="threads")
        for backend in ("reference", "host", "simt")
    )
    for found in others:
        for of_rank, wanted in zip(found, expected, strict=True):
            for got, right in zip(of_rank, wanted, strict=True):
                assert torch.equal(got.view(torch.int16), right.view(torch.int16))


def _refused(context: RankContext, backend: str, num_local_ranks: int | None, differ: bool) -> str:
    comm = moe_comm.Communicator(
        context.group, backend=backend, num_local_ranks=num_local_ranks, arrival_timeout_s=60.0
    )
    has_it = not differ or context.rank_idx == 1
    with pytest.raises(ValueError, match="rank_reduction") as error:
        EpBuffer(comm, _config(has_it))
    comm.destroy()
    return str(error.value)


@pytest.mark.parametrize(
    ("backend", "num_local_ranks", "differ", "text"),
    [
        ("host", None, True, "rank_reduction is False on rank 0 and True on rank 1"),
        ("simt", None, True, "rank_reduction is False on rank 0 and True on rank 1"),
        ("host", 1, False, "a node must have all 2 ranks, got 1"),
        ("simt", 1, False, "a node must have all 2 ranks, got 1"),
        ("deep_ep", None, False, "the deep_ep backend has no rank_reduction"),
    ],
)
def test_every_rank_refuses_it(
    backend: str, num_local_ranks: int | None, differ: bool, text: str
) -> None:
    said = run_ranks(_refused, 2, backend, num_local_ranks, differ, mode="threads")
    assert len(set(said)) == 1
    assert text in said[0]
