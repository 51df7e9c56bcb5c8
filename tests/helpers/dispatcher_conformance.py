"""One suite for every dispatcher: an MoE layer around it against what `dispatcher_cases` expects.

`check_dispatcher` holds a target to a case. `DISPATCHERS` has the dispatchers of this package; one made
elsewhere is a `DispatcherTarget` of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from moe_comm.ep.group_buffers import GroupBuffers, group_buffers
from moe_comm.peers.communicator import Communicator
from moe_comm.testing.conformance import ConformanceError
from moe_comm.testing.launch import RankContext, run_ranks
from tests.helpers.dispatcher_cases import (
    DispatcherCase,
    Expected,
    RankTokens,
    all_tokens,
    expected,
)

RunLayer = Callable[[GroupBuffers, DispatcherCase, RankTokens], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DispatcherTarget:
    """A dispatcher and how to run a layer around it.

    Args:
        name: Name for messages and test ids.
        run: `run(buffers, case, tokens)` makes the dispatcher for `buffers.group`, dispatches `tokens`,
            applies `expert_output` and combines; returns `[T, hidden]`, differentiable where "backward"
            is a feature. At the top of an importable module.
        features: Features beyond the plain forward: "backward", "fp8" (FP8_BLOCK128), "rows per
            expert" and "rows" (the two limits of a capacity).
        num_roundings: Roundings to the dtype of the case on the way of a row that are not the experts',
            1 where all is added in float32.
    """

    name: str
    run: RunLayer
    features: frozenset[str] = frozenset()
    num_roundings: int = 1


def can_run(target: DispatcherTarget, case: DispatcherCase) -> bool:
    """Return whether a dispatcher offers what a case needs."""
    return case.features <= target.features


def check_dispatcher(
    target: DispatcherTarget,
    case: DispatcherCase,
    *,
    backend: str = "auto",
    mode: str = "processes",
    num_rounds: int = 2,
) -> None:
    """Run a case `num_rounds` times on one group and compare every rank's results.

    Raises:
        ConformanceError: A row is further from what is expected than its arithmetic explains, or the rounds
            differ; the message has the worst row.
        ValueError: The target does not offer what the case needs.
    """
    if not can_run(target, case):
        missing = sorted(case.features - target.features)
        raise ValueError(f"{target.name} does not offer {missing}, which {case.name} needs")
    found = run_ranks(_run_rank, case.num_ranks, target, case, backend, num_rounds, mode=mode)
    faults = [text for rank_faults in found for text in rank_faults]
    if faults:
        what = f"{target.name} on {backend}, {case.name}"
        raise ConformanceError(f"{what}: {len(faults)} faults\n" + "\n".join(faults[:20]))


def _run_rank(
    context: RankContext,
    target: DispatcherTarget,
    case: DispatcherCase,
    backend: str,
    num_rounds: int,
) -> list[str]:
    want = expected(case, context.rank_idx)
    tokens = all_tokens(case)[context.rank_idx]
    faults: list[str] = []
    first: list[torch.Tensor] = []
    with Communicator(context.group, backend=backend) as communicator:
        buffers = group_buffers(communicator)
        for round_idx in range(num_rounds):
            x, weights = tokens.x.clone(), tokens.topk_weights.clone()
            if case.with_backward:
                x.requires_grad_()
                weights.requires_grad_()
            y = target.run(buffers, case, RankTokens(x, tokens.topk_idx, weights, tokens.grad))
            if y.shape != tokens.x.shape:
                shapes = f"{tuple(y.shape)}, not {tuple(tokens.x.shape)}"
                return [*faults, f"rank {context.rank_idx}: y has shape {shapes}"]
            got = [y.detach().clone()]
            if case.with_backward:
                torch.autograd.backward(y, tokens.grad)
                assert x.grad is not None
                assert weights.grad is not None
                got += [x.grad, weights.grad]
            if round_idx == 0:
                first = got
                faults += _compare(context.rank_idx, target, case, got, want)
            elif not all(torch.equal(a, b) for a, b in zip(got, first, strict=True)):
                faults.append(f"rank {context.rank_idx}: round {round_idx} differs from the first")
    return faults


def _compare(
    rank_idx: int,
    target: DispatcherTarget,
    case: DispatcherCase,
    got: list[torch.Tensor],
    want: Expected,
) -> list[str]:
    eps = torch.finfo(case.dtype).eps * target.num_roundings
    eps_f32 = torch.finfo(torch.float32).eps
    num_terms = case.num_topk + 4  # additions, and the products before them
    comparisons = [
        # The expected rows round experts' outputs too: what is left is the sum.
        ("y", got[0], want.y, eps * want.y_size + num_terms * eps_f32 * want.y_size),
    ]
    if case.with_backward:
        # Backward through the experts rounds every term once more.
        comparisons += [
            ("grad of x", got[1], want.grad_x, (4 * eps + num_terms * eps_f32) * want.grad_x_size),
            (
                "grad of weights",
                got[2][..., None],
                want.grad_weights[..., None],
                (4 * eps + case.hidden**0.5 * eps_f32) * want.grad_weights_size,
            ),
        ]
    faults: list[str] = []
    for name, actual, reference, bound in comparisons:
        error = (actual.double() - reference).norm(dim=-1)
        is_bad = ~(error <= bound)  # NaN is bad
        if bool(is_bad.any()):
            worst = (error / bound.clamp(min=1e-30)).nan_to_num(float("inf")).flatten().argmax()
            faults.append(
                f"rank {rank_idx}: {name}: {int(is_bad.sum())} rows of {is_bad.numel()} are wrong, "
                f"worst {int(worst)}: error {error.flatten()[worst]:.3e}, allowed "
                f"{bound.flatten()[worst]:.3e}"
            )
    return faults
