"""Every dispatcher against a layer in plain torch, and what the suite finds when one is broken."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moe_comm.dispatcher import TokenDispatcher
from moe_comm.dispatcher.torchtitan import TorchtitanTokenDispatcher
from moe_comm.ep.config import Capacity
from moe_comm.ep.group_buffers import GroupBuffers, group_buffers
from moe_comm.testing import RankContext, run_ranks
from moe_comm.testing.conformance import ConformanceError
from tests.helpers.dispatcher_cases import (
    DISPATCHER_CASES,
    DispatcherCase,
    RankTokens,
    all_tokens,
    expected,
    expert_output,
    kept_choices,
)
from tests.helpers.dispatcher_conformance import DispatcherTarget, can_run, check_dispatcher
from tests.helpers.dispatcher_targets import DISPATCHERS

RUNS = [
    pytest.param(target, case, id=f"{target.name}-{case.name}")
    for target in DISPATCHERS
    for case in DISPATCHER_CASES
    if can_run(target, case)
]
FEW = ("ragged", "masked", "backward of masked and padded", "fp8 backward")
BY_NAME = {target.name: target for target in DISPATCHERS}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("target", "case"), RUNS)
def test_host(target: DispatcherTarget, case: DispatcherCase) -> None:
    check_dispatcher(target, case)


@pytest.mark.sampled(1, of=("target",))
@pytest.mark.parametrize(("target", "case"), RUNS)
def test_reference(target: DispatcherTarget, case: DispatcherCase) -> None:
    check_dispatcher(target, case, backend="reference", mode="threads", num_rounds=1)


@pytest.mark.sampled(1, of=("target",))
@pytest.mark.parametrize(
    ("target", "case"), [run for run in RUNS if str(run.id).split("-", 1)[1] in FEW]
)
def test_collective(target: DispatcherTarget, case: DispatcherCase) -> None:
    check_dispatcher(target, case, backend="collective", num_rounds=1)


def test_every_case_runs_on_some_dispatcher() -> None:
    for case in DISPATCHER_CASES:
        assert any(can_run(target, case) for target in DISPATCHERS), case.name


def broken(
    buffers: GroupBuffers, case: DispatcherCase, tokens: RankTokens, *, fault: str
) -> torch.Tensor:
    """The plain dispatcher with a mistake somewhere."""
    x, ids, weights = tokens.x, tokens.topk_idx, tokens.topk_weights
    if fault == "a choice is lost":
        ids = ids.clone()
        ids[-1:, -1] = -1
    elif fault == "weights of another choice":
        weights = weights.roll(1, dims=1)
    elif fault == "rows of another token":
        x = torch.cat([x[1:], x[:1]])
    elif fault == "no gradient of weights":
        weights = weights.detach() + 0 * weights
    y = BY_NAME["plain"].run(buffers, case, RankTokens(x, ids, weights, tokens.grad))
    if fault == "scaled":
        y = y * 1.02
    elif fault == "gradient scaled":
        y = y * 1.2 - y.detach() * 0.2
    elif fault == "padding is added":
        y = y + float("nan")
    elif fault == "another shape":
        y = y[None]
    return y


@pytest.mark.parametrize(
    "fault",
    [
        "a choice is lost",
        "weights of another choice",
        "rows of another token",
        "no gradient of weights",
        "scaled",
        "gradient scaled",
        "padding is added",
        "another shape",
    ],
)
def test_the_suite_finds(fault: str) -> None:
    case = next(case for case in DISPATCHER_CASES if case.name == "backward in bfloat16")
    target = DispatcherTarget(
        name="broken",
        run=lambda buffers, case, tokens: broken(buffers, case, tokens, fault=fault),
        features=frozenset({"backward"}),
        num_roundings=2,
    )
    with pytest.raises(ConformanceError, match=r"wrong|has shape"):
        check_dispatcher(target, case, mode="threads")


def test_what_is_expected_is_what_autograd_says() -> None:
    """Value and gradients of the analytic layer against float64 autograd of a loop over choices."""
    case = DispatcherCase(
        name="oracle", num_tokens=(5,), num_topk=3, routing="masked", dtype=torch.float64
    )
    tokens, want = all_tokens(case)[0], expected(case, 0)
    x = tokens.x.clone().requires_grad_()
    weights = tokens.topk_weights.double().requires_grad_()
    y = torch.zeros_like(x)
    for token_idx, topk_pos in (tokens.topk_idx >= 0).nonzero().tolist():
        number = tokens.topk_idx[token_idx, topk_pos]
        out = torch.sin(x[token_idx] * (0.5 + number / 10)) + number / 100
        y = y.index_add(0, torch.tensor([token_idx]), (weights[token_idx, topk_pos] * out)[None])
    y.backward(tokens.grad)
    assert torch.allclose(y, want.y, atol=1e-5)
    assert torch.allclose(x.grad, want.grad_x, atol=1e-5)
    assert torch.allclose(weights.grad, want.grad_weights, atol=1e-4)


def interleave(context: RankContext) -> list[str]:
    """Two micro-batches of one dispatcher, their calls and their backwards interleaved."""
    cases = [
        DispatcherCase(
            name=f"batch {idx}", num_tokens=sizes, dtype=torch.float32, with_backward=True
        )
        for idx, sizes in enumerate([(6, 3), (2, 8)])
    ]
    faults = []
    buffers = group_buffers(context.group)
    dispatcher = TokenDispatcher(6, group=context.group, weighted_by="combine")
    owner = dispatcher.buffer.expert_rank
    mine = (owner == context.rank_idx).nonzero().flatten()
    inputs, routed = [], []
    for case in cases:
        tokens = all_tokens(case)[context.rank_idx]
        x = tokens.x.clone().requires_grad_()
        inputs.append((tokens, x))
        routed.append(dispatcher.dispatch(x, tokens.topk_weights, topk_idx=tokens.topk_idx))
    outputs = []
    for batch in reversed(routed):
        ids = torch.repeat_interleave(mine, batch.num_tokens_per_expert)
        outputs.append(dispatcher.combine(expert_output(batch.tokens, ids), batch))
    for y, (tokens, _) in zip(outputs, reversed(inputs), strict=True):
        y.backward(tokens.grad)
    for idx, case in enumerate(cases):
        want = expected(case, context.rank_idx)
        y = outputs[1 - idx]
        if not torch.allclose(y.double(), want.y, atol=1e-5):
            faults.append(f"y of batch {idx}")
        if not torch.allclose(inputs[idx][1].grad.double(), want.grad_x, atol=1e-5):
            faults.append(f"gradient of batch {idx}")
    buffers.destroy()
    return faults


def test_micro_batches_of_one_dispatcher_may_interleave() -> None:
    assert run_ranks(interleave, 2, mode="threads") == [[], []]


def count_dropped(context: RankContext, case: DispatcherCase) -> list[int]:
    buffers = group_buffers(context.group)
    tokens = all_tokens(case)[context.rank_idx]
    if case.num_rows_per_expert is not None:
        dispatcher: Any = TokenDispatcher(
            case.num_experts,
            group=context.group,
            capacity=Capacity(num_rows_per_expert=case.num_rows_per_expert, on_overflow="drop"),
        )
        routed = dispatcher.dispatch(tokens.x, topk_idx=tokens.topk_idx)
        dropped = routed.num_dropped_per_expert
    else:
        dispatcher = TorchtitanTokenDispatcher.Config(
            num_experts=case.num_experts,
            top_k=case.num_topk,
            non_blocking_capacity_factor=case.capacity_factor,
            pad_multiple=case.expert_alignment,
        ).build()
        dispatcher.wire_group(context.group)
        rows, _, metadata = dispatcher.dispatch(
            tokens.x, tokens.topk_weights, tokens.topk_idx, torch.zeros(case.num_experts)
        )
        dropped = metadata.num_dropped_per_expert
        assert (int(metadata.num_required_rows) > rows.shape[0]) == bool(dropped.any())
    buffers.destroy()
    return dropped.tolist()


@pytest.mark.parametrize("name", ["rows per expert", "rows of a rank"])
def test_what_is_dropped_is_counted(name: str) -> None:
    case = next(case for case in DISPATCHER_CASES if case.name == name)
    counted = run_ranks(count_dropped, case.num_ranks, case, mode="threads")
    want = [0] * case.num_experts
    for tokens, kept in zip(all_tokens(case), kept_choices(case), strict=True):
        lost = tokens.topk_idx[(tokens.topk_idx >= 0) & ~kept]
        for expert_idx in lost.tolist():
            want[expert_idx] += 1
    assert sum(want) > 0
    assert [count for rank in counted for count in rank] == want


X, IDS, PROBS = torch.ones(3, 16), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2)
MAP = torch.ones(3, 4, dtype=torch.bool)


def plain_mistake(context: RankContext, mistake: dict[str, Any]) -> str:
    buffers = group_buffers(context.group)
    dispatcher = TokenDispatcher(4, group=context.group)
    given: dict[str, Any] = {"hidden": X, "probs": PROBS, "topk_idx": IDS, "routing_map": None}
    if context.rank_idx == 1:
        given |= mistake
    try:
        dispatcher.dispatch(**given)
    except (TypeError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    routed = dispatcher.dispatch(X, PROBS, topk_idx=IDS)  # the buffer stays usable
    with pytest.raises(TypeError, match="rank 1: routed must be DispatchedTokens, got Tensor"):
        dispatcher.combine(routed.tokens, routed if context.rank_idx == 0 else X)  # type: ignore[arg-type]
    assert dispatcher.combine(routed.tokens, routed).shape == X.shape
    buffers.destroy()
    return text


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"routing_map": MAP}, "ValueError: rank 1: give topk_idx or routing_map, got both"),
        ({"topk_idx": None}, "ValueError: rank 1: give topk_idx or routing_map, got neither"),
        (
            {"topk_idx": IDS.float()},
            "TypeError: rank 1: topk_idx must be integers, got torch.float32",
        ),
        (
            {"topk_idx": IDS.to(torch.complex64)},
            "TypeError: rank 1: topk_idx must be integers, got torch.complex64",
        ),
        ({"topk_idx": IDS.bool()}, "TypeError: rank 1: topk_idx must be integers, got torch.bool"),
        (
            {"topk_idx": None, "routing_map": MAP.long(), "probs": None},
            "TypeError: rank 1: routing_map must be bool, got torch.int64",
        ),
        (
            {"topk_idx": None, "routing_map": MAP[:, :3], "probs": None},
            "ValueError: rank 1: routing_map must have 4 columns, got 3",
        ),
        ({"topk_idx": IDS[:2]}, "(3, 16) and topk_idx (2, 2) must agree"),
        ({"probs": PROBS[:, :1]}, "must have the shape of topk_idx (3, 2), got (3, 1)"),
        ({"probs": PROBS.long()}, "TypeError: rank 1: probs must be a floating-point tensor"),
        ({"topk_idx": IDS + 4}, "rank 1"),
        (
            {"hidden": X.numpy()},
            "TypeError: rank 1: hidden must be a tensor, got ndarray",
        ),
    ],
)
def test_a_mistake_of_one_rank_is_raised_on_all(mistake: dict[str, Any], message: str) -> None:
    for text in run_ranks(plain_mistake, 2, mistake, mode="threads"):
        assert message in text


def torchtitan_mistake(context: RankContext, num_tokens: int, hidden: int) -> str:
    buffers = group_buffers(context.group)
    dispatcher = TorchtitanTokenDispatcher.Config(
        num_experts=4, top_k=2, hidden_dim=16, num_max_tokens_per_rank=3
    ).build()
    with pytest.raises(RuntimeError, match="call wire_meshes"):
        dispatcher.dispatch(X, PROBS, IDS, torch.zeros(4))
    dispatcher.wire_group(context.group)
    x = torch.ones(num_tokens, hidden) if context.rank_idx == 0 else X
    ids = IDS.new_zeros(x.shape[0], 2)
    with pytest.raises(ValueError, match="rank 0") as raised:
        dispatcher.dispatch(x, ids.float(), ids, torch.zeros(4))
    buffers.destroy()
    return str(raised.value)


@pytest.mark.parametrize(
    ("num_tokens", "hidden", "message"),
    [
        (4, 16, "x_TD has 4 tokens, num_max_tokens_per_rank is 3"),
        (3, 32, "x_TD has hidden 32, hidden_dim is 16"),
    ],
)
def test_torchtitan_limits(num_tokens: int, hidden: int, message: str) -> None:
    for text in run_ranks(torchtitan_mistake, 2, num_tokens, hidden, mode="threads"):
        assert message in text


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"non_blocking_capacity_factor": 1.5}, r"must be in \(0, 1\], got 1.5"),
        ({"non_blocking_capacity_factor": 0.0}, r"must be in \(0, 1\], got 0.0"),
        ({"pad_multiple": 0}, "pad_multiple must be >= 1, got 0"),
    ],
)
def test_torchtitan_configuration(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchtitanTokenDispatcher.Config(num_experts=4, top_k=2, **fields).build()


def test_torchtitan_without_expert_parallelism() -> None:
    """`wire_meshes(ep_mesh=None)`: all experts are here, whatever process group there is."""
    dispatcher = TorchtitanTokenDispatcher.Config(num_experts=4, top_k=2).build()
    dispatcher.wire_meshes(ep_mesh=None)
    rows, counts, metadata = dispatcher.dispatch(X, PROBS, IDS, torch.zeros(4))
    assert counts.tolist() == [6, 0, 0, 0]
    assert torch.equal(dispatcher.combine(rows, metadata, X), 2 * X)
    dispatcher._group_buffers.destroy()
